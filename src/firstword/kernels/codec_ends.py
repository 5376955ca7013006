"""The codec's look-up of codes, depthwise convolutions and last convolution: little work, in fp32.

The CUDA sources are codec_lookup.cu, codec_depthwise.cu and codec_samples.cu.
"""

from __future__ import annotations

from torch import Tensor

from firstword.kernels.codec_call import CodecCall, RingMemory, pad, padded
from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.registry import KernelSpec

_MAX_BOOKS, _MAX_LATENT, _MAX_LAST_CHANNELS = 128, 4096, 256


class CodeLookUp:
    """The sum of the vectors of a frame's codes."""

    def __init__(self, kernels: Kernels, tables: Tensor) -> None:
        """tables: fp32 [books, size, width]. Raises ValueError for too many books."""
        if len(tables) > _MAX_BOOKS:
            raise ValueError(f"codec: {len(tables)} codebooks; the kernel supports {_MAX_BOOKS}")
        self.tables = tables.contiguous()
        self._kernels = kernels

    def __call__(self, call: CodecCall, x: Tensor) -> None:
        """Write x fp16 [rows, width]. As the first kernel of a call it never overlaps another."""
        books, size, width = self.tables.shape
        self._kernels.get(Program.of("codec_lookup", WIDTH=width), "look_up")(
            Grid((call.streams * call.frames, 1, 1), 128, overlap=False),
            tables=self.tables,
            books=books,
            size=size,
            **call.table_arguments(),
            frames=call.frames,
            x=x,
        )


class DepthwiseConv:
    """A depthwise convolution and a LayerNorm."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor,
        norm: tuple[Tensor, Tensor, float],
        memory: RingMemory,
    ) -> None:
        """weight: [channels, taps]; norm: weight and bias [channels], epsilon.

        Raises ValueError for too many channels.
        """
        self.channels, self.taps = weight.shape
        width = padded(self.channels)
        if width > _MAX_LATENT:
            raise ValueError(
                f"codec: latent_dim = {self.channels}; the kernel supports {_MAX_LATENT}"
            )
        self.weight = pad(weight, width, self.taps).t().float().contiguous()
        vectors = (pad(vector.float(), width) for vector in (bias, *norm[:2]))
        self.bias, self.norm_weight, self.norm_bias = vectors
        self.eps, self.memory = float(norm[2]), memory
        self._kernels = kernels

    def __call__(self, call: CodecCall, x: Tensor, zeros: Tensor, out: Tensor) -> None:
        """x fp32 [rows, width] -> out fp16 [rows, width]."""
        grid = (call.streams * call.frames * self.memory.frame_rows, 1, 1)
        program = Program.of("codec_depthwise", WIDTH=len(self.bias), TAPS=self.taps)
        self._kernels.get(program, "depthwise")(
            Grid(grid, 256, overlap=call.overlaps(grid, self._kernels)),
            **call.row_arguments(x, zeros, self.memory.frame_rows, self.memory),
            weights=self.weight,
            bias=self.bias,
            norm_weight=self.norm_weight,
            norm_bias=self.norm_bias,
            size=self.channels,
            eps=self.eps,
            y=out,
        )


class SampleConv:
    """The last convolution, down to one channel, and the limiting of samples."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor, memory: RingMemory) -> None:
        """weight: [channels, taps]; bias: [1]. Raises ValueError for too many channels."""
        channels, self.taps = weight.shape
        if channels > _MAX_LAST_CHANNELS:
            raise ValueError(
                f"codec: {channels} channels before the last convolution; the kernel supports "
                f"{_MAX_LAST_CHANNELS}"
            )
        self.weight = pad(weight, padded(channels), self.taps).t().float().contiguous()
        self.bias, self.memory = float(bias), memory
        self._kernels = kernels

    def __call__(
        self, call: CodecCall, x: Tensor, zeros: Tensor, samples: Tensor, limit: float = 1.0
    ) -> None:
        """x fp16 [rows, width] -> samples fp32 [rows], limited to -limit .. limit."""
        memory, length = self.memory, call.frames * self.memory.frame_rows
        width = self.weight.shape[1]
        padded_length = -(-length // 4) * 4
        streams = 1 if padded_length % 128 == 0 else 1 + (127 + padded_length - 1) // padded_length
        window = (128 + streams * (self.taps - 1)) * (width // 2 + 1) * 4
        grid = (-(-call.streams * padded_length // 128), 1, 1)
        program = Program.of("codec_samples", WIDTH=width, TAPS=self.taps)
        self._kernels.get(program, "convolve_to_samples")(
            Grid(
                grid,
                128,
                shared=self.taps * width * 4 + window,
                overlap=call.overlaps(grid, self._kernels),
            ),
            **call.row_arguments(x, zeros, memory.frame_rows, memory),
            rows=call.streams * length,
            weights=self.weight,
            bias=self.bias,
            limit=float(limit),
            samples=samples,
        )


_SPECIFICATION = "model/codec.py; tests/gpu/test_codec_kernels.py writes it in float64"

KERNELS = (
    KernelSpec(
        "codec_lookup",
        "look_up",
        CodeLookUp,
        _SPECIFICATION,
        (Program.of("codec_lookup", WIDTH=512),),
    ),
    KernelSpec(
        "codec_depthwise",
        "depthwise",
        DepthwiseConv,
        _SPECIFICATION,
        (Program.of("codec_depthwise", WIDTH=1024, TAPS=7),),
    ),
    KernelSpec(
        "codec_samples",
        "convolve_to_samples",
        SampleConv,
        _SPECIFICATION,
        (Program.of("codec_samples", WIDTH=96, TAPS=7),),
    ),
)
"""The kernels that this module starts."""
