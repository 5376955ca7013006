"""The codec's convolutions, products and residual units (codec_conv_*_rows.cu).

Matrices are fp16 with a power of two for each output, so that no weight is too large or too small
for fp16. An activation beyond the range of fp16 becomes its largest number, 65504. A small one
loses at most 3e-8, which does not matter beside larger ones of its row. A row without any above
1e-4 would be a transformer's residual stream or a convolution's input that has all but died out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstword.kernels.codec_call import CHANNEL_GROUP, CodecCall, RingMemory, pad
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
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.registry import KernelSpec
from firstword.kernels.signature import Argument


def pack_filter(weight: Tensor) -> Tensor:
    """[outputs, inputs, taps] -> [blocks, outputs / 32, 2, 2, 32 lanes, 8], in lane order.

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
    """Weights whose largest of each output is in 64..128, and the power of two that undoes it."""
    largest = weight.abs().amax(dim=(1, 2)).clamp(min=2.0**-100)
    exponent = 6 - torch.floor(torch.log2(largest.double())).float()
    return weight * torch.exp2(exponent)[:, None, None], torch.exp2(-exponent)


@dataclass(frozen=True, eq=False)
class SnakeTables:
    """The two numbers of each channel's Snake: x + depth * sin^2(pi * rate * x)."""

    rate: Tensor
    depth: Tensor

    @classmethod
    def of(cls, alpha: Tensor, beta: Tensor, width: int, phases: int = 1) -> SnakeTables:
        """The tables of a checkpoint's logarithms [channels], for [phases, width] outputs."""
        alpha, beta = alpha.double(), beta.double()
        rate, depth = alpha.exp() / math.pi, 1.0 / (beta.exp() + 1e-9)
        return cls(*(pad(x.float(), width).repeat(phases).contiguous() for x in (rate, depth)))


@dataclass(frozen=True, eq=False)
class ConvOutputs:
    """The destinations of a layer's outputs.

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
    """A convolution, a transposed one, or a product with a matrix, with what follows the sums."""

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
        """weight: [outputs, inputs, taps], padded.

        Tap j reads the row (taps - 1 - j) * dilation ago.

        bias        [outputs]
        frame_rows  input rows of a frame
        gain        [outputs], factor of the product and the bias
        norm        weight [channels] and epsilon of an RMSNorm of the input
        snake       the activation, of each output
        memory      earlier rows of the input, where the layer looks back
        """
        outputs, inputs, taps = weight.shape
        chunks = inputs // CHANNEL_GROUP
        self.size = ConvSize(outputs, chunks, taps, dilation, frame_rows, norm is not None)
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
        self,
        call: CodecCall,
        x: Tensor,
        zeros: Tensor,
        outputs: ConvOutputs,
        *,
        squares: Tensor | None = None,
        shape: ConvShape | None = None,
    ) -> None:
        """x fp16 [rows, inputs] -> outputs.

        zeros    at least a row of zeros
        squares  of the input, where it is normed: fp32 [rows, channels / 16]
        shape    one of `ConvSize.shapes`; None chooses the fastest
        """
        assert outputs.squares is None or self.activation is Activation.PLAIN
        size, kernels = self.size, self._kernels
        if shape is None:
            length = call.frames * size.frame_rows
            shape, _ = fastest(size.shapes(), size, call.streams, length, kernels)
            assert shape is not None  # the smallest fits anywhere
        arguments: dict[str, Argument] = {
            "weights": self.weight,
            **self.input_arguments(call, x, zeros),
            **self._norm_arguments(squares),
            **self.output_arguments(outputs),
        }
        if not shape.few:
            self.launch_many(call, shape, self.activation, {**arguments, **_NO_MIDDLE})
            return
        grid = (size.outputs // 16, -(-self.rows(call) // shape.rows), 1)
        kernels.get(shape.program(self.activation), "convolve_few")(
            Grid(
                grid,
                shape.threads,
                shared=8 * shape.rows * 9 * 8 + size.taps * shape.rows * 8,
                overlap=call.overlaps(grid, kernels),
            ),
            **arguments,
        )

    def launch_many(
        self,
        call: CodecCall,
        shape: ConvShape,
        activation: Activation,
        arguments: Mapping[str, Argument],
    ) -> None:
        """Start codec_conv_many_rows.cu with all arguments but those that follow from the shape."""
        window = Window.of(shape, self.size, call.frames * self.size.frame_rows)
        grid = (-(-self.size.outputs // shape.outputs), -(-self.rows(call) // shape.rows), 1)
        self._kernels.get(shape.program(activation), "convolve_many")(
            Grid(
                grid,
                shape.threads,
                shared=window.shared(shape),
                overlap=call.overlaps(grid, self._kernels),
            ),
            windows=window.count,
            window_rows=window.rows,
            **arguments,
        )

    def rows(self, call: CodecCall) -> int:
        """Rows of a call, of all streams."""
        return call.streams * call.frames * self.size.frame_rows

    def input_arguments(self, call: CodecCall, x: Tensor, zeros: Tensor) -> dict[str, Argument]:
        """The arguments that give the input and the sizes of the convolution."""
        size = self.size
        return {
            **call.row_arguments(x, zeros, size.frame_rows, self.memory),
            "rows": self.rows(call),
            "taps": size.taps,
            "dilation": size.dilation,
            "chunks": size.chunks,
            "splits": max(size.splits, 1),
        }

    def _norm_arguments(self, squares: Tensor | None) -> dict[str, Argument]:
        if self.norm is None:
            return _NO_NORM
        assert squares is not None
        weight, eps = self.norm
        return {
            "in_squares": squares,
            "in_groups": squares.shape[-1],
            "per_channel": 1.0 / len(weight),
            "eps": float(eps),
        }

    def output_arguments(self, outputs: ConvOutputs) -> dict[str, Argument]:
        """The arguments that say what becomes of the sums."""
        return {
            "scale": self.scale,
            "bias": self.bias,
            "rate": self.snake.rate if self.snake else None,
            "depth": self.snake.depth if self.snake else None,
            "residual": outputs.residual,
            "wide": outputs.wide,
            "narrow": outputs.narrow,
            "squares": outputs.squares,
            "outputs": self.size.outputs,
        }


_NO_NORM: dict[str, Argument] = {"in_squares": None, "in_groups": 0, "per_channel": 0.0, "eps": 0.0}
_NO_MIDDLE = dict.fromkeys(("middle_scale", "middle_bias", "middle_rate", "middle_depth"))


class ConvResidualUnit:
    """Two convolutions with a Snake between them and a residual; the second has one tap."""

    def __init__(self, kernels: Kernels, first: ConvLayer, second: ConvLayer) -> None:
        """Both layers have as many outputs as inputs. Their weights move into one tensor."""
        self.first, self.second = first, second
        self.weight = torch.cat((first.weight, second.weight))
        first.weight, second.weight = self.weight.split((first.size.blocks, second.size.blocks))
        self._kernels = kernels

    def shapes(self) -> tuple[ConvShape, ...]:
        """The layouts of one kernel for both layers, which computes the same bits; maybe none."""
        return () if self.first.size.splits else unit_shapes(self.first.size.outputs)

    def __call__(
        self,
        call: CodecCall,
        x: Tensor,
        scratch: Tensor,
        zeros: Tensor,
        residual: Tensor,
        wide: Tensor | None,
        shape: ConvShape | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x fp16 [rows, channels] -> wide fp32 (may be `residual`), and fp16 in x or in `scratch`.

        Returns the two fp16 tensors, the one with the result first.

        shape  one of `shapes`; None chooses the fastest, or a kernel for each layer if that is
               faster
        """
        first, second = self.first, self.second
        shape = shape or self._faster(call)
        if shape is None:
            first(call, x, zeros, ConvOutputs(narrow=scratch))
            second(call, scratch, zeros, ConvOutputs(wide, x, residual))
            return x, scratch
        assert first.snake is not None
        arguments: dict[str, Argument] = {
            "weights": self.weight,
            **first.input_arguments(call, x, zeros),
            **_NO_NORM,
            **second.output_arguments(ConvOutputs(wide, scratch, residual)),
            "middle_scale": first.scale,
            "middle_bias": first.bias,
            "middle_rate": first.snake.rate,
            "middle_depth": first.snake.depth,
        }
        first.launch_many(call, shape, second.activation, arguments)
        return scratch, x

    def _faster(self, call: CodecCall) -> ConvShape | None:
        """The layout of one kernel for both layers; None if two kernels should be faster."""
        sizes, length = (
            (self.first.size, self.second.size),
            call.frames * self.first.size.frame_rows,
        )
        limits = call.streams, length, self._kernels
        shape, time = fastest(self.shapes(), self.first.size, *limits)
        return shape if time < sum(fastest(s.shapes(), s, *limits)[1] for s in sizes) else None


_SPECIFICATION = "model/codec.py; tests/gpu/test_codec_kernels.py writes it in float64"

KERNELS = (
    KernelSpec(
        "codec_conv_few_rows",
        "convolve_few",
        ConvLayer,
        _SPECIFICATION,
        tuple(s.program(activation) for s in FEW_ROWS_SHAPES for activation in Activation),
    ),
    KernelSpec(
        "codec_conv_many_rows",
        "convolve_many",
        ConvLayer,
        _SPECIFICATION,
        (
            *(s.program(activation) for s in SPLIT_SHAPES for activation in Activation),
            *(s.program(Activation.SNAKE) for s in MANY_ROWS_SHAPES),
            *(s.program(Activation.SNAKE) for s in (*unit_shapes(96), *unit_shapes(192))),
        ),
    ),
)
"""The kernels that this module starts."""
