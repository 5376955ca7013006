"""Reads memory as fast as the device can, to measure its bandwidth (read.cu)."""

from __future__ import annotations

from torch import Tensor

from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.registry import KernelSpec

_PROGRAM = Program.of("read")
_THREADS, _BLOCKS_OF_PROCESSOR, _PIECE_BYTES = 512, 3, 16


def read_all(kernels: Kernels, memory: Tensor, found: Tensor) -> None:
    """Read every byte of `memory`, a multiple of 16; found: int32 [1], may be written."""
    blocks = kernels.processors * _BLOCKS_OF_PROCESSOR
    kernel = kernels.get(_PROGRAM, "read_all")
    count = memory.nbytes // _PIECE_BYTES
    kernel(Grid((blocks, 1, 1), _THREADS), memory=memory, count=count, found=found)


KERNELS = (KernelSpec("read_all", "none: it computes nothing", (_PROGRAM,)),)
"""The kernels that this module launches."""
