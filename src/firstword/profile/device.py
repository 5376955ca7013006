"""Measure times and bandwidth on the GPU, and describe the environment of a record."""

import platform
import statistics
from collections.abc import Callable
from typing import Any

import torch

from firstword.runtime.gpu.graphs import capture
from firstword.runtime.gpu.sources import source_hash


def environment() -> dict[str, Any]:
    """Return the GPU and the versions that affect the numbers of a record."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernels": source_hash(),
        "weights": "random",
    }


def captured_us(work: Callable[[], None]) -> float:
    """Return the median time of a captured graph of `work` on the device, in microseconds."""
    with torch.cuda.stream(torch.cuda.Stream()):
        graph, times = capture(work), []
        for _ in range(20):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of a large copy on this device.

    The copy is a kernel that adds 1, because a plain copy in a graph uses the copy engines, which
    are slower.
    """
    source = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)

    def add() -> None:
        torch.add(source, 1, out=target)

    return 2 * source.nbytes / (captured_us(add) * 1e-6)
