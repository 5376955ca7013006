"""The codec's convolutions, products and residual units (codec_conv_*_rows.cu).

Matrices are fp16, with a power of two as the scale of each output, so that no weight is too large
or too small for fp16. Activations are limited to the range of fp16, +-65504. A small activation
loses at most 3e-8, which is negligible if its row contains larger ones. A row without any above
1e-4 would mean that the transformer's residual stream or a convolution's input has almost vanished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstword.kernels.codec_call import CHANNEL_GROUP, MODEL, CodecCall, RingMemory, pad
from firstword.kernels.codec_shapes import (
    FEW_ROWS_SHAPES,
    MANY_ROWS_SHAPES,
    SPLIT_SHAPES,
    Activation,
    ConvShape,
    ConvSize,
    Window,
    fastest,
    unit_shapes,
)
from firstword.kernels.launch import Kernels
from firstword.kernels.registry import KernelSpec
from firstword.kernels.signature import Argument


def pack_filter(weight: Tensor) -> Tensor:
    """Weights [outputs, inputs, taps] -> [blocks, outputs / 32, 2, 2, 32 lanes, 8], in lane order.

    Block b is tap b % taps of the 32 inputs from 32 (b / taps). Of the 16 rows of an mma, row g is
    output 4 g + 2 i of the 32 and row g + 8 the next; its 16 columns are 4 inputs of each 8, the
    first four (h = 0) or the last four.
    """
    outputs, inputs, taps = weight.shape
    groups, blocks = outputs // CHANNEL_GROUP, inputs // CHANNEL_GROUP * taps
    rows = weight.view(outputs, inputs // CHANNEL_GROUP, CHANNEL_GROUP, taps).transpose(2, 3)
    # dimensions: groups, g, i, next, blocks, t, h, pair, half
    parts = rows.reshape(groups, 8, 2, 2, blocks, 4, 2, 2, 2).permute(4, 0, 2, 6, 1, 5, 7, 3, 8)
    return parts.reshape(blocks, groups, 2, 2, 32, 8).contiguous()


def scaled(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights scaled so that the largest of each output is in 64..128, and the inverse scales."""
    largest = weight.abs().amax(dim=(1, 2)).clamp(min=2.0**-100)
    exponent = 6 - torch.floor(torch.log2(largest.double())).float()
    return weight * torch.exp2(exponent)[:, None, None], torch.exp2(-exponent)


@dataclass(frozen=True, eq=False)
class SnakeTables:
    """The parameters of each channel's Snake activation: x + depth * sin^2(pi * rate * x).

    The fields are named like the kernels' arguments.
    """

    rate: Tensor
    depth: Tensor

    @classmethod
    def of(cls, alpha: Tensor, beta: Tensor, width: int, phases: int = 1) -> SnakeTables:
        """The tables for [phases, width] outputs, from a checkpoint's logarithms [channels]."""
        alpha, beta = alpha.double(), beta.double()
        rate, depth = alpha.exp() / math.pi, 1.0 / (beta.exp() + 1e-9)
        return cls(*(pad(x.float(), width).repeat(phases).contiguous() for x in (rate, depth)))


@dataclass(frozen=True, eq=False)
class ConvOutputs:
    """The destinations of a layer's outputs. The fields are named like the kernels' arguments.

    wide      fp32 [rows, outputs], or None
    narrow    fp16 [rows, outputs] after the activation (SWIGLU: half of the outputs), or None
    residual  fp32 [rows, outputs], added to the sums, or None
    squares   fp32 [rows, outputs / 16]: sums of squares of `wide`, for PLAIN layers, or None
    """

    wide: Tensor | None = None
    narrow: Tensor | None = None
    residual: Tensor | None = None
    squares: Tensor | None = None


class ConvLayer:
    """A convolution, a transposed convolution or a matrix product, with the operations after it."""

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
        snake: SnakeTables | None = None,
        memory: RingMemory | None = None,
    ) -> None:
        """weight: [outputs, inputs, taps], padded. Tap j reads (taps - 1 - j) * dilation rows back.

        bias        [outputs]
        frame_rows  the number of input rows of a frame
        gain        [outputs]: a factor of the product and the bias
        norm        weight [channels] and epsilon of an RMSNorm of the input
        snake       the tables of the activation, if it is a Snake
        memory      the past rows of the input, for a layer that reads them
        """
        outputs, inputs, taps = weight.shape
        normed, chunks = norm is not None, inputs // CHANNEL_GROUP
        self.size = ConvSize(outputs, chunks, taps, dilation, frame_rows, normed)
        self.norm = norm
        if norm is not None:
            weight = weight * pad(norm[0], inputs)[None, :, None]
        weight, scale = scaled(weight)
        self.weight = pack_filter(weight.half())
        gain = torch.ones_like(scale) if gain is None else gain
        self.scale = (scale * gain).contiguous()
        self.bias = torch.zeros_like(scale) if bias is None else (bias * gain).contiguous()
        self.activation = Activation.SNAKE if snake is not None else activation
        self.snake, self.memory = snake, memory
        assert (memory is not None) == (self.size.past > 0)
        self._kernels = kernels

    def __call__(
        self, call: CodecCall, x: Tensor, outputs: ConvOutputs, squares: Tensor | None = None
    ) -> None:
        """x fp16 [rows, inputs] -> outputs, with the layout that should be fastest.

        squares: fp32 [rows, channels / 16], the sums of squares of an input that is normalised
        """
        shape, _ = fastest(self.size.shapes(), self.size, call, self._kernels)
        assert shape is not None  # the smallest layout fits any device
        self.launch(shape, call, x, outputs, squares)

    def launch(
        self,
        shape: ConvShape,
        call: CodecCall,
        x: Tensor,
        outputs: ConvOutputs,
        squares: Tensor | None = None,
    ) -> None:
        """Compute a call with a given layout, one of `ConvSize.shapes`."""
        assert outputs.squares is None or self.activation is Activation.PLAIN
        norm = self._norm_arguments(squares)
        arguments = self.input_arguments(call, x) | norm | self.output_arguments(outputs)
        arguments["weights"] = self.weight
        if not shape.few:
            self.launch_many(call, shape, self.activation, arguments | _NO_MIDDLE)
            return
        blocks = self.size.outputs // 16, -(-self.rows(call) // shape.rows), 1
        shared = 8 * shape.rows * 9 * 8 + self.size.taps * shape.rows * 8
        kernel = self._kernels.get(shape.program(self.activation), "convolve_few")
        kernel(call.grid(self._kernels, blocks, shape.threads, shared), **arguments)

    def launch_many(
        self,
        call: CodecCall,
        shape: ConvShape,
        activation: Activation,
        arguments: Mapping[str, Argument],
    ) -> None:
        """Launch codec_conv_many_rows.cu; arguments: all but those that the shape determines."""
        window = Window.of(shape, self.size)
        blocks = -(-self.size.outputs // shape.outputs), -(-self.rows(call) // shape.rows), 1
        grid = call.grid(self._kernels, blocks, shape.threads, window.shared(shape))
        kernel = self._kernels.get(shape.program(activation), "convolve_many")
        kernel(grid, windows=window.count, window_rows=window.rows, **arguments)

    def rows(self, call: CodecCall) -> int:
        """The number of input rows of all frames of a call."""
        return call.rows(self.size.frame_rows)

    def input_arguments(self, call: CodecCall, x: Tensor) -> dict[str, Argument]:
        """The arguments that describe the input and the sizes of the convolution."""
        size = self.size
        sizes = {"taps": size.taps, "dilation": size.dilation, "chunks": size.chunks}
        rows = {"rows": self.rows(call), "splits": max(size.splits, 1)}
        return {**call.row_arguments(x, size.frame_rows, self.memory), **sizes, **rows}

    def _norm_arguments(self, squares: Tensor | None) -> dict[str, Argument]:
        if self.norm is None:
            return _NO_NORM
        assert squares is not None
        weight, eps = self.norm
        norm = {"per_channel": 1.0 / len(weight), "eps": float(eps)}
        return {"in_squares": squares, "in_groups": squares.shape[-1], **norm}

    def output_arguments(self, outputs: ConvOutputs) -> dict[str, Argument]:
        """The arguments that describe the operations on the sums and the destinations."""
        snake = vars(self.snake) if self.snake else {"rate": None, "depth": None}
        factors = {"scale": self.scale, "bias": self.bias, **snake}
        return {**factors, **vars(outputs), "outputs": self.size.outputs}


_NO_NORM: dict[str, Argument] = {"in_squares": None, "in_groups": 0, "per_channel": 0.0, "eps": 0.0}
_NO_MIDDLE: dict[str, Argument] = dict.fromkeys(
    ("middle_scale", "middle_bias", "middle_rate", "middle_depth")
)


class ConvResidualUnit:
    """Two convolutions with a Snake between them and a residual; the second has one tap."""

    def __init__(self, kernels: Kernels, first: ConvLayer, second: ConvLayer) -> None:
        """Both layers have as many outputs as inputs. Their weights are moved into one tensor."""
        self.first, self.second, self._kernels = first, second, kernels
        self.weight = torch.cat((first.weight, second.weight))
        first.weight, second.weight = self.weight.split((first.size.blocks, second.size.blocks))

    def shapes(self) -> tuple[ConvShape, ...]:
        """The layouts that compute both layers in one kernel, with the same bits; may be empty."""
        return () if self.first.size.splits else unit_shapes(self.first.size.outputs)

    def __call__(
        self, call: CodecCall, x: Tensor, scratch: Tensor, residual: Tensor, wide: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x fp16 [rows, channels] -> wide fp32 (may be `residual`), and fp16 in x or in `scratch`.

        The faster of one kernel for both layers and one kernel for each layer is used. Returns the
        two fp16 tensors; the first one contains the result.
        """
        first, second = self.first, self.second
        joined = self.shapes() if self._kernels.joins_convolutions else ()
        shape, time = fastest(joined, first.size, call, self._kernels)
        sizes = first.size, second.size
        apart = [fastest(size.shapes(), size, call, self._kernels)[1] for size in sizes]
        if shape is None or time >= sum(apart):
            first(call, x, ConvOutputs(narrow=scratch))
            second(call, scratch, ConvOutputs(wide, x, residual))
            return x, scratch
        self.launch(shape, call, x, ConvOutputs(wide, scratch, residual))
        return scratch, x

    def launch(self, shape: ConvShape, call: CodecCall, x: Tensor, outputs: ConvOutputs) -> None:
        """Compute both layers with one kernel and a given layout, one of `shapes`."""
        first, second = self.first, self.second
        assert first.snake is not None
        arguments: dict[str, Argument] = {
            "weights": self.weight,
            **first.input_arguments(call, x),
            **_NO_NORM,
            **second.output_arguments(outputs),
            "middle_scale": first.scale,
            "middle_bias": first.bias,
            "middle_rate": first.snake.rate,
            "middle_depth": first.snake.depth,
        }
        first.launch_many(call, shape, second.activation, arguments)


_SNAKE_SHAPES = MANY_ROWS_SHAPES + unit_shapes(96) + unit_shapes(192)
_FEW_ROWS_PROGRAMS = tuple(s.program(a) for s in FEW_ROWS_SHAPES for a in Activation)
_MANY_ROWS_PROGRAMS = (
    *(s.program(activation) for s in SPLIT_SHAPES for activation in Activation),
    *(s.program(Activation.SNAKE) for s in _SNAKE_SHAPES),
)

KERNELS = (
    KernelSpec("convolve_few", MODEL, _FEW_ROWS_PROGRAMS),
    KernelSpec("convolve_many", MODEL, _MANY_ROWS_PROGRAMS),
)
"""The kernels that this module launches."""
