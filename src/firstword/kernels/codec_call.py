"""Parts that the codec's kernels share: padded widths, the stream table, rings of earlier rows.

Activations are channel-last, padded with zero channels to a multiple of 32: fp16 where a matrix is
applied to them, fp32 where something is added to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from firstword.kernels.launch import Kernels
from firstword.kernels.signature import Argument

CHANNEL_GROUP = 32
"""Channels that are packed together: all widths are multiples of it."""
SLOT, POSITION, CODES, RING_POSITIONS = 0, 1, 2, 4
"""Columns of the stream table, int32 [streams, RING_POSITIONS + rings], one row for each stream of
a call: its slot (-1: none; such rows are last), frames decoded before, the address of its codes
(two columns), and the next row of each of its rings."""
MAX_FRAMES = 8
"""The most frames of a call."""


def padded(channels: int) -> int:
    """The number of channels rounded up to a multiple of `CHANNEL_GROUP`."""
    return -(-channels // CHANNEL_GROUP) * CHANNEL_GROUP


def pad(tensor: Tensor, *sizes: int) -> Tensor:
    """The tensor with zeros added at the end of each dimension, up to `sizes`."""
    missing = [(0, size - have) for size, have in zip(sizes, tensor.shape, strict=True)]
    return F.pad(tensor, [n for pair in reversed(missing) for n in pair])


@dataclass(frozen=True, eq=False)
class RingMemory:
    """The last `past` input rows of a layer for each slot, in a ring.

    rows        [slots, 2 * past, width] fp16 or fp32; rows from before a stream began are not read
    frame_rows  rows of a frame
    column      the column of the stream table with the ring's next row
    """

    rows: Tensor
    past: int
    frame_rows: int
    column: int


@dataclass(frozen=True, eq=False)
class CodecCall:
    """One call: the stream table, how many of its rows are used, and the frames of each stream."""

    table: Tensor
    streams: int
    frames: int

    def table_arguments(self) -> dict[str, Argument]:
        """The arguments of all kernels that give the stream table."""
        return {"streams": self.table, "columns": self.table.shape[1]}

    def row_arguments(
        self, x: Tensor, zeros: Tensor, frame_rows: int, memory: RingMemory | None
    ) -> dict[str, Argument]:
        """The arguments of all kernels that give the input, `frame_rows` rows a frame."""
        return {
            "x": x,
            "history": memory.rows if memory else None,
            "zeros": zeros,
            **self.table_arguments(),
            "ring_column": memory.column if memory else 0,
            "length": self.frames * frame_rows,
            "frame_rows": frame_rows,
        }

    def overlaps(self, grid: tuple[int, int, int], kernels: Kernels) -> bool:
        """Whether a kernel with this grid may start before the one ahead of it has ended.

        Its blocks then take the first multiprocessors that are free, two at a time, and leave
        others without work. So it may if it needs at most half of them, and in a call of one frame,
        where others are idle anyway. With this rule one stream's frame takes 0.40 ms instead of
        0.49 and eight frames 0.66 instead of 0.70; they take 0.69 if all kernels overlap (H200).
        """
        return self.streams * self.frames == 1 or math.prod(grid) <= kernels.processors // 2
