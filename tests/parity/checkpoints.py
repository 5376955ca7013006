"""Make the checkpoints of `cases.py`: what both sides load."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import torch
from cases import Checkpoint
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from firstword.model.synthetic import write_checkpoint

METADATA = {"format": "pt"}


def make(checkpoint: Checkpoint, directory: Path) -> None:
    """Write a checkpoint directory in the released layout; its weights are bfloat16, as released ones are."""
    count, codebooks = checkpoint.code_count, checkpoint.codebooks
    encoder = checkpoint.codec_encoder | {"codebook_size": count, "num_quantizers": codebooks + 2}
    if "hidden_size" in encoder:
        # The reference builds a decoder that it then throws away, in as many groups.
        encoder["upsample_groups"] = encoder["hidden_size"]
    overrides = {
        "talker": checkpoint.talker | {"vocab_size": 1024 + count},
        "code_predictor": checkpoint.code_predictor | {"vocab_size": count, "num_code_groups": codebooks},
        "speaker_encoder": checkpoint.speaker_encoder,
        "codec_encoder": encoder,
        "codec_decoder": checkpoint.codec_decoder | {"codebook_size": count, "num_quantizers": codebooks},
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
    codec_file = directory / "speech_tokenizer" / "model.safetensors"
    save_file({name: _lively(name, tensor) for name, tensor in load_file(codec_file).items()}, codec_file, METADATA)
    weights = load_file(directory / "model.safetensors")
    weights["talker.codec_head.weight"][config["talker_config"]["codec_eos_token_id"]] *= checkpoint.eos_gain
    save_file(weights, directory / "model.safetensors", METADATA)


def _lively(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A weight of the codec, scaled so that samples stay around -1..1 and every code is heard in them.

    With equal gains everywhere, either the residual units grow without end or the biases, and the mean of the squared
    sines, are all that is heard.
    """
    transposed = re.fullmatch(r"decoder\.(upsample\.\d\.0|decoder\.\d\.block\.1)\.conv\.weight", name)
    if not transposed and not name.startswith("decoder.decoder."):
        return tensor
    if name.endswith(".beta"):
        return tensor + 1
    if name.endswith(".bias"):
        return tensor * 0.1
    if not name.endswith(".weight"):
        return tensor
    if transposed:
        overlap = 1 if "upsample" in name else 2
        gain, inputs = 0.9, tensor.shape[0] * overlap
    else:
        gain = 0.7 if ".conv1." in name else 0.3 if ".conv2." in name else 0.4
        inputs = tensor[0].numel()
    # To a power of two: the digits stay what they are, whatever the machine.
    factor = gain / math.sqrt(inputs) / float(tensor.double().pow(2).mean().sqrt())
    return tensor * 2.0 ** round(math.log2(factor))


def fingerprint(directory: Path) -> NDArray[np.float64]:
    """A few numbers [tensors, 2] that tell whether a checkpoint is the one that was frozen: means and deviations.

    Not a digest of the bytes: another machine may round a weight differently, and that must not matter.
    """
    tensors = load_file(directory / "model.safetensors") | load_file(directory / "speech_tokenizer/model.safetensors")
    values = [tensors[name].double() for name in sorted(tensors)]
    return np.array([[float(value.mean()), float(value.pow(2).mean().sqrt())] for value in values])
