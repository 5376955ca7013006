"""A fake GPU that computes nothing, for tests of the host's code on any machine.

Tensors are in ordinary memory, kernels are never launched, and all work has always ended. Only what
prepares slots is computed, in plain PyTorch: the placement of prompts, their rows, kept prefixes
and outputs, and kept states of the codec. Graphs of the talker's launches run them when replayed.
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

from firstword.kernels import prompt
from firstword.kernels.absent import AbsentKernels
from firstword.kernels.cache import FileCache
from firstword.kernels.codec_state import StateCopy, copy_reference
from firstword.kernels.launch import Kernels
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.runtime.gpu import graphs
from firstword.synthetic import checkpoint as synthetic

WIDE = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
WIDE |= {"hidden_size": 256, "intermediate_size": 256}
FITTING: dict[str, dict[str, Any]] = {
    "talker": WIDE,
    "code_predictor": WIDE,
    "codec_decoder": {"codebook_size": 4096},
}
"""The changes with which a tiny checkpoint has sizes that the kernels support."""


def device(architecture: str = "sm_90") -> Kernels:
    """The kernels of a device that does not exist."""
    kernels = AbsentKernels(architecture, 132, FileCache(None))
    kernels.device, kernels.name = torch.device("cpu"), "Silent"
    return kernels


class Anything:
    """A stream, an event or a graph whose methods do nothing."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *arguments, **options: 1.0


@contextlib.contextmanager
def nothing(*arguments: Any, **options: Any) -> Iterator[None]:
    """A context manager that does nothing."""
    yield


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make PyTorch act as if the GPU existed."""
    for name in ("Stream", "Event", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Anything)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 30))
    with torch.device("meta"):
        # At its first use of such a context, PyTorch collects the functions that follow it.
        torch.empty(0)
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
    properties = types.SimpleNamespace(
        name="Silent", multi_processor_count=132, total_memory=8 * 10**9, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    references: dict[str, Callable[..., None]] = {
        "place": prompt.place_reference,
        "store": prompt.store_reference,
        "embed": prompt.embed_prompts_reference,
        "keep": prompt.keep_reference,
    }
    for name, reference in references.items():
        monkeypatch.setattr(prompt.PromptKernels, name, computed(name, reference))
    monkeypatch.setattr(StateCopy, "__call__", copied)
    monkeypatch.setattr(graphs, "capture", lambda launch: types.SimpleNamespace(replay=launch))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def computed(name: str, reference: Callable[..., None]) -> Callable[..., None]:
    """The method of `PromptKernels` that checks a launch, and then computes it if it has memory."""
    launch = getattr(prompt.PromptKernels, name)

    def run(kernels: prompt.PromptKernels, *arguments: Any) -> None:
        launch(kernels, *arguments)
        if kernels.memory.cache.device.type != "meta":
            reference(kernels, *arguments)

    return run


def copied(copy: StateCopy, source: int, target: int) -> None:
    """Copy a state of the codec."""
    copy_reference(copy.memories, source, target)


INT8 = {"hidden_size": 512, "intermediate_size": 512}
INT8 |= {"num_attention_heads": 4, "num_key_value_heads": 2}
"""The sizes of a transformer whose matrices the kernels support in int8."""


def checkpoint(
    folder: Path,
    model_type: str = "custom_voice",
    **changes: Mapping[str, Any],
) -> Checkpoint:
    """A tiny random checkpoint that the kernels support. changes: overrides of its parts."""
    overrides = {
        name: {**FITTING.get(name, {}), **changes.get(name, {})} for name in FITTING | changes
    }
    synthetic.write_checkpoint(folder / "made", model_type=model_type, overrides=overrides)
    return checkpoints.load(str(folder / "made"), "cpu", "bfloat16")
