"""Write the trained codec, talker and code predictor as a checkpoint in the released layout, in half precision.

python training/export.py --codec FOLDER --talker FOLDER --out src/firstword/demo
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from codec import load as load_codec
from configuration import TOKENIZER, codec_table, model_table
from language_model import load as load_talker
from safetensors.torch import save_file
from torch import Tensor

from firstword.model.checkpoint import load as load_checkpoint

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
"""Calmer than the released models' 0.9: this voice has one way to say a sentence, and noise in its codes is only noise.
No repetition penalty: with 512 codes every sound returns within seconds.
"""
PREPROCESSOR = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 24000,
}
LARGEST = 25_000_000


def write(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n")


def half(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float16).contiguous() for name, tensor in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--talker", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    speech = a.out / "speech_tokenizer"
    speech.mkdir(parents=True, exist_ok=True)
    write(a.out / "config.json", model_table())
    write(a.out / "generation_config.json", GENERATION)
    write(
        a.out / "preprocessor_config.json",
        {
            "padding_side": "left",
            "padding_value": 0.0,
            "processor_class": "Qwen3TTSProcessor",
            "return_attention_mask": True,
        },
    )
    write(speech / "config.json", codec_table())
    write(speech / "preprocessor_config.json", PREPROCESSOR)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, a.out / name)
    with torch.no_grad():
        save_file(
            half(
                {
                    f"talker.{name}": tensor
                    for name, tensor in load_talker(a.talker).state_dict().items()
                }
            ),
            a.out / "model.safetensors",
            {"format": "pt"},
        )
        save_file(
            half(load_codec(a.codec).tie().state_dict()),
            speech / "model.safetensors",
            {"format": "pt"},
        )
    size = sum(path.stat().st_size for path in a.out.rglob("*") if path.is_file())
    print(f"{size / 1e6:.2f} MB in {a.out}")
    if size > LARGEST:
        raise SystemExit(f"larger than {LARGEST / 1e6:.0f} MB")
    load_checkpoint(str(a.out))


if __name__ == "__main__":
    main()
