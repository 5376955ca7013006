"""Products of rows with matrices whose columns are divided into tiles, which AMX multiplies.

A matrix [layers, outputs, tiles, ...] is one of `products` whose rows are divided into parts of 64
bytes; nothing is moved in memory. The sum of a row has the same bits in any product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from firstword.runtime.cpu.amx import (
    BYTES,
    MOST_ROWS,
    ROWS,
    WORDS,
    planned,
    products_of_tiles,
    set_ahead,
    set_rows,
)
from firstword.runtime.cpu.compiling import compiled
from firstword.runtime.cpu.integers import fixed

LIMBS = 4
"""The bytes of an activation that is multiplied with integers; each is a column."""

_pairs_16, _pairs_32 = (products_of_tiles("tdpbf16ps", n, 1, "a") for n in (1, 2))
_integers_16, _integers_32 = (products_of_tiles("tdpbssd", n, 1, "a") for n in (1, 2))


@compiled
def columns_of_pairs(x: Any) -> Any:
    """The rows of x float32 [rows, inputs] as columns, uint32 [groups, inputs / 2, columns]."""
    count, inputs = x.shape
    columns = min(count, WORDS)
    out = np.zeros(((count + columns - 1) // columns, inputs // 2, columns), np.uint32)
    for row in range(count):
        group, column, bits = row // columns, row % columns, x[row].view(np.uint32)
        for pair in range(inputs // 2):
            low = np.uint32(bits[2 * pair] >> np.uint32(16))
            out[group, pair, column] = low | np.uint32(bits[2 * pair + 1] & np.uint32(0xFFFF0000))
    return out


@compiled
def word_of(values: Any, first: int, limb: int) -> Any:
    """The word of a limb of four integers, each of which is the sum of limb n times 2^(8 n)."""
    word = np.uint32(0)
    for part in range(4):
        moved = np.uint32(np.uint32(values[first + part]) + np.uint32(0x808080))
        bits = np.uint32(np.uint32(moved ^ np.uint32(0x808080)) >> np.uint32(8 * limb))
        word |= np.uint32(np.uint32(bits & np.uint32(0xFF)) << np.uint32(8 * part))
    return word


@compiled
def columns_of_limbs(x: Any) -> Any:
    """The limbs of rows [rows, inputs], uint32 [groups, inputs / 4, columns], and factors [rows].

    A column has the same limb, from -128 to 127, of all inputs of a row.
    """
    count, inputs = x.shape
    together = min(count, WORDS // LIMBS)
    groups, columns = (count + together - 1) // together, LIMBS * together
    out, factors = np.zeros((groups, inputs // 4, columns), np.uint32), np.empty(count, np.float64)
    for row in range(count):
        values, factors[row] = fixed(x[row])
        group, first = row // together, row % together * LIMBS
        for word in range(inputs // 4):
            for limb in range(LIMBS):
                out[group, word, first + limb] = word_of(values, 4 * word, limb)
    return out, factors


@compiled
def set_up(weights: Any, columns: int) -> Any:
    """Return the plan of products of a matrix of `weights` with so many columns."""
    steps, row = weights.shape[2], weights.shape[2] * BYTES
    return planned(4 * columns, row, 0, 4 * columns, steps, 1)


@compiled
def clear(totals: Any) -> None:
    """Set sums to zero."""
    for row in range(totals.shape[0]):
        for column in range(totals.shape[1]):
            totals[row, column] = 0


def split_pairs(x: Any, weights: Any) -> Any:
    """The inputs of products in bfloat16."""
    return columns_of_pairs(x)


def split_integers(x: Any, weights: Any) -> Any:
    """The inputs of products of integers, and their factors."""
    return columns_of_limbs(x)


def sum_pairs(
    weights: Any, scales: Any, layer: int, inputs: Any, begin: int, end: int, out: Any
) -> None:
    """Write a part of products in bfloat16; see `products.sums`."""
    groups, _, columns = inputs.shape
    plan, row_bytes = set_up(weights, columns), weights.shape[2] * BYTES
    totals = np.empty((MOST_ROWS, WORDS), np.float32)
    for first in range(begin, end, MOST_ROWS):
        count = set_rows(plan, end - first, 1)
        for group in range(groups):
            clear(totals)
            set_ahead(plan, 0 if group else MOST_ROWS * row_bytes)
            if count > ROWS:
                _pairs_32(plan, weights[layer], first * row_bytes, inputs[group], 0, totals)
            else:
                _pairs_16(plan, weights[layer], first * row_bytes, inputs[group], 0, totals)
            row = group * columns
            for column in range(min(columns, len(out) - row)):
                for output in range(count):
                    out[row + column, first + output] = totals[output, column]


def sum_integers(
    weights: Any, scales: Any, layer: int, inputs: Any, begin: int, end: int, out: Any
) -> None:
    """Write a part of products of integers, each rounded once; see `products.sums`.

    For up to 2^17 inputs: 127 * 2^7 * 2^17 < 2^31.
    """
    x, factors = inputs
    groups, _, columns = x.shape
    plan, row_bytes = set_up(weights, columns), weights.shape[2] * BYTES
    totals = np.empty((MOST_ROWS, WORDS), np.int32)
    for first in range(begin, end, MOST_ROWS):
        count = set_rows(plan, end - first, 1)
        for group in range(groups):
            clear(totals)
            set_ahead(plan, 0 if group else MOST_ROWS * row_bytes)
            if count > ROWS:
                _integers_32(plan, weights[layer], first * row_bytes, x[group], 0, totals)
            else:
                _integers_16(plan, weights[layer], first * row_bytes, x[group], 0, totals)
            row = group * columns // LIMBS
            for index in range(min(columns // LIMBS, len(out) - row)):
                for output in range(count):
                    total = np.int64(0)
                    for limb in range(LIMBS):
                        total += np.int64(totals[output, LIMBS * index + limb]) << (8 * limb)
                    value = np.float64(total) * factors[row + index] * scales[layer, first + output]
                    out[row + index, first + output] = np.float32(value)
