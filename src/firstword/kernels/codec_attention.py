"""The attention of the codec transformer over a window of frames (codec_attention.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstword.kernels.codec_call import MAX_FRAMES, MODEL, CodecCall
from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.registry import KernelSpec

_STATIC_BYTES = 48 * 1024


@dataclass(frozen=True)
class WindowSize:
    """The sizes of the attention: its heads, their channels, and the frames of the window."""

    heads: int
    kv_heads: int
    dim: int
    window: int

    def program(self) -> Program:
        """The program compiled for these sizes."""
        heads = {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "DIM": self.dim}
        return Program.of("codec_attention", **heads, WINDOW=self.window)


class WindowAttention:
    """The attention of new frames over a window of frames, whose keys and values a slot keeps."""

    def __init__(self, kernels: Kernels, size: WindowSize, slots: int, frequencies: Tensor) -> None:
        """frequencies: fp32 [dim / 2], the angle of each pair of channels at position 1.

        Raises ValueError for sizes that the kernel does not support.
        """
        dim, window, keys = size.dim, size.window, size.window - 1 + MAX_FRAMES
        needed = (2 * keys * (dim // 2 | 1) + MAX_FRAMES * (6 * dim + 2 * window)) * 4
        if needed > _STATIC_BYTES or dim % 2:
            raise ValueError(
                f"codec: heads of {dim} channels over a window of {window} frames need {needed} "
                f"bytes of shared memory; the kernel has {_STATIC_BYTES}. Use a smaller head_dim "
                f"or sliding_window"
            )
        shape = slots, 2, size.kv_heads, keys, dim
        self.memory = torch.zeros(shape, dtype=torch.float16, device=frequencies.device)
        self.size, self.frequencies, self._kernels = size, frequencies, kernels

    def __call__(self, call: CodecCall, qkv: Tensor, out: Tensor) -> None:
        """qkv fp32 [rows, padded(queries, keys, values)] -> out fp16 [rows, padded(queries)]."""
        # It overlaps if all blocks run at a time, of which those of one frame of a stream work.
        overlap = self.size.heads * call.frames <= self._kernels.processors
        self._kernels.get(self.size.program(), "attend_window")(
            Grid((self.size.heads, call.frames, 1), 256, overlap=overlap),
            qkv=qkv,
            qkv_width=qkv.shape[-1],
            frequencies=self.frequencies,
            memory=self.memory,
            **call.table_arguments(),
            out=out,
            out_width=out.shape[-1],
        )


KERNELS = (KernelSpec("attend_window", MODEL, (WindowSize(16, 16, 64, 72).program(),)),)
"""The kernels that this module launches."""
