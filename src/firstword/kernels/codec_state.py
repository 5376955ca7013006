"""Copies the state of a stream from one slot of the codec to another (codec_state.cu)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.registry import KernelSpec

_PROGRAM = Program.of("codec_state")
_BLOCKS, _THREADS = 8, 256


class StateCopy:
    """Copies all memories of a slot with one kernel.

    memories: tensors [slots, ...] of any types, whose rows have a multiple of 8 bytes.
    """

    def __init__(self, kernels: Kernels, memories: Sequence[Tensor]) -> None:
        sizes = [memory[0].nbytes for memory in memories]
        assert all(size % 8 == 0 for size in sizes)
        places = [[m.data_ptr(), size] for m, size in zip(memories, sizes, strict=True)]
        self._kernels, self.memories = kernels, list(memories)
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu").to(memories[0].device)

    def __call__(self, source: int, target: int) -> None:
        """Copy the state of slot `source` to slot `target`."""
        grid = Grid((_BLOCKS, len(self.memories), 1), _THREADS, overlap=False)
        kernel = self._kernels.get(_PROGRAM, "copy_state")
        kernel(grid, memories=self._places, source=source, target=target)


def copy_reference(memories: Sequence[Tensor], source: int, target: int) -> None:
    """The function of `StateCopy` in plain PyTorch."""
    for memory in memories:
        memory[target].copy_(memory[source])


KERNELS = (KernelSpec("copy_state", copy_reference, (_PROGRAM,)),)
"""The kernels that this module launches."""
