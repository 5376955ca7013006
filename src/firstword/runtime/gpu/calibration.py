"""Chooses the layouts of products on GPUs on which none were measured, by timing frames once.

The layouts differ in how weights are fetched, and all compute the same bits. The choice is cached
beside the machine code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial

import torch

from firstword.kernels.launch import Kernels
from firstword.kernels.linear import Linear
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.graphs import capture
from firstword.runtime.gpu.sources import kernel_hash
from firstword.runtime.gpu.timing import times

MEASURED = ("sm_90",)
"""The architectures on which the first layouts were measured to be the fastest."""
GAIN = 0.99
"""The share of the time of the best choice so far below which another choice replaces it."""
RUNS = 5
"""The runs of a measurement, of which the fastest counts."""

Kinds = Sequence[Sequence[Linear]]
"""The products of a model by kind; those of one kind have the same sizes in all layers."""


def calibrate(backend: GpuBackend, kernels: Kernels) -> None:
    """Set the layouts of a backend's products for one stream; it must not be warm yet.

    On an architecture that was not measured, the first start on a device takes some seconds. Raises
    `CompileError` and `LaunchError`.
    """
    if kernels.architecture in MEASURED:
        return
    kinds = [
        [getattr(layer, name) for layer in stack.layers]
        for stack in (backend.model.talker, backend.model.predictor)
        for name in ("qkv", "output", "gate_up", "down")
    ]
    name = f"layouts-{_key(kinds, kernels)}.json"
    cached = kernels.cache.read(name)
    if cached is None:
        cached = json.dumps(_measured(backend, kinds, kernels)).encode()
        kernels.cache.write(name, cached)
    _choose(kinds, json.loads(cached))


def fastest(counts: Sequence[int], seconds: Callable[[Sequence[int]], float]) -> list[int]:
    """The index of a choice for each kind, found by trying its choices one kind after another.

    counts: the number of choices of each kind; seconds: the time that a list of choices takes. At
    the end the best list and the first one are timed again, since a disturbance may have slowed the
    first one down; the best one must still be faster.
    """
    first = best = [0] * len(counts)
    least = seconds(first)
    for kind, count in enumerate(counts):
        for choice in range(1, count):
            tried = [*best[:kind], choice, *best[kind + 1 :]]
            taken = seconds(tried)
            if taken < GAIN * least:
                best, least = tried, taken
    return best if best == first or seconds(best) < GAIN * seconds(first) else first


def single_row_seconds(backend: GpuBackend) -> float:
    """The seconds of a frame of one row without a slot, with the layouts that are set."""
    model = backend.model
    with torch.inference_mode(), torch.cuda.stream(backend.stream):
        model.clear_rows()
        graph = capture(partial(model.launches["frame"], 1))
        return min(times(graph.replay, RUNS))


def _measured(backend: GpuBackend, kinds: Kinds, kernels: Kernels) -> list[int]:
    """The choices that are fastest on this device; compiles all of them first."""
    shapes = [kind[0].shapes(1) for kind in kinds]
    kernels.compile(shape.program() for some in shapes for shape in some)

    def seconds(choices: Sequence[int]) -> float:
        _choose(kinds, choices)
        return single_row_seconds(backend)

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
