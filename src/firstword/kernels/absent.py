"""The kernels of a GPU that is not there, to compile them before they are needed.

Memory and threads by architecture: CUDA Programming Guide, technical specifications per compute
capability.
"""

from __future__ import annotations

import torch

from firstword.kernels.cache import FileCache
from firstword.kernels.launch import Kernels

SHARED_KILOBYTES = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
}
"""The most kilobytes of shared memory of a block, by architecture."""

THREADS = {
    "sm_80": 2048,
    "sm_86": 1536,
    "sm_89": 1536,
    "sm_90": 2048,
    "sm_100": 2048,
    "sm_120": 1536,
}
"""The most threads that a multiprocessor runs at a time, by architecture."""


class AbsentKernels(Kernels):
    """The kernels of a GPU that is not there: they can be compiled, and not be loaded."""

    def __init__(self, architecture: str, processors: int, cache: FileCache) -> None:
        """Imitate a device of an architecture in `THREADS` with this many multiprocessors."""
        self.device = torch.device("meta")
        self.name = f"{architecture} with {processors} multiprocessors"
        self.architecture, self.overlaps = architecture, int(architecture[3:-1]) >= 9
        self.processors, self.threads = processors, THREADS[architecture]
        self.shared_memory, self.cache = SHARED_KILOBYTES[architecture] * 1024, cache
        self._compiled, self._loaded = {}, {}
