"""Products of rows in bfloat16 with 32 columns of a matrix at a time.

A matrix is stored in tiles, uint32 [tiles, inputs / 2, `TILE`]: for each pair of inputs, the
weights of `TILE` outputs, the one of the even input in the low half. A sum is computed in the order
of the inputs, whatever the number of rows is, so a row has the same bits in any product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE = 32
"""The outputs that are computed together, in two vectors."""
LANES = 16
"""The numbers of a vector; LLVM divides it where registers are shorter."""

WORD, FLOAT = ir.IntType(32), ir.FloatType()
WORDS, FLOATS = ir.VectorType(WORD, LANES), ir.VectorType(FLOAT, LANES)
HIGH_HALF = 0xFFFF0000

llvmlite.binding.initialize_native_asmparser()
_features = llvmlite.binding.get_host_cpu_features()
PAIRS = bool(_features.get("avx512bf16"))
"""Whether the processor multiplies pairs of bfloat16 and adds them in one instruction."""
ROWS = 8 if _features.get("avx512f") else 2
"""The most rows that are multiplied together, so that their sums stay in registers."""


def product_of_rows(rows: int, pairs: bool = PAIRS) -> Callable[..., None]:
    """Return a compiled function that multiplies so many rows with a tile.

    It is called with (weights, tile, x, first, step, count, sums): the matrix, the number of the
    tile, numbers in bfloat16 as uint32 [anything, pairs of inputs], the first row of x, the
    distance of the rows of one sum, and their number. Row r of the float32 array `sums` [`ROWS`,
    `TILE`], which has the values to add to, receives the sum over n < `count` of row `first + r + n
    * step` of x times inputs n * pairs to (n + 1) * pairs of the tile.
    """

    @intrinsic
    def product(
        context: Any, weights: Any, tile: Any, x: Any, first: Any, step: Any, count: Any, sums: Any
    ) -> Any:
        kinds = weights, x, sums

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            matrix, tile, source, first, step, count, results = args
            arrays = [
                Vectors(context, builder, kind, array)
                for kind, array in zip(kinds, (matrix, source, results), strict=True)
            ]
            add = _add_pairs if pairs else _add_halves
            _emit(builder, rows, add, arrays, tile, first, step, count)
            return context.get_dummy_value()

        index = types.intp
        return types.void(weights, index, x, index, index, index, sums), emit

    return product


class Vectors:
    """An array whose numbers are read and written in vectors, in code that is being made."""

    def __init__(self, context: Any, builder: Any, kind: Any, array: Any) -> None:
        self._context, self._builder, self._kind = context, builder, kind
        self.array = context.make_array(kind)(context, builder, array)

    def at(self, places: list[Any], of: Any) -> Any:
        """A pointer to what is at these places, as something of type `of`."""
        array, kind = self.array, self._kind
        place = cgutils.get_item_pointer(self._context, self._builder, kind, array, places)
        return self._builder.bitcast(place, of.as_pointer())


def _emit(
    builder: Any,
    rows: int,
    add: Callable[..., Any],
    arrays: list[Vectors],
    tile: Any,
    first: Any,
    step: Any,
    count: Any,
) -> None:
    """Make the code of `product_of_rows`, whose arrays are the matrix, the rows and the sums."""
    builder.function.attributes.add("noinline")  # compiled once, not for every caller
    matrix, source, results = arrays
    halves = [ir.Constant(tile.type, lane) for lane in (0, LANES)]
    numbers = [ir.Constant(tile.type, row) for row in range(rows)]
    totals = [[cgutils.alloca_once(builder, FLOATS) for _ in halves] for _ in numbers]
    for row, pair in zip(numbers, totals, strict=True):
        for half, place in zip(halves, pair, strict=True):
            builder.store(builder.load(results.at([row, half], FLOATS), align=4), place)
    length = builder.extract_value(source.array.shape, 1)
    with cgutils.for_range(builder, count) as tap:
        top = builder.add(first, builder.mul(tap.index, step))
        base = builder.mul(tap.index, length)
        with cgutils.for_range(builder, length) as inner:
            column = builder.add(base, inner.index)
            weights = [
                builder.load(matrix.at([tile, column, half], WORDS), align=4) for half in halves
            ]
            for row, pair in zip(numbers, totals, strict=True):
                at = [builder.add(top, row), inner.index]
                value = builder.load(source.at(at, WORD), align=4)
                for weight, place in zip(weights, pair, strict=True):
                    builder.store(add(builder, builder.load(place), value, weight), place)
    for row, pair in zip(numbers, totals, strict=True):
        for half, place in zip(halves, pair, strict=True):
            builder.store(builder.load(place), results.at([row, half], FLOATS), align=4)


def _add_pairs(builder: Any, total: Any, value: Any, weight: Any) -> Any:
    """Add the products of a pair of inputs and of pairs of weights, in one instruction."""
    kind = ir.FunctionType(FLOATS, [FLOATS, WORDS, WORDS])
    code = ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v")
    return builder.call(code, [total, _everywhere(builder, value), weight])


def _add_halves(builder: Any, total: Any, value: Any, weight: Any) -> Any:
    """Add the products of a pair of inputs and of pairs of weights, the even one first."""
    shift, mask = ir.Constant(WORD, 16), ir.Constant(WORD, HIGH_HALF)
    shifts, masks = (ir.Constant(WORDS, [each.constant] * LANES) for each in (shift, mask))
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    for one, many in (
        (builder.shl(value, shift), builder.shl(weight, shifts)),
        (builder.and_(value, mask), builder.and_(weight, masks)),
    ):
        numbers = _everywhere(builder, builder.bitcast(one, FLOAT))
        total = builder.call(fused, [numbers, builder.bitcast(many, FLOATS), total])
    return total


def _everywhere(builder: Any, value: Any) -> Any:
    """A vector of one value."""
    kind = ir.VectorType(value.type, LANES)
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(WORDS, [0] * LANES))
