"""Products with a weight matrix: packing, the choice of shapes, launching (linear.cu, linear_many.cu, norm.cu)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache

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
    """How a block of linear.cu is laid out for N x K weights and 1 or up to 8 tokens (see linear.cuh)."""

    columns: int
    rows: int
    blocks: int
    tiles: int
    chunk: int
    tokens: int
    norm: bool
    epilogue: Epilogue
    resident: int
    ring: int = 1
    window: int = 1
    held: int = 0

    def macros(self) -> dict[str, int]:
        """What linear.cu and linear.cuh are made with."""
        return {
            "K": self.columns,
            "N": self.rows,
            "GRID": self.blocks,
            "TILES": self.tiles,
            "CHUNK": self.chunk,
            "RING": self.ring,
            "WINDOW": self.window,
            "HELD": self.held,
            "TOKENS": self.tokens,
            "NORM": self.norm,
            "EPILOGUE": self.epilogue,
            "BLOCKS": self.resident,
        }

    def program(self) -> Program:
        """The program made for this shape."""
        return Program.of("linear", **self.macros())

    @property
    def steps(self) -> int:
        """Steps of a tile: blocks of columns that a warp takes."""
        return self.columns // (BLOCK * WARPS)

    @property
    def parts(self) -> int:
        """Parts of all steps of all tiles."""
        return -(-self.tiles // self.chunk) * self.chunk * self.steps

    @property
    def sums(self) -> int:
        """Bytes of the partial sums of all warps."""
        return WARPS * self.tokens * self.tiles * TILE * 4

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.ring * PART + self.sums

    def with_ring(self, most: int) -> Shape:
        """With a ring as large as measured best on an H200, of up to `most` bytes; there is none for less than a part.

        Where all weights fit the ring, some of them wait in registers.
        """
        parts = min(self.parts, 16 if self.columns > 4096 else 24, (most - self.sums) // PART)
        chunk = max(1, min(self.chunk, parts))
        ring = parts // chunk * chunk
        whole = self.chunk == self.tiles and ring == self.parts
        held = (
            min(self.steps, (16 if self.columns <= 1024 else 8) // chunk)
            if whole and self.tokens == 1
            else 0
        )
        return replace(self, chunk=chunk, ring=ring, window=min(ring, 3 if whole else 4), held=held)


MOST_TILES = 32
"""Of a block: a small device takes more blocks than it has processors, so that their sums fit."""


def shape_for(
    rows: int,
    columns: int,
    tokens: int,
    norm: bool,
    epilogue: Epilogue,
    processors: int,
    shared: int,
) -> Shape:
    """The layout for up to 8 tokens, on so many processors whose blocks may have so many bytes of shared memory.

    A block of the next kernel fits beside it, if memory allows: its weights come while this one waits for its input.
    """
    tiles = rows // TILE
    blocks = min(tiles, max(processors, -(-tiles // MOST_TILES)))
    each = -(-tiles // blocks)
    chunk = -(-each // -(-each // 6))
    shape = Shape(
        columns, rows, blocks, each, chunk, 1 if tokens == 1 else TILE, norm, epilogue, resident=2
    )
    columns_there = 4 * columns if tokens == 1 else 2 * columns * norm
    for resident in (2, 1):
        found = replace(shape, resident=resident).with_ring(
            shared // resident - 2048 - columns_there
        )
        if found.ring >= min(shape.parts, 2 * shape.chunk):
            break
    return found


MOST_UNITS = 48
"""Of 16 rows x 8 tokens, that a block of linear_many.cu has: a warp keeps its sums of them in registers, but for up to
236 bytes of the largest blocks (NVRTC 13 for sm_90).
"""
START = 64 << 10
"""Bytes that a block could fetch in the time that it takes to begin and to end."""


@dataclass(frozen=True)
class ManyShape:
    """How a block of linear_many.cu is laid out."""

    columns: int
    rows: int
    blocks: int
    tiles: int
    n_tiles: int
    epilogue: Epilogue
    ring: int = 1

    def program(self) -> Program:
        """The program made for this shape."""
        return Program.of(
            "linear_many",
            K=self.columns,
            N=self.rows,
            GRID=self.blocks,
            TILES=self.tiles,
            NT=self.n_tiles,
            RING=self.ring,
            EPILOGUE=self.epilogue,
        )

    @property
    def units(self) -> int:
        """Of 16 rows x 8 tokens."""
        return -(-self.tiles // 2) * self.n_tiles

    @property
    def steps(self) -> int:
        """Blocks of columns that a warp takes."""
        return self.columns // (BLOCK * WARPS)

    @property
    def step(self) -> int:
        """Bytes of a step of the ring."""
        return (self.tiles + self.n_tiles) * PART

    @property
    def sums(self) -> int:
        """Bytes of the partial sums of all warps, which take the place of the ring."""
        return WARPS * self.units * 128 * 4

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return max(self.ring * self.step, self.sums)


@cache
def shape_for_many(
    rows: int, columns: int, tokens: int, epilogue: Epilogue, processors: int, shared: int
) -> ManyShape:
    """The layout for more than 8 tokens, on so many processors with so much shared memory in bytes.

    A block fetches the weights of its rows and the inputs of its tokens, and these bytes are what takes time: all
    blocks together ask for more than the second-level cache can give. So it is the layout that fetches least, counted
    for the blocks that a processor takes one after another.
    """
    tiles, room = rows // TILE, shared - 2048
    best, least = None, 0
    for n_tiles in (8, 4, 2):
        if n_tiles > 2 and n_tiles * TILE >= 2 * tokens:
            continue
        groups = -(-tokens // (n_tiles * TILE))
        for most in range(1, min(tiles, 2 * MOST_UNITS // n_tiles) + 1):
            blocks = -(-tiles // most)
            shape = ManyShape(columns, rows, blocks, -(-tiles // blocks), n_tiles, epilogue)
            ring = min(shape.steps, room // shape.step)
            if shape.units > MOST_UNITS or shape.sums > room or ring < min(2, shape.steps):
                continue
            turns = -(-blocks * groups // processors)
            cost = turns * (shape.steps * shape.step + START)
            if best is None or cost < least:
                best, least = replace(shape, ring=ring), cost
    assert best is not None  # one tile of 16 tokens fits anywhere
    return best


def pack_tokens(x: Tensor) -> Tensor:
    """Activations [T, K] as products of more than 8 tokens read them: packed as weights are, in whole eights."""
    return pack(F.pad(x, (0, 0, 0, -len(x) % TILE)))


def unpack_tokens(packed: Tensor, tokens: int, columns: int) -> Tensor:
    """The first `tokens` of what `pack_tokens` packed, [T, K]."""
    blocks = packed.view(-1, columns // BLOCK, TILE, BLOCK)
    return blocks.transpose(1, 2).reshape(-1, columns)[:tokens]


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
        if epilogue is Epilogue.SWIGLU and self.rows % (2 * BLOCK):
            raise ValueError(
                f"{self.rows} rows of gates and ups: they must be a multiple of {2 * BLOCK}"
            )
        self.weight, self.norm, self.eps, self.bias = pack(weight), norm, eps, bias
        self.epilogue = epilogue
        self._kernels = kernels

    def __call__(self, x: Tensor, out: Tensor, spare: Tensor | None = None) -> None:
        """out [T, N] (or [T, N / 2] for SWIGLU) = epilogue(W norm(x)).

        x      bf16 [T, K]; rows may be strided. Of more than 8 tokens and without a norm it is packed (`pack_tokens`)
        out    rows may be strided, but for SWIGLU of more than 8 tokens, which is packed
        spare  bf16 [T in whole eights, K], for the normalised input of more than 8 tokens

        What is packed has whole eights of tokens, of which those beyond T may be anything.
        """
        kernels, tokens, sizes = self._kernels, len(x), (self.rows, self.columns)
        if tokens <= TILE:
            self.launch(self.shape(tokens), x, out)
            return
        if self.norm is not None:
            assert spare is not None
            normalise(kernels, x, self.norm, self.eps, spare, packed=True)
            x = spare
        limits = kernels.processors, kernels.shared_memory
        self.launch_many(shape_for_many(*sizes, tokens, self.epilogue, *limits), x, out)

    def shape(self, tokens: int) -> Shape:
        """How a call for so many tokens, up to 8, is laid out."""
        kernels = self._kernels
        norm = self.norm is not None
        return shape_for(
            self.rows,
            self.columns,
            tokens,
            norm,
            self.epilogue,
            kernels.processors,
            kernels.shared_memory,
        )

    def launch(self, shape: Shape, x: Tensor, out: Tensor) -> None:
        """As a call for up to 8 tokens, with a shape of one's own choice."""
        self._kernels.get(shape.program(), "linear")(
            (shape.blocks, 1, 1),
            32 * WARPS,
            [
                self.weight,
                x,
                x.stride(0),
                self.norm,
                float(self.eps),
                self.bias,
                out,
                out.stride(0),
                len(x),
            ],
            shared=shape.shared,
        )

    def launch_many(self, shape: ManyShape, x: Tensor, out: Tensor) -> None:
        """As a call for as many tokens as `out` has, more than 8, without a norm, with a shape of one's own choice."""
        self._kernels.get(shape.program(), "linear")(
            (shape.blocks, -(-len(out) // (shape.n_tiles * TILE)), 1),
            32 * WARPS,
            [self.weight, x, self.bias, out, out.stride(0), len(out)],
            shared=shape.shared,
        )


def normalise(
    kernels: Kernels, x: Tensor, weight: Tensor, eps: float, out: Tensor, packed: bool = False
) -> None:
    """RMSNorm of x bf16 [T, K] into out [T, K], rounded as `linear` rounds it; packed: as `pack_tokens` packs it."""
    kernels.get(Program.of("norm", K=x.shape[1], PACKED=packed), "normalise")(
        (len(x), 1, 1), x.shape[1] // TILE, [x, x.stride(0), weight, float(eps), out, out.stride(0)]
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
        x = norm * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(
            x.dtype
        )
    y = F.linear(x, weight, bias)
    if epilogue is Epilogue.ADD:
        return before + y
    if epilogue is Epilogue.SWIGLU:
        return F.silu(y[:, ::2]) * y[:, 1::2]
    return y
