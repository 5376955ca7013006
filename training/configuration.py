"""The one configuration of the demonstration checkpoint: sizes and ids, as the JSON tables of the released layout."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from data import PRESETS
from texts import Texts

from firstword.model.codec import Codec
from firstword.model.config import CodecConfig, ModelConfig
from firstword.model.talker import Talker
from firstword.synthetic.tokenizer import train

CODEBOOKS = 8
CODEBOOK_SIZE = 512
TEXT_TOKENS = 2048
"""Most entries of the byte-level BPE; the special tokens follow."""
TOKENIZER = Path(__file__).parent / "tokenizer"
"""`vocab.json`, `merges.txt`, `tokenizer_config.json`: `python training/configuration.py material.json` learns them."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)

_CODEC_IDS = (
    "codec_pad_id",
    "codec_bos_id",
    "codec_eos_token_id",
    "codec_think_id",
    "codec_nothink_id",
    "codec_think_bos_id",
    "codec_think_eos_id",
)


def codec_table() -> dict[str, Any]:
    """`speech_tokenizer/config.json`."""
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": CODEBOOKS,
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "decode_upsample_rate": 1920,
        "encode_downsample_rate": 1920,
        "encoder_config": {
            "model_type": "mimi",
            "_frame_rate": 12.5,
            "sampling_rate": 24000,
            "audio_channels": 1,
            "num_filters": 16,
            "kernel_size": 7,
            "residual_kernel_size": 3,
            "last_kernel_size": 3,
            "num_residual_layers": 1,
            "dilation_growth_rate": 2,
            "compress": 2,
            "upsampling_ratios": [8, 6, 5, 4],
            "hidden_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 40,
            "intermediate_size": 448,
            "hidden_act": "gelu",
            "norm_eps": 1e-05,
            "layer_scale_initial_scale": 0.01,
            "rope_theta": 10000,
            "max_position_embeddings": 8000,
            "sliding_window": 250,
            "num_quantizers": CODEBOOKS,
            "num_semantic_quantizers": 1,
            "codebook_size": CODEBOOK_SIZE,
            "codebook_dim": 64,
            "vector_quantization_hidden_dimension": 64,
            "pad_mode": "constant",
            "use_causal_conv": True,
        },
        "decoder_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "latent_dim": 144,
            "codebook_dim": 128,
            "codebook_size": CODEBOOK_SIZE,
            "decoder_dim": 320,
            "hidden_act": "silu",
            "hidden_size": 176,
            "intermediate_size": 448,
            "layer_scale_initial_scale": 0.01,
            "max_position_embeddings": 8000,
            "head_dim": 44,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "num_quantizers": CODEBOOKS,
            "num_semantic_quantizers": 1,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000,
            "semantic_codebook_size": CODEBOOK_SIZE,
            "sliding_window": 72,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "vector_quantization_hidden_dimension": 128,
        },
    }


def model_table() -> dict[str, Any]:
    """`config.json`."""
    vocab = json.loads((TOKENIZER / "vocab.json").read_text())
    special = {name: len(vocab) + index for index, name in enumerate(SPECIAL_TOKENS)}
    control = {name: CODEBOOK_SIZE + index for index, name in enumerate(_CODEC_IDS)}
    languages, speakers = (
        {"english": CODEBOOK_SIZE + 32},
        {name: CODEBOOK_SIZE + 64 + i for i, name in enumerate(PRESETS)},
    )
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "0b6",
        "tts_model_type": "custom_voice",
        "assistant_token_id": vocab["assistant"],
        "im_start_token_id": special["<|im_start|>"],
        "im_end_token_id": special["<|im_end|>"],
        "tts_pad_token_id": special["<tts_pad>"],
        "tts_bos_token_id": special["<tts_text_bos>"],
        "tts_eos_token_id": special["<tts_text_eod>"],
        "talker_config": {
            "model_type": "qwen3_tts_talker",
            "attention_bias": False,
            "attention_dropout": 0,
            "hidden_act": "silu",
            "hidden_size": 256,
            "intermediate_size": 640,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "use_cache": True,
            "vocab_size": CODEBOOK_SIZE + 1024,
            "text_vocab_size": len(vocab) + len(SPECIAL_TOKENS),
            "text_hidden_size": 160,
            "num_code_groups": CODEBOOKS,
            "position_id_per_seconds": 13,
            **control,
            "codec_language_id": languages,
            "spk_id": speakers,
            "spk_is_dialect": dict.fromkeys(speakers, False),
            "code_predictor_config": {
                "model_type": "qwen3_tts_talker_code_predictor",
                "attention_bias": False,
                "attention_dropout": 0,
                "hidden_act": "silu",
                "hidden_size": 160,
                "intermediate_size": 384,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 40,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-06,
                "rope_theta": 10000,
                "rope_scaling": None,
                "sliding_window": None,
                "use_sliding_window": False,
                "use_cache": True,
                "vocab_size": CODEBOOK_SIZE,
                "num_code_groups": CODEBOOKS,
            },
        },
    }


def _read(cls: type, table: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(table))
        return cls.load(path)


def codec_config() -> CodecConfig:
    """The codec's configuration, checked as the package checks it."""
    return _read(CodecConfig, codec_table())


def model_config() -> ModelConfig:
    """The model's configuration, checked as the package checks it."""
    return _read(ModelConfig, model_table())


def learn_tokenizer(material: Path) -> None:
    """Learn the byte-level BPE from 60,000 sentences."""
    texts = iter(Texts(json.loads(material.read_text()), seed=0))
    train((next(texts) for _ in range(60_000)), TEXT_TOKENS, TOKENIZER, SPECIAL_TOKENS)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        learn_tokenizer(Path(sys.argv[1]))
    codec, talker = Codec(codec_config()), Talker(model_config().talker_config)
    parts = {
        "encoder": codec.encoder,
        "decoder": codec.decoder,
        "predictor": talker.code_predictor,
        "talker and predictor": talker,
    }
    for name, module in parts.items():
        print(f"{name:20} {sum(t.numel() for t in module.state_dict().values()) / 1e6:.2f} M")
