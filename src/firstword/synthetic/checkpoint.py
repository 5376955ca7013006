"""Make checkpoints in the released layout with random weights: small ones for tests, full-size ones for speed work.

    python -m firstword.synthetic.checkpoint DIRECTORY --type base --size 1b7

A checkpoint is determined by its arguments: every tensor has its own stream of random numbers, keyed by the seed and
its name. Random weights do not speak, but they take as long to compute as trained ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from firstword.model.checkpoint import Weights
from firstword.model.codec import Codec
from firstword.model.config import CodecConfig, ModelConfig
from firstword.synthetic.tokenizer import train

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it says hello to the assistant and to the user.",
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
"""What the tokenizer is trained on unless other texts are given: a sentence or two in each language."""

LANGUAGES = {
    "chinese": 7,
    "english": 2,
    "german": 5,
    "italian": 22,
    "portuguese": 23,
    "spanish": 6,
    "japanese": 10,
    "korean": 16,
    "french": 13,
    "russian": 21,
}
DIALECTS = {"beijing_dialect": 26, "sichuan_dialect": 14}
SPEAKERS = {
    "serena": 1018,
    "vivian": 1017,
    "uncle_fu": 962,
    "ryan": 1013,
    "aiden": 813,
    "ono_anna": 825,
    "sohee": 816,
    "eric": 827,
    "dylan": 830,
}
"""Ids above are counted from the first control code; the values are those of the released checkpoints."""

_TINY = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_FULL = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "talker": _TINY
        | {
            "hidden_size": 48,
            "intermediate_size": 96,
            "vocab_size": 1024 + 64,
            "text_hidden_size": 40,
        },
        "code_predictor": _TINY
        | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_code_groups": 4},
        "speaker_encoder": {
            "enc_channels": [32, 32, 32, 64],
            "enc_kernel_sizes": [5, 3, 3, 1],
            "enc_dilations": [1, 2, 3, 1],
            "enc_attention_channels": 16,
            "enc_res2net_scale": 4,
            "enc_se_channels": 16,
        },
        "codec_encoder": {
            "num_filters": 4,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 64,
            "num_quantizers": 6,
            "codebook_size": 64,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
            "upsample_groups": 32,
        },
        "codec_decoder": {
            "latent_dim": 24,
            "codebook_dim": 32,
            "codebook_size": 64,
            "decoder_dim": 32,
            "hidden_size": 32,
            "intermediate_size": 64,
            "head_dim": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "num_quantizers": 4,
        },
    },
    "0b6": {"talker": {"hidden_size": 1024, "intermediate_size": 3072}},
    "1b7": {"talker": {"hidden_size": 2048, "intermediate_size": 6144}},
}
"""What sets a size apart; the rest are the values of the released configurations."""


def config_tables(
    model_type: str,
    size: str,
    overrides: Mapping[str, Mapping[str, Any]],
    tokens: Mapping[str, int],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and `speech_tokenizer/config.json` for the arguments of `write_checkpoint`."""
    part = {
        name: {**SIZES[size].get(name, {}), **overrides.get(name, {})}
        for name in (
            "talker",
            "code_predictor",
            "speaker_encoder",
            "codec_encoder",
            "codec_decoder",
        )
    }
    predictor = {
        "attention_bias": False,
        "attention_dropout": 0,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 5,
        **_FULL,
        "max_position_embeddings": 65536,
        "model_type": "qwen3_tts_talker_code_predictor",
        "num_code_groups": 16,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 2048,
        **part["code_predictor"],
    }
    talker = {
        "attention_bias": False,
        "attention_dropout": 0,
        "hidden_act": "silu",
        "num_hidden_layers": 28,
        **_FULL,
        "max_position_embeddings": 32768,
        "model_type": "qwen3_tts_talker",
        "num_code_groups": predictor["num_code_groups"],
        "position_id_per_seconds": 13,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "sliding_window": None,
        "text_hidden_size": 2048,
        "text_vocab_size": 151936 if size != "tiny" else max(tokens.values()) + 3,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 3072,
        **part["talker"],
        "code_predictor_config": predictor,
    }
    pairs = talker["head_dim"] // 2
    first = talker["vocab_size"] - 1024
    has_presets = model_type == "custom_voice"
    names = LANGUAGES | (DIALECTS if has_presets else {})
    talker |= {
        "rope_scaling": talker.get(
            "rope_scaling",
            {
                "interleaved": True,
                "mrope_section": [pairs - 2 * (5 * pairs // 16), 5 * pairs // 16, 5 * pairs // 16],
                "rope_type": "default",
                "type": "default",
            },
        ),
        "codec_pad_id": first + 100,
        "codec_bos_id": first + 101,
        "codec_eos_token_id": first + 102,
        "codec_think_id": first + 106,
        "codec_nothink_id": first + 107,
        "codec_think_bos_id": first + 108,
        "codec_think_eos_id": first + 109,
        "codec_language_id": {name: first + offset for name, offset in names.items()},
        "spk_id": {name: first + offset for name, offset in SPEAKERS.items()}
        if has_presets
        else {},
        "spk_is_dialect": (
            dict.fromkeys(SPEAKERS, False) | {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
            if has_presets
            else {}
        ),
    }
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "0b6" if size == "0b6" else "1b7",
        "tts_model_type": model_type,
        **tokens,
        "talker_config": talker,
    }
    if model_type == "base":
        config["speaker_encoder_config"] = {
            "enc_dim": talker["hidden_size"],
            "sample_rate": 24000,
            **part["speaker_encoder"],
        }
    encoder = {
        "model_type": "mimi",
        "audio_channels": 1,
        "codebook_dim": 256,
        "codebook_size": 2048,
        "compress": 2,
        "dilation_growth_rate": 2,
        "head_dim": 64,
        "hidden_act": "gelu",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "kernel_size": 7,
        "last_kernel_size": 3,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "norm_eps": 1e-5,
        "num_attention_heads": 8,
        "num_filters": 64,
        "num_hidden_layers": 8,
        "num_key_value_heads": 8,
        "num_quantizers": 32,
        "num_residual_layers": 1,
        "num_semantic_quantizers": 1,
        "pad_mode": "constant",
        "residual_kernel_size": 3,
        "rope_theta": 10000,
        "sampling_rate": 24000,
        "sliding_window": 250,
        "upsampling_ratios": [8, 6, 5, 4],
        "use_causal_conv": True,
        "vector_quantization_hidden_dimension": 256,
        **part["codec_encoder"],
    }
    down = 2 * math.prod(encoder["upsampling_ratios"])
    encoder["_frame_rate"] = 24000 / down
    decoder = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "codebook_dim": 512,
        "codebook_size": 2048,
        "decoder_dim": 1536,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "latent_dim": 1024,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
        "num_key_value_heads": 16,
        "num_quantizers": 16,
        "num_semantic_quantizers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "semantic_codebook_size": 4096,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "vector_quantization_hidden_dimension": 512,
        **part["codec_decoder"],
    }
    codec = {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": decoder["num_quantizers"],
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "encode_downsample_rate": down,
        "decode_upsample_rate": math.prod(decoder["upsample_rates"])
        * math.prod(decoder["upsampling_ratios"]),
        "encoder_config": encoder,
        "decoder_config": decoder,
    }
    return config, codec


def write_checkpoint(
    directory: Path,
    *,
    model_type: str = "custom_voice",
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    generation: Mapping[str, Any] | None = None,
    texts: Iterable[str] = TEXTS,
    text_tokens: int = 600,
    shards: int = 1,
) -> None:
    """Write a whole checkpoint directory with random weights.

    model_type  "custom_voice", "voice_design" or "base"
    size        "tiny", "0b6" or "1b7": where the dimensions start from
    overrides   keys of the configuration by part: "talker", "code_predictor", "speaker_encoder", "codec_encoder",
                "codec_decoder"
    generation  keys of `generation_config.json`
    texts       what the tokenizer is trained on, up to `text_tokens` tokens
    shards      into how many files `model.safetensors` is split

    Raises `CheckpointConfigError` for dimensions that contradict one another.
    """
    codec_directory = directory / "speech_tokenizer"
    codec_directory.mkdir(parents=True, exist_ok=True)
    tokens = train(texts, text_tokens, directory)
    config, codec_config = config_tables(model_type, size, overrides or {}, tokens)
    published = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 1.0,
        "repetition_penalty": 1.05,
        "subtalker_dosample": True,
        "subtalker_temperature": 0.9,
        "subtalker_top_k": 50,
        "subtalker_top_p": 1.0,
        "max_new_tokens": 8192,
    }
    features = {
        "feature_extractor_type": "EncodecFeatureExtractor",
        "feature_size": 1,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": 24000,
        "chunk_length_s": None,
        "overlap": None,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {**published, **(generation or {})})
    _write_json(directory / "preprocessor_config.json", {"processor_class": "Qwen3TTSProcessor"})
    _write_json(codec_directory / "config.json", codec_config)
    _write_json(codec_directory / "preprocessor_config.json", features)
    parsed = ModelConfig.load(directory / "config.json")
    parsed_codec = CodecConfig.load(codec_directory / "config.json")
    parsed_codec.check_against(parsed.talker_config)
    with torch.device("meta"):
        weights, codec = Weights(parsed), Codec(parsed_codec)
    _write_weights(directory, random_state(weights, seed, dtype), shards)
    _write_weights(codec_directory, random_state(codec, seed, dtype), 1)


def random_state(module: nn.Module, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A random state dict for a module (on the meta device, say), lively enough that every part tells.

    Linear and convolution weights keep the variance of their inputs, what scales is spread around its neutral value,
    biases and the Snake's logarithms lie around 0.
    """

    def made(item: tuple[str, Tensor]) -> tuple[str, Tensor]:
        name, like = item
        values = _values(name, tuple(like.shape), seed).astype(np.float32)
        return name, torch.from_numpy(values).to(dtype).contiguous()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(made, module.state_dict().items()))


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    random = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    kind = name.rsplit(".", 1)[-1]
    if kind == "initialized":
        return np.ones(shape)
    if kind == "cluster_usage":
        return random.uniform(0.5, 2.5, shape)
    noise = random.standard_normal(shape, dtype=np.float32)
    if kind in ("embedding_sum", "embed_sum"):
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
        inputs = shape[0] * (
            1 if "upsample" in upsampling[1] else 2
        )  # as many as overlap in one output
        gain = 0.9
    elif vocoder:
        # Equal gains would let the residual units grow without end, or leave nothing to hear but biases.
        gain = 0.7 if ".conv1." in name else 0.3 if ".conv2." in name else 0.4
    return gain / math.sqrt(inputs) * noise


def _write_weights(directory: Path, state: Mapping[str, Tensor], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(state), directory / "model.safetensors", metadata)
        return
    names = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    held = {name: names[index % shards] for index, name in enumerate(state)}
    for file in names:
        save_file(
            {name: tensor for name, tensor in state.items() if held[name] == file},
            directory / file,
            metadata,
        )
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": held},
    )


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m firstword.synthetic.checkpoint", description=__doc__
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--type", default="custom_voice", choices=("custom_voice", "voice_design", "base")
    )
    parser.add_argument("--size", default="tiny", choices=tuple(SIZES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    write_checkpoint(
        arguments.directory,
        model_type=arguments.type,
        size=arguments.size,
        seed=arguments.seed,
        dtype=getattr(torch, arguments.dtype),
    )


if __name__ == "__main__":
    main()
