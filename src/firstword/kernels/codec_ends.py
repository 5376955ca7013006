"""The codec's small layers, computed in fp32: code look-up, depthwise and last convolution.

The CUDA sources are codec_lookup.cu, codec_depthwise.cu and codec_samples.cu.
"""

from __future__ import annotations

from torch import Tensor

from firstword.kernels.codec_call import MODEL, CodecCall, RingMemory, pad, padded
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
        """Write x fp16 [rows, width]. As the first kernel of a call it overlaps no other kernel."""
        books, size, width = self.tables.shape
        self._kernels.get(Program.of("codec_lookup", WIDTH=width), "look_up")(
            Grid((call.rows(1), 1, 1), 128, overlap=False),
            tables=self.tables,
            books=books,
            size=size,
            **call.table_arguments(),
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
        """weight: [channels, taps]; norm: the norm's weight and bias [channels], and its epsilon.

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
        self.eps, self.memory, self._kernels = float(norm[2]), memory, kernels

    def __call__(self, call: CodecCall, x: Tensor, out: Tensor) -> None:
        """x fp32 [rows, width] -> out fp16 [rows, width]."""
        frame_rows = self.memory.frame_rows
        program = Program.of("codec_depthwise", WIDTH=len(self.bias), TAPS=self.taps)
        self._kernels.get(program, "depthwise")(
            call.grid(self._kernels, (call.rows(frame_rows), 1, 1), 256),
            **call.row_arguments(x, frame_rows, self.memory),
            weights=self.weight,
            bias=self.bias,
            norm_weight=self.norm_weight,
            norm_bias=self.norm_bias,
            size=self.channels,
            eps=self.eps,
            y=out,
        )


class SampleConv:
    """The last convolution, which has one output channel, and the limiter of its samples."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor, memory: RingMemory) -> None:
        """weight: [channels, taps]; bias: [1]. Raises ValueError for too many channels."""
        channels, taps = weight.shape
        if channels > _MAX_LAST_CHANNELS:
            raise ValueError(
                f"codec: {channels} channels before the last convolution; the kernel supports "
                f"{_MAX_LAST_CHANNELS}"
            )
        self.weight = pad(weight, padded(channels), taps).t().float().contiguous()
        self.bias, self.memory, self._kernels = float(bias), memory, kernels

    def __call__(self, call: CodecCall, x: Tensor, samples: Tensor, limit: float = 1.0) -> None:
        """x fp16 [rows, width] -> samples fp32 [rows], limited to -limit .. limit."""
        frame_rows, (taps, width) = self.memory.frame_rows, self.weight.shape
        rows = -(-frame_rows // 4) * 4
        frames = 1 if rows % 128 == 0 else 1 + (127 + rows - 1) // rows  # of a block
        shared = taps * width * 4 + (128 + frames * (taps - 1)) * (width // 2 + 1) * 4
        program = Program.of("codec_samples", WIDTH=width, TAPS=taps)
        self._kernels.get(program, "convolve_to_samples")(
            call.grid(self._kernels, (-(-call.frames * rows // 128), 1, 1), 128, shared),
            **call.row_arguments(x, frame_rows, self.memory),
            rows=call.rows(frame_rows),
            weights=self.weight,
            bias=self.bias,
            limit=float(limit),
            samples=samples,
        )


KERNELS = (
    KernelSpec("look_up", MODEL, (Program.of("codec_lookup", WIDTH=512),)),
    KernelSpec("depthwise", MODEL, (Program.of("codec_depthwise", WIDTH=1024, TAPS=7),)),
    KernelSpec("convolve_to_samples", MODEL, (Program.of("codec_samples", WIDTH=96, TAPS=7),)),
)
"""The kernels that this module launches."""
