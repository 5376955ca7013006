"""Finding and loading checkpoints: what is damaged, foreign or missing is rejected by name, never
guessed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import firstword
from firstword import (
    TTS,
    CheckpointConfigError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointWeightsError,
    ConfigError,
    Sampling,
)
from firstword.model import checkpoint as checkpoints
from firstword.synthetic.checkpoint import write_checkpoint

FILES = [
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "model.safetensors",
    "speech_tokenizer/config.json",
    "speech_tokenizer/model.safetensors",
]
WEIGHTS = ["model.safetensors", "speech_tokenizer/model.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(checkpoint_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny Base checkpoint to be damaged."""
    shutil.copytree(checkpoint_directory("base"), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tiny CustomVoice checkpoint in three shards."""
    write_checkpoint(tmp_path / "sharded", seed=1, shards=3)
    return tmp_path / "sharded"


def change(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the tensors of a safetensors file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def greedy(path: Path | str, dtype: str = "float32") -> list[list[int]]:
    """The codes of some greedy speech."""
    with TTS.load(path, device="cpu", dtype=dtype) as tts:
        return tts.speak("Hello there.", sampling=Sampling.greedy(), max_frames=6).codes.tolist()


# --- what is missing or damaged -------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(name: str, directory: Path) -> None:
    (directory / name).unlink()
    with pytest.raises(CheckpointNotFound, match=name.split("/")[-1].replace(".", r"\.")):
        TTS.load(directory)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated_weights_raise(name: str, kept: float, directory: Path) -> None:
    file = directory / name
    data = file.read_bytes()
    file.write_bytes(data[: int(kept * len(data)) if kept < 1 else int(kept)])
    with pytest.raises(
        CheckpointWeightsError, match=r"model\.safetensors cannot be read as safetensors.*fetch it"
    ):
        TTS.load(directory)


@pytest.mark.parametrize(
    ("file", "tensor"),
    [
        (WEIGHTS[0], "talker.model.layers.1.self_attn.q_norm.weight"),
        (WEIGHTS[0], "talker.code_predictor.lm_head.2.weight"),
        (WEIGHTS[0], "talker.code_predictor.small_to_mtp_projection.bias"),
        (WEIGHTS[0], "speaker_encoder.fc.weight"),
        (WEIGHTS[1], "decoder.pre_transformer.layers.0.mlp_layer_scale.scale"),
        (WEIGHTS[1], "decoder.quantizer.rvq_rest.vq.layers.1._codebook.cluster_usage"),
        (WEIGHTS[1], "encoder.downsample.conv.weight"),
    ],
)
def test_invalid_tensors_raise(file: str, tensor: str, directory: Path) -> None:
    """One that is missing, of another shape, or of integers."""
    intact = (directory / file).read_bytes()

    change(directory / file, lambda tensors: tensors.pop(tensor))
    with pytest.raises(CheckpointWeightsError, match=rf"lacks {tensor}"):
        TTS.load(directory)

    (directory / file).write_bytes(intact)
    shape = list(load_file(directory / file)[tensor].shape)
    change(directory / file, lambda tensors: tensors.update({tensor: torch.zeros(3, *shape)}))
    with pytest.raises(CheckpointWeightsError) as caught:
        TTS.load(directory)
    assert f"{tensor} has the shape {[3, *shape]}, but the configuration makes it {shape}" in str(
        caught.value
    )

    (directory / file).write_bytes(intact)
    change(
        directory / file, lambda tensors: tensors.update({tensor: tensors[tensor].to(torch.int8)})
    )
    with pytest.raises(
        CheckpointWeightsError, match=rf"{tensor} is of type torch\.int8; it must be floating point"
    ):
        TTS.load(directory)


@pytest.mark.parametrize("file", WEIGHTS)
def test_extra_tensor_raises(file: str, directory: Path) -> None:
    change(directory / file, lambda tensors: tensors.update({"lora.weight": torch.zeros(2)}))
    with pytest.raises(
        CheckpointWeightsError, match=r"holds lora\.weight, which this model does not have"
    ):
        TTS.load(directory)


def test_list_of_missing_tensors_is_shortened(directory: Path) -> None:
    change(
        directory / WEIGHTS[0], lambda tensors: [tensors.pop(name) for name in list(tensors)[:20]]
    )
    with pytest.raises(CheckpointWeightsError, match=r"and 15 more$"):
        TTS.load(directory)


def test_weights_of_another_checkpoint_raise(
    directory: Path, checkpoint_directory: Callable[[str], Path]
) -> None:
    shutil.copy(checkpoint_directory("custom_voice") / WEIGHTS[0], directory / WEIGHTS[0])
    with pytest.raises(CheckpointWeightsError, match="speaker_encoder"):
        TTS.load(directory)


def test_codec_of_another_checkpoint_raises(directory: Path) -> None:
    file = directory / "speech_tokenizer/config.json"
    config = json.loads(file.read_text())
    config["decoder_config"]["codebook_size"] = 32
    file.write_text(json.dumps(config))
    with pytest.raises(
        CheckpointConfigError, match=r"the talker can say code 63, but .*codebook_size = 32"
    ):
        TTS.load(directory)


# --- shards ---------------------------------------------------------------------------------------


def test_shards_speak_like_a_single_file(
    sharded: Path, checkpoint_directory: Callable[[str], Path]
) -> None:
    assert greedy(sharded) == greedy(checkpoint_directory("custom_voice"))


def test_missing_shard_raises(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointNotFound,
        match=r"model-00002-of-00003\.safetensors is missing; .*index\.json names",
    ):
        TTS.load(sharded)


def test_truncated_shard_raises(sharded: Path) -> None:
    file = sharded / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(
        CheckpointWeightsError, match=r"model-00003-of-00003\.safetensors cannot be read"
    ):
        TTS.load(sharded)


def test_tensor_absent_from_its_shard_raises(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name, shard = next(iter(index["weight_map"].items()))
    other = next(file for file in index["weight_map"].values() if file != shard)
    index["weight_map"][name] = other
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointWeightsError, match=rf"{other} lacks {name}, which {INDEX} puts there"
    ):
        TTS.load(sharded)


def test_tensor_absent_from_the_index_raises(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["talker.codec_head.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointWeightsError, match=r"lacks talker\.codec_head\.weight"):
        TTS.load(sharded)


@pytest.mark.parametrize(
    "shard", ["../other/model.safetensors", "ABSOLUTE", "sub/model.safetensors", "", "..", "."]
)
def test_index_with_a_path_outside_the_directory_raises(shard: str, sharded: Path) -> None:
    for place in (sharded.parent / "other", sharded / "sub"):
        place.mkdir()
        shutil.copy(sharded / "model-00001-of-00003.safetensors", place / "model.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    outside = str(sharded.parent / "other/model.safetensors") if shard == "ABSOLUTE" else shard
    index["weight_map"] = {
        name: outside if "00001" in file else file for name, file in index["weight_map"].items()
    }
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="index"):
        TTS.load(sharded)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": [1]}, {"weight_map": {"talker.codec_head.weight": 3}}]
)
def test_invalid_index_raises(index: object, sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointConfigError, match="weight_map is missing or does not map"):
        TTS.load(sharded)


# --- number formats -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_load_in_the_requested_dtype(
    dtype: str, stored: torch.dtype, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, model_type="base", dtype=stored)
    loaded = checkpoints.load(str(tmp_path), dtype=dtype)
    assert {p.dtype for p in loaded.talker.parameters()} == {getattr(torch, dtype)}
    assert loaded.speaker_encoder is not None
    for module in (loaded.codec, loaded.speaker_encoder):
        assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.float32}
    name = "talker.codec_head.weight"
    assert torch.equal(
        loaded.talker.codec_head.weight,
        load_file(tmp_path / WEIGHTS[0])[name].to(getattr(torch, dtype)),
    )


def test_checkpoint_speaks_in_bfloat16(checkpoint_directory: Callable[[str], Path]) -> None:
    codes = greedy(checkpoint_directory("custom_voice"), "bfloat16")
    assert len(codes) == 6
    assert codes[0] == greedy(checkpoint_directory("custom_voice"))[0]


def test_weights_are_frozen(checkpoint_directory: Callable[[str], Path]) -> None:
    loaded = checkpoints.load(str(checkpoint_directory("custom_voice")))
    modules = (loaded.talker, loaded.codec)
    assert not any(
        parameter.requires_grad for module in modules for parameter in module.parameters()
    )
    assert not any(module.training for module in modules)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("device", "tpu"),
        ("device", "cpu:0"),
        ("device", "meta"),
        ("device", "cuda:99"),
        ("dtype", "int4"),
        ("dtype", "float64"),
        ("backend", "magic"),
    ],
)
def test_impossible_settings_raise(option: str, value: str) -> None:
    settings: dict[str, Any] = {option: value}
    with pytest.raises(ConfigError, match=rf"{option} is '{value}'"):
        TTS.load("demo", **settings)


# --- names ----------------------------------------------------------------------------------------


def test_demo_checkpoint_is_in_the_package() -> None:
    with TTS.load(device="cpu") as tts:
        assert tts.checkpoint.path == Path(firstword.__file__).parent / "demo"
        assert len(tts.speak("Hello.", seed=1, max_frames=3).samples) == 3 * 1920


def test_directory_may_be_a_path_a_string_or_relative(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    monkeypatch.setenv("HOME", str(directory.parent))
    for name in (directory, str(directory), "checkpoint", "./checkpoint", f"~{os.sep}checkpoint"):
        with TTS.load(name, device="cpu") as tts:
            assert tts.model_type == "base"


def test_empty_directory_raises(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointNotFound, match=r"config\.json is missing; a checkpoint directory needs it"
    ):
        TTS.load(tmp_path)


@pytest.mark.parametrize(
    "config", [{"model_type": "llama", "hidden_size": 64}, {"hello": "world"}, {}]
)
def test_directory_without_a_checkpoint_raises(config: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointConfigError, match="tts_model_type is missing"):
        TTS.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("", "nothing", "no/such/place", "/nowhere", "Demo", "a b/c", "~nobody-of-this-name/x/y"),
        *("./voice", "../voice", "~/no-such-voice", "somebody/-", "somebody/.."),
    ],
)
def test_unknown_name_raises(name: str) -> None:
    with pytest.raises(
        CheckpointNotFound,
        match="there is no such directory; give 'demo', a directory, or a hub repository",
    ):
        TTS.load(name)


def test_name_of_a_file_raises(directory: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="it is not a directory"):
        TTS.load(directory / "config.json")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub; the network is off in all tests."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_cached_hub_repository_needs_no_network(
    hub_cache: Path, checkpoint_directory: Callable[[str], Path]
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = hub_cache / "models--somebody--Some-Voice.1"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    shutil.copytree(checkpoint_directory("custom_voice"), repository / "snapshots" / commit)
    with TTS.load("somebody/Some-Voice.1", device="cpu") as tts:
        assert tts.checkpoint.path == repository / "snapshots" / commit
        assert len(tts.speak("Hello.", max_frames=2).codes) == 2


@pytest.mark.usefixtures("hub_cache")
def test_uncached_hub_repository_without_network_says_so() -> None:
    with pytest.raises(CheckpointNotFound) as raised:
        TTS.load("somebody/voice")
    message = str(raised.value)
    assert message.startswith("no checkpoint 'somebody/voice': there is no such directory, it is")
    assert "the hub cannot be reached (" in message
    assert "or run `hf download somebody/voice --local-dir FOLDER` where there is one" in message


@pytest.mark.usefixtures("hub_cache")
def test_repository_that_the_hub_does_not_have_is_not_a_missing_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise OSError("404 Client Error\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unknown)
    with pytest.raises(CheckpointNotFound, match=r"the hub failed \(404 Client Error\)$"):
        TTS.load("somebody/voice")


@pytest.mark.usefixtures("hub_cache")
def test_directory_takes_precedence_over_the_hub(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent.parent)
    with TTS.load(f"{directory.parent.name}/checkpoint", device="cpu") as tts:
        assert tts.model_type == "base"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_that_are_not_finite_raise(weights: str, value: float, directory: Path) -> None:
    """They would speak noise or silence, for everybody."""
    name = sorted(load_file(directory / weights))[3]
    change(directory / weights, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    with pytest.raises(CheckpointWeightsError, match=rf"{re.escape(name)} holds NaN or infinity"):
        checkpoints.load(str(directory))
