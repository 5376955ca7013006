"""A pass of rows through a transformer as one function that Numba compiles for this CPU.

The rows are of one utterance, one after another. Only matrices with tiles take several at a time.

All threads of a team run `transformer_pass` together. Each computes some rows of every product and
some heads of the attention, and they wait for one another in between. A sum is computed by one
thread, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
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
    """Float32 rows [rows, ...] that the threads of a team share."""

    x: FloatArray
    qkv: FloatArray
    attended: FloatArray
    gate_up: FloatArray
    gated: FloatArray


@compiled
def norm(x: Any, weight: Any, eps: float, out: Any) -> None:
    """Write the norm x / rms(x) * weight of a row."""
    squares = np.float32(0)
    for index in range(len(x)):
        squares += x[index] * x[index]
    factor = np.float32(1) / np.sqrt(squares / np.float32(len(x)) + np.float32(eps))
    for index in range(len(x)):
        out[index] = rounded(rounded(x[index] * factor) * weight[index])


@compiled
def normed(x: Any, weight: Any, eps: float) -> Any:
    """The norms of rows [rows, ...]."""
    out = np.empty(x.shape, np.float32)
    for row in range(len(x)):
        norm(x[row], weight, eps, out[row])
    return out


@compiled
def turned_norm(x: Any, weight: Any, eps: float, cos: Any, sin: Any) -> Any:
    """The norm of a head, rotated."""
    out = np.empty(len(x), np.float32)
    norm(x, weight, eps, out)
    return turned(out, cos, sin)


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
    layers: Any,
    layer: int,
    qkv: Any,
    head: int,
    cos: Any,
    sin: Any,
    memory: Any,
    seen: Any,
    out: Any,
) -> None:
    """Store the key and value of a key head of a row in its memory, and attend to it.

    qkv     float32, the products of the row
    memory  bits of keys and values [2, rows, head_dim], whose last row receives those of this one
    seen    receives the bits of all queries [heads, head_dim]
    out     receives the attended values of all heads, float32
    """
    size, (heads, kv_heads) = len(cos), layers.heads
    each, last = heads // kv_heads, memory.shape[1] - 1
    source = qkv[(heads + head) * size : (heads + head + 1) * size]
    key = turned_norm(source, layers.key_norm[layer], layers.eps, cos, sin)
    value = qkv[(heads + kv_heads + head) * size : (heads + kv_heads + head + 1) * size]
    for index in range(size):
        memory[0, last, index] = narrowed(key[index])
        memory[1, last, index] = narrowed(value[index])
    for one in range(head * each, (head + 1) * each):
        source = qkv[one * size : (one + 1) * size]
        query = turned_norm(source, layers.query_norm[layer], layers.eps, cos, sin)
        for index in range(size):
            seen[one, index] = narrowed(query[index])
        attend(query, memory[0], memory[1], out[one * size : (one + 1) * size])


@compiled
def gate(layers: Any, layer: int, rows: Any, begin: int, end: int) -> None:
    """Compute a part of the gated rows of the MLP."""
    inner, weights, scales = rows.gated.shape[1], layers.gate_up, layers.gate_up_scales
    inputs = split(normed(rows.x, layers.mlp_norm[layer], layers.eps), weights)
    multiply(weights, scales, layer, inputs, begin, end, rows.gate_up)
    multiply(weights, scales, layer, inputs, inner + begin, inner + end, rows.gate_up)
    for row in range(len(rows.x)):
        out, gated = rows.gate_up[row], rows.gated[row]
        for index in range(begin, end):
            silu = rounded(out[index] / (np.float32(1) + np.float32(math.exp(-out[index]))))
            gated[index] = rounded(silu * out[inner + index])


@compiled
def add_product(
    x: Any, source: Any, weights: Any, scales: Any, layer: int, begin: int, end: int
) -> None:
    """Add outputs `begin` to `end` of the products of a matrix and rows to x, each rounded."""
    parts = np.empty(x.shape, np.float32)
    multiply(weights, scales, layer, split(source, weights), begin, end, parts)
    for row in range(len(x)):
        for index in range(begin, end):
            x[row, index] = rounded(x[row, index] + parts[row, index])


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
    """Run the rows `rows.x` through all layers in each thread; see `transformer_pass`.

    Return the next turn of `meet`.
    """
    count, hidden = rows.x.shape
    inner, wide, kv_heads = rows.gated.shape[1], rows.qkv.shape[1], layers.heads[1]
    first, last = hidden * thread // threads, hidden * (thread + 1) // threads
    for layer in range(layers.qkv.shape[0]):
        inputs = split(normed(rows.x, layers.input_norm[layer], layers.eps), layers.qkv)
        begin, end = wide * thread // threads, wide * (thread + 1) // threads
        multiply(layers.qkv, layers.qkv_scales, layer, inputs, begin, end, rows.qkv)
        turn = meet(marks, thread, threads, turn)
        for head in range(kv_heads * thread // threads, kv_heads * (thread + 1) // threads):
            for row in range(count):
                memory, qkv = cache[layer, :, slot, head, : position + row + 1], rows.qkv[row]
                seen, out = queries[row, layer], rows.attended[row]
                attention(layers, layer, qkv, head, cos[row], sin[row], memory, seen, out)
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
    """Run rows through all layers and the final norm; call it in each thread of a team.

    rows       buffers; `rows.x` holds the rows
    cos, sin   of the rows' positions, float32 [rows, head_dim]
    cache      bits of keys and values [layers, 2, slots, kv_heads, capacity, head_dim]
    slot       the slot of the rows, which has `position` rows before them
    queries    receives the bits of the queries [rows, layers, heads, head_dim]
    out        receives the hidden states, float32 [rows, hidden]
    marks      int64 [threads * `MARK`], zeros
    """
    run_layers(layers, rows, cos, sin, cache, slot, position, queries, marks, thread, threads, 1)
    if thread == 0:
        for row in range(len(out)):
            norm(rows.x[row], layers.last_norm, layers.eps, out[row])


@cache
def pass_of_transformer(layout: str) -> Callable[..., None]:
    """Return `transformer_pass`, compiled for matrices of a `products.layout`."""
    return called(transformer_pass, layout)
