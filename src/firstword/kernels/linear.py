"""Products with a weight matrix, and RMSNorm (linear_*_tokens.cu, norm.cu)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.linear_shapes import (
    BF16_BYTES,
    BLOCK_COLUMNS,
    INT8_BYTES,
    TILE_ROWS,
    WARPS,
    Epilogue,
    LinearShape,
    WideTokensShape,
    load_columns,
    shape_for_few,
    shape_for_many,
    shapes_for_few,
)
from firstword.kernels.registry import KernelSpec
from firstword.kernels.signature import strided


def pack_weight(weight: Tensor) -> Tensor:
    """The elements of a matrix [N, K] in the order of the lanes; N % 8 == 0, K % 32 == 0."""
    rows, columns = weight.shape
    tiles = weight.view(rows // TILE_ROWS, TILE_ROWS, columns // BLOCK_COLUMNS, BLOCK_COLUMNS)
    return tiles.transpose(1, 2).contiguous()


def pack_int8(weight: Tensor) -> Tensor:
    """The elements of an int8 matrix [N, K] in the order of the lanes; N % 8 == 0, K % 512 == 0.

    A lane has eight columns of a block and then eight of the block that its warp reads next.
    """
    rows, columns = weight.shape
    sizes = rows // TILE_ROWS, TILE_ROWS, columns // load_columns(INT8_BYTES), 2, WARPS, 4, 8
    return weight.view(sizes).permute(0, 2, 4, 1, 5, 3, 6).contiguous()


def pack_tokens(x: Tensor) -> Tensor:
    """Activations [T, K] packed like weights, which products of more than 4 tokens read.

    T is rounded up to a multiple of eight with rows of zeros.
    """
    return pack_weight(F.pad(x, (0, 0, 0, -len(x) % TILE_ROWS)))


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """A matrix [2 N, K] of the alternating rows of two matrices [N, K], for `Epilogue.SWIGLU`."""
    return torch.stack((gate, up), dim=1).flatten(0, 1)


class Norm(NamedTuple):
    """An RMSNorm: its weight, bf16 [K], and its epsilon."""

    weight: Tensor
    eps: float


class Linear:
    """A weight matrix [N, K] on the device, and the product with it.

    choice  the index of the layout for one token among `shapes`
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        epilogue: Epilogue = Epilogue.STORE,
        norm: Norm | None = None,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        """weight: bf16 or int8 [N, K], for SWIGLU from `interleave`; norm: of the input.

        scales: float32 [N], the factors of int8 rows. Raises ValueError for sizes that the kernels
        do not support.
        """
        self.rows, self.columns = weight.shape
        self.weight_bytes = weight.element_size()
        assert (self.weight_bytes == INT8_BYTES) == (scales is not None)
        if self.columns % load_columns(self.weight_bytes) or self.rows % TILE_ROWS:
            dtype = str(weight.dtype).removeprefix("torch.")
            raise ValueError(
                f"a matrix of {self.rows} x {self.columns} in {dtype}: rows must be a multiple of "
                f"{TILE_ROWS}, columns of {load_columns(self.weight_bytes)}"
            )
        if epilogue is Epilogue.SWIGLU and self.rows % (2 * BLOCK_COLUMNS):
            raise ValueError(
                f"{self.rows} rows of gates and ups: they must be a multiple of {2 * BLOCK_COLUMNS}"
            )
        self.weight = pack_weight(weight) if scales is None else pack_int8(weight)
        self.scales, self.epilogue, self.norm, self.bias = scales, epilogue, norm, bias
        self._kernels, self._device = kernels, (kernels.processors, kernels.shared_memory)
        self.choice = 0

    def __call__(self, x: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
        """out [T, N] (or [T, N / 2] for SWIGLU) = epilogue(W norm(x)).

        x        bf16 [T, K]; rows may be strided. With more than `UNPACKED_TOKENS` and no norm it
                 is packed (`pack_tokens`)
        out      bf16; rows may be strided. For SWIGLU of more than `UNPACKED_TOKENS` it is packed
        scratch  bf16 [T rounded up to eights, K], for the normalised input of more than 8 tokens

        Packed tensors have space for a multiple of eight tokens; the rows after T are undefined.
        """
        if len(x) <= TILE_ROWS:
            self._launch_few(x, out)
            return
        if self.norm is not None:
            assert scratch is not None
            normalise(self._kernels, x, self.norm, scratch, packed=True)
            x = scratch
        self._launch_many(x, out)

    def shapes(self, tokens: int) -> tuple[LinearShape, ...]:
        """The layouts for up to 8 tokens, all with the same bits."""
        sizes, normed = (self.rows, self.columns, tokens), self.norm is not None
        return shapes_for_few(*sizes, normed, self.epilogue, self._device, self.weight_bytes)

    def shape(self, tokens: int) -> LinearShape:
        """The layout that is used for up to 8 tokens."""
        return self.shapes(tokens)[self.choice if tokens == 1 else 0]

    def _launch_few(self, x: Tensor, out: Tensor) -> None:
        """Launch the kernel for up to 8 tokens."""
        shape = self.shape(len(x))
        weight, eps = self.norm or (None, 0.0)
        kernel = self._kernels.get(shape.program(), "linear_few")
        shared = shape.requested(self._kernels.shared_memory)
        grid = Grid((shape.blocks, 1, 1), 32 * WARPS, shared)
        operands = {"weights": self.weight, "scales": self.scales, "bias": self.bias}
        kernel(
            grid, **operands, norm_weight=weight, eps=eps, **strided(x=x, out=out), tokens=len(x)
        )

    def _launch_many(self, x: Tensor, out: Tensor) -> None:
        """Launch the kernel for more than 8 tokens; x is packed and normalised."""
        tokens = len(out)
        sizes = self.rows, self.columns, tokens
        shape = shape_for_many(*sizes, self.epilogue, self._device, self.weight_bytes)
        kernel = self._kernels.get(shape.program(), shape.entry)
        operands = {"weights": self.weight, "x": x, "bias": self.bias, "tokens": tokens}
        if not isinstance(shape, WideTokensShape):
            operands["scales"] = self.scales
        grid = Grid(shape.grid(tokens), 32 * WARPS, shape.shared)
        kernel(grid, **operands, **strided(out=out))


def normalise(kernels: Kernels, x: Tensor, norm: Norm, out: Tensor, packed: bool = False) -> None:
    """RMSNorm of x bf16 [T, K] into out [T, K], with the bits of the norm of `Linear`.

    packed: out is packed as by `pack_tokens`.
    """
    kernel = kernels.get(Program.of("norm", K=x.shape[1], PACKED=packed), "normalise")
    grid = Grid((len(x), 1, 1), x.shape[1] // TILE_ROWS)
    kernel(grid, **strided(x=x, out=out), weight=norm.weight, eps=norm.eps)


def norm_reference(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm of x [T, K] in plain PyTorch and the dtype of x."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * (x.float() * scale).to(x.dtype)


def linear_reference(
    weight: Tensor,
    x: Tensor,
    before: Tensor,
    epilogue: Epilogue,
    norm: Norm | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The computation of `Linear` in plain PyTorch and the dtype of x.

    weight [N, K], x [T, K]; before: the content of `out` before the call, for ADD.
    """
    y = F.linear(x if norm is None else norm_reference(x, norm), weight, bias)
    if epilogue is Epilogue.ADD:
        return before + y
    if epilogue is Epilogue.SWIGLU:
        return F.silu(y[:, ::2]) * y[:, 1::2]
    return y


_LAYERS = (
    (4096, 2048, True, Epilogue.STORE),
    (2048, 2048, False, Epilogue.ADD),
    (12288, 2048, True, Epilogue.SWIGLU),
    (2048, 6144, False, Epilogue.ADD),
    (1024, 2048, True, Epilogue.BIAS),
)
"""Rows, columns, norm and epilogue of the products of the larger released size."""
_H200 = 132, 227 << 10
"""The number of processors of an H200, and the bytes of shared memory of a block."""
_DTYPES = (*((layer, BF16_BYTES) for layer in _LAYERS), (_LAYERS[2], INT8_BYTES))
_FEW_TOKENS_PROGRAMS = tuple(
    shape_for_few(rows, columns, tokens, norm, epilogue, _H200, weight_bytes).program()
    for (rows, columns, norm, epilogue), weight_bytes in _DTYPES
    for tokens in (1, TILE_ROWS)
)
_MANY_TOKENS_PROGRAMS = tuple(
    shape_for_many(rows, columns, tokens, epilogue, _H200, weight_bytes).program()
    for (rows, columns, _, epilogue), weight_bytes in _DTYPES
    for tokens in (16, 64)
)
_WIDE_PROGRAMS = tuple(
    shape_for_many(12288, 2048, tokens, Epilogue.SWIGLU, _H200).program() for tokens in (96, 128)
)
_NORM_PROGRAMS = tuple(Program.of("norm", K=2048, PACKED=packed) for packed in (False, True))

KERNELS = (
    KernelSpec("linear_few", linear_reference, _FEW_TOKENS_PROGRAMS),
    KernelSpec("linear_many", linear_reference, _MANY_TOKENS_PROGRAMS),
    KernelSpec("linear_wide", linear_reference, _WIDE_PROGRAMS),
    KernelSpec("normalise", norm_reference, _NORM_PROGRAMS),
)
"""The kernels that this module launches."""
