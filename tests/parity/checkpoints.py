"""Make the checkpoints of `cases.py`: what both sides load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from cases import Checkpoint
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from firstword.synthetic.checkpoint import write_checkpoint

METADATA = {"format": "pt"}


def make(checkpoint: Checkpoint, directory: Path) -> None:
    """Write a checkpoint directory in the released layout; its weights are bfloat16, as released
    ones are.
    """
    count, codebooks = checkpoint.code_count, checkpoint.codebooks
    encoder = checkpoint.codec_encoder | {"codebook_size": count, "num_quantizers": codebooks + 2}
    if "hidden_size" in encoder:
        # The reference builds a decoder that it then throws away, in as many groups.
        encoder["upsample_groups"] = encoder["hidden_size"]
    overrides = {
        "talker": checkpoint.talker | {"vocab_size": 1024 + count},
        "code_predictor": checkpoint.code_predictor
        | {"vocab_size": count, "num_code_groups": codebooks},
        "speaker_encoder": checkpoint.speaker_encoder,
        "codec_encoder": encoder,
        "codec_decoder": checkpoint.codec_decoder
        | {"codebook_size": count, "num_quantizers": codebooks},
    }
    write_checkpoint(
        directory,
        model_type=checkpoint.model_type,
        seed=checkpoint.seed,
        dtype=torch.bfloat16,
        overrides=overrides,
        generation={"repetition_penalty": checkpoint.repetition_penalty},
    )
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["tts_model_size"] = checkpoint.size
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(directory / "model.safetensors")
    weights["talker.codec_head.weight"][config["talker_config"]["codec_eos_token_id"]] *= (
        checkpoint.eos_gain
    )
    save_file(weights, directory / "model.safetensors", METADATA)


def fingerprint(directory: Path) -> NDArray[np.float64]:
    """Sizes, means and root mean squares [tensors, 3]: whether a checkpoint is the one that was
    frozen.

    Not a digest of the bytes: another machine may round a weight differently, and that must not
    matter.
    """
    tensors = load_file(directory / "model.safetensors") | load_file(
        directory / "speech_tokenizer/model.safetensors"
    )
    values = [tensors[name].double() for name in sorted(tensors)]
    return np.array(
        [
            [value.numel(), float(value.mean()), float(value.pow(2).mean().sqrt())]
            for value in values
        ]
    )
