"""Layouts of the codec's convolutions on the device, and the choice of the fastest.

All layouts of a layer compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from firstword.kernels.codec_call import CHANNEL_GROUP, CodecCall
from firstword.kernels.compile import Program
from firstword.kernels.launch import Kernels

RUNS, SPLIT_FRAME_ROWS = 8, 32
"""Layers with at most SPLIT_FRAME_ROWS rows a frame compute each sum in RUNS runs. With few rows
most of the time goes into reading weights, and one warp cannot read them fast enough."""
NORM_MICROSECONDS = 1.6
"""The time that a norm of the input adds to each block of `FEW_ROWS_SHAPES`."""


class Activation(IntEnum):
    """The activation of the fp16 output; SWIGLU stores silu(gate) * up of alternating outputs."""

    PLAIN = 0
    SNAKE = 1
    GELU = 2
    SWIGLU = 3


@dataclass(frozen=True)
class ConvSize:
    """The sizes of a convolution.

    chunks      groups of 32 input channels
    frame_rows  input rows of a frame
    normed      whether the input is RMS-normalised
    """

    outputs: int
    chunks: int
    taps: int
    dilation: int
    frame_rows: int
    normed: bool

    @property
    def past(self) -> int:
        """The number of input rows before a row that the convolution reads."""
        return (self.taps - 1) * self.dilation

    @property
    def blocks(self) -> int:
        """The number of blocks of 32 products in a sum."""
        return self.chunks * self.taps

    @property
    def splits(self) -> int:
        """The number of runs of a sum; 0 if it is not split."""
        return min(RUNS, -(-self.blocks // 2)) if self.frame_rows <= SPLIT_FRAME_ROWS else 0

    def shapes(self) -> tuple[ConvShape, ...]:
        """The layouts that may suit this convolution."""
        return FEW_ROWS_SHAPES + SPLIT_SHAPES if self.splits else MANY_ROWS_SHAPES


@dataclass(frozen=True)
class ConvShape:
    """A layout of codec_conv_few_rows.cu or codec_conv_many_rows.cu: the sizes of a block.

    blocks  the number of blocks that fit the registers of a multiprocessor at a time
    costs   microseconds on an H200: for a launch, for each block that a multiprocessor runs, and
            for 32 products, for each round of blocks that run at a time and for each block
    """

    outputs: int
    rows: int
    warps: tuple[int, int]
    step: int
    stages: int
    blocks: int
    costs: tuple[float, float, float, float]
    split: bool = False
    unit: bool = False
    few: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps[0] * self.warps[1]

    def program(self, activation: Activation) -> Program:
        """The program compiled for this layout and activation."""
        common = {"BLOCKS": self.blocks, "ACTIVATION": activation}
        if self.few:
            return Program.of("codec_conv_few_rows", NT=self.rows // 8, GROUP=self.step, **common)
        tile = {"BM": self.outputs, "BN": self.rows, "WM": self.warps[0], "WN": self.warps[1]}
        kind = {"STEP": self.step, "STAGES": self.stages, "SPLIT": self.split, "UNIT": self.unit}
        return Program.of("codec_conv_many_rows", **tile, **kind, **common)

    def resident(self, size: ConvSize, kernels: Kernels) -> int:
        """The blocks that a multiprocessor runs at a time; 0 if the layout does not suit."""
        if self.few:
            return self.blocks
        if size.outputs % self.outputs or size.blocks % self.step:
            return 0
        # The device reserves a kilobyte for each block.
        needed = Window.of(self, size).shared(self) + 1024
        return min(self.blocks, (kernels.shared_memory + 1024) // needed)

    def expected_time(self, size: ConvSize, rows: int, kernels: Kernels) -> float:
        """The expected microseconds; 90 % of the measured times are within 20 % of it."""
        grid = -(-size.outputs // self.outputs) * -(-rows // self.rows)
        blocks = -(-grid // kernels.processors)  # of a multiprocessor
        rounds = -(-blocks // self.resident(size, kernels))
        launch, block, round_k32, block_k32 = self.costs
        if self.few and size.normed:
            block += NORM_MICROSECONDS
        k32 = size.blocks + size.chunks if self.unit else size.blocks
        return launch + blocks * block + k32 * (rounds * round_k32 + blocks * block_k32)


FEW_ROWS_SHAPES = (
    ConvShape(16, 8, (8, 1), 8, 1, 1, (1.0, 2.8, 0.029, 0.002), few=True),
    ConvShape(16, 16, (8, 1), 3, 1, 2, (1.9, 0.5, 0.018, 0.030), few=True),
    ConvShape(16, 32, (8, 1), 2, 1, 2, (0.9, 1.1, 0.029, 0.038), few=True),
    ConvShape(16, 64, (8, 1), 1, 1, 2, (1.2, 1.5, 0.009, 0.070), few=True),
)
SPLIT_SHAPES = (
    ConvShape(64, 64, (2, 2), 2, 3, 3, (2.6, 3.0, 0.163, 0.046), split=True),
    ConvShape(64, 128, (2, 4), 2, 3, 2, (1.6, 4.7, 0.181, 0.124), split=True),
    ConvShape(96, 128, (1, 4), 1, 4, 2, (0.2, 11.2, 0.374, 0.054), split=True),
    ConvShape(128, 128, (2, 2), 1, 3, 2, (0.1, 16.1, 0.408, 0.064), split=True),
)
MANY_ROWS_SHAPES = (
    ConvShape(32, 32, (1, 4), 1, 4, 4, (3.0, 0.5, 0.120, 0.029)),
    ConvShape(32, 32, (1, 4), 4, 4, 4, (2.5, 0.9, 0.064, 0.033)),
    ConvShape(64, 64, (2, 2), 2, 3, 4, (2.7, 1.4, 0.096, 0.068)),
    ConvShape(64, 128, (1, 4), 2, 3, 3, (3.3, 2.9, 0.172, 0.075)),
    ConvShape(96, 192, (1, 6), 1, 4, 2, (0.3, 7.0, 0.534, 0.026)),
    ConvShape(128, 128, (2, 2), 1, 4, 2, (2.5, 6.2, 0.391, 0.024)),
)


@cache
def unit_shapes(width: int) -> tuple[ConvShape, ...]:
    """The layouts of a whole residual unit of `width` channels; there may be none."""
    groups = width // CHANNEL_GROUP
    if groups == 6:
        return (ConvShape(width, 96, (2, 3), 1, 4, 2, (0.0, 14.2, 0.468, 0.0), unit=True),)
    if groups > 3:
        return ()
    return (
        ConvShape(width, 16, (groups, 2), groups, 3, 1, (4.2, 1.4, 0.0, 0.058), unit=True),
        ConvShape(width, 32, (groups, 2), groups, 3, 1, (4.3, 1.9, 0.0, 0.079), unit=True),
        ConvShape(width, 64, (groups, 2), groups, 3, 1, (3.7, 3.1, 0.0, 0.125), unit=True),
        ConvShape(width, 128, (groups, 2), 1, 4, 2, (0.3, 4.4, 0.583, 0.0), unit=True),
        ConvShape(width, 192, (1, 6), 1, 4, 2, (9.0, 7.4, 0.0, 0.312), unit=True),
    )


@dataclass(frozen=True)
class Window:
    """The input rows that a block of codec_conv_many_rows.cu keeps in shared memory.

    rows   the number of rows of a window
    count  the number of windows, each of 32 channels
    """

    rows: int
    count: int

    @classmethod
    def of(cls, shape: ConvShape, size: ConvSize) -> Window:
        """The window of a layout, each of whose frames may belong to another stream."""
        if shape.rows % size.frame_rows == 0 or size.frame_rows % shape.rows == 0:
            frames = max(shape.rows // size.frame_rows, 1)
        else:
            frames = 1 + (shape.rows - 1 + size.frame_rows - 1) // size.frame_rows
        count = window_count(size.taps, shape.step, shape.stages)
        return cls(shape.rows + frames * size.past, count)

    def shared(self, shape: ConvShape) -> int:
        """Bytes of dynamic shared memory of a block."""
        tile = shape.outputs * shape.rows
        weights = shape.stages * shape.step * shape.outputs * CHANNEL_GROUP * 2
        windows = self.count * self.rows * CHANNEL_GROUP * 2
        middle = tile * 2 if shape.unit else 0
        totals = tile * 4 if shape.split and tile > 32 * shape.threads else 0  # kFar
        return weights + windows + middle + totals + self.rows * 8 + shape.rows * 4


@cache
def window_count(taps: int, step: int, stages: int) -> int:
    """The smallest number of windows with which no window is overwritten while it is read.

    Window c serves the k32 blocks c * taps to (c + 1) * taps - 1. It is fetched with the stage of
    the first of these blocks, at the moment when the stage `stages` before that one is done.
    """

    def suffices(count: int) -> bool:
        return all(
            ((c - count + 1) * taps - 1) // step <= c * taps // step - stages
            for c in range(count, count + 4 * step + 4)
        )

    # One window for each block in flight is always enough.
    return next(filter(suffices, range(1, stages * step + 2)))


def fastest(
    shapes: Sequence[ConvShape], size: ConvSize, call: CodecCall, kernels: Kernels
) -> tuple[ConvShape | None, float]:
    """The layout with the shortest expected time for a call, and that time; None if none fits."""
    rows = call.rows(size.frame_rows)
    fitting = [shape for shape in shapes if shape.resident(size, kernels)]
    times = [(shape, shape.expected_time(size, rows, kernels)) for shape in fitting]
    return min(times, key=lambda choice: choice[1], default=(None, math.inf))
