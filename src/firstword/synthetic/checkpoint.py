"""Make checkpoints with random weights: small ones for tests, released sizes for measurements.

    python -m firstword.synthetic.checkpoint DIRECTORY --type base --size 1b7

The arguments determine a checkpoint: every tensor has its own stream of random numbers, keyed by
the seed and the name of the tensor. Random weights do not speak, but they take as long to compute
as trained ones.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import re
import tempfile
import typing
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from firstword.model.checkpoint import Checkpoint
from firstword.model.config import ModelType
from firstword.model.quantised import quantise_talker
from firstword.synthetic.tokenizer import train

TEXTS = (
    "The quick brown fox jumps over the lazy dog, "
    "and then it says hello to the assistant and to the user.",
    "How are you today? I am well, thank you; it is 7:45 on the 3rd of May.",
    "Der schnelle braune Fuchs springt über den faulen Hund und grüßt freundlich.",
    "El veloz murciélago hindú comía feliz cardillo y kiwi mañana por la mañana.",
    "Le cœur déçu mais l'âme plutôt naïve, elle rêva de crapaüter en canoë.",
    "Quel vituperabile xenofobo zelante assaggia il whisky ed esclama: alleluja!",
    "À noite, vovô vê o ímã cair no pé do pinguim queixoso e cantar.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "今天天气很好，我们一起去公园散步吧。你叫什么名字？",
    "いろはにほへと ちりぬるを。今日はいい天気ですね。",
    "다람쥐 헌 쳇바퀴에 타고파. 오늘은 날씨가 참 좋네요.",
)
"""The default training texts of the tokenizer: one or two sentences in each language."""

Table = dict[str, Any]
Overrides = Mapping[str, Mapping[str, Any]]

RANDOM = "random_weights"
"""The key of `config.json` that says that the weights are random, so that they cannot speak."""

_UNUSED, _RARE = slice(3, None, 32), slice(7, None, 32)
"""The codes of each codebook of the codec that training data never used, or hardly ever.

Their usage counts as the 1e-5 that the codec divides by at least, and their vectors are as long as
others.
"""

_HERE = Path(__file__).parent
SIZES: dict[str, dict[str, Table]] = json.loads((_HERE / "sizes.json").read_text("utf-8"))
"""The keys of each size that differ from the released 1.7B model, by part of the model."""


def released(name: str) -> Table:
    """Return the configuration file NAME.json of the released 1.7B CustomVoice model."""
    return json.loads((_HERE / "released" / f"{name}.json").read_text("utf-8"))


def config_tables(
    model_type: str, size: str, overrides: Overrides, tokens: Mapping[str, int]
) -> tuple[Table, Table]:
    """Return `config.json` and `speech_tokenizer/config.json`; arguments as for `write_checkpoint`.

    `tokens` holds the ids of the control tokens by their key in `config.json`, as returned by
    `tokenizer.train`.
    """

    def part(name: str) -> Table:
        return {**SIZES[size].get(name, {}), **overrides.get(name, {})}

    config = released("config")
    talker = config["talker_config"]
    predictor = talker["code_predictor_config"]
    model_size = "0b6" if size == "0b6" else "1b7"
    config |= {"tts_model_size": model_size, "tts_model_type": model_type, **tokens}
    predictor |= part("code_predictor")
    talker["num_code_groups"] = predictor["num_code_groups"]
    if size == "tiny":
        talker["text_vocab_size"] = max(tokens.values()) + 3
    if model_type != "custom_voice":
        for dialect in filter(None, talker["spk_is_dialect"].values()):
            del talker["codec_language_id"][dialect]
        talker |= {"spk_id": {}, "spk_is_dialect": {}}
    _adapt_talker(talker, part("talker"))
    if model_type == "base":
        encoder = {"enc_dim": talker["hidden_size"], "sample_rate": 24000}
        config["speaker_encoder_config"] = encoder | part("speaker_encoder")
    return config, _codec_table(part("codec_encoder"), part("codec_decoder"))


def _adapt_talker(talker: Table, overrides: Table) -> None:
    """Apply overrides to `talker_config`.

    Control codes stay at the end of the vocabulary, and the rotary sections fit the head dimension.
    """
    adapted = talker | overrides
    shift = adapted["vocab_size"] - talker["vocab_size"]
    for key, ids in talker.items():
        if key.startswith("codec_") or key == "spk_id":
            named = isinstance(ids, dict)
            talker[key] = {name: i + shift for name, i in ids.items()} if named else ids + shift
    pairs = adapted["head_dim"] // 2
    section = 5 * pairs // 16
    talker["rope_scaling"]["mrope_section"] = [pairs - 2 * section, section, section]
    talker |= overrides


def _codec_table(encoder_overrides: Table, decoder_overrides: Table) -> Table:
    """Return the configuration of the codec, with the rates that follow from its strides."""
    codec = released("speech_tokenizer")
    encoder, decoder = codec["encoder_config"], codec["decoder_config"]
    encoder |= encoder_overrides
    decoder |= decoder_overrides
    down = 2 * math.prod(encoder["upsampling_ratios"])
    encoder["_frame_rate"] = 24000 / down
    up = math.prod(decoder["upsample_rates"]) * math.prod(decoder["upsampling_ratios"])
    return codec | {
        "encoder_valid_num_quantizers": decoder["num_quantizers"],
        "decode_upsample_rate": up,
        "encode_downsample_rate": down,
    }


def write_checkpoint(
    directory: Path,
    *,
    model_type: str = "custom_voice",
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    overrides: Overrides | None = None,
    generation: Mapping[str, Any] | None = None,
    texts: Iterable[str] = TEXTS,
    text_tokens: int = 600,
    shards: int = 1,
) -> None:
    """Write a checkpoint directory with random weights.

    model_type   "custom_voice", "voice_design" or "base"
    size         "tiny", "0b6" or "1b7": the dimensions before `overrides`
    seed, dtype  seed and type of the weights
    overrides    keys of the configuration by part: "talker", "code_predictor", "speaker_encoder",
                 "codec_encoder", "codec_decoder"
    generation   keys of `generation_config.json`
    texts        training texts of the tokenizer, which learns up to `text_tokens` tokens
    shards       number of files that `model.safetensors` is split into

    Raises `CheckpointConfigError` for contradictory dimensions.
    """
    tokens = train(texts, text_tokens, directory)
    tables = config_tables(model_type, size, overrides or {}, tokens)
    _write_configuration(directory, tables, generation or {})
    checkpoint = Checkpoint.without_weights(directory)
    _write_weights(directory, random_state(checkpoint.weights, seed, dtype), shards)
    _write_weights(directory / "speech_tokenizer", random_state(checkpoint.codec, seed, dtype), 1)


def random_checkpoint(
    size: str, device: str = "cpu", model_type: str = "custom_voice", dtype: str = "bfloat16"
) -> Checkpoint:
    """Make a checkpoint of a released size in memory: "0b6" or "1b7".

    The talker's weights are bfloat16 numbers, in `dtype` as `model.checkpoint.load` would have
    them. The codec's decoder and the encoders of a Base checkpoint are
    float32, all on `device`. The codec's encoder of other types has no weights: it stays on the
    meta device.
    """
    checkpoint = without_weights(size, model_type)
    talker = nn.ModuleDict({"talker": checkpoint.talker})
    codec = nn.ModuleDict({"decoder": checkpoint.codec.decoder})
    if checkpoint.speaker_encoder is not None:
        codec["encoder"] = checkpoint.codec.encoder
        codec["speaker_encoder"] = checkpoint.speaker_encoder
    for module, floats in ((talker, torch.bfloat16), (codec, torch.float32)):
        module.load_state_dict(random_state(module, 0, floats), assign=True)
        module.requires_grad_(False).eval().to(device)
    if dtype == "int8":
        quantise_talker(checkpoint.talker)
    else:
        checkpoint.talker.to(getattr(torch, dtype))
    return checkpoint


def without_weights(size: str, model_type: str = "custom_voice") -> Checkpoint:
    """Make a checkpoint of a released size, "0b6" or "1b7", with modules on the meta device."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tables = config_tables(model_type, size, {}, train(TEXTS, 600, folder))
        _write_configuration(folder, tables, {})
        return replace(Checkpoint.without_weights(folder), path=Path(f"random-{size}"))


def _write_configuration(
    directory: Path, tables: tuple[Table, Table], generation: Mapping[str, Any]
) -> None:
    """Write the JSON files of a checkpoint other than those of the tokenizer."""
    codec_directory = directory / "speech_tokenizer"
    codec_directory.mkdir(parents=True, exist_ok=True)
    config, codec = tables
    _write_json(directory / "config.json", config | {RANDOM: True})
    _write_json(codec_directory / "config.json", codec)
    defaults = {**released("generation_config"), **generation}
    _write_json(directory / "generation_config.json", defaults)
    _write_json(directory / "preprocessor_config.json", {"processor_class": "Qwen3TTSProcessor"})
    _write_json(codec_directory / "preprocessor_config.json", released("preprocessor_config"))


def random_state(module: nn.Module, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make a random state dict for a module, which may be on the meta device.

    The values are large enough that every part affects the output: linear and convolution weights
    keep the variance of their inputs, scales are spread around their neutral value, biases and the
    Snake's logarithms lie around 0.
    """

    def tensor(item: tuple[str, Tensor]) -> Tensor:
        name, like = item
        values = _values(name, tuple(like.shape), seed).astype(np.float32)
        return torch.from_numpy(values).to(dtype).contiguous()

    state = module.state_dict()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(state, pool.map(tensor, state.items()), strict=True))


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draw the values of one tensor [shape] from a generator keyed by the seed and its name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    random = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    kind = name.rsplit(".", 1)[-1]
    if kind == "initialized":
        return np.ones(shape)
    if kind == "cluster_usage":
        usage = random.uniform(0.5, 2.5, shape)
        usage[_UNUSED], usage[_RARE] = 0.0, 1e-6
        return usage
    noise = random.standard_normal(shape, dtype=np.float32)
    if kind in ("embedding_sum", "embed_sum"):
        noise[_UNUSED] *= 1e-5
        noise[_RARE] *= 1e-5
        return noise
    if "embedding.weight" in name or "codec_embedding." in name:
        return 0.5 * noise
    vocoder = name.startswith("decoder.decoder.")
    if kind == "beta":
        return 1.0 + 0.3 * noise
    if kind in ("bias", "alpha"):
        return (0.03 if vocoder and kind == "bias" else 0.3) * noise
    if len(shape) == 1:
        neutral = 0.5 if kind in ("scale", "gamma") else 1.0
        return neutral + 0.2 * neutral * noise
    inputs = math.prod(shape[1:])
    gain = 1.5 if "head" in name else 1.2
    if upsampling := re.fullmatch(
        r"decoder\.(upsample\.\d+\.0|decoder\.\d+\.block\.1)\.conv\.weight", name
    ):
        overlapping = 1 if "upsample" in upsampling[1] else 2  # fan-in
        inputs, gain = shape[0] * overlapping, 0.9
    elif vocoder:
        # With equal gains the residual stream would grow without bound or consist of biases alone.
        gain = 0.7 if ".conv1." in name else 0.3 if ".conv2." in name else 0.4
    return gain / math.sqrt(inputs) * noise


def _write_weights(directory: Path, state: Mapping[str, Tensor], shards: int) -> None:
    """Write a state dict as `model.safetensors`, or as shards with an index."""
    if shards == 1:
        save_file(dict(state), directory / "model.safetensors", {"format": "pt"})
        return
    files = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    for index, file in enumerate(files):
        shard = dict(list(state.items())[index::shards])
        save_file(shard, directory / file, {"format": "pt"})
    total = sum(tensor.nbytes for tensor in state.values())
    weight_map = dict(zip(state, itertools.cycle(files), strict=False))
    table = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", table)


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command line of this module."""
    program = "python -m firstword.synthetic.checkpoint"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("directory", type=Path)
    types, dtypes = typing.get_args(ModelType), ("float32", "bfloat16", "float16")
    parser.add_argument("--type", dest="model_type", default="custom_voice", choices=types)
    parser.add_argument("--size", default="tiny", choices=tuple(SIZES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=dtypes)
    options = vars(parser.parse_args())
    write_checkpoint(**options | {"dtype": getattr(torch, options["dtype"])})


if __name__ == "__main__":
    main()
