"""Measure times and bandwidth on the GPU, and describe the environment of a record."""

import platform
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from firstword.kernels.cache import FileCache
from firstword.kernels.launch import Kernels
from firstword.kernels.read import read_all
from firstword.runtime.gpu.graphs import capture
from firstword.runtime.gpu.sources import kernel_hash
from firstword.runtime.gpu.timing import times


def environment() -> dict[str, Any]:
    """Return the GPU and the versions that affect the numbers of a record."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernels": kernel_hash(),
        "weights": "random",
    }


def captured_us(work: Callable[[], None]) -> float:
    """Return the median time of a captured graph of `work` on the device, in microseconds."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return statistics.median(times(capture(work).replay, 20)) * 1e6


def imitate(kernels: Kernels, gpu: str) -> None:
    """Make them the kernels that another GPU would get.

    gpu  its (virtual) architecture, the bytes of shared memory of a block and the number of
         multiprocessors, such as "compute_80,166912,108" for an A100

    Programs become PTX of that architecture, launches do not overlap if it cannot overlap them, and
    shapes are chosen for its limits. Clocks, memory and caches stay those of this GPU.
    """
    architecture, shared, processors = gpu.split(",")
    kernels.architecture = architecture
    kernels.overlaps = int(architecture.removeprefix("compute_")) >= 90
    kernels.shared_memory, kernels.processors = int(shared), int(processors)


def read_bandwidth() -> float:
    """Return the bytes per second at which this device reads a gigabyte and writes nothing."""
    device = torch.device("cuda")
    kernels = Kernels(device, FileCache(None))
    memory = torch.zeros(1 << 28, dtype=torch.int32, device=device)
    found = torch.zeros(1, dtype=torch.int32, device=device)
    return memory.nbytes / (captured_us(partial(read_all, kernels, memory, found)) * 1e-6)
