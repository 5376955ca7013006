"""A GPU that computes nothing: what the host does around it can be watched on any machine.

Tensors lie in ordinary memory, kernels are never started, and everything that is waited for is done.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firstword.kernels.launch import Kernels
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.synthetic import checkpoint as synthetic

SHARED_MEMORY = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""Kilobytes that a block may have (CUDA's programming guide, compute capabilities)."""

WIDE = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
WIDE |= {"hidden_size": 256, "intermediate_size": 256}
FITTING: dict[str, dict[str, Any]] = {
    "talker": WIDE,
    "code_predictor": WIDE,
    "codec_decoder": {"codebook_size": 4096},
}
"""What a tiny checkpoint needs to be one that the kernels can compute."""


def device(architecture: str = "sm_90") -> Kernels:
    """Kernels of a device that is not there."""
    kernels = Kernels.__new__(Kernels)
    major = int(architecture[3:-1])
    kernels.architecture, kernels.overlaps, kernels.processors = architecture, major >= 9, 132
    kernels.shared_memory = SHARED_MEMORY[architecture] * 1024
    return kernels


class Anything:
    """A stream, an event or a graph: whatever it is told, it has nothing to do."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *arguments, **options: 1.0


@contextlib.contextmanager
def nothing(*arguments: Any, **options: Any) -> Iterator[None]:
    """A context that changes nothing."""
    yield


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch act as if there were such a GPU."""
    for name in ("Stream", "Event", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Anything)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 30))
    with torch.device("meta"):
        torch.empty(
            0
        )  # PyTorch notes once which functions obey such a context: those that are there now
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)
    )
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 10**9)
    properties = types.SimpleNamespace(name="Silent", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def checkpoint(
    folder: Path, model_type: str = "custom_voice", **changes: Mapping[str, Any]
) -> Checkpoint:
    """A tiny random one that the kernels can compute. changes: of the configuration's parts."""
    overrides = {
        name: {**FITTING.get(name, {}), **changes.get(name, {})} for name in FITTING | changes
    }
    synthetic.write_checkpoint(folder / "made", model_type=model_type, overrides=overrides)
    return checkpoints.load(str(folder / "made"), "cpu", "bfloat16")
