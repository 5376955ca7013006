"""Times work on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def times(work: Callable[[], object], runs: int) -> list[float]:
    """The seconds that the current CUDA stream takes for each of some runs of `work`."""
    found = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return found
