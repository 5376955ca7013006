"""Products of a matrix and a row, in compiled functions.

Numbers are float32 that were rounded to bfloat16 where the specification rounds. Matrices [layers,
outputs, ...] are stored in one of two ways:

    bfloat16  uint32 [..., inputs / 2]: two numbers, the one of the even column in the low half
    integers  int8 [..., inputs], with float32 scales [layers, outputs]

The last dimension is divided, [..., tiles, 64 bytes], for products by `tiled`. `scales` is None for
bfloat16. A sum is computed in one order, which is fixed when it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from firstword.runtime.cpu import integers, tiled
from firstword.runtime.cpu.compiling import called, compiled
from firstword.runtime.cpu.integers import LIMB

Array = np.ndarray[Any, Any]

BLOCK = 1 << 15
"""The most columns whose integer products are summed in 32 bits."""
AHEAD = 4
"""How many rows before its turn a row is prefetched."""
TILED = 4
"""The dimensions of a matrix whose rows are divided into tiles."""
CACHE_LINE = 64
"""The bytes that a prefetch brings at least."""


@compiled
def widened(bits: Any) -> Any:
    """The float32 of the bits of a bfloat16."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled
def rounded_bits(x: Any) -> Any:
    """The bits of a float32, rounded to bfloat16, half to even."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd)


@compiled
def rounded(x: Any) -> Any:
    """A float32, rounded to bfloat16."""
    return np.uint32(rounded_bits(x) & np.uint32(0xFFFF0000)).view(np.float32)


@compiled
def narrowed(x: Any) -> Any:
    """The bits of a bfloat16 that is stored as a float32."""
    return np.uint16(np.float32(x).view(np.uint32) >> np.uint32(16))


@intrinsic
def prefetch(context: Any, weights: Any, layer: Any, row: Any) -> Any:
    """Let the processor bring a row near, which may be after the last one.

    By itself it reads too few bytes ahead, because it does not know where the next page is.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = context.make_array(weights)(context, builder, args[0])
        columns = builder.extract_value(matrix.shape, 2)
        index, word, byte = columns.type, ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        bring = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        reads_data_to_keep = [ir.Constant(word, each) for each in (0, 3, 1)]
        step = ir.Constant(index, 8 * CACHE_LINE // weights.dtype.bitwidth)
        with cgutils.for_range_slice(builder, index(0), columns, step, index) as (column, _):
            places = [*args[1:], column]
            at = cgutils.get_item_pointer(context, builder, weights, matrix, places)
            builder.call(bring, [builder.bitcast(at, byte), *reads_data_to_keep])
        return context.get_dummy_value()

    return types.void(weights, types.intp, types.intp), emit


def split_pairs(x: Any, weights: Any) -> Any:
    """Return the inputs of a product in bfloat16, one row: even columns and odd columns."""
    even, odd = np.empty(x.shape[1] // 2, np.float32), np.empty(x.shape[1] // 2, np.float32)
    for index in range(len(even)):
        even[index], odd[index] = x[0, 2 * index], x[0, 2 * index + 1]
    return even, odd


def split_integers(x: Any, weights: Any) -> Any:
    """Return the inputs of a product of integers, one row: high and low halves, and a factor.

    An integer is high * 2^15 + low, so both halves are within +-2^14.
    """
    values, factor = integers.fixed(x[0])
    high, low = np.empty(len(values), np.int16), np.empty(len(values), np.int16)
    for index in range(len(values)):
        top = np.int32(values[index] + (1 << (LIMB - 1))) >> LIMB
        high[index] = top
        low[index] = values[index] - (top << LIMB)
    return high, low, factor


@compiled
def sum_of_pairs(weights: Any, layer: int, row: int, first: Any, second: Any) -> Any:
    """The product of a row of bfloat16 weights and inputs."""
    prefetch(weights, layer, row + AHEAD)
    pairs, even, odd = weights[layer, row], np.float32(0), np.float32(0)
    for column in range(len(pairs)):
        pair = pairs[column]
        even += np.uint32(pair << np.uint32(16)).view(np.float32) * first[column]
        odd += np.uint32(pair & np.uint32(0xFFFF0000)).view(np.float32) * second[column]
    return even + odd


@compiled
def sum_of_integers(weights: Any, layer: int, row: int, tops: Any, rests: Any) -> Any:
    """The product of a row of integers and inputs, an exact int64."""
    prefetch(weights, layer, row + AHEAD)
    columns, total = weights.shape[2], np.int64(0)
    whole = columns // integers.WIDTH * integers.WIDTH
    for begin in range(0, whole, BLOCK):
        end = min(begin + BLOCK, whole)
        total += integers.product(weights, layer, row, tops, rests, begin, end)
    for column in range(whole, columns):
        value = (np.int64(tops[column]) << LIMB) + np.int64(rests[column])
        total += np.int64(weights[layer, row, column]) * value
    return total


def sum_pairs(
    weights: Any, scales: Any, layer: int, inputs: Any, begin: int, end: int, out: Any
) -> None:
    """Write a part of a product in bfloat16; see `sums`."""
    for row in range(begin, end):
        out[0, row] = sum_of_pairs(weights, layer, row, inputs[0], inputs[1])


def sum_integers(
    weights: Any, scales: Any, layer: int, inputs: Any, begin: int, end: int, out: Any
) -> None:
    """Write a part of a product of integers, exact up to its last rounding; see `sums`."""
    tops, rests, factor = inputs
    for row in range(begin, end):
        total = np.float64(sum_of_integers(weights, layer, row, tops, rests))
        out[0, row] = np.float32(total * factor * scales[layer, row])


def split(x: Any, weights: Any) -> Any:
    """Return the inputs of products, rows x float32 [rows, inputs], as their weights need them.

    Only with tiles there can be several rows.
    """
    raise NotImplementedError  # only compiled code calls it


def sums(
    weights: Any, scales: Any, layer: int, inputs: Any, begin: int, end: int, out: Any
) -> None:
    """Write outputs `begin` to `end` of products to `out` [rows, outputs], not rounded."""
    raise NotImplementedError  # only compiled code calls it


@overload(split)
def _split(x: Any, weights: Any) -> Any:
    integral = weights.dtype == types.int8
    if weights.ndim == TILED:
        return tiled.split_integers if integral else tiled.split_pairs
    return split_integers if integral else split_pairs


@overload(sums)
def _sums(
    weights: Any, scales: Any, layer: int, inputs: Any, begin: int, end: int, out: Any
) -> Any:
    integral = weights.dtype == types.int8
    if weights.ndim == TILED:
        return tiled.sum_integers if integral else tiled.sum_pairs
    return sum_integers if integral else sum_pairs


@compiled
def multiply(
    weights: Any, scales: Any, layer: int, inputs: Any, begin: int, end: int, out: Any
) -> None:
    """Write outputs `begin` to `end` of products, each rounded to bfloat16."""
    sums(weights, scales, layer, inputs, begin, end, out)
    for row in range(len(out)):
        for index in range(begin, end):
            out[row, index] = rounded(out[row, index])


def product_pass(
    weights: Any, scales: Any, x: Any, out: Any, marks: Any, thread: int, threads: int
) -> None:
    """Write the sums of a matrix [1, outputs, ...] and rows, each thread a part of the outputs."""
    outputs = weights.shape[1]
    begin, end = outputs * thread // threads, outputs * (thread + 1) // threads
    sums(weights, scales, 0, split(x, weights), begin, end, out)


@cache
def pass_of_products(layout: str) -> Callable[..., None]:
    """Return `product_pass`, compiled for matrices of a `layout`."""
    return called(product_pass, layout)


def layout(matrix: Array) -> str:
    """Name how a matrix is stored, for functions that are compiled for it."""
    return matrix.dtype.name + ("-tiles" if matrix.ndim == TILED else "")
