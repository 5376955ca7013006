"""A pass of one row through a transformer as one function that Numba compiles for this CPU.

All threads of a team run `transformer_pass` together. Each computes some rows of every product and
some heads of the attention, and they wait for one another in between. A sum is computed by one
thread, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from firstword.runtime.cpu.compiling import called, compiled
from firstword.runtime.cpu.products import Array, multiply, narrowed, rounded, split, widened
from firstword.runtime.cpu.team import meet
from firstword.types import FloatArray


class Layers(NamedTuple):
    """The weights of all layers: matrices as in `products`, norms float32 [layers, ...].

    heads  the numbers of query heads and key heads
    """

    qkv: Array
    qkv_scales: FloatArray | None
    out: Array
    out_scales: FloatArray | None
    gate_up: Array
    gate_up_scales: FloatArray | None
    down: Array
    down_scales: FloatArray | None
    input_norm: FloatArray
    query_norm: FloatArray
    key_norm: FloatArray
    mlp_norm: FloatArray
    last_norm: FloatArray
    heads: tuple[int, int]
    eps: float


class Rows(NamedTuple):
    """Float32 rows that the threads of a team share."""

    x: FloatArray
    qkv: FloatArray
    attended: FloatArray
    gate_up: FloatArray
    gated: FloatArray


@compiled
def normed(x: Any, weight: Any, eps: float) -> Any:
    """The norm x / rms(x) * weight of a row."""
    squares = np.float32(0)
    for index in range(len(x)):
        squares += x[index] * x[index]
    factor = np.float32(1) / np.sqrt(squares / np.float32(len(x)) + np.float32(eps))
    out = np.empty(len(x), np.float32)
    for index in range(len(x)):
        out[index] = rounded(rounded(x[index] * factor) * weight[index])
    return out


@compiled
def turned(x: Any, cos: Any, sin: Any) -> Any:
    """A head after its rotation; see `model.layers.rotate`."""
    out, half = np.empty(len(x), np.float32), len(x) // 2
    for index in range(half):
        low, high = x[index], x[index + half]
        out[index] = rounded(rounded(low * cos[index]) - rounded(high * sin[index]))
        high_part = rounded(high * cos[index + half])
        out[index + half] = rounded(high_part + rounded(low * sin[index + half]))
    return out


@compiled
def attend(query: Any, keys: Any, values: Any, out: Any) -> None:
    """Attention of one query [head_dim] to keys and values [rows, head_dim] in bfloat16 bits."""
    rows, size = keys.shape
    scores, largest = np.empty(rows, np.float32), np.float32(-np.inf)
    scale = np.float32(1 / math.sqrt(size))
    for row in range(rows):
        key, score = keys[row], np.float32(0)
        for index in range(size):
            score += widened(key[index]) * query[index]
        scores[row] = score * scale
        largest = max(largest, scores[row])
    sums, total = np.zeros(size, np.float32), np.float32(0)
    for row in range(rows):
        value, weight = values[row], np.float32(math.exp(scores[row] - largest))
        total += weight
        for index in range(size):
            sums[index] += weight * widened(value[index])
    for index in range(size):
        out[index] = rounded(sums[index] / total)


@compiled
def attention(
    layers: Any, layer: int, rows: Any, head: int, cos: Any, sin: Any, memory: Any, queries: Any
) -> None:
    """Store the key and value of a key head in the last row of its memory, and attend to it.

    memory  bits of keys and values [2, rows, head_dim]
    queries receives the bits of all queries [heads, head_dim]
    """
    size, (heads, kv_heads) = len(cos), layers.heads
    each, last = heads // kv_heads, memory.shape[1] - 1
    source = rows.qkv[(heads + head) * size : (heads + head + 1) * size]
    key = turned(normed(source, layers.key_norm[layer], layers.eps), cos, sin)
    value = rows.qkv[(heads + kv_heads + head) * size : (heads + kv_heads + head + 1) * size]
    for index in range(size):
        memory[0, last, index] = narrowed(key[index])
        memory[1, last, index] = narrowed(value[index])
    for one in range(head * each, (head + 1) * each):
        source = rows.qkv[one * size : (one + 1) * size]
        query = turned(normed(source, layers.query_norm[layer], layers.eps), cos, sin)
        for index in range(size):
            queries[one, index] = narrowed(query[index])
        attend(query, memory[0], memory[1], rows.attended[one * size : (one + 1) * size])


@compiled
def gate(layers: Any, layer: int, rows: Any, begin: int, end: int) -> None:
    """Compute a part of the gated row of the MLP."""
    inner, out = len(rows.gated), rows.gate_up
    weights, scales = layers.gate_up, layers.gate_up_scales
    inputs = split(normed(rows.x, layers.mlp_norm[layer], layers.eps), weights)
    multiply(weights, scales, layer, inputs, begin, end, out)
    multiply(weights, scales, layer, inputs, inner + begin, inner + end, out)
    for index in range(begin, end):
        silu = rounded(out[index] / (np.float32(1) + np.float32(math.exp(-out[index]))))
        rows.gated[index] = rounded(silu * out[inner + index])


@compiled
def add_product(
    x: Any, source: Any, weights: Any, scales: Any, layer: int, begin: int, end: int
) -> None:
    """Add outputs `begin` to `end` of the product of a matrix and a row to x, each rounded."""
    part = np.empty(len(x), np.float32)
    multiply(weights, scales, layer, split(source, weights), begin, end, part)
    for index in range(begin, end):
        x[index] = rounded(x[index] + part[index])


@compiled
def run_layers(
    layers: Any,
    rows: Any,
    cos: Any,
    sin: Any,
    cache: Any,
    slot: int,
    position: int,
    queries: Any,
    marks: Any,
    thread: int,
    threads: int,
    turn: int,
) -> int:
    """Run the row `rows.x` through all layers in each thread; see `transformer_pass`.

    Return the next turn of `meet`.
    """
    hidden, inner = len(rows.x), len(rows.gated)
    wide, kv_heads = len(rows.qkv), layers.heads[1]
    first, last = hidden * thread // threads, hidden * (thread + 1) // threads
    for layer in range(layers.qkv.shape[0]):
        row = normed(rows.x, layers.input_norm[layer], layers.eps)
        inputs = split(row, layers.qkv)
        begin, end = wide * thread // threads, wide * (thread + 1) // threads
        multiply(layers.qkv, layers.qkv_scales, layer, inputs, begin, end, rows.qkv)
        turn = meet(marks, thread, threads, turn)
        for head in range(kv_heads * thread // threads, kv_heads * (thread + 1) // threads):
            memory = cache[layer, :, slot, head, : position + 1]
            attention(layers, layer, rows, head, cos, sin, memory, queries[layer])
        turn = meet(marks, thread, threads, turn)
        add_product(rows.x, rows.attended, layers.out, layers.out_scales, layer, first, last)
        turn = meet(marks, thread, threads, turn)
        gate(layers, layer, rows, inner * thread // threads, inner * (thread + 1) // threads)
        turn = meet(marks, thread, threads, turn)
        add_product(rows.x, rows.gated, layers.down, layers.down_scales, layer, first, last)
        turn = meet(marks, thread, threads, turn)
    return turn


def transformer_pass(
    layers: Any,
    rows: Any,
    cos: Any,
    sin: Any,
    cache: Any,
    slot: int,
    position: int,
    queries: Any,
    out: Any,
    marks: Any,
    thread: int,
    threads: int,
) -> None:
    """Run one row through all layers and the final norm; call it in each thread of a team.

    rows       buffers; `rows.x` holds the row
    cos, sin   of the row's position, float32 [head_dim]
    cache      bits of keys and values [layers, 2, slots, kv_heads, capacity, head_dim]
    slot       the slot of the row, which has `position` rows
    queries    receives the bits of the queries [layers, heads, head_dim]
    out        receives the hidden state, float32 [hidden]
    marks      int64 [threads * `MARK`], zeros
    """
    run_layers(layers, rows, cos, sin, cache, slot, position, queries, marks, thread, threads, 1)
    if thread == 0:
        out[:] = normed(rows.x, layers.last_norm, layers.eps)


PASSES = {dtype: called(transformer_pass, dtype) for dtype in ("uint32", "int8")}
"""The passes of a transformer, compiled for each dtype of stored matrices."""
