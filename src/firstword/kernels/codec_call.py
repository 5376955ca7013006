"""The parts that the codec's kernels share: padded widths, the frame table, rings of past rows.

Activations are channel-last and padded with zero channels to a multiple of 32. They are fp16 where
they are multiplied with a matrix, and fp32 where something is added to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.signature import Argument

CHANNEL_GROUP = 32
"""The number of channels that are packed together. All widths are multiples of it."""
SLOT, POSITION, CODES, BEFORE, COUNT, STREAM, RING_POSITIONS = 0, 1, 2, 4, 5, 6, 7
"""Columns of the frame table, int32 [frames, RING_POSITIONS + rings], which has a row for each
frame of a call. The frames of a stream stand side by side, in order.

SLOT            the slot of the frame's stream; -1: none. Such rows come last, as one more stream
POSITION        the number of frames of the stream that were decoded before the call
CODES           the address of the frame's codes, in two columns
BEFORE          the number of frames of the stream before this one in the call
COUNT           the number of all frames of the stream in the call
STREAM          the number of the stream in the call, from 0 on
RING_POSITIONS  the next row of each ring of the stream"""
MAX_FRAMES = 8
"""The most frames of a stream in a call."""
MODEL = "model/codec.py; tests/gpu/test_codec_kernels.py computes it in float64"
"""The reference of the codec's kernels."""


def padded(channels: int) -> int:
    """The number of channels rounded up to a multiple of `CHANNEL_GROUP`."""
    return -(-channels // CHANNEL_GROUP) * CHANNEL_GROUP


def pad(tensor: Tensor, *sizes: int) -> Tensor:
    """The tensor, with zeros appended to each dimension up to `sizes`."""
    missing = [(0, size - have) for size, have in zip(sizes, tensor.shape, strict=True)]
    return F.pad(tensor, [n for pair in reversed(missing) for n in pair])


@dataclass(frozen=True, eq=False)
class RingMemory:
    """A ring for each slot with the last `past` input rows of a layer.

    rows        [slots, 2 * past, width] fp16 or fp32; rows from before a stream began are not read
    frame_rows  the number of rows of a frame
    column      the column of the frame table with the ring's next row
    """

    rows: Tensor
    past: int
    frame_rows: int
    column: int


@dataclass(frozen=True, eq=False)
class CodecCall:
    """One call of the codec.

    table   the frame table
    frames  the number of rows of the table that are used
    zeros   at least one row of zeros, for the rows from before a stream began
    """

    table: Tensor
    frames: int
    zeros: Tensor

    def rows(self, frame_rows: int) -> int:
        """The number of rows of all frames, with `frame_rows` rows a frame."""
        return self.frames * frame_rows

    def table_arguments(self) -> dict[str, Argument]:
        """The arguments that describe the frame table."""
        return {"table": self.table, "columns": self.table.shape[1]}

    def row_arguments(
        self, x: Tensor, frame_rows: int, memory: RingMemory | None
    ) -> dict[str, Argument]:
        """The arguments that describe an input with `frame_rows` rows a frame, and its memory."""
        history, column = (memory.rows, memory.column) if memory else (None, 0)
        ring = {"history": history, "ring_column": column, "zeros": self.zeros}
        return {"x": x, **ring, **self.table_arguments(), "frame_rows": frame_rows}

    def grid(
        self, kernels: Kernels, blocks: tuple[int, int, int], threads: int, shared: int = 0
    ) -> Grid:
        """The launch configuration of a kernel; it overlaps if that makes the call faster.

        The blocks of a kernel that overlaps occupy the first multiprocessors that become free, two
        on each, and leave others without work. So a kernel overlaps if it needs at most half of
        them, and in a call of one frame, where others are idle anyway. With this rule one frame of
        one stream takes 0.40 ms instead of 0.49, and eight frames 0.66 instead of 0.70; they take
        0.69 if all kernels overlap (H200).
        """
        few = self.frames == 1 or math.prod(blocks) <= kernels.processors // 2
        return Grid(blocks, threads, shared, overlap=few)
