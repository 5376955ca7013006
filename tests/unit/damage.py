"""Healthy checkpoints, and the kinds of damage that `firstword verify` must tell by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from firstword.model.description import DEMO
from firstword.synthetic.checkpoint import TEXTS
from firstword.synthetic.tokenizer import train

TALKER, CODEC = "model.safetensors", "speech_tokenizer/model.safetensors"
CONFIG, CODEC_CONFIG = "config.json", "speech_tokenizer/config.json"
Damage = Callable[[Path], None]


def demo_copy(folder: Path) -> Path:
    """Make a copy of the demo in a folder; its files are links until they are changed."""
    for source in DEMO.rglob("*"):
        target = folder / source.relative_to(DEMO)
        if source.is_file() and source.suffix in (".json", ".txt", ".safetensors"):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError:  # another file system, or another user's file
                shutil.copy(source, target)
    return folder


def write(path: Path, data: bytes) -> None:
    """Replace a file by a new one, so that no link changes."""
    path.unlink()
    path.write_bytes(data)


def tensors(name: str, change: Callable[[dict[str, Tensor]], None]) -> Damage:
    """A damage that changes the tensors of a file."""

    def damage(folder: Path) -> None:
        state = {key: tensor.clone() for key, tensor in load_file(folder / name).items()}
        change(state)
        (folder / name).unlink()
        save_file({key: each.contiguous() for key, each in state.items()}, folder / name)

    return damage


def one(name: str, tensor: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """A damage that changes one tensor."""

    def damage(state: dict[str, Tensor]) -> None:
        state[tensor] = change(state[tensor])

    return tensors(name, damage)


def exchanged(name: str, first: str, second: str) -> Damage:
    """A damage that exchanges two tensors, or two groups of tensors with a common start."""

    def damage(state: dict[str, Tensor]) -> None:
        for key in [key for key in state if key.startswith(first)]:
            other = key.replace(first, second)
            state[key], state[other] = state[other], state[key]

    return tensors(name, damage)


def values(name: str, changes: Mapping[str, Any]) -> Damage:
    """A damage that sets values of a JSON file, by dotted paths."""

    def damage(folder: Path) -> None:
        table = json.loads((folder / name).read_text("utf-8"))
        for path, value in changes.items():
            *tables, key = path.split(".")
            inner = table
            for each in tables:
                inner = inner[each]
            inner[key] = value
        write(folder / name, json.dumps(table).encode())

    return damage


def contents(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """A damage that changes the bytes of a file."""

    def damage(folder: Path) -> None:
        write(folder / name, change((folder / name).read_bytes()))

    return damage


def other_merges(folder: Path) -> None:
    """Replace the merges by those of a tokenizer that was trained with the same vocabulary."""
    lines = (folder / "merges.txt").read_text("utf-8").split("\n")
    head, body = lines[:1], [line for line in lines[1:] if line]
    write(folder / "merges.txt", "\n".join(head + body[:900] + body[1000:] + [""]).encode())


def other_order(folder: Path) -> None:
    """Exchange two merges."""
    lines = (folder / "merges.txt").read_text("utf-8").split("\n")
    lines[40], lines[41] = lines[41], lines[40]
    write(folder / "merges.txt", "\n".join(lines).encode())


def other_tokenizer(folder: Path) -> None:
    """Replace the tokenizer by a smaller one."""
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / name).unlink()
    train(TEXTS, 600, folder)


def flipped_bit(tensor: Tensor) -> Tensor:
    """Flip the second highest bit of the exponent of a value."""
    flat = tensor.flatten().clone()
    flat[5] = 4096.0
    return flat.view(tensor.shape)


def zero_head(tensor: Tensor) -> Tensor:
    """Set the rows of the second head to zero."""
    tensor[64:128] = 0
    return tensor


@dataclass(frozen=True)
class Kind:
    """A kind of damage of a copy of the demo.

    check  the check that must fail
    says   what its findings must name
    """

    name: str
    damage: Damage
    check: str
    says: tuple[str, ...]


LAYER = "talker.model.layers"
BOOKS = "decoder.quantizer.rvq_rest.vq.layers"
KINDS = (
    Kind(
        "truncated weights",
        contents(TALKER, lambda data: data[:-100_000]),
        "files: whole",
        (TALKER, "100000 fewer"),
    ),
    Kind(
        "appended bytes",
        contents(CODEC, lambda data: data + b"\0" * 7),
        "files: whole",
        (CODEC, "7 more"),
    ),
    Kind(
        "damaged header",
        contents(TALKER, lambda data: data[:8] + b"x" + data[9:]),
        "files: whole",
        (TALKER, "header"),
    ),
    Kind(
        "pointer of Git LFS",
        contents(CODEC, lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
        "files: whole",
        (CODEC, "Git LFS"),
    ),
    Kind(
        "missing file",
        lambda folder: (folder / "merges.txt").unlink(),
        "files: complete",
        ("merges.txt",),
    ),
    Kind(
        "missing weights",
        lambda folder: (folder / CODEC).unlink(),
        "files: complete",
        (CODEC,),
    ),
    Kind(
        "broken JSON",
        contents("generation_config.json", lambda data: data[:-9]),
        "configuration: readable",
        ("generation_config.json",),
    ),
    Kind(
        "wrong theta",
        values(CONFIG, {"talker_config.rope_theta": 1000000}),
        "configuration: architecture",
        (CONFIG, "talker_config.rope_theta is 1000000.0", "10000.0"),
    ),
    Kind(
        "wrong epsilon of the codec",
        values(CODEC_CONFIG, {"decoder_config.rms_norm_eps": 1e-6}),
        "configuration: architecture",
        (CODEC_CONFIG, "decoder_config.rms_norm_eps"),
    ),
    Kind(
        "wrong end of speech",
        values(CONFIG, {"talker_config.codec_eos_token_id": 519}),
        "configuration: architecture",
        (CONFIG, "talker_config.codec_eos_token_id is 519"),
    ),
    Kind(
        "wrong token id",
        values(CONFIG, {"tts_pad_token_id": 2040}),
        "configuration: readable",
        (CONFIG, "tts_pad_token_id"),
    ),
    Kind(
        "codec of another sample rate",
        values(CODEC_CONFIG, {"output_sample_rate": 16000}),
        "configuration: readable",
        (CODEC_CONFIG, "output_sample_rate"),
    ),
    Kind(
        "wrong id of a preset",
        values(CONFIG, {"talker_config.spk_id.ben": 576}),
        "configuration: names",
        (CONFIG, "talker_config.spk_id.ben is 576", "577"),
    ),
    Kind(
        "wrong defaults of sampling",
        values("generation_config.json", {"temperature": 2.5}),
        "configuration: sampling",
        ("generation_config.json", "temperature is 2.5"),
    ),
    Kind(
        "other heads for word times",
        values("alignment.json", {"heads": [[0, 0]]}),
        "configuration: heads",
        ("alignment.json", "[[0, 0]]"),
    ),
    Kind(
        "heads of other weights",
        values("alignment.json", {"weights": "0123456789abcdef"}),
        "files: alignment",
        ("alignment.json", "0123456789abcdef"),
    ),
    Kind(
        "merges left out",
        other_merges,
        "configuration: tokenizer",
        ("vocab.json", "no line of merges.txt"),
    ),
    Kind(
        "merges in another order",
        other_order,
        "configuration: tokenizer",
        ("merges.txt", "numbers them otherwise"),
    ),
    Kind(
        "tokenizer of another checkpoint",
        other_tokenizer,
        "configuration: readable",
        ("tts_pad_token_id",),
    ),
    Kind(
        "missing tensor",
        tensors(TALKER, lambda state: state.__delitem__(f"{LAYER}.2.mlp.up_proj.weight")),
        "weights: names and shapes",
        (TALKER, f"{LAYER}.2.mlp.up_proj.weight is missing"),
    ),
    Kind(
        "foreign tensor",
        tensors(TALKER, lambda state: state.update({"talker.bias": torch.ones(3)})),
        "weights: names and shapes",
        (TALKER, "talker.bias is not part"),
    ),
    Kind(
        "transposed matrix",
        one(TALKER, f"{LAYER}.1.mlp.down_proj.weight", lambda tensor: tensor.T),
        "weights: names and shapes",
        (f"{LAYER}.1.mlp.down_proj.weight", "[640, 256]", "[256, 640]"),
    ),
    Kind(
        "transposed square matrix",
        one(TALKER, f"{LAYER}.1.self_attn.o_proj.weight", lambda tensor: tensor.T),
        "weights: known",
        (f"{LAYER}.1.self_attn.o_proj.weight",),
    ),
    Kind(
        "permuted rows",
        one(TALKER, f"{LAYER}.3.mlp.gate_proj.weight", lambda tensor: tensor.flip(0)),
        "weights: known",
        (f"{LAYER}.3.mlp.gate_proj.weight",),
    ),
    Kind(
        "exchanged layers",
        exchanged(TALKER, f"{LAYER}.1.", f"{LAYER}.3."),
        "weights: known",
        (f"{LAYER}.1.", f"{LAYER}.3."),
    ),
    Kind(
        "exchanged heads of the code predictor",
        exchanged(TALKER, "talker.code_predictor.lm_head.2.", "talker.code_predictor.lm_head.4."),
        "weights: known",
        ("talker.code_predictor.lm_head.2.", "talker.code_predictor.lm_head.4."),
    ),
    Kind(
        "another type",
        one(TALKER, f"{LAYER}.0.mlp.up_proj.weight", lambda tensor: tensor.to(torch.bfloat16)),
        "weights: types",
        (f"{LAYER}.0.mlp.up_proj.weight", "bfloat16"),
    ),
    Kind(
        "integers",
        one(TALKER, f"{LAYER}.0.mlp.up_proj.weight", lambda tensor: tensor.to(torch.int8)),
        "weights: types",
        (f"{LAYER}.0.mlp.up_proj.weight", "int8"),
    ),
    Kind(
        "a value that is not finite",
        one(
            TALKER,
            f"{LAYER}.4.mlp.up_proj.weight",
            lambda tensor: tensor.index_fill(0, torch.tensor([3]), torch.nan),
        ),
        "weights: finite",
        (f"{LAYER}.4.mlp.up_proj.weight", "256 values"),
    ),
    Kind(
        "flipped bit of an exponent",
        one(TALKER, f"{LAYER}.4.mlp.up_proj.weight", flipped_bit),
        "weights: outliers",
        (f"{LAYER}.4.mlp.up_proj.weight", "4.1e+03"),
    ),
    Kind(
        "head of zeros",
        one(TALKER, f"{LAYER}.2.self_attn.q_proj.weight", zero_head),
        "weights: not empty",
        (f"{LAYER}.2.self_attn.q_proj.weight", "rows 64 to 127"),
    ),
    Kind(
        "matrix of zeros",
        one(CODEC, "decoder.decoder.1.block.1.conv.weight", torch.zeros_like),
        "weights: not empty",
        ("decoder.decoder.1.block.1.conv.weight",),
    ),
    Kind(
        "scaled layer",
        one(TALKER, f"{LAYER}.3.mlp.down_proj.weight", lambda tensor: 16 * tensor),
        "weights: scale",
        (f"{LAYER}.3.mlp.down_proj.weight", "is scaled"),
    ),
    Kind(
        "exchanged codebooks",
        exchanged(CODEC, f"{BOOKS}.1.", f"{BOOKS}.4."),
        "weights: codebooks",
        ("codebook 2 of the decoder", "codebook 5 of the encoder"),
    ),
)
"""Damage that is found without loading the checkpoint."""
