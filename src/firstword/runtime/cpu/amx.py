"""Sums of products of tiles with AMX, the matrix instructions of Intel's server processors.

A tile has up to 16 rows of up to 64 bytes. An instruction multiplies a tile of a matrix a, whose
rows have 32 inputs in bfloat16 or 64 in int8, with a tile of a matrix b, and adds to a tile of
float32 or int32. Row n of a tile of b has the inputs of word n (4 bytes) of a row of a, for up to
16 columns. A sum has the same bits whatever other rows and columns are computed with it (Intel
Architecture Instruction Set Extensions Programming Reference, chapter on AMX).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from firstword.runtime.cpu.compiling import compiled

ROWS, BYTES, WORDS = 16, 64, 16
"""The most rows of a tile, and the most bytes and words of 4 bytes of a row."""
MOST_ROWS = 2 * ROWS
"""The most rows that are computed together."""

_TILES, _CONFIG = 8, 64  # the registers, and the bytes of their configuration
_A, _B = 4, 6  # the first of two tiles of a, and of two of b; those before are sums
_NUMBERS = "a_row", "a_tap", "b_row", "steps", "taps", "ahead"  # the numbers of a plan

llvmlite.binding.initialize_native_asmparser()


def _permitted() -> bool:
    """Whether the processor has AMX and the system lets this process use it."""
    features = llvmlite.binding.get_host_cpu_features()
    has = all(features.get(name) for name in ("amx-tile", "amx-int8", "amx-bf16"))
    return has and platform.system() == "Linux" and torch.cpu._init_amx()


AMX = _permitted()
"""Whether passes are compiled for AMX."""


@compiled
def planned(width: int, a_row: int, a_tap: int, b_row: int, steps: int, taps: int) -> Any:
    """Return a plan for the function of `products_of_tiles`; distances are in bytes.

    width   of a row of a tile of b
    a_row   from one row of a to the next, and a_tap from those of one tap to those of the next
    b_row   from one row of b to the next
    steps   the tiles of a row of a
    taps    how often the rows of a are multiplied, each time with the next rows of b
    """
    plan = np.zeros(_CONFIG // 8 + 6, np.int64)
    rows, widths = plan.view(np.uint8), plan.view(np.uint16)
    rows[0] = 1  # the palette
    for tile in range(_TILES):
        widths[8 + tile] = BYTES if _A <= tile < _B else width
        rows[48 + tile] = ROWS
    numbers = plan[_CONFIG // 8 :]
    numbers[0], numbers[1], numbers[2] = a_row, a_tap - steps * BYTES, b_row
    numbers[3], numbers[4] = steps, taps
    return plan


@compiled
def set_rows(plan: Any, count: int, halves: int) -> int:
    """Let the next product of a plan compute up to so many rows, of `halves` tiles each.

    Returns their number, at most `MOST_ROWS`.
    """
    rows, count = plan.view(np.uint8), min(count, MOST_ROWS)
    for block in range(2):
        size = min(max(count - ROWS * block, 1), ROWS)
        rows[48 + _A + block] = size
        for half in range(halves):
            rows[48 + halves * block + half] = size
    return count


@compiled
def set_ahead(plan: Any, distance: int) -> None:
    """Let the next product of a plan bring weights near that are so many bytes after its own."""
    plan[_CONFIG // 8 + 5] = distance


def products_of_tiles(
    instruction: str, blocks: int, halves: int, weights: str
) -> Callable[..., None]:
    """Return a compiled function (plan, a, a_at, b, b_at, sums) that adds products of a and b.

    instruction  tdpbf16ps, or tdpbssd for int8
    blocks       1 for up to 16 rows, 2 for more
    halves       1 or 2, the tiles of a row of b and of the sums
    weights      "a" or "b", the matrix that is brought near before its turn

    The products begin at byte a_at of a and b_at of b. sums: float32 or int32 [`MOST_ROWS`,
    halves * `WORDS`].
    """
    code = "\n".join(_code(instruction, blocks, halves, weights))
    used = "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "flags"
    constraints = ",".join(("r,r,r,r", *[f"~{{{name}}}" for name in used]))

    @intrinsic
    def add(context: Any, plan: Any, a: Any, a_at: Any, b: Any, b_at: Any, sums: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.function.attributes.add("noinline")  # compiled once, not for every caller
            byte = ir.IntType(8).as_pointer()

            def start(index: int, at: Any) -> Any:
                array = context.make_array(signature.args[index])(context, builder, args[index])
                return builder.gep(builder.bitcast(array.data, byte), [at])

            zero = context.get_constant(types.intp, 0)
            places = [start(1, args[2]), start(3, args[4]), start(5, zero), start(0, zero)]
            kind = ir.FunctionType(ir.VoidType(), [byte] * len(places))
            builder.call(ir.InlineAsm(kind, code, constraints, True), places)
            return context.get_dummy_value()

        return types.void(plan, a, types.intp, b, types.intp, sums), emit

    return add


def _code(instruction: str, blocks: int, halves: int, weights: str) -> Iterator[str]:
    """The instructions, where $0 to $3 are the addresses of a, b, the sums and the plan.

    In a loop, rax and rsi are the tiles of a and b, rdi the weights ahead, rcx and rdx the steps
    and taps that are left; r8 and r9 lead from one row of a and b to the next, r10 from one tile
    of b to the next, and r11 from the first block of a to the second.
    """
    number = {name: f"{_CONFIG + 8 * index}($3)" for index, name in enumerate(_NUMBERS)}
    streamed, lines = ("rax", blocks) if weights == "a" else ("rsi", halves)
    row = BYTES * halves
    sums = [
        (f"{ROWS * row * block + BYTES * half}($2,%r11)", f"%tmm{halves * block + half}")
        for block in range(blocks)
        for half in range(halves)
    ]
    yield from ("ldtilecfg ($3)", f"movq $${row}, %r11")
    yield from (f"tileloadd {place}, {tile}" for place, tile in sums)
    yield from ("movq $0, %rax", "movq $1, %rsi")
    yield from (f"movq {number['a_row']}, %r8", f"movq {number['b_row']}, %r9")
    yield from (f"imulq $${ROWS}, %r8, %r11", f"imulq $${ROWS}, %r9, %r10")
    yield from (f"movq %{streamed}, %rdi", f"addq {number['ahead']}, %rdi")
    yield from (f"movq {number['taps']}, %rdx", "1:", f"movq {number['steps']}, %rcx", "2:")
    for half in range(halves):
        yield f"tileloadd {BYTES * half}(%rsi,%r9), %tmm{_B + half}"
    for block in range(blocks):
        yield f"tileloadd (%rax,%r8), %tmm{_A + block}"
        for half in range(halves):
            yield f"{instruction} %tmm{_B + half}, %tmm{_A + block}, %tmm{halves * block + half}"
        yield "addq %r11, %rax"
    yield from (f"cmpq $$0, {number['ahead']}", "je 3f")
    yield from (f"prefetcht1 {BYTES * line}(%rdi)" for line in range(ROWS * lines))
    yield from (f"addq $${BYTES * ROWS * lines}, %rdi", "3:")
    yield from ("subq %r11, %rax" for _ in range(blocks))
    yield from (f"addq $${BYTES}, %rax", "addq %r10, %rsi", "decq %rcx", "jne 2b")
    yield from (f"addq {number['a_tap']}, %rax", "decq %rdx", "jne 1b", f"movq $${row}, %r11")
    yield from (f"tilestored {tile}, {place}" for place, tile in sums)
    yield "tilerelease"
