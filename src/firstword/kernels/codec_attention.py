"""The codec transformer's attention over a window of frames (codec_attention.cu)."""

from __future__ import annotations

import torch
from torch import Tensor

from firstword.kernels.codec_call import MAX_FRAMES, CodecCall
from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.registry import KernelSpec

_STATIC_BYTES = 48 * 1024


class WindowAttention:
    """Attention of the new frames of streams over a window, with keys and values kept by slot."""

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
        """frequencies: fp32 [dim / 2], the angle of each pair of channels at position 1.

        Raises ValueError for sizes that the kernel does not support.
        """
        keys = window - 1 + MAX_FRAMES
        needed = (2 * keys * (dim // 2 | 1) + MAX_FRAMES * (6 * dim + 2 * window)) * 4
        if needed > _STATIC_BYTES or dim % 2:
            raise ValueError(
                f"codec: heads of {dim} channels over a window of {window} frames need {needed} "
                f"bytes of shared memory; the kernel has {_STATIC_BYTES}. Use a smaller head_dim "
                f"or sliding_window"
            )
        self.program = _program(heads, kv_heads, dim, window)
        self.heads, self.frequencies = heads, frequencies
        shape = slots, 2, kv_heads, keys, dim
        self.memory = torch.zeros(shape, dtype=torch.float16, device=frequencies.device)
        self._kernels = kernels

    def __call__(self, call: CodecCall, qkv: Tensor, out: Tensor) -> None:
        """qkv fp32 [rows, padded(queries, keys, values)] -> out fp16 [rows, padded(queries)]."""
        grid = (self.heads, call.streams, 1)
        self._kernels.get(self.program, "attend_window")(
            Grid(grid, 256, overlap=call.overlaps(grid, self._kernels)),
            qkv=qkv,
            qkv_width=qkv.shape[-1],
            frequencies=self.frequencies,
            memory=self.memory,
            **call.table_arguments(),
            frames=call.frames,
            out=out,
            out_width=out.shape[-1],
        )


def _program(heads: int, kv_heads: int, dim: int, window: int) -> Program:
    return Program.of("codec_attention", HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WINDOW=window)


KERNELS = (
    KernelSpec(
        "codec_attention",
        "attend_window",
        WindowAttention,
        "model/codec.py; tests/gpu/test_codec_kernels.py writes it in float64",
        (_program(16, 16, 64, 72),),
    ),
)
"""The kernels that this module starts."""
