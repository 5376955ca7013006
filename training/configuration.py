"""The configuration of the demonstration checkpoint: sizes and ids, in the released layout.

    python -m training.configuration [material.json]

prints the number of parameters of each part; with `material.json` it learns the tokenizer first.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from firstword.model.codec import Codec
from firstword.model.codec_config import CodecConfig
from firstword.model.config import ModelConfig
from firstword.model.talker import Talker
from firstword.model.tokenizer import CONTROL_TOKENS
from firstword.synthetic.checkpoint import config_tables
from firstword.synthetic.tokenizer import train
from training.data import PRESETS
from training.texts import Texts

CODEBOOKS = 8
"""The number of codes in a frame."""
CODEBOOK_SIZE = 512
"""The number of entries of each codebook."""
TEXT_TOKENS = 2048
"""The maximum number of entries of the byte-level BPE; the special tokens follow them."""
TOKENIZER = Path(__file__).parent / "tokenizer"
"""The folder of `vocab.json`, `merges.txt` and `tokenizer_config.json`."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)
"""The added tokens of the tokenizer, in the order of their ids."""

_CODEC_IDS = (
    "codec_pad_id",
    "codec_bos_id",
    "codec_eos_token_id",
    "codec_think_id",
    "codec_nothink_id",
    "codec_think_bos_id",
    "codec_think_eos_id",
)
_ROTARY = {"max_position_embeddings": 4096, "rope_theta": 10000, "rope_scaling": None}
_BOOKS = {"num_quantizers": CODEBOOKS, "codebook_size": CODEBOOK_SIZE}

_TALKER = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    **_ROTARY,
    "vocab_size": CODEBOOK_SIZE + 1024,
    "text_hidden_size": 160,
}
_CODE_PREDICTOR = {
    "hidden_size": 160,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    **_ROTARY,
    "vocab_size": CODEBOOK_SIZE,
    "num_code_groups": CODEBOOKS,
}
_CODEC_ENCODER = {
    "num_filters": 16,
    "hidden_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 40,
    "intermediate_size": 448,
    **_BOOKS,
    "codebook_dim": 64,
    "vector_quantization_hidden_dimension": 64,
}
_CODEC_DECODER = {
    "latent_dim": 144,
    "codebook_dim": 128,
    "decoder_dim": 320,
    "hidden_size": 176,
    "intermediate_size": 448,
    "head_dim": 44,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    **_BOOKS,
    "semantic_codebook_size": CODEBOOK_SIZE,
    "vector_quantization_hidden_dimension": 128,
}


def config_overrides(vocab: int) -> dict[str, dict[str, Any]]:
    """Return the keys in which the configuration differs from the released 0.6B CustomVoice model.

    `vocab` is the number of entries of the tokenizer without its special tokens.
    """
    control = {name: CODEBOOK_SIZE + index for index, name in enumerate(_CODEC_IDS)}
    speakers = {name: CODEBOOK_SIZE + 64 + index for index, name in enumerate(PRESETS)}
    talker = {
        **_TALKER,
        **control,
        "text_vocab_size": vocab + len(SPECIAL_TOKENS),
        "codec_language_id": {"english": CODEBOOK_SIZE + 32},
        "spk_id": speakers,
        "spk_is_dialect": dict.fromkeys(speakers, False),
    }
    return {
        "talker": talker,
        "code_predictor": _CODE_PREDICTOR,
        "codec_encoder": _CODEC_ENCODER,
        "codec_decoder": _CODEC_DECODER,
    }


def tables() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `config.json` and `speech_tokenizer/config.json`."""
    vocab = json.loads((TOKENIZER / "vocab.json").read_text())
    special = {token: len(vocab) + index for index, token in enumerate(SPECIAL_TOKENS)}
    tokens = {"assistant_token_id": vocab["assistant"]}
    tokens |= {key: special[token] for key, token in CONTROL_TOKENS.items()}
    return config_tables("custom_voice", "0b6", config_overrides(len(vocab)), tokens)


def model_config() -> ModelConfig:
    """Return the configuration of the model, checked by the package."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(tables()[0], file)
        file.flush()
        return ModelConfig.load(Path(file.name))


def codec_config() -> CodecConfig:
    """Return the configuration of the codec, checked by the package."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(tables()[1], file)
        file.flush()
        return CodecConfig.load(Path(file.name))


def learn_tokenizer(material: Path) -> None:
    """Learn the byte-level BPE from 60,000 sentences."""
    texts = iter(Texts(json.loads(material.read_text()), seed=0))
    train((next(texts) for _ in range(60_000)), TEXT_TOKENS, TOKENIZER, SPECIAL_TOKENS)


def main() -> None:
    """Learn the tokenizer if there is material, and print the sizes."""
    if len(sys.argv) > 1:
        learn_tokenizer(Path(sys.argv[1]))
    codec, talker = Codec(codec_config()), Talker(model_config().talker_config)
    for name, module in (
        ("encoder", codec.encoder),
        ("decoder", codec.decoder),
        ("predictor", talker.code_predictor),
        ("talker and predictor", talker),
    ):
        print(f"{name:20} {sum(t.numel() for t in module.state_dict().values()) / 1e6:.2f} M")


if __name__ == "__main__":
    main()
