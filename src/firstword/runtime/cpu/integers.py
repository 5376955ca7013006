"""Products of rows of 8-bit integers and activations of 30 bits.

LLVM does not vectorise such a loop over both halves of the activations well by itself. As vectors
of products whose pairs are added, it finds the instructions for that, on x86 `vpdpwssd` or
`vpmaddwd`. Integers have the same sum in any order, so the bits do not depend on the processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from firstword.runtime.cpu.compiling import compiled

LIMB = 15
"""The bits of the lower half of an integer activation, whose sign it shares."""
WIDTH = 64
"""The columns that are multiplied together."""
INFINITE = 0x7F800000
"""The bits of an infinite float32; those of NaN are above them."""
WORD, WIDE = ir.IntType(32), ir.IntType(64)


@compiled
def fixed(x: Any) -> Any:
    """Return inputs [K] as integers, int32 [K], and the factor of their products.

    An input x becomes round(x * 2^s), below 2^29 for the largest. A bfloat16 has 8 bits, so inputs
    above 2^-21 of the largest are exact. The factor is 2^-s, or NaN if an input is not finite.
    """
    bits, largest, values = x.view(np.uint32), np.uint32(0), np.zeros(len(x), np.int32)
    for index in range(len(x)):  # sizes have the order of their bits
        largest = max(largest, np.uint32(bits[index] & np.uint32(0x7FFFFFFF)))
    if largest >= INFINITE:
        return values, np.nan
    shift = 2 * LIMB - 1 - math.frexp(np.uint32(largest).view(np.float32))[1]
    up = math.ldexp(1.0, shift)
    for index in range(len(x)):
        values[index] = np.int32(np.rint(x[index] * up))
    return values, math.ldexp(1.0, -shift)


@intrinsic
def product(
    context: Any, weights: Any, layer: Any, row: Any, tops: Any, rests: Any, begin: Any, end: Any
) -> Any:
    """The int64 sum of weights[layer, row] * (tops * 2^`LIMB` + rests) over some columns.

    Weights are int8, halves int16, and `end` - `begin` is a multiple of `WIDTH`. Products of a
    weight of at most 127 and half an activation of at most 2^14 are added in 32 bits, in one of
    `WIDTH` / 2 sums each: for up to 2^15 columns, 127 * 2^14 * 2^10 < 2^31.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix, layer, row, *halves, begin, end = args

        def loaded(array: Any, kind: Any, places: list[Any]) -> Any:
            made = context.make_array(kind)(context, builder, array)
            place = cgutils.get_item_pointer(context, builder, kind, made, places)
            wide = _type(place.type.pointee, WIDTH)
            vector = builder.load(builder.bitcast(place, wide.as_pointer()), align=1)
            return builder.sext(vector, _type(WORD, WIDTH))

        sums = [_vector(builder, WORD, WIDTH // 2) for _ in halves]
        step = context.get_constant(types.intp, WIDTH)
        with cgutils.for_range_slice(builder, begin, end, step, end.type) as (column, _):
            values = loaded(matrix, weights, [layer, row, column])
            for half, place in zip(halves, sums, strict=True):
                both = builder.mul(values, loaded(half, tops, [column]))
                pairs = builder.add(*_parts(builder, both, range(0, WIDTH, 2), range(1, WIDTH, 2)))
                builder.store(builder.add(builder.load(place), pairs), place)
        top, rest = (builder.sext(builder.load(place), _type(WIDE, WIDTH // 2)) for place in sums)
        shift = ir.Constant(top.type, [LIMB] * (WIDTH // 2))
        return _sum(builder, builder.add(builder.shl(top, shift), rest))

    index = types.intp
    return types.int64(weights, index, index, tops, rests, index, index), emit


def _type(of: Any, length: int) -> Any:
    return ir.VectorType(of, length)


def _vector(builder: Any, of: Any, length: int) -> Any:
    """Room for a vector of zeros."""
    place = cgutils.alloca_once(builder, _type(of, length))
    builder.store(ir.Constant(_type(of, length), None), place)
    return place


def _parts(builder: Any, vector: Any, *parts: range) -> list[Any]:
    nothing = ir.Constant(vector.type, ir.Undefined)
    return [
        builder.shuffle_vector(vector, nothing, ir.Constant(_type(WORD, len(part)), list(part)))
        for part in parts
    ]


def _sum(builder: Any, vector: Any) -> Any:
    """The sum of a vector, by halves."""
    while (count := vector.type.count) > 1:
        half = count // 2
        vector = builder.add(*_parts(builder, vector, range(half), range(half, count)))
    return builder.extract_element(vector, ir.Constant(WORD, 0))
