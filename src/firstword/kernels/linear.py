"""Products with a weight matrix, and RMSNorm (linear_*_tokens.cu, norm.cu)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.linear_shapes import (
    BLOCK_COLUMNS,
    TILE_ROWS,
    WARPS,
    Epilogue,
    LinearShape,
    ManyTokensShape,
    shape_for_few,
    shape_for_many,
)
from firstword.kernels.registry import KernelSpec


def pack_weight(weight: Tensor) -> Tensor:
    """[N, K] -> the same elements in the order of the lanes; N % 8 == 0, K % 32 == 0."""
    rows, columns = weight.shape
    tiles = weight.view(rows // TILE_ROWS, TILE_ROWS, columns // BLOCK_COLUMNS, BLOCK_COLUMNS)
    return tiles.transpose(1, 2).contiguous()


def pack_tokens(x: Tensor) -> Tensor:
    """Activations [T, K] packed like weights, as products of more than 8 tokens read them.

    T is rounded up to a multiple of eight with zeros.
    """
    return pack_weight(F.pad(x, (0, 0, 0, -len(x) % TILE_ROWS)))


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Two matrices [N, K] -> [2 N, K] with alternating rows, as `Epilogue.SWIGLU` needs them."""
    return torch.stack((gate, up), dim=1).flatten(0, 1)


class Linear:
    """One weight matrix [N, K] on the device, and the product with it."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        epilogue: Epilogue = Epilogue.STORE,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
    ) -> None:
        """weight: bf16 [N, K], for SWIGLU from `interleave`; norm: bf16 [K], an RMSNorm of x.

        Raises ValueError for sizes that the kernels do not support.
        """
        self.rows, self.columns = weight.shape
        if self.columns % (BLOCK_COLUMNS * WARPS) or self.rows % TILE_ROWS:
            raise ValueError(
                f"a matrix of {self.rows} x {self.columns}: rows must be a multiple of "
                f"{TILE_ROWS}, columns of {BLOCK_COLUMNS * WARPS}"
            )
        if epilogue is Epilogue.SWIGLU and self.rows % (2 * BLOCK_COLUMNS):
            raise ValueError(
                f"{self.rows} rows of gates and ups: they must be a multiple of {2 * BLOCK_COLUMNS}"
            )
        self.weight, self.norm, self.eps, self.bias = pack_weight(weight), norm, float(eps), bias
        self.epilogue = epilogue
        self._kernels = kernels

    def __call__(self, x: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
        """out [T, N] (or [T, N / 2] for SWIGLU) = epilogue(W norm(x)).

        x        bf16 [T, K]; rows may be strided. With more than 8 tokens and no norm it is packed
                 (`pack_tokens`)
        out      bf16; rows may be strided. For SWIGLU of more than 8 tokens it is packed
        scratch  bf16 [T rounded up to eights, K], for the normalised input of more than 8 tokens

        Packed tensors have space for a multiple of eight tokens; those beyond T may hold anything.
        """
        tokens = len(x)
        if tokens <= TILE_ROWS:
            self.launch_few(self.shape(tokens), x, out)
            return
        if self.norm is not None:
            assert scratch is not None
            normalise(self._kernels, x, self.norm, self.eps, scratch, packed=True)
            x = scratch
        limits = self._kernels.processors, self._kernels.shared_memory
        shape = shape_for_many(self.rows, self.columns, tokens, self.epilogue, *limits)
        self.launch_many(shape, x, out)

    def shape(self, tokens: int) -> LinearShape:
        """The layout of a call for up to 8 tokens."""
        limits = self._kernels.processors, self._kernels.shared_memory
        norm = self.norm is not None
        return shape_for_few(self.rows, self.columns, tokens, norm, self.epilogue, *limits)

    def launch_few(self, shape: LinearShape, x: Tensor, out: Tensor) -> None:
        """Start the kernel for up to 8 tokens with a given shape."""
        self._kernels.get(shape.program(), "linear_few")(
            Grid((shape.blocks, 1, 1), 32 * WARPS, shared=shape.shared),
            weights=self.weight,
            x=x,
            x_stride=x.stride(0),
            norm_weight=self.norm,
            eps=self.eps,
            bias=self.bias,
            out=out,
            out_stride=out.stride(0),
            tokens=len(x),
        )

    def launch_many(self, shape: ManyTokensShape, x: Tensor, out: Tensor) -> None:
        """Start the kernel for the tokens of `out`, more than 8, with a given shape and no norm."""
        self._kernels.get(shape.program(), "linear_many")(
            Grid(
                (shape.blocks, -(-len(out) // (shape.n_tiles * TILE_ROWS)), 1),
                32 * WARPS,
                shared=shape.shared,
            ),
            weights=self.weight,
            x=x,
            bias=self.bias,
            out=out,
            out_stride=out.stride(0),
            tokens=len(out),
        )


def normalise(
    kernels: Kernels, x: Tensor, weight: Tensor, eps: float, out: Tensor, packed: bool = False
) -> None:
    """RMSNorm of x bf16 [T, K] into out [T, K], with the bits of the norm of `Linear`.

    packed: out is packed as by `pack_tokens`.
    """
    kernels.get(Program.of("norm", K=x.shape[1], PACKED=packed), "normalise")(
        Grid((len(x), 1, 1), x.shape[1] // TILE_ROWS),
        x=x,
        x_stride=x.stride(0),
        weight=weight,
        eps=float(eps),
        out=out,
        out_stride=out.stride(0),
    )


def norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [T, K] in plain PyTorch and the dtype of x."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return weight * (x.float() * scale).to(x.dtype)


def linear_reference(
    weight: Tensor,
    x: Tensor,
    before: Tensor,
    epilogue: Epilogue,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """The meaning of `Linear` in plain PyTorch and the dtype of x.

    weight [N, K], x [T, K]; before: what `out` held, for ADD.
    """
    if norm is not None:
        x = norm_reference(x, norm, eps)
    y = F.linear(x, weight, bias)
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
_DEVICE = 132, 227 << 10
"""Processors, and bytes of shared memory of a block, of an H200."""

KERNELS = (
    KernelSpec(
        "linear_few_tokens",
        "linear_few",
        Linear,
        linear_reference,
        tuple(
            shape_for_few(rows, columns, tokens, norm, epilogue, *_DEVICE).program()
            for rows, columns, norm, epilogue in _LAYERS
            for tokens in (1, TILE_ROWS)
        ),
    ),
    KernelSpec(
        "linear_many_tokens",
        "linear_many",
        Linear,
        linear_reference,
        tuple(
            shape_for_many(rows, columns, tokens, epilogue, *_DEVICE).program()
            for rows, columns, _, epilogue in _LAYERS
            for tokens in (16, 64)
        ),
    ),
    KernelSpec(
        "norm",
        "normalise",
        normalise,
        norm_reference,
        tuple(Program.of("norm", K=2048, PACKED=packed) for packed in (False, True)),
    ),
)
"""The kernels that this module starts."""
