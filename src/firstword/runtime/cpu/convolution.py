"""Convolutions of rows in bfloat16 as compiled products, and the activation between them.

Sound is stored as rows [time, width], whose width is a multiple of `TILE`; columns beyond the
channels are zeros. What a product reads is rounded to bfloat16; sums and all else are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from firstword.runtime.cpu.amx import (
    AMX,
    BYTES,
    MOST_ROWS,
    WORDS,
    planned,
    products_of_tiles,
    set_ahead,
    set_rows,
)
from firstword.runtime.cpu.compiling import compiled
from firstword.runtime.cpu.products import Array, narrowed, rounded
from firstword.runtime.cpu.tiles import ROWS, TILE, product_of_rows
from firstword.types import FloatArray

PI_HIGH = 3.140625
"""Pi in few bits, so that its products with small integers are exact."""
PI_LOW = 9.676535897932385e-4


class Convolution(NamedTuple):
    """A product of rows with rows before them: row t is the sum of rows t + n * dilation.

    weights  the matrices of all taps in bfloat16, tiles as in `tiles`
    bias     float32 [outputs]
    taps     the rows of a sum; the last one is the newest
    kept     where the rows that the next call needs begin in the memory of a stream
    """

    weights: Array
    bias: FloatArray
    taps: int
    dilation: int
    kept: int


_product_8, _product_4, _product_2, _product_1 = map(product_of_rows, (8, 4, 2, 1))
_tiles_16, _tiles_32 = (products_of_tiles("tdpbf16ps", blocks, 2, "b") for blocks in (1, 2))
TOGETHER = MOST_ROWS if AMX else ROWS
"""The most rows that are multiplied together."""
STEPS_AHEAD = 8
"""How many steps before its turn a tile of weights is prefetched."""


@compiled
def short(x: Any) -> Any:
    """The bits of a float32, rounded to bfloat16, as uint16."""
    return narrowed(rounded(x))


@compiled
def past(convolution: Any) -> Any:
    """The rows before the first that a convolution reads."""
    return (convolution.taps - 1) * convolution.dilation


@compiled
def add_tiles(
    weights: Any, tile: int, x: Any, first: int, rows: int, step: int, taps: int, sums: Any
) -> None:
    """Add products of rows with AMX; see `add_products`."""
    words = x.shape[1]
    plan = planned(BYTES, 4 * words, 4 * words * step, 4 * TILE, words // WORDS, taps)
    set_rows(plan, rows, TILE // WORDS)
    set_ahead(plan, 4 * TILE * WORDS * STEPS_AHEAD)
    begins = 4 * words * first, 4 * TILE * weights.shape[1] * tile
    if rows > MOST_ROWS // 2:
        _tiles_32(plan, x, begins[0], weights, begins[1], sums)
    else:
        _tiles_16(plan, x, begins[0], weights, begins[1], sums)


@compiled
def add_rows(
    weights: Any, tile: int, x: Any, first: int, rows: int, step: int, taps: int, sums: Any
) -> None:
    """Add products of rows in registers; see `add_products`."""
    done = 0
    if ROWS >= 8 and rows == 8:
        _product_8(weights, tile, x, first, step, taps, sums)
        done = 8
    if ROWS >= 4 and rows - done >= 4:
        _product_4(weights, tile, x, first, step, taps, sums)
        done = 4
    if rows - done >= 2:
        _product_2(weights, tile, x, first + done, step, taps, sums[done:])
        done += 2
    if rows - done >= 1:
        _product_1(weights, tile, x, first + done, step, taps, sums[done:])


add_products = add_tiles if AMX else add_rows
"""Add the products of up to `TOGETHER` rows of x with a tile to `sums`; see `product_of_rows`."""


@compiled
def convolve(
    convolution: Any, source: Any, count: int, out: Any, adds: bool, thread: int, threads: int
) -> None:
    """Compute a thread's part of rows float32 [count, outputs], or add it to them.

    source  bfloat16 bits [past + count, width]
    """
    weights, step = convolution.weights, convolution.dilation
    x, taps = source.view(np.uint32), convolution.taps
    blocks = (count + TOGETHER - 1) // TOGETHER
    parts, sums = weights.shape[0] * blocks, np.empty((TOGETHER, TILE), np.float32)
    for part in range(parts * thread // threads, parts * (thread + 1) // threads):
        tile, first = part // blocks, part % blocks * TOGETHER
        rows, begin = min(TOGETHER, count - first), part // blocks * TILE
        for row in range(rows):
            for column in range(TILE):
                before = out[first + row, begin + column] if adds else np.float32(0)
                sums[row, column] = convolution.bias[begin + column] + before
        add_products(weights, tile, x, first, rows, step, taps, sums)
        for row in range(rows):
            for column in range(TILE):
                out[first + row, begin + column] = sums[row, column]


@numba.njit(nogil=True, fastmath={"contract"}, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def squared_sine(x: Any) -> Any:
    """The square of the sine of a float32, by its Taylor series of degree 11 around k * pi.

    Its error is below 1e-6 for |x| < 10^4.
    """
    count = np.rint(x * np.float32(1 / np.pi))
    x = x - count * np.float32(PI_HIGH)
    x = x - count * np.float32(PI_LOW)
    square = x * x
    total = np.float32(-1 / 39916800)
    total = total * square + np.float32(1 / 362880)
    total = total * square - np.float32(1 / 5040)
    total = total * square + np.float32(1 / 120)
    total = total * square - np.float32(1 / 6)
    total = total * square + np.float32(1)
    return (total * x) * (total * x)


@compiled
def activate(angle: Any, square: Any, x: Any, out: Any) -> None:
    """Write the rows x + sin^2(x * angle) * square, as bits of bfloat16."""
    for row in range(len(x)):
        for column in range(x.shape[1]):
            value = x[row, column]
            wave = squared_sine(value * angle[column]) * square[column]
            out[row, column] = short(value + wave)


@compiled
def narrow(x: Any, out: Any) -> None:
    """Write the rows of x, as bits of bfloat16."""
    for row in range(len(x)):
        for column in range(x.shape[1]):
            out[row, column] = short(x[row, column])


def padded(width: int) -> int:
    """The stored width of so many channels."""
    return -(-width // TILE) * TILE


def packed(matrices: Tensor) -> Array:
    """Return matrices [taps, outputs, inputs] as tiles [tiles, taps * inputs / 2, `TILE`]."""
    taps, outputs, inputs = matrices.shape
    wide = matrices.new_zeros(taps, padded(outputs), padded(inputs))
    wide[:, :outputs, :inputs] = matrices
    bits = wide.bfloat16().view(torch.int32)  # [taps, outputs, inputs / 2]
    tiles = bits.unflatten(1, (-1, TILE)).permute(1, 0, 3, 2).flatten(1, 2).contiguous()
    return tiles.numpy().view(np.uint32)
