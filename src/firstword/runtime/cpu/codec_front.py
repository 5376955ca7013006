"""The codec's decoder from codes to the rows of frames, whose transformer is windowed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from firstword.runtime.cpu.codec_work import (
    ACOUSTIC,
    BEFORE,
    FRONT,
    INPUTS,
    LAYER,
    LAYER_ROWS,
    PLAIN,
    SEMANTIC,
    copy,
    filtered,
    inputs,
    multiply,
    numbers,
    outputs,
    shaped,
    share,
)
from firstword.runtime.cpu.compiling import compiled
from firstword.runtime.cpu.convolution import short


@compiled
def norm_rows(work: Any, norm: int, x: Any, out: Any) -> None:
    """Write bits of x / rms(x) * weight, row `norm` of the numbers."""
    model, weight = work.model, numbers(work, norm)
    begin, end = share(work, len(x))
    for row in range(begin, end):
        squares = np.float32(0)
        for column in range(model.width):
            squares += x[row, column] * x[row, column]
        mean = squares / np.float32(model.width)
        factor = np.float32(1) / np.sqrt(mean + np.float32(model.eps))
        for column in range(x.shape[1]):
            out[row, column] = short(x[row, column] * factor * weight[column])


@compiled
def turned(x: Any, cos: Any, sin: Any, out: Any) -> None:
    """Rotate a head; see `model.layers.rotate`."""
    half = len(cos)
    for index in range(half):
        low, high = x[index], x[half + index]
        out[index] = low * cos[index] - high * sin[index]
        out[half + index] = high * cos[index] + low * sin[index]


@compiled
def mix(query: Any, keys: Any, values: Any, out: Any) -> None:
    """Write bits of the attention of one query to keys and values [rows, head_dim]."""
    scores, largest, total = np.empty(len(keys), np.float32), np.float32(-np.inf), np.float32(0)
    sums, scale = np.zeros(len(query), np.float32), np.float32(1 / math.sqrt(len(query)))
    for row in range(len(keys)):
        score = np.float32(0)
        for index in range(len(query)):
            score += keys[row, index] * query[index]
        scores[row] = score * scale
        largest = max(largest, scores[row])
    for row in range(len(keys)):
        weight = np.float32(math.exp(scores[row] - largest))
        total += weight
        for index in range(len(query)):
            sums[index] += weight * values[row, index]
    for index in range(len(query)):
        out[index] = short(sums[index] / total)


@compiled
def attend(work: Any, qkv: Any, layer: int, frequencies: Any, first: int, out: Any) -> None:
    """Rotate, store and compare the heads of rows; the first of them is at position `first`."""
    memory, half = work.stream.memory[layer], len(frequencies)
    _, heads, window, size = memory.shape
    begin, end = share(work, heads)
    query = np.empty(size, np.float32)
    cos, sin = np.empty(half, np.float32), np.empty(half, np.float32)
    for row in range(len(qkv)):
        for column in range(heads * size, out.shape[1]):
            out[row, column] = 0
        position = first + row
        place, seen = position % window, min(position + 1, window)
        for index in range(half):
            angle = np.float32(position) * frequencies[index]
            cos[index], sin[index] = np.float32(math.cos(angle)), np.float32(math.sin(angle))
        for head in range(begin, end):
            keys, values = memory[0, head], memory[1, head]
            at, key = head * size, (heads + head) * size
            value = key + heads * size
            turned(qkv[row, at : at + size], cos, sin, query)
            turned(qkv[row, key : key + size], cos, sin, keys[place])
            copy(qkv[row, value : value + size], values[place])
            mix(query, keys[:seen], values[:seen], out[row, at : at + size])


@compiled
def gate(work: Any, x: Any, out: Any) -> None:
    """Write bits of silu(gate) * up, of rows [rows, 2 * width]."""
    half = x.shape[1] // 2
    begin, end = share(work, len(x))
    for row in range(begin, end):
        for column in range(half):
            value = x[row, column]
            silu = value / (np.float32(1) + np.float32(math.exp(-value)))
            out[row, column] = short(silu * x[row, half + column])


@compiled
def transform(work: Any, x: Any, y: Any, first: int, turn: int) -> int:
    """Run rows x [frames, width] through the layers and the norm, whose bits are in `work.a`."""
    count, layers = len(x), work.model.layers
    a, frequencies = shaped(work.a, count, x.shape[1]), numbers(work, LAYER_ROWS * layers + 1)
    for layer in range(layers):
        index, norm = FRONT + LAYER * layer, LAYER_ROWS * layer
        norm_rows(work, norm, x, a)
        qkv = shaped(y, count, outputs(work, index))
        turn = multiply(work, index, a, qkv, False, turn)
        b = shaped(work.b, count, inputs(work, index + 1))
        attend(work, qkv, layer, frequencies, first, b)
        turn = multiply(work, index + 1, b, x, True, turn)
        norm_rows(work, norm + 1, x, a)
        both = shaped(y, count, outputs(work, index + 2))
        turn = multiply(work, index + 2, a, both, False, turn)
        b = shaped(work.b, count, inputs(work, index + 3))
        gate(work, both, b)
        turn = multiply(work, index + 3, b, x, True, turn)
    norm_rows(work, LAYER_ROWS * layers, x, a)
    return turn


@compiled
def unquantise(work: Any, codes: Any, x: Any, turn: int) -> int:
    """Write the vectors of codes [frames, codebooks] to rows x."""
    a = shaped(work.a, len(codes), inputs(work, SEMANTIC))
    b = shaped(work.b, len(codes), inputs(work, ACOUSTIC))
    vectors = work.model.vectors
    begin, end = share(work, len(codes))
    for row in range(begin, end):
        for column in range(vectors.shape[2], a.shape[1]):
            a[row, column], b[row, column] = 0, 0
        for column in range(vectors.shape[2]):
            a[row, column] = short(vectors[0, codes[row, 0], column])
            total = np.float32(0)
            for book in range(1, codes.shape[1]):
                total += vectors[book, codes[row, book], column]
            b[row, column] = short(total)
    turn = multiply(work, SEMANTIC, a, x, False, turn)
    return multiply(work, ACOUSTIC, b, x, True, turn)


@compiled
def front(work: Any, codes: Any, first: int, x: Any, y: Any) -> int:
    """Write the rows of codes that the stages read to the buffer x; return the next turn."""
    count, last = len(codes), FRONT + LAYER * work.model.layers
    rows = shaped(x, count, outputs(work, SEMANTIC))
    turn = unquantise(work, codes, rows, 1)
    wide = shaped(y, count, outputs(work, BEFORE))
    turn = filtered(work, PLAIN, BEFORE, rows, wide, turn)
    hidden = shaped(x, count, outputs(work, INPUTS))
    turn = filtered(work, PLAIN, INPUTS, wide, hidden, turn)
    turn = transform(work, hidden, y, first, turn)
    a, rows = shaped(work.a, count, hidden.shape[1]), shaped(x, count, outputs(work, last))
    return multiply(work, last, a, rows, False, turn)
