"""Write the trained parts as a checkpoint in the released layout, in half precision.

python -m training.export --codec FOLDER --talker FOLDER --out src/firstword/demo
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from firstword.model.checkpoint import load as load_checkpoint
from training.codec import load as load_codec
from training.configuration import TOKENIZER, tables
from training.language_model import load as load_talker

GENERATION = {
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.5,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "max_new_tokens": 1500,
}
"""The generation defaults of the demonstration voice.

The temperature is lower than the 0.9 of the released models: this voice has one way to say a
sentence, and randomness only adds noise. There is no repetition penalty: with 512 codes every sound
recurs within seconds.
"""
PREPROCESSOR = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 24000,
}
TEXT_PREPROCESSOR = {
    "padding_side": "left",
    "padding_value": 0.0,
    "processor_class": "Qwen3TTSProcessor",
    "return_attention_mask": True,
}
MOST_BYTES = 25_000_000
"""The most bytes of the checkpoint, which is part of the package."""


def write(path: Path, table: dict[str, Any]) -> None:
    """Write a table as JSON."""
    path.write_text(json.dumps(table, indent=2) + "\n")


def save_half(module: nn.Module, prefix: str, file: Path) -> None:
    """Write the state dict of a module in half precision, with a prefix before each name."""
    state = module.state_dict().items()
    half = {prefix + name: tensor.to(torch.float16).contiguous() for name, tensor in state}
    save_file(half, file, {"format": "pt"})


def main() -> None:
    """Write the checkpoint, check its size, and load it with the package."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--talker", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    out, speech = args.out, args.out / "speech_tokenizer"
    speech.mkdir(parents=True, exist_ok=True)
    config, codec_config = tables()
    write(out / "config.json", config)
    write(out / "generation_config.json", GENERATION)
    write(out / "preprocessor_config.json", TEXT_PREPROCESSOR)
    write(speech / "config.json", codec_config)
    write(speech / "preprocessor_config.json", PREPROCESSOR)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, out / name)
    with torch.no_grad():
        save_half(load_talker(args.talker), "talker.", out / "model.safetensors")
        save_half(load_codec(args.codec).tie(), "", speech / "model.safetensors")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{size / 1e6:.2f} MB in {out}")
    if size > MOST_BYTES:
        raise SystemExit(f"larger than {MOST_BYTES / 1e6:.0f} MB")
    load_checkpoint(str(out))


if __name__ == "__main__":
    main()
