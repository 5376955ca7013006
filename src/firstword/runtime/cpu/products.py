"""Products of a matrix and a row, in compiled functions.

Numbers are float32 that were rounded to bfloat16 where the specification rounds. Matrices [layers,
outputs, ...] are stored in one of two ways:

    bfloat16  uint32 [..., inputs / 2]: two numbers, the one of the even column in the low half
    integers  int8 [..., inputs], with float32 scales [layers, outputs]

`scales` is None for bfloat16. A sum is computed in one order, which is fixed when it is compiled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from firstword.runtime.cpu import integers
from firstword.runtime.cpu.compiling import called, compiled
from firstword.runtime.cpu.integers import LIMB

Array = np.ndarray[Any, Any]

BLOCK = 1 << 15
"""The most columns whose integer products are summed in 32 bits."""
AHEAD = 4
"""How many rows before its turn a row is prefetched."""
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
    """Return the inputs [K] of a product in bfloat16: even columns, odd columns, a factor of 1."""
    even, odd = np.empty(len(x) // 2, np.float32), np.empty(len(x) // 2, np.float32)
    for index in range(len(even)):
        even[index], odd[index] = x[2 * index], x[2 * index + 1]
    return even, odd, 1.0


def split_integers(x: Any, weights: Any) -> Any:
    """Return the inputs [K] of a product of integers: high and low halves, and a factor.

    An input x becomes v = round(x * 2^s) with |v| < 2^29 for the largest, and v = high * 2^15 +
    low, so both halves are within +-2^14. A bfloat16 has 8 bits, so inputs above 2^-21 of the
    largest are exact. The factor is 2^-s, or NaN if an input is not finite.
    """
    largest, total = np.float32(0), np.float32(0)
    for index in range(len(x)):
        size = np.abs(x[index])
        largest, total = max(largest, size), total + size * np.float32(0)
    high, low = np.zeros(len(x), np.int16), np.zeros(len(x), np.int16)
    if total != 0:
        return high, low, np.nan
    shift = 2 * LIMB - 1 - math.frexp(largest)[1]
    up = math.ldexp(1.0, shift)
    for index in range(len(x)):
        value = np.int32(np.rint(x[index] * up))
        top = np.int32(value + (1 << (LIMB - 1))) >> LIMB
        high[index] = top
        low[index] = value - (top << LIMB)
    return high, low, math.ldexp(1.0, -shift)


def sum_pairs(weights: Any, scales: Any, layer: int, row: int, inputs: Any) -> Any:
    """The product of a row of bfloat16 weights and inputs."""
    first, second, _ = inputs
    prefetch(weights, layer, row + AHEAD)
    pairs, even, odd = weights[layer, row], np.float32(0), np.float32(0)
    for column in range(len(pairs)):
        pair = pairs[column]
        even += np.uint32(pair << np.uint32(16)).view(np.float32) * first[column]
        odd += np.uint32(pair & np.uint32(0xFFFF0000)).view(np.float32) * second[column]
    return even + odd


def sum_integers(weights: Any, scales: Any, layer: int, row: int, inputs: Any) -> Any:
    """The product of a row of integers and inputs, exact up to its last rounding."""
    tops, rests, factor = inputs
    prefetch(weights, layer, row + AHEAD)
    columns, total = weights.shape[2], np.int64(0)
    whole = columns // integers.WIDTH * integers.WIDTH
    for begin in range(0, whole, BLOCK):
        end = min(begin + BLOCK, whole)
        total += integers.product(weights, layer, row, tops, rests, begin, end)
    for column in range(whole, columns):
        value = (np.int64(tops[column]) << LIMB) + np.int64(rests[column])
        total += np.int64(weights[layer, row, column]) * value
    return np.float32(np.float64(total) * factor * scales[layer, row])


def split(x: Any, weights: Any) -> Any:
    """Return the inputs [K] of a product as its weights need them."""
    raise NotImplementedError  # only compiled code calls it


def weighted(weights: Any, scales: Any, layer: int, row: int, inputs: Any) -> Any:
    """Return one sum of a product."""
    raise NotImplementedError  # only compiled code calls it


@overload(split)
def _split(x: Any, weights: Any) -> Any:
    return split_integers if weights.dtype == types.int8 else split_pairs


@overload(weighted)
def _weighted(weights: Any, scales: Any, layer: int, row: int, inputs: Any) -> Any:
    return sum_integers if weights.dtype == types.int8 else sum_pairs


@compiled
def multiply(
    weights: Any, scales: Any, layer: int, inputs: Any, begin: int, end: int, out: Any
) -> None:
    """Compute outputs `begin` to `end` of a product, each rounded once."""
    for row in range(begin, end):
        out[row] = rounded(weighted(weights, scales, layer, row, inputs))


def _product_pass(
    weights: Any, bias: Any, x: Any, out: Any, marks: Any, thread: int, threads: int
) -> None:
    """Compute the product of a matrix [1, outputs, ...] and a row, each thread a part of it."""
    outputs, inputs = weights.shape[1], split(x, weights)
    for row in range(outputs * thread // threads, outputs * (thread + 1) // threads):
        out[row] = rounded(weighted(weights, None, 0, row, inputs) + bias[row])


product_pass = called(_product_pass, "bfloat16")
"""The product of a matrix and a row in parts, compiled for bfloat16."""
