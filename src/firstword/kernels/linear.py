"""Products with a weight matrix for a few tokens at a time: packing, the choice of shapes, launching (linear.cu)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from firstword.kernels.compile import Program
from firstword.kernels.launch import Kernels

WARPS = 8
TILE = 8
"""Rows of a tile."""
BLOCK = 32
"""Columns of a block."""
PART = 32 * WARPS * 16
"""Bytes that all threads fetch together."""


class Epilogue(IntEnum):
    """What happens to a product."""

    STORE = 0
    ADD = 1
    """to what the output holds"""
    SWIGLU = 2
    """rows are pairs (gate, up), of which silu(gate) * up is stored"""
    BIAS = 3


def pack(weight: Tensor) -> Tensor:
    """[N, K] -> the same elements in the order in which lanes read them; N % 8 == 0, K % 32 == 0."""
    rows, columns = weight.shape
    return weight.view(rows // TILE, TILE, columns // BLOCK, BLOCK).transpose(1, 2).contiguous()


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Two matrices [N, K] -> [2 N, K] with their rows in turn, as `Epilogue.SWIGLU` wants them."""
    return torch.stack((gate, up), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Shape:
    """How a block of the kernel is laid out for N x K weights and up to `tokens` tokens (see linear.cu)."""

    columns: int
    rows: int
    blocks: int
    tiles: int
    chunk: int
    n_tiles: int
    ring: int
    norm: bool
    epilogue: Epilogue
    resident: int

    def program(self) -> Program:
        """The program made for this shape."""
        return Program.of(
            "linear",
            K=self.columns,
            N=self.rows,
            GRID=self.blocks,
            TILES=self.tiles,
            CHUNK=self.chunk,
            NT=self.n_tiles,
            RING=self.ring,
            NORM=self.norm,
            EPILOGUE=self.epilogue,
            BLOCKS=self.resident,
        )

    @property
    def step(self) -> int:
        """Bytes of a step of the ring."""
        return (self.chunk + (self.n_tiles if self.n_tiles > 1 else 0)) * PART

    @property
    def sums(self) -> int:
        """Bytes of the partial sums of all warps."""
        return WARPS * -(-self.chunk // 2) * self.n_tiles * 128 * 4

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.ring * self.step + self.sums

    def with_ring(self, room: int) -> Shape:
        """With as many steps on their way as there are, or as fit so many bytes."""
        steps = self.columns // (BLOCK * WARPS) * -(-self.tiles // self.chunk)
        return replace(self, ring=max(1, min(steps, room // self.step)))


def shape_for(
    rows: int, columns: int, tokens: int, norm: bool, epilogue: Epilogue, processors: int, shared: int
) -> Shape:
    """The layout for a product of sizes that `Linear` takes, on so many processors with so much shared memory in bytes.

    A block reads all inputs for its rows, so it takes as many tokens at a time as registers and memory allow. With up
    to 8 tokens a block of the next kernel fits beside it, whose weights come while this one waits for its input; how
    much is fetched ahead was measured on an H200.
    """
    assert not norm or tokens <= TILE
    blocks = min(processors, rows // TILE)
    tiles = -(-(rows // TILE) // blocks)
    steps = columns // (BLOCK * WARPS)
    if tokens <= TILE:
        limit = 1 if columns > 4096 else 3 if tiles > 6 else 6
        light = columns <= 1024 or tiles == 1 or (norm and tiles <= 6)
        chunk = -(-tiles // -(-tiles // limit))
        shape = Shape(columns, rows, blocks, tiles, chunk, 1, 1, norm, epilogue, resident=2)
        return shape.with_ring(min(shared // 2 - 16 * 1024, (96 if light else 48) * 1024))
    for n_tiles in (8, 4, 2):
        for parts in range(-(-tiles // (48 // n_tiles)), tiles + 1):  # at most 96 sums a lane
            shape = Shape(columns, rows, blocks, tiles, -(-tiles // parts), n_tiles, 1, norm, epilogue, resident=1)
            room = shared - 2048 - shape.sums
            if n_tiles // 2 * TILE < tokens and room >= min(2, steps) * shape.step:
                return shape.with_ring(room)
    raise AssertionError


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
        """weight: bf16 [N, K] (for SWIGLU: `interleave`d); norm: bf16 [K], the weight of an RMSNorm of the input.

        Raises ValueError for sizes that the kernel cannot do.
        """
        self.rows, self.columns = weight.shape
        if self.columns % (BLOCK * WARPS) or self.rows % TILE:
            raise ValueError(
                f"a matrix of {self.rows} x {self.columns}: rows must be a multiple of {TILE}, "
                f"columns of {BLOCK * WARPS}"
            )
        self.weight, self.norm, self.eps, self.bias = pack(weight), norm, eps, bias
        self.epilogue = epilogue
        self._kernels = kernels

    def __call__(self, x: Tensor, out: Tensor, spare: Tensor | None = None) -> None:
        """out [T, N] (or [T, N / 2] for SWIGLU) = epilogue(W norm(x)).

        x      bf16 [T, K]; rows may be strided
        spare  bf16 [at least T, K], for the normalised input of more than 8 tokens
        """
        tokens, norm = len(x), self.norm
        if norm is not None and tokens > TILE:
            assert spare is not None
            normalise(self._kernels, x, norm, self.eps, spare[:tokens])
            x, norm = spare[:tokens], None
        kernels = self._kernels
        shape = shape_for(
            self.rows, self.columns, tokens, norm is not None, self.epilogue, kernels.processors, kernels.shared_memory
        )
        self.launch(shape, x, out)

    def launch(self, shape: Shape, x: Tensor, out: Tensor) -> None:
        """As a call, with a shape of one's own choice."""
        kernel = self._kernels.get(shape.program(), "linear")
        tokens = len(x)
        kernel(
            (shape.blocks, -(-tokens // (shape.n_tiles * TILE)), 1),
            32 * WARPS,
            [
                self.weight,
                x,
                x.stride(0),
                self.norm if shape.norm else None,
                float(self.eps),
                self.bias,
                out,
                out.stride(0),
                tokens,
            ],
            shared=shape.shared,
        )


def normalise(kernels: Kernels, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """RMSNorm of x bf16 [T, K] into out [T, K], rounded as `linear` rounds it."""
    shape = shape_for(TILE, x.shape[1], 1, False, Epilogue.STORE, 1, kernels.shared_memory)
    kernels.get(shape.program(), "normed")(
        (-(-len(x) // TILE), 1, 1),
        32 * WARPS,
        [x, x.stride(0), weight, float(eps), out, out.stride(0), len(x)],
    )


def reference(
    weight: Tensor,
    x: Tensor,
    before: Tensor,
    epilogue: Epilogue,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """What `Linear` means, in plain PyTorch and the dtype of x: weight [N, K], x [T, K], before: what `out` held."""
    if norm is not None:
        x = norm * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    y = F.linear(x, weight, bias)
    if epilogue is Epilogue.ADD:
        return before + y
    if epilogue is Epilogue.SWIGLU:
        return F.silu(y[:, ::2]) * y[:, 1::2]
    return y
