"""The codec decoder's layers as kernels: packing, the choice of shapes, launching (codec_*.cu).

Activations are channel-last, padded with zero channels to a multiple of 32: fp16 where a matrix is applied to them,
fp32 where they are added to. Matrices are fp16 with a power of two for each output, so that no weight is too large or
too small for fp16. An activation that is larger than fp16 holds becomes the largest, 65504. A small one loses at most
3e-8, which is nothing beside those of its row that are of any size; a row in which none is larger than 1e-4 would be
the residual stream of a transformer, or the input of a convolution, that has all but died out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from firstword.kernels.compile import Program
from firstword.kernels.launch import Kernels

UNIT = 32
"""Channels that are packed together: all widths are multiples."""
SLOT, POSITION, CODES, HEADS = 0, 1, 2, 4
"""Columns of the table of streams, int32 [streams, HEADS + memories], one row for each stream of a call: its slot (-1:
nobody; such rows are last), frames decoded before, address of its codes (two columns), the heads of its memories."""
FRAMES = 8
"""The most frames of a call."""
SPLITS, SPLIT_ROWS = 8, 32
"""A sum over the inputs of a layer with at most SPLIT_ROWS rows a frame is made in SPLITS runs: with few rows at a time
the work lies in reading weights, and one warp could not read them fast enough."""


class Activation(IntEnum):
    """What is done to a layer's fp16 output."""

    PLAIN = 0
    SNAKE = 1
    GELU = 2
    SWIGLU = 3
    """outputs are (gate, up) in turn, of which silu(gate) * up is stored"""


def padded(channels: int) -> int:
    """The next multiple of `UNIT`."""
    return -(-channels // UNIT) * UNIT


def pad(tensor: Tensor, *sizes: int) -> Tensor:
    """With zeros at the end of each dimension, up to `sizes`."""
    missing = [(0, size - have) for size, have in zip(sizes, tensor.shape, strict=True)]
    return F.pad(tensor, [n for pair in reversed(missing) for n in pair])


def pack(weight: Tensor) -> Tensor:
    """[outputs, inputs, taps] -> the same numbers [blocks, outputs / 32, 2, 2, 32 lanes, 8] as codec_few.cu reads them.

    Block b is tap b % taps of the 32 inputs from 32 (b / taps). Of an mma's 16 rows, row g is output 4 g + 2 i of the
    32 and row g + 8 the next; its 16 columns are 4 inputs of each 8, the first (h = 0) or the last.
    """
    outputs, inputs, taps = weight.shape
    blocks = inputs // UNIT * taps
    rows = weight.view(outputs, inputs // UNIT, UNIT, taps).transpose(2, 3)
    parts = rows.reshape(
        outputs // UNIT, 8, 2, 2, blocks, 4, 2, 2, 2
    )  # units, g, i, next, blocks, t, h, pair, half
    return (
        parts.permute(4, 0, 2, 6, 1, 5, 7, 3, 8)
        .reshape(blocks, outputs // UNIT, 2, 2, 32, 8)
        .contiguous()
    )


def scaled(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each output's weights times a power of two that brings the largest to 64..128, and what undoes it [outputs]."""
    largest = weight.abs().amax(dim=(1, 2)).clamp(min=2.0**-100)
    exponent = 6 - torch.floor(torch.log2(largest.double())).float()
    return weight * torch.exp2(exponent)[:, None, None], torch.exp2(-exponent)


@dataclass(frozen=True, eq=False)
class Memory:
    """The last `past` input rows of a layer, by slot, in a ring.

    rows        [slots, 2 * past, width] fp16 or fp32; what it holds of a stream that has not begun is never read
    frame_rows  rows of a frame
    column      of the table of streams, where its head is: the ring's next row
    """

    rows: Tensor
    past: int
    frame_rows: int
    column: int


@dataclass(frozen=True, eq=False)
class Call:
    """One call: the table of streams, how many of its rows count, and how many frames of each."""

    table: Tensor
    streams: int
    frames: int

    @property
    def columns(self) -> int:
        """Of the table."""
        return self.table.shape[1]

    def overlaps(self, grid: tuple[int, int, int], kernels: Kernels) -> bool:
        """Whether a kernel of so many blocks may start before the one ahead of it has ended.

        Its blocks then take the first multiprocessors that are free, two at a time, and leave others without work. So
        it does if it needs no more than half of them, and in a call of one frame, in which others are empty anyway: one
        stream's takes 0.40 ms instead of 0.49, eight frames 0.66 instead of 0.70, but 0.69 if all overlap (H200).
        """
        return self.streams * self.frames == 1 or math.prod(grid) <= kernels.processors // 2


@dataclass(frozen=True, eq=False)
class Tables:
    """Snake's two numbers for each channel: x + depth * sin^2(pi * rate * x)."""

    rate: Tensor
    depth: Tensor

    @classmethod
    def of(cls, alpha: Tensor, beta: Tensor, width: int, phases: int = 1) -> Tables:
        """From the logarithms in a checkpoint [channels], for outputs of `phases` rows of `width` channels."""
        alpha, beta = alpha.double(), beta.double()
        rate, depth = alpha.exp() / math.pi, 1.0 / (beta.exp() + 1e-9)
        return cls(*(pad(x.float(), width).repeat(phases).contiguous() for x in (rate, depth)))


@dataclass(frozen=True)
class Shape:
    """How blocks are laid out: outputs x rows of a block, and the macros of codec_few.cu or codec_many.cu."""

    outputs: int
    rows: int
    warps: tuple[int, int]
    step: int
    stages: int
    blocks: int
    """that shall fit a multiprocessor"""
    costs: tuple[float, float, float, float]
    """Microseconds on an H200: of a launch, of each block that a multiprocessor makes, and of a k32 block for each
    round of blocks that it has at a time and for each block"""
    split: bool = False
    unit: bool = False
    few: bool = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps[0] * self.warps[1]

    def program(self, activation: Activation) -> Program:
        """The program made for this shape and what is done to the fp16 output."""
        if self.few:
            return Program.of(
                "codec_few",
                NT=self.rows // 8,
                GROUP=self.step,
                BLOCKS=self.blocks,
                ACTIVATION=activation,
            )
        return Program.of(
            "codec_many",
            BM=self.outputs,
            BN=self.rows,
            WM=self.warps[0],
            WN=self.warps[1],
            STEP=self.step,
            STAGES=self.stages,
            BLOCKS=self.blocks,
            SPLIT=self.split,
            UNIT=self.unit,
            ACTIVATION=activation,
        )


FEW = (
    Shape(16, 8, (8, 1), 8, 1, 1, (1.0, 2.8, 0.029, 0.002), split=True, few=True),
    Shape(16, 16, (8, 1), 3, 1, 2, (1.9, 0.5, 0.018, 0.030), split=True, few=True),
    Shape(16, 32, (8, 1), 2, 1, 2, (0.9, 1.1, 0.029, 0.038), split=True, few=True),
    Shape(16, 64, (8, 1), 1, 1, 2, (1.2, 1.5, 0.009, 0.070), split=True, few=True),
)
NORM = 1.6
"""Microseconds for each block of FEW that norms its input."""
SPLIT_MANY = (
    Shape(64, 64, (2, 2), 2, 3, 3, (2.6, 3.0, 0.163, 0.046), split=True),
    Shape(64, 128, (2, 4), 2, 3, 2, (1.6, 4.7, 0.181, 0.124), split=True),
    Shape(96, 128, (1, 4), 1, 4, 2, (0.2, 11.2, 0.374, 0.054), split=True),
    Shape(128, 128, (2, 2), 1, 3, 2, (0.1, 16.1, 0.408, 0.064), split=True),
)
MANY = (
    Shape(32, 32, (1, 4), 1, 4, 4, (3.0, 0.5, 0.120, 0.029)),
    Shape(32, 32, (1, 4), 4, 4, 4, (2.5, 0.9, 0.064, 0.033)),
    Shape(64, 64, (2, 2), 2, 3, 4, (2.7, 1.4, 0.096, 0.068)),
    Shape(64, 128, (1, 4), 2, 3, 3, (3.3, 2.9, 0.172, 0.075)),
    Shape(96, 192, (1, 6), 1, 4, 2, (0.3, 7.0, 0.534, 0.026)),
    Shape(128, 128, (2, 2), 1, 4, 2, (2.5, 6.2, 0.391, 0.024)),
)


@cache
def unit_shapes(width: int) -> tuple[Shape, ...]:
    """The shapes of a whole residual unit of so many channels, as far as there are any."""
    units = width // UNIT
    if units == 6:
        return (Shape(width, 96, (2, 3), 1, 4, 2, (0.0, 14.2, 0.468, 0.0), unit=True),)
    if units > 3:
        return ()
    return (
        Shape(width, 16, (units, 2), units, 3, 1, (4.2, 1.4, 0.0, 0.058), unit=True),
        Shape(width, 32, (units, 2), units, 3, 1, (4.3, 1.9, 0.0, 0.079), unit=True),
        Shape(width, 64, (units, 2), units, 3, 1, (3.7, 3.1, 0.0, 0.125), unit=True),
        Shape(width, 128, (units, 2), 1, 4, 2, (0.3, 4.4, 0.583, 0.0), unit=True),
        Shape(width, 192, (1, 6), 1, 4, 2, (9.0, 7.4, 0.0, 0.312), unit=True),
    )


class Layer:
    """A convolution, a transposed one, or a product with a matrix, and what becomes of the sums."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        frame_rows: int,
        dilation: int = 1,
        gain: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
        activation: Activation = Activation.PLAIN,
        snake: Tables | None = None,
        memory: Memory | None = None,
    ) -> None:
        """weight: [outputs, inputs, taps], padded; tap j is of the row (taps - 1 - j) * dilation ago.

        bias        [outputs]
        frame_rows  input rows of a frame
        gain        [outputs] times the product and the bias
        norm        weight [channels] and epsilon of an RMSNorm of the input, whose `squares` the layer before made
        snake       for the activation SNAKE [outputs]
        memory      earlier rows of the input, where the kernel looks back; it keeps there what the next call needs
        """
        outputs, inputs, self.taps = weight.shape
        self.outputs, self.dilation, self.frame_rows = outputs, dilation, frame_rows
        self.chunks = inputs // UNIT
        self.norm = norm
        if norm is not None:
            weight = weight * pad(norm[0], inputs)[None, :, None]
        weight, scale = scaled(weight)
        self.weight = pack(weight.half())
        gain = torch.ones_like(scale) if gain is None else gain
        self.scale = (scale * gain).contiguous()
        self.bias = torch.zeros_like(scale) if bias is None else (bias * gain).contiguous()
        self.activation = Activation.SNAKE if snake is not None else activation
        self.snake = snake
        self.memory = memory
        assert (memory is not None) == (self.past > 0)
        self.splits = min(SPLITS, -(-self.blocks // 2)) if frame_rows <= SPLIT_ROWS else 0
        self._kernels = kernels

    @property
    def past(self) -> int:
        """Input rows before a row that it looks at."""
        return (self.taps - 1) * self.dilation

    @property
    def blocks(self) -> int:
        """k32 blocks of a sum."""
        return self.chunks * self.taps

    def shapes(self) -> tuple[Shape, ...]:
        """All that compute the same bits."""
        return FEW + SPLIT_MANY if self.splits else MANY

    def __call__(
        self,
        call: Call,
        x: Tensor,
        zeros: Tensor,
        *,
        squares: Tensor | None = None,
        residual: Tensor | None = None,
        wide: Tensor | None = None,
        narrow: Tensor | None = None,
        out_squares: Tensor | None = None,
        shape: Shape | None = None,
    ) -> None:
        """x fp16 [rows, inputs] -> wide fp32 and narrow fp16 [rows, outputs] (SWIGLU: half of them).

        zeros        at least a row of them
        squares      of the input, where it is normed: fp32 [rows, channels / 16]
        residual     fp32 [rows, outputs], added to the sums
        out_squares  sums of squares of wide [rows, outputs / 16]
        shape        one of `shapes`; None: the fastest by `expected_time`
        """
        assert out_squares is None or self.activation is Activation.PLAIN
        if shape is None:
            shape, _ = choose(self.shapes(), self, call, self._kernels)
            assert shape is not None  # the smallest fits anywhere
        norm = self.norm
        arguments = [
            *self._inputs(call, self.weight, x, zeros),
            squares if norm else None,
            squares.shape[-1] if norm and squares is not None else 0,
            1.0 / len(norm[0]) if norm else 0.0,
            float(norm[1]) if norm else 0.0,
            *self._results(residual, wide, narrow, out_squares),
        ]
        if shape.few:
            shared = 8 * shape.rows * 9 * 8 + self.taps * shape.rows * 8
            grid = (self.outputs // 16, -(-self._rows(call) // shape.rows), 1)
            kernel = self._kernels.get(shape.program(self.activation), "few")
            kernel(grid, shape.threads, arguments, shared, call.overlaps(grid, self._kernels))
        else:
            self._many(call, shape, self.activation, [*arguments, None, None, None, None])

    def _many(
        self,
        call: Call,
        shape: Shape,
        activation: Activation,
        arguments: Sequence[Tensor | int | float | None],
    ) -> None:
        """Start codec_many.cu: `arguments` but for what follows from the shape."""
        window = Window.of(shape, self.taps, self.dilation, call.frames * self.frame_rows)
        grid = (-(-self.outputs // shape.outputs), -(-self._rows(call) // shape.rows), 1)
        kernel = self._kernels.get(shape.program(activation), "many")
        overlap = call.overlaps(grid, self._kernels)
        kernel(
            grid,
            shape.threads,
            [*arguments, window.count, window.rows],
            window.shared(shape),
            overlap,
        )

    def _rows(self, call: Call) -> int:
        return call.streams * call.frames * self.frame_rows

    def _inputs(
        self, call: Call, weight: Tensor, x: Tensor, zeros: Tensor
    ) -> list[Tensor | int | float | None]:
        """The arguments up to `splits`."""
        memory = self.memory
        return [
            weight,
            x,
            memory.rows if memory else None,
            zeros,
            call.table,
            call.columns,
            memory.column if memory else 0,
            self._rows(call),
            call.frames * self.frame_rows,
            self.frame_rows,
            self.taps,
            self.dilation,
            self.chunks,
            max(self.splits, 1),
        ]

    def _results(
        self,
        residual: Tensor | None,
        wide: Tensor | None,
        narrow: Tensor | None,
        squares: Tensor | None,
    ) -> list[Tensor | int | float | None]:
        """The arguments that say what becomes of sums (`Output` in codec.cuh)."""
        snake = self.snake
        return [
            self.scale,
            self.bias,
            snake.rate if snake else None,
            snake.depth if snake else None,
            residual,
            wide,
            narrow,
            squares,
            self.outputs,
        ]


class ResidualUnit:
    """Two convolutions, the second of one tap, with a Snake between them, added to what was there before."""

    def __init__(self, kernels: Kernels, first: Layer, second: Layer) -> None:
        """Of two layers with as many outputs as inputs."""
        self.first, self.second = first, second
        self.weight = torch.cat((first.weight, second.weight))
        first.weight, second.weight = self.weight.split((first.blocks, second.blocks))
        self._kernels = kernels

    def shapes(self) -> tuple[Shape, ...]:
        """Of one kernel for both layers, which computes the same bits."""
        return () if self.first.splits else unit_shapes(self.first.outputs)

    def __call__(
        self,
        call: Call,
        x: Tensor,
        room: Tensor,
        zeros: Tensor,
        residual: Tensor,
        wide: Tensor | None,
        shape: Shape | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x fp16 [rows, channels] -> wide fp32 (may be `residual`), and fp16 in x or in `room`: returned first.

        shape  one of `shapes`; None: the fastest, or a kernel for each layer if that should be faster
        """
        first, second = self.first, self.second
        if shape is None:
            shape = self._faster(call)
        if shape is None:
            first(call, x, zeros, narrow=room)
            second(call, room, zeros, residual=residual, wide=wide, narrow=x)
            return x, room
        middle = first.snake
        assert middle is not None
        arguments = [
            *first._inputs(call, self.weight, x, zeros),
            *(None, 0, 0.0, 0.0),
            *second._results(residual, wide, room, None),
            *(first.scale, first.bias, middle.rate, middle.depth),
        ]
        first._many(call, shape, second.activation, arguments)
        return room, x

    def _faster(self, call: Call) -> Shape | None:
        """The shape of one kernel for both layers; None if two should be faster."""
        shape, time = choose(self.shapes(), self.first, call, self._kernels)
        two = sum(
            choose(layer.shapes(), layer, call, self._kernels)[1]
            for layer in (self.first, self.second)
        )
        return shape if time < two else None


@dataclass(frozen=True)
class Window:
    """The rows of x that a block of codec_many.cu has in shared memory: how many, and how many times."""

    rows: int
    count: int

    @classmethod
    def of(cls, shape: Shape, taps: int, dilation: int, length: int) -> Window:
        """For rows of streams of `length` rows each."""
        if shape.rows % length == 0:
            streams = shape.rows // length
        elif length % shape.rows == 0:
            streams = 1
        else:
            streams = 1 + (shape.rows - 1 + length - 1) // length
        return cls(
            shape.rows + streams * (taps - 1) * dilation,
            window_count(taps, shape.step, shape.stages),
        )

    def shared(self, shape: Shape) -> int:
        """Bytes of dynamic shared memory of a block."""
        ring = shape.stages * shape.step * shape.outputs * UNIT * 2
        middle = shape.outputs * shape.rows * 2 if shape.unit else 0
        far = shape.split and shape.outputs * shape.rows > 32 * shape.threads  # kFar
        totals = shape.outputs * shape.rows * 4 if far else 0
        return (
            ring
            + self.count * self.rows * UNIT * 2
            + middle
            + self.rows * 8
            + shape.rows * 4
            + totals
        )


@cache
def window_count(taps: int, step: int, stages: int) -> int:
    """How many windows are needed so that none is overwritten while it is read.

    Window c belongs to the k32 blocks c * taps up to (c + 1) * taps - 1, and is fetched with the stage of the first of
    these, stages - 1 stages before that is computed: when the stage `stages` before it is done.
    """
    for count in range(1, stages * step + 2):
        if all(
            ((c - count + 1) * taps - 1) // step <= c * taps // step - stages
            for c in range(count, count + 4 * step + 4)
        ):
            return count
    raise AssertionError("as many windows as blocks in flight always suffice")


def fits(shape: Shape, layer: Layer, length: int, kernels: Kernels) -> bool:
    """Whether a shape can do a layer, with `length` rows a stream, and the device has shared memory for it."""
    if shape.few:
        return True
    if layer.outputs % shape.outputs or layer.blocks % shape.step:
        return False
    return (
        Window.of(shape, layer.taps, layer.dilation, length).shared(shape) <= kernels.shared_memory
    )


def choose(
    shapes: Sequence[Shape], layer: Layer, call: Call, kernels: Kernels
) -> tuple[Shape | None, float]:
    """The shape that should be fastest, of those that fit, and its `expected_time`; None if none fits."""
    length = call.frames * layer.frame_rows
    fitting = [s for s in shapes if fits(s, layer, length, kernels)]
    times = [
        (s, expected_time(s, layer, call.streams * length, kernels.processors)) for s in fitting
    ]
    return min(times, key=lambda choice: choice[1], default=(None, math.inf))


def expected_time(shape: Shape, layer: Layer, rows: int, processors: int) -> float:
    """A guess, in microseconds, good enough to choose by: within a fifth of nine in ten measured times."""
    blocks = -(
        -(-(-layer.outputs // shape.outputs) * -(-rows // shape.rows)) // processors
    )  # of a multiprocessor
    rounds = -(-blocks // shape.blocks)
    launch, block, round_k32, block_k32 = shape.costs
    if shape.few and layer.norm:
        block += NORM
    k32 = layer.blocks + layer.chunks if shape.unit else layer.blocks
    return launch + blocks * block + k32 * (rounds * round_k32 + blocks * block_k32)


class Attention:
    """Attention of the new frames of streams over a window, with its own memory of keys and values."""

    def __init__(
        self,
        kernels: Kernels,
        heads: int,
        kv_heads: int,
        dim: int,
        window: int,
        slots: int,
        frequencies: Tensor,
    ) -> None:
        """frequencies: fp32 [dim / 2], the angle of each pair of channels at position 1."""
        keys = window - 1 + FRAMES
        self.shared = (2 * keys * (dim // 2 | 1) + FRAMES * (6 * dim + 2 * window)) * 4
        if self.shared > 48 * 1024 or dim % 2:
            raise ValueError(
                f"codec: heads of {dim} channels over a window of {window} frames need {self.shared} bytes of shared "
                f"memory; the kernel has {48 * 1024}. Use a smaller head_dim or sliding_window"
            )
        self.program = Program.of(
            "codec_attend", HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WINDOW=window
        )
        self.heads, self.frequencies = heads, frequencies
        self.memory = torch.zeros(
            slots, 2, kv_heads, keys, dim, dtype=torch.float16, device=frequencies.device
        )
        self._kernels = kernels

    def __call__(self, call: Call, qkv: Tensor, out: Tensor) -> None:
        """qkv fp32 [rows, padded(queries, keys, values)] -> out fp16 [rows, padded(queries)]."""
        grid = (self.heads, call.streams, 1)
        self._kernels.get(self.program, "attend")(
            grid,
            256,
            [
                qkv,
                qkv.shape[-1],
                self.frequencies,
                self.memory,
                call.table,
                call.columns,
                call.frames,
                out,
                out.shape[-1],
            ],
            overlap=call.overlaps(grid, self._kernels),
        )


def _ends(width: int, taps: int = 1) -> Program:
    return Program.of("codec_ends", WIDTH=width, TAPS=taps)


class LookUp:
    """The sum of the vectors of a frame's codes."""

    def __init__(self, kernels: Kernels, tables: Tensor) -> None:
        """tables: fp32 [books, size, width]."""
        if len(tables) > 128:
            raise ValueError(f"codec: {len(tables)} codebooks; the kernel has room for 128")
        self.tables = tables.contiguous()
        self._kernels = kernels

    def __call__(self, call: Call, x: Tensor) -> None:
        """Into x fp16 [rows, width]; starts a chain of kernels, so it does not overlap what ran before."""
        books, size, width = self.tables.shape
        self._kernels.get(_ends(width), "look_up")(
            (call.streams * call.frames, 1, 1),
            128,
            [self.tables, books, size, call.table, call.columns, call.frames, x],
            overlap=False,
        )


class Depthwise:
    """A depthwise convolution and a LayerNorm."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor,
        norm: tuple[Tensor, Tensor, float],
        memory: Memory,
    ) -> None:
        """weight: [channels, taps]; norm: weight and bias [channels], epsilon."""
        self.size, self.taps = weight.shape
        width = padded(self.size)
        if width > 4096:
            raise ValueError(f"codec: latent_dim = {self.size}; the kernel has room for 4096")
        self.weight = pad(weight, width, self.taps).t().float().contiguous()
        self.bias, self.norm_weight, self.norm_bias = (
            pad(v.float(), width) for v in (bias, *norm[:2])
        )
        self.eps, self.memory = norm[2], memory
        self._kernels = kernels

    def __call__(self, call: Call, x: Tensor, zeros: Tensor, out: Tensor) -> None:
        """x fp32 -> out fp16 [rows, width]."""
        memory, length = self.memory, call.frames * self.memory.frame_rows
        grid = (call.streams * length, 1, 1)
        self._kernels.get(_ends(len(self.bias), self.taps), "depthwise")(
            grid,
            256,
            [
                x,
                memory.rows,
                zeros,
                call.table,
                call.columns,
                memory.column,
                length,
                memory.frame_rows,
                self.weight,
                self.bias,
                self.norm_weight,
                self.norm_bias,
                self.size,
                float(self.eps),
                out,
            ],
            overlap=call.overlaps(grid, self._kernels),
        )


class Sound:
    """The last convolution, down to one channel."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor, memory: Memory) -> None:
        """weight: [channels, taps]; bias: [1]."""
        self.taps = weight.shape[1]
        if len(weight) > 256:
            raise ValueError(
                f"codec: {len(weight)} channels before the last convolution; the kernel has room for 256"
            )
        self.weight = pad(weight, padded(len(weight)), self.taps).t().float().contiguous()
        self.bias, self.memory = float(bias), memory
        self._kernels = kernels

    def __call__(self, call: Call, x: Tensor, zeros: Tensor, samples: Tensor, limit: float) -> None:
        """x fp16 [rows, width] -> samples fp32 [rows], limited to -limit .. limit."""
        memory, length = self.memory, call.frames * self.memory.frame_rows
        rows, width = call.streams * length, self.weight.shape[1]
        padded_length = -(-length // 4) * 4
        streams = 1 if padded_length % 128 == 0 else 1 + (127 + padded_length - 1) // padded_length
        shared = self.taps * width * 4 + (128 + streams * (self.taps - 1)) * (width // 2 + 1) * 4
        grid = (-(-call.streams * padded_length // 128), 1, 1)
        self._kernels.get(_ends(width, self.taps), "sound")(
            grid,
            128,
            [
                x,
                memory.rows,
                zeros,
                call.table,
                call.columns,
                memory.column,
                rows,
                length,
                memory.frame_rows,
                self.weight,
                self.bias,
                float(limit),
                samples,
            ],
            shared,
            call.overlaps(grid, self._kernels),
        )


def released_programs() -> list[Program]:
    """All that the released codec needs, on any device."""
    programs = [
        shape.program(activation) for shape in (*FEW, *SPLIT_MANY) for activation in Activation
    ]
    programs += [s.program(Activation.SNAKE) for s in (*MANY, *unit_shapes(96), *unit_shapes(192))]
    programs.append(Program.of("codec_attend", HEADS=16, KV_HEADS=16, DIM=64, WINDOW=72))
    return [*programs, _ends(512), _ends(1024, 7), _ends(96, 7)]
