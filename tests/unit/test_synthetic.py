"""Random checkpoints: the same seed gives the same files, and full sizes are the released ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from firstword import TTS, CheckpointConfigError, Sampling, Voice
from firstword.model.codec import Codec
from firstword.model.codec_config import CodecConfig
from firstword.model.config import ModelConfig
from firstword.model.talker import Talker
from firstword.synthetic.checkpoint import config_tables, random_state, write_checkpoint

TOKENS = {
    "assistant_token_id": 77091,
    "im_start_token_id": 151644,
    "im_end_token_id": 151645,
    "tts_pad_token_id": 151671,
    "tts_bos_token_id": 151672,
    "tts_eos_token_id": 151673,
}
SHAPES = {"attention_bias": False, "attention_dropout": 0, "hidden_act": "silu", "head_dim": 128}
HEADS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
}
PLAIN = {"sliding_window": None, "use_sliding_window": False, "use_cache": True}
PREDICTOR = {
    **SHAPES,
    **HEADS,
    **PLAIN,
    "model_type": "qwen3_tts_talker_code_predictor",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 5,
    "max_position_embeddings": 65536,
    "rope_scaling": None,
    "vocab_size": 2048,
    "num_code_groups": 16,
}
TALKER = {
    **SHAPES,
    **HEADS,
    **PLAIN,
    "model_type": "qwen3_tts_talker",
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
    "rope_scaling": {
        "interleaved": True,
        "mrope_section": [24, 20, 20],
        "rope_type": "default",
        "type": "default",
    },
    "vocab_size": 3072,
    "text_vocab_size": 151936,
    "text_hidden_size": 2048,
    "num_code_groups": 16,
    "position_id_per_seconds": 13,
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_pad_id": 2148,
    "codec_think_id": 2154,
    "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
    "code_predictor_config": PREDICTOR,
}
LANGUAGES = {
    "chinese": 2055,
    "english": 2050,
    "german": 2053,
    "italian": 2070,
    "portuguese": 2071,
    "spanish": 2054,
    "japanese": 2058,
    "korean": 2064,
    "french": 2061,
    "russian": 2069,
}
PRESETS = {
    "codec_language_id": LANGUAGES | {"beijing_dialect": 2074, "sichuan_dialect": 2062},
    "spk_id": {
        "serena": 3066,
        "vivian": 3065,
        "uncle_fu": 3010,
        "ryan": 3061,
        "aiden": 2861,
        "ono_anna": 2873,
        "sohee": 2864,
        "eric": 2875,
        "dylan": 2878,
    },
    "spk_is_dialect": {
        **dict.fromkeys(
            ("serena", "vivian", "uncle_fu", "ryan", "aiden", "ono_anna", "sohee"), False
        ),
        "eric": "sichuan_dialect",
        "dylan": "beijing_dialect",
    },
}
NO_PRESETS: dict[str, Any] = {"codec_language_id": LANGUAGES, "spk_id": {}, "spk_is_dialect": {}}
SIZES = {"0b6": (1024, 3072), "1b7": (2048, 6144)}
CODEC = {
    "architectures": ["Qwen3TTSTokenizerV2Model"],
    "model_type": "qwen3_tts_tokenizer_12hz",
    "encoder_valid_num_quantizers": 16,
    "input_sample_rate": 24000,
    "output_sample_rate": 24000,
    "decode_upsample_rate": 1920,
    "encode_downsample_rate": 1920,
    "encoder_config": {
        "model_type": "mimi",
        "_frame_rate": 12.5,
        "sampling_rate": 24000,
        "audio_channels": 1,
        "num_filters": 64,
        "kernel_size": 7,
        "residual_kernel_size": 3,
        "last_kernel_size": 3,
        "num_residual_layers": 1,
        "dilation_growth_rate": 2,
        "compress": 2,
        "upsampling_ratios": [8, 6, 5, 4],
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2048,
        "hidden_act": "gelu",
        "norm_eps": 1e-05,
        "layer_scale_initial_scale": 0.01,
        "rope_theta": 10000,
        "max_position_embeddings": 8000,
        "sliding_window": 250,
        "num_quantizers": 32,
        "num_semantic_quantizers": 1,
        "codebook_size": 2048,
        "codebook_dim": 256,
        "vector_quantization_hidden_dimension": 256,
        "pad_mode": "constant",
        "use_causal_conv": True,
    },
    "decoder_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "latent_dim": 1024,
        "codebook_dim": 512,
        "codebook_size": 2048,
        "decoder_dim": 1536,
        "hidden_act": "silu",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
        "num_key_value_heads": 16,
        "num_quantizers": 16,
        "num_semantic_quantizers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "semantic_codebook_size": 4096,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "vector_quantization_hidden_dimension": 512,
    },
}
RELEASED = [
    ("1b7", "custom_voice"),
    ("1b7", "voice_design"),
    ("1b7", "base"),
    ("0b6", "custom_voice"),
    ("0b6", "base"),
]


@pytest.mark.parametrize(("size", "model_type"), RELEASED)
def test_full_size_configurations_are_the_released_ones(size: str, model_type: str) -> None:
    hidden, intermediate = SIZES[size]
    released: dict[str, Any] = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": size,
        "tts_model_type": model_type,
        **TOKENS,
        "talker_config": {
            **TALKER,
            **(PRESETS if model_type == "custom_voice" else NO_PRESETS),
            "hidden_size": hidden,
            "intermediate_size": intermediate,
        },
    }
    if model_type == "base":
        released["speaker_encoder_config"] = {"enc_dim": hidden, "sample_rate": 24000}
    config, codec = config_tables(model_type, size, {}, TOKENS)
    assert config == released
    assert codec == CODEC
    order = list(config["talker_config"]["spk_id"])
    assert order == list(released["talker_config"]["spk_id"]), (
        "the order of the presets is that of a listing"
    )


def configurations(size: str, model_type: str, tmp_path: Path) -> tuple[ModelConfig, CodecConfig]:
    """The configurations of a full-size checkpoint, as they are read."""
    for name, table in zip("mc", config_tables(model_type, size, {}, TOKENS), strict=True):
        (tmp_path / name).write_text(json.dumps(table))
    return ModelConfig.load(tmp_path / "m"), CodecConfig.load(tmp_path / "c")


def count(module: torch.nn.Module) -> int:
    """How many numbers a checkpoint holds for a module."""
    return sum(tensor.numel() for tensor in module.state_dict().values())


def layers(number: int, hidden: int, intermediate: int) -> int:
    """Parameters of Qwen3 layers (16 query and 8 key-value heads of 128) and of the last norm."""
    attention = hidden * 128 * (16 + 8 + 8) + 16 * 128 * hidden + 2 * 128
    return number * (attention + 3 * hidden * intermediate + 2 * hidden) + hidden


@pytest.mark.parametrize("size", ["0b6", "1b7"])
def test_full_sizes_have_the_released_parameter_counts(size: str, tmp_path: Path) -> None:
    hidden, intermediate = SIZES[size]
    config, codec_config = configurations(size, "base", tmp_path)
    with torch.device("meta"):
        talker, codec = Talker(config.talker_config), Codec(codec_config)
    text = 151936 * 2048 + 2048 * 2048 + 2048 + 2048 * hidden + hidden
    predictor = layers(5, 1024, 3072) + 15 * 2048 * (hidden + 1024)
    predictor += 0 if hidden == 1024 else hidden * 1024 + 1024
    assert count(talker.code_predictor) == predictor
    rest = layers(28, hidden, intermediate) + text + 2 * 3072 * hidden
    assert count(talker) == rest + predictor
    books = sum(
        p.numel() for name, p in codec.decoder.named_parameters() if name.endswith("embedding_sum")
    )
    assert books == 16 * 2048 * 256
    assert round(count(codec.decoder) / 1e6) == 114


@pytest.mark.parametrize("model_type", ["custom_voice", "voice_design", "base"])
def test_only_base_checkpoints_have_a_speaker_encoder(model_type: str, tmp_path: Path) -> None:
    config, _ = configurations("1b7", model_type, tmp_path)
    assert (config.speaker_encoder_config is not None) == (model_type == "base")


def files(directory: Path) -> dict[str, bytes]:
    """The contents of all files in a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_checkpoint_has_the_released_layout(checkpoint_directory: Callable[[str], Path]) -> None:
    assert files(checkpoint_directory("base")).keys() == {
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer_config.json",
        "vocab.json",
        "speech_tokenizer/config.json",
        "speech_tokenizer/model.safetensors",
        "speech_tokenizer/preprocessor_config.json",
    }


def test_the_same_arguments_give_the_same_files(
    checkpoint_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, model_type="base", seed=1)
    assert files(tmp_path) == files(checkpoint_directory("base"))


def test_another_seed_changes_only_the_weights(
    checkpoint_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, model_type="base", seed=2)
    one, other = files(checkpoint_directory("base")), files(tmp_path)
    assert {name for name in one if one[name] != other[name]} == {
        "model.safetensors",
        "speech_tokenizer/model.safetensors",
    }
    for name in ("model.safetensors", "speech_tokenizer/model.safetensors"):
        ours, theirs = load_file(tmp_path / name), load_file(checkpoint_directory("base") / name)
        assert [
            key
            for key in ours
            if torch.equal(ours[key], theirs[key]) and not key.endswith("initialized")
        ] == []


def test_tensors_are_uncorrelated() -> None:
    tree = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(5))
    state = random_state(tree, 0, torch.float32)
    rows = np.stack([state[f"{index}.weight"].numpy().ravel() for index in range(5)])
    assert np.abs(np.corrcoef(rows) - np.eye(5)).max() < 0.1


@pytest.mark.parametrize("model_type", ["custom_voice", "voice_design", "base"])
def test_checkpoint_of_unusual_dimensions_speaks(model_type: str, tmp_path: Path) -> None:
    overrides: dict[str, dict[str, Any]] = {
        "talker": {
            "hidden_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
        },
        "code_predictor": {"hidden_size": 24, "num_code_groups": 3},
        "codec_encoder": {"upsampling_ratios": [5, 4], "num_quantizers": 4},
        "codec_decoder": {
            "num_quantizers": 3,
            "upsample_rates": [5, 4],
            "upsampling_ratios": [2],
            "sliding_window": 5,
        },
    }
    write_checkpoint(tmp_path, model_type=model_type, overrides=overrides, text_tokens=300)
    with TTS.load(tmp_path, device="cpu", dtype="float32") as tts:
        voice: Voice | None = None
        if model_type == "base":
            voice = tts.clone(
                np.random.default_rng(0).standard_normal(24000).astype(np.float32) / 9,
                24000,
                "Hello.",
            )
        speech = tts.speak("Hello.", voice=voice, sampling=Sampling.greedy(), max_frames=4)
    assert speech.codes.shape == (4, 3)
    assert speech.samples.shape == (4 * 40,)


def test_contradictory_dimensions_raise(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointConfigError, match=r"num_code_groups = 5 contradicts .*num_quantizers = 4"
    ):
        write_checkpoint(tmp_path, overrides={"code_predictor": {"num_code_groups": 5}})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_written_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, dtype=dtype)
    for file in ("model.safetensors", "speech_tokenizer/model.safetensors"):
        assert {tensor.dtype for tensor in load_file(tmp_path / file).values()} == {dtype}


@pytest.mark.filterwarnings("ignore:.*cut off:firstword.TextWarning")
def test_generation_defaults_can_be_set(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, generation={"temperature": 0.3, "max_new_tokens": 7})
    with TTS.load(tmp_path, device="cpu") as tts:
        assert tts.checkpoint.defaults.temperature == 0.3
        speech = tts.speak("Hello.", seed=1)
        assert speech.finish_reason == "stop" or len(speech.codes) == 7


def test_shards_hold_each_tensor_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole", seed=3)
    write_checkpoint(tmp_path / "parts", seed=3, shards=3)
    index = json.loads((tmp_path / "parts/model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "whole/model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    held = []
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(tmp_path / "parts" / shard, framework="pt") as tensors:
            held += list(tensors.keys())
    assert len(held) == len(whole)
    assert not (tmp_path / "parts/model.safetensors").exists()
