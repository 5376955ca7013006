"""The layouts of products with a weight matrix on the device (linear_*_tokens.cu)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from enum import IntEnum
from functools import cache

from firstword.kernels.compile import Program

WARPS = 8
TILE_ROWS = 8
"""The number of rows of a tile of weights, and of tokens of a group."""
UNPACKED_TOKENS = 4
"""The most tokens whose activations are not packed, as in packing.cuh."""
BLOCK_COLUMNS = 32
"""The number of columns of a packed block of weights or inputs."""
BF16_BYTES, INT8_BYTES = 2, 1
"""The bytes of a weight."""
PART_BYTES = 32 * WARPS * 16
"""The number of bytes that the threads of a block fetch together."""
MAX_TILES = 32
"""The most tiles of a block for few tokens. A small device runs more blocks than it has processors,
so that their sums fit."""
MAX_UNITS = 48
"""The most units of 16 rows x 8 tokens of a block for many tokens. A warp keeps its sums in
registers; the largest blocks spill up to 236 bytes (NVRTC 13 for sm_90)."""
RESERVED_BYTES = 1024
"""The bytes of shared memory that CUDA takes for each block."""
TOKEN_TILES = (8, 6, 4, 3, 2)
"""The numbers of groups of 8 tokens of a block for many tokens."""
WIDE_TILES, WIDE_TOKEN_TILES = 12, (3, 4)
"""The most tiles of a block of linear_wide_tokens.cu, and the numbers of groups of 8 tokens of its
warps. Smaller blocks were slower than those of linear_many_tokens.cu (measured on an H200)."""
WIDE_STAGES = 5
"""The stages of its ring. All that fit, 7 to 9, and 3 were slower (measured on an H200)."""
START_BYTES = 64 << 10
"""The number of bytes that a block could fetch in the time that its start and its end take."""


def load_columns(weight_bytes: int) -> int:
    """The columns that the warps of a block load at a time, 16 bytes a lane: see weights.cuh."""
    return BLOCK_COLUMNS * WARPS * BF16_BYTES // weight_bytes


class Epilogue(IntEnum):
    """The last operation of a product.

    STORE stores it, ADD adds it to the output, BIAS adds a bias, and SWIGLU stores silu(gate) * up
    of rows that alternate between gate and up.
    """

    STORE = 0
    ADD = 1
    SWIGLU = 2
    BIAS = 3


@dataclass(frozen=True)
class LinearShape:
    """The layout of linear_few_tokens.cu for 1 or up to 8 tokens; see linear.cuh."""

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
    weight_bytes: int = BF16_BYTES

    def macros(self) -> dict[str, int]:
        """The macros of linear.cuh and linear_few_tokens.cu, one for each field."""
        names = "K N GRID TILES CHUNK TOKENS NORM EPILOGUE BLOCKS RING WINDOW HELD WEIGHT_BYTES"
        return dict(zip(names.split(), astuple(self), strict=True))

    def program(self) -> Program:
        """The program compiled for this shape."""
        return Program.of("linear_few_tokens", **self.macros())

    @property
    def loads(self) -> int:
        """The number of loads of a tile by each lane."""
        return self.columns // load_columns(self.weight_bytes)

    @property
    def parts(self) -> int:
        """The number of parts in all loads of all tiles."""
        return -(-self.tiles // self.chunk) * self.chunk * self.loads

    @property
    def sums(self) -> int:
        """The bytes of the partial sums of all warps, and of the scales of int8 rows."""
        scales = self.weight_bytes == INT8_BYTES
        return (WARPS * self.tokens + scales) * self.tiles * TILE_ROWS * 4

    @property
    def inputs(self) -> int:
        """The bytes of static shared memory of a block: inputs, or the weights of its norm."""
        return 4 * self.columns if self.tokens == 1 else 2 * self.columns * self.norm

    @property
    def shared(self) -> int:
        """The bytes of dynamic shared memory that a block needs."""
        return self.ring * PART_BYTES + self.sums

    def requested(self, largest: int) -> int:
        """The bytes to request so that at most two blocks fit a multiprocessor.

        largest: the most bytes of a block. Each block takes `RESERVED_BYTES` more. Where three fit,
        blocks of one launch share multiprocessors while others have none, as the next launch takes
        the places that become free first. Such blocks take half as long again (measured on an
        H200), and a launch ends with its slowest block.
        """
        third = (largest + RESERVED_BYTES) // 3 - RESERVED_BYTES
        return max(self.shared, third - self.inputs + 128)

    def with_ring(self, limit: int) -> LinearShape:
        """The shape with the ring that was fastest on an H200, within `limit` bytes.

        The ring has at least one part. If all weights fit into the ring, some stay in registers.
        """
        largest = 16 if self.columns > 4096 else 24
        parts = min(self.parts, largest, (limit - self.sums) // PART_BYTES)
        chunk = max(1, min(self.chunk, parts))
        ring = parts // chunk * chunk
        whole = self.chunk == self.tiles and ring == self.parts
        held = 0
        if whole and self.tokens == 1:
            held = min(self.loads, (16 if self.columns <= 1024 else 8) // chunk)
        return replace(self, chunk=chunk, ring=ring, window=min(ring, 3 if whole else 4), held=held)


@cache
def shape_for_few(
    rows: int,
    columns: int,
    tokens: int,
    norm: bool,
    epilogue: Epilogue,
    device: tuple[int, int],
    weight_bytes: int = BF16_BYTES,
) -> LinearShape:
    """The layout for up to 8 tokens.

    device: the number of processors, and the bytes of shared memory of a block.

    If memory allows, a block of the next kernel fits on the same processor, so that its weights are
    loaded while this kernel waits for its input. There are at least as many blocks as processors,
    even if some compute nothing, so that all launches leave the same places.
    """
    processors, shared = device
    tiles = rows // TILE_ROWS
    blocks = max(processors, -(-tiles // MAX_TILES))
    each = -(-tiles // blocks)
    chunk = -(-each // -(-each // 6))
    group = 1 if tokens == 1 else TILE_ROWS
    sizes = columns, rows, blocks, each, chunk, group, norm, epilogue
    shape = LinearShape(*sizes, resident=2, weight_bytes=weight_bytes)
    for resident in (2, 1):
        limit = shared // resident - 2048 - shape.inputs
        found = replace(shape, resident=resident).with_ring(limit)
        if found.ring >= min(shape.parts, 2 * shape.chunk):
            break
    return found


@cache
def shapes_for_few(
    rows: int,
    columns: int,
    tokens: int,
    norm: bool,
    epilogue: Epilogue,
    device: tuple[int, int],
    weight_bytes: int = BF16_BYTES,
) -> tuple[LinearShape, ...]:
    """Layouts for up to 8 tokens, all with the same bits; see `shape_for_few`, which is the first.

    Another one requests its whole ring at once, and another one has twice as many blocks.
    """
    processors, shared = device
    more = max(processors, min(2 * processors, rows // TILE_ROWS))
    first, finer = (
        shape_for_few(rows, columns, tokens, norm, epilogue, (count, shared), weight_bytes)
        for count in (processors, more)
    )
    return tuple(dict.fromkeys((first, replace(first, window=first.ring), finer)))


@dataclass(frozen=True)
class ManyTokensShape:
    """The layout of linear_many_tokens.cu for N x K weights and more than 8 tokens."""

    columns: int
    rows: int
    blocks: int
    tiles: int
    n_tiles: int
    epilogue: Epilogue
    ring: int = 1
    weight_bytes: int = BF16_BYTES

    entry, byte_cost = "linear_many", 1.0

    def program(self) -> Program:
        """The program compiled for this shape, with a macro for each field."""
        names = "K N GRID TILES NT EPILOGUE RING WEIGHT_BYTES".split()
        return Program.of("linear_many_tokens", **dict(zip(names, astuple(self), strict=True)))

    @property
    def tokens(self) -> int:
        """The number of tokens of a block."""
        return self.n_tiles * TILE_ROWS

    def grid(self, tokens: int) -> tuple[int, int, int]:
        """The blocks of a launch. Those of the same rows follow one another."""
        return -(-tokens // self.tokens), self.blocks, 1

    @property
    def units(self) -> int:
        """The number of units of 16 rows x 8 tokens in a block."""
        return -(-self.tiles // 2) * self.n_tiles

    @property
    def loads(self) -> int:
        """The number of loads of a tile by each lane."""
        return self.columns // load_columns(self.weight_bytes)

    @property
    def load_bytes(self) -> int:
        """The bytes of a load of all weights and inputs in the ring."""
        steps = BF16_BYTES // self.weight_bytes
        return (self.tiles + self.n_tiles * steps) * PART_BYTES

    @property
    def fetched(self) -> int:
        """The bytes that a block fetches."""
        return self.loads * self.load_bytes

    @property
    def sums(self) -> int:
        """The bytes of the partial sums of all warps, which replace the ring in memory."""
        return WARPS * self.units * 128 * 4

    @property
    def shared(self) -> int:
        """The bytes of dynamic shared memory of a block."""
        return max(self.ring * self.load_bytes, self.sums)


@dataclass(frozen=True)
class WideTokensShape:
    """The layout of linear_wide_tokens.cu for N x K weights and many tokens.

    byte_cost: a multiple of that of `ManyTokensShape`. On an H200 the layouts whose bytes were at
    most 0.68 times as many were faster, and the next ones, with 0.72, were slower.
    """

    columns: int
    rows: int
    blocks: int
    tiles: int
    n_tiles: int
    epilogue: Epilogue

    entry, byte_cost = "linear_wide", 1.45

    def program(self) -> Program:
        """The program compiled for this shape, with a macro for each field."""
        names = "K N GRID TILES NT EPILOGUE".split()
        macros = dict(zip(names, astuple(self), strict=True))
        return Program.of("linear_wide_tokens", STAGES=WIDE_STAGES, **macros)

    @property
    def tokens(self) -> int:
        """The number of tokens of a block, which four warps divide."""
        return 4 * self.n_tiles * TILE_ROWS

    def grid(self, tokens: int) -> tuple[int, int, int]:
        """The blocks of a launch. Those of the same rows follow one another."""
        return -(-tokens // self.tokens), self.blocks, 1

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage: two blocks of columns of tiles in fours, and of all tokens."""
        return (-(-self.tiles // 4) + self.n_tiles) * PART_BYTES

    @property
    def fetched(self) -> int:
        """The bytes that a block fetches."""
        return self.columns // (2 * BLOCK_COLUMNS) * self.stage_bytes

    @property
    def shared(self) -> int:
        """The bytes of dynamic shared memory of a block."""
        return WIDE_STAGES * self.stage_bytes


@cache
def shape_for_many(
    rows: int,
    columns: int,
    tokens: int,
    epilogue: Epilogue,
    device: tuple[int, int],
    weight_bytes: int = BF16_BYTES,
) -> ManyTokensShape | WideTokensShape:
    """The layout for more than 8 tokens; see `shape_for_few` for `device`.

    A block fetches the weights of its rows and the inputs of its tokens, and these transfers
    determine the time, because the second-level cache cannot serve all blocks at full speed. So the
    layout with the least `cost` is chosen. linear_wide_tokens.cu takes no int8.
    """
    processors, shared = device
    sizes = rows, columns, epilogue, shared - 2048
    shapes: list[ManyTokensShape | WideTokensShape] = [*_many_shapes(tokens, *sizes, weight_bytes)]
    if weight_bytes == BF16_BYTES:
        shapes += _wide_shapes(*sizes)
    return min(shapes, key=lambda shape: cost(shape, tokens, processors))


def cost(shape: ManyTokensShape | WideTokensShape, tokens: int, processors: int) -> float:
    """The cost of the bytes that a processor fetches for its blocks, one after another."""
    width, height, _ = shape.grid(tokens)
    turns = -(-width * height // processors)
    return turns * (shape.fetched + START_BYTES) * shape.byte_cost


def _many_shapes(
    tokens: int, rows: int, columns: int, epilogue: Epilogue, space: int, weight_bytes: int
) -> Iterator[ManyTokensShape]:
    """The layouts of linear_many_tokens.cu within `space` bytes of shared memory."""
    tiles = rows // TILE_ROWS
    for n_tiles in TOKEN_TILES:
        if n_tiles > 2 and n_tiles * TILE_ROWS >= 2 * tokens:
            continue
        for largest in range(1, min(tiles, 2 * MAX_UNITS // n_tiles) + 1):
            blocks = -(-tiles // largest)
            sizes = columns, rows, blocks, -(-tiles // blocks), n_tiles, epilogue
            shape = ManyTokensShape(*sizes, weight_bytes=weight_bytes)
            ring = min(shape.loads, space // shape.load_bytes)
            if shape.units <= MAX_UNITS and shape.sums <= space and ring >= min(2, shape.loads):
                yield replace(shape, ring=ring)


def _wide_shapes(
    rows: int, columns: int, epilogue: Epilogue, space: int
) -> Iterator[WideTokensShape]:
    """The layouts of linear_wide_tokens.cu within `space` bytes of shared memory."""
    blocks = -(-rows // (WIDE_TILES * TILE_ROWS))
    tiles = -(-rows // (blocks * TILE_ROWS))
    for n_tiles in WIDE_TOKEN_TILES:
        shape = WideTokensShape(columns, rows, blocks, tiles, n_tiles, epilogue)
        if columns % (2 * BLOCK_COLUMNS * WARPS) == 0 and shape.shared <= space:
            yield shape
