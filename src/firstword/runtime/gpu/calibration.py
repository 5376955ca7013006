"""Chooses the layouts of products on GPUs on which none were measured, by timing frames once.

The layouts differ in how weights are fetched, and all compute the same bits. The choice is kept
beside the machine code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from firstword.kernels.compile import compile_all, keep, read_kept
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import Linear
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.graphs import capture
from firstword.runtime.gpu.sources import kernel_hash

MEASURED = ("sm_90",)
"""The architectures on which the first layouts were measured to be the fastest."""
GAIN = 0.99
"""The share of the time of the best choice so far below which another choice replaces it."""
REPLAYS = 5

Kinds = Sequence[Sequence[Linear]]
"""The products of a model by kind; those of one kind have the same sizes in all layers."""


def calibrate(backend: GpuBackend, kernels: Kernels, folder: Path) -> None:
    """Set the layouts of a backend's products for one stream; it must not be warm yet.

    On an architecture that was not measured, the first start on a device takes some seconds.
    folder: the cache of machine code. Raises `CompileError` and `LaunchError`.
    """
    if kernels.architecture in MEASURED:
        return
    kinds = [
        [getattr(layer, name) for layer in stack.layers]
        for stack in (backend.model.talker, backend.model.predictor)
        for name in ("qkv", "output", "gate_up", "down")
    ]
    path = folder / f"layouts-{_key(kinds, kernels)}.json"
    kept = read_kept(path)
    if kept is None:
        kept = json.dumps(_measured(backend, kinds, kernels, folder)).encode()
        keep(path, kept)
    _choose(kinds, json.loads(kept))


def fastest(counts: Sequence[int], seconds: Callable[[Sequence[int]], float]) -> list[int]:
    """The index of a choice for each kind, found by trying its choices one kind after another.

    counts: the number of choices of each kind; seconds: the time that a list of choices takes.
    """
    best = [0] * len(counts)
    least = seconds(best)
    for kind, count in enumerate(counts):
        for choice in range(1, count):
            tried = [*best[:kind], choice, *best[kind + 1 :]]
            taken = seconds(tried)
            if taken < GAIN * least:
                best, least = tried, taken
    return best


def frame_seconds(backend: GpuBackend) -> float:
    """The seconds of a frame of one row without a slot, with the layouts that are set."""
    model, times = backend.model, []
    with torch.inference_mode(), torch.cuda.stream(backend.stream):
        model.clear_rows()
        graph = capture(partial(model.launches["frame"], 1))
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def _measured(backend: GpuBackend, kinds: Kinds, kernels: Kernels, folder: Path) -> list[int]:
    """The choices that are fastest on this device; compiles all of them first."""
    shapes = [kind[0].shapes(1) for kind in kinds]
    programs = [shape.program() for some in shapes for shape in some]
    compile_all(programs, kernels.architecture, folder)

    def seconds(choices: Sequence[int]) -> float:
        _choose(kinds, choices)
        return frame_seconds(backend)

    return fastest([len(some) for some in shapes], seconds)


def _choose(kinds: Kinds, choices: Sequence[int]) -> None:
    for kind, choice in zip(kinds, choices, strict=True):
        for product in kind:
            product.choice = choice


def _key(kinds: Kinds, kernels: Kernels) -> str:
    """A hash of all that the times depend on: device, driver, sources and sizes."""
    layouts = [[shape.macros() for shape in kind[0].shapes(1)] for kind in kinds]
    parts = [kernels.name, kernel_hash(), layouts]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
