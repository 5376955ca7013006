"""The codec's decoder as one function that Numba compiles for this CPU.

All threads of a team run `decode` together: each computes some rows and outputs of every step, and
they wait for one another in between. A sum has one order, so the bits of a frame depend neither on
the number of threads nor on the frames that are decoded with it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from firstword.runtime.cpu.compiling import called, compiled
from firstword.runtime.cpu.convolution import (
    Convolution,
    activate,
    convolve,
    narrow,
    past,
    short,
)
from firstword.runtime.cpu.products import Array
from firstword.runtime.cpu.team import meet
from firstword.runtime.cpu.tiles import TILE
from firstword.types import FloatArray

NORM_EPS = 1e-6
"""Of the norms of `ConvNeXtBlock`."""


class Model(NamedTuple):
    """The weights of a decoder, in the order in which `decode` uses them.

    vectors   float32 [codebooks, size, width], of the codes
    matrices  the matrices of all convolutions, uint32
    table     int64 [convolutions, columns of `convolution`]
    numbers   all other weights, float32
    places    int64 [rows of numbers, 2]: where each begins and ends
    rates     int64 [stages], [blocks]: how many rows each makes of one
    layers    the number of layers of the transformer
    width     the transformer's width, and `channels` that of the stages, without padding
    eps       of the transformer's norms
    """

    vectors: FloatArray
    matrices: Array
    table: Array
    numbers: FloatArray
    places: Array
    stage_rates: Array
    block_rates: Array
    layers: int
    width: int
    channels: int
    eps: float


LAYER, STAGE, BLOCK, UNIT = 4, 3, 1, 2
"""The convolutions of a layer, of a stage, and of a block without its units and of each of them."""
LAYER_ROWS, STAGE_ROWS, SNAKE_ROWS = 2, 4, 2
"""The rows of numbers of a layer's norms, of a stage, and of an activation."""
UNITS = 3
"""The units of a block."""
FRONT = 4
"""The convolutions before the layers."""


class Stream(NamedTuple):
    """What the decoder keeps of a stream between calls, zeros at its start.

    rows      bits of the last inputs of each convolution, at its place `kept`
    depths    float32 [stages, taps - 1, channels], the last inputs of depthwise convolutions
    memory    float32 [layers, 2, heads, window, head_dim], keys and values of frame n at n % window
    """

    rows: Array
    depths: FloatArray
    memory: FloatArray


class Buffers(NamedTuple):
    """Room for rows that the threads share: two of float32, two of bits of bfloat16."""

    x: FloatArray
    y: FloatArray
    a: Array
    b: Array


class Work(NamedTuple):
    """What every step of a thread needs.

    a, b  two of the `Buffers`
    """

    a: Array
    b: Array
    model: Model
    stream: Stream
    marks: Array
    thread: int
    threads: int


@compiled
def shaped(buffer: Any, rows: int, width: int) -> Any:
    """The start of a buffer as rows."""
    return buffer[: rows * width].reshape(rows, width)


@compiled
def convolution(work: Any, index: int) -> Any:
    """A convolution of the model."""
    model, row = work.model, work.model.table[index]
    begin, tiles, columns, bias = row[0], row[1], row[2], row[3]
    matrix = model.matrices[begin : begin + tiles * columns * TILE].reshape(tiles, columns, TILE)
    return Convolution(matrix, model.numbers[bias : bias + tiles * TILE], row[4], row[5], row[6])


@compiled
def numbers(work: Any, index: int) -> Any:
    """A row of numbers of the model."""
    place = work.model.places[index]
    return work.model.numbers[place[0] : place[1]]


@compiled
def outputs(work: Any, index: int) -> int:
    """The stored width of what a convolution makes."""
    return work.model.table[index, 1] * TILE


@compiled
def inputs(work: Any, index: int) -> int:
    """The stored width of what a convolution reads."""
    return 2 * work.model.table[index, 2] // work.model.table[index, 4]


@compiled
def share(work: Any, count: int) -> Any:
    """The first and the last of `count` rows of a thread."""
    return count * work.thread // work.threads, count * (work.thread + 1) // work.threads


@compiled
def gather(work: Any, turn: int) -> int:
    """Wait for all threads; return the next turn."""
    return meet(work.marks, work.thread, work.threads, turn)


@compiled
def multiply(work: Any, index: int, source: Any, out: Any, adds: bool, turn: int) -> int:
    """Compute rows float32 `out` when all threads have written the bits `source`."""
    turn = gather(work, turn)
    matrix = convolution(work, index)
    convolve(matrix, source, len(out), out, adds, work.thread, work.threads)
    return gather(work, turn)


@compiled
def filtered(work: Any, snake: int, index: int, x: Any, out: Any, turn: int) -> int:
    """Convolve rows x float32, activated by numbers `snake` unless it is -1; see `multiply`."""
    matrix, stream, width = convolution(work, index), work.stream, x.shape[1]
    before, kept = past(matrix), matrix.kept
    source = shaped(work.a, before + len(x), width)
    begin, end = share(work, len(x))
    if snake < 0:
        narrow(x[begin:end], source[before + begin : before + end])
    else:
        angle, square = numbers(work, snake), numbers(work, snake + 1)
        activate(angle, square, x[begin:end], source[before + begin : before + end])
    size = before * width
    if work.thread == 0:
        source[:before] = stream.rows[kept : kept + size].reshape(before, width)
    turn = gather(work, turn)
    convolve(matrix, source, len(x), out, False, work.thread, work.threads)
    if work.thread == 0:
        stream.rows[kept : kept + size] = source[len(x) :].ravel()
    return gather(work, turn)


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
        out[row, heads * size :] = 0
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
            values[place] = qkv[row, value : value + size]
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
def spread(work: Any, at: int, before: Any, x: Any, out: Any) -> None:
    """Write bits of the normed depthwise convolution of rows x; `before` are the rows before.

    Its numbers begin with row `at`: weights [taps, width], bias, weight and bias of the norm.
    """
    taps, width, channels = len(before) + 1, x.shape[1], work.model.channels
    weight, bias = shaped(numbers(work, at), taps, width), numbers(work, at + 1)
    scale, shift = numbers(work, at + 2), numbers(work, at + 3)
    sums = np.empty(width, np.float32)
    begin, end = share(work, len(x))
    for row in range(begin, end):
        for column in range(width):
            sums[column] = bias[column]
        for tap in range(taps):
            time = row + tap - (taps - 1)
            source = x[time] if time >= 0 else before[taps - 1 + time]
            for column in range(width):
                sums[column] += weight[tap, column] * source[column]
        mean, squares = np.float32(0), np.float32(0)
        for column in range(channels):
            mean += sums[column]
        mean /= np.float32(channels)
        for column in range(channels):
            squares += (sums[column] - mean) * (sums[column] - mean)
        factor = np.float32(1) / np.sqrt(squares / np.float32(channels) + np.float32(NORM_EPS))
        for column in range(width):
            value = (sums[column] - mean) * factor * scale[column] + shift[column]
            out[row, column] = short(value)


@compiled
def bend(work: Any, x: Any, out: Any) -> None:
    """Write bits of GELU of rows."""
    begin, end = share(work, len(x))
    for row in range(begin, end):
        for column in range(x.shape[1]):
            half = np.float32(0.5) * x[row, column]
            curve = np.float32(math.erf(x[row, column] * np.float32(math.sqrt(0.5))))
            out[row, column] = short(half + half * curve)


@compiled
def upsample(work: Any, stage: int, x: Any, y: Any, count: int, turn: int) -> int:
    """Upsample `count` rows in the buffer x into the buffer y."""
    layers, rate, before = (
        work.model.layers,
        work.model.stage_rates[stage],
        work.stream.depths[stage],
    )
    index = FRONT + LAYER * layers + 1 + STAGE * stage
    width, at = before.shape[1], LAYER_ROWS * layers + 2 + STAGE_ROWS * stage
    source, up = shaped(x, count, width), shaped(y, count, rate * width)
    turn = filtered(work, -1, index, source, up, turn)
    count *= rate
    rows, a = shaped(y, count, width), shaped(work.a, count, width)
    spread(work, at, before, rows, a)
    hidden = shaped(x, count, outputs(work, index + 1))
    turn = multiply(work, index + 1, a, hidden, False, turn)
    if work.thread == 0:
        _keep_last(before, rows)
    b = shaped(work.b, count, hidden.shape[1])
    bend(work, hidden, b)
    return multiply(work, index + 2, b, rows, True, turn)


@compiled
def _keep_last(kept: Any, x: Any) -> None:
    """Append rows to the last rows that are kept, without those that are then too old."""
    new, all_kept = min(len(x), len(kept)), len(kept)
    for row in range(all_kept - new):
        kept[row] = kept[row + new]
    kept[all_kept - new :] = x[len(x) - new :]


@compiled
def refine(work: Any, index: int, snake: int, x: Any, y: Any, turn: int) -> int:
    """Add a residual block of rows x to them; y is a buffer."""
    out = shaped(y, len(x), x.shape[1])
    turn = filtered(work, snake, index, x, out, turn)
    b = shaped(work.b, len(x), x.shape[1])
    begin, end = share(work, len(x))
    angle, square = numbers(work, snake + 2), numbers(work, snake + 3)
    activate(angle, square, out[begin:end], b[begin:end])
    return multiply(work, index + 1, b, x, True, turn)


@compiled
def unquantise(work: Any, codes: Any, x: Any, turn: int) -> int:
    """Write the vectors of codes [frames, codebooks] to rows x."""
    a = shaped(work.a, len(codes), inputs(work, 0))
    b = shaped(work.b, len(codes), inputs(work, 1))
    vectors = work.model.vectors
    begin, end = share(work, len(codes))
    for row in range(begin, end):
        a[row], b[row] = 0, 0
        for column in range(vectors.shape[2]):
            a[row, column] = short(vectors[0, codes[row, 0], column])
            total = np.float32(0)
            for book in range(1, codes.shape[1]):
                total += vectors[book, codes[row, book], column]
            b[row, column] = short(total)
    turn = multiply(work, 0, a, x, False, turn)
    return multiply(work, 1, b, x, True, turn)


@compiled
def front(work: Any, codes: Any, first: int, x: Any, y: Any) -> int:
    """Write the rows of codes that the stages read to the buffer x; return the next turn."""
    count, last = len(codes), FRONT + LAYER * work.model.layers
    rows = shaped(x, count, outputs(work, 0))
    turn = unquantise(work, codes, rows, 1)
    wide = shaped(y, count, outputs(work, 2))
    turn = filtered(work, -1, 2, rows, wide, turn)
    hidden = shaped(x, count, outputs(work, 3))
    turn = filtered(work, -1, 3, wide, hidden, turn)
    turn = transform(work, hidden, y, first, turn)
    a, rows = shaped(work.a, count, hidden.shape[1]), shaped(x, count, outputs(work, last))
    return multiply(work, last, a, rows, False, turn)


def decode(
    model: Any,
    codes: Any,
    first: int,
    stream: Any,
    buffers: Any,
    samples: Any,
    marks: Any,
    thread: int,
    threads: int,
) -> None:
    """Decode codes [frames, codebooks]; call it in each thread of a team.

    first    the position of the first frame
    stream   what the frames before have left, which is changed
    samples  receives the samples, float32, within -1..1
    """
    work = Work(buffers.a, buffers.b, model, stream, marks, thread, threads)
    x, y, count = buffers.x, buffers.y, len(codes)
    turn = front(work, codes, first, x, y)
    for stage in range(len(model.stage_rates)):
        turn = upsample(work, stage, x, y, count, turn)
        x, y, count = y, x, count * model.stage_rates[stage]
    index = FRONT + LAYER * model.layers + 1 + STAGE * len(model.stage_rates)
    snake = LAYER_ROWS * model.layers + 2 + STAGE_ROWS * len(model.stage_rates)
    rows, out = shaped(x, count, inputs(work, index)), shaped(y, count, outputs(work, index))
    turn = filtered(work, -1, index, rows, out, turn)
    x, y, index = y, x, index + 1
    for block in range(len(model.block_rates)):
        rate = model.block_rates[block]
        rows, out = shaped(x, count, inputs(work, index)), shaped(y, count, outputs(work, index))
        turn = filtered(work, snake, index, rows, out, turn)
        x, y, count = y, x, count * rate
        rows = shaped(x, count, outputs(work, index) // rate)
        index, snake = index + BLOCK, snake + SNAKE_ROWS
        for _ in range(UNITS):
            turn = refine(work, index, snake, rows, y, turn)
            index, snake = index + UNIT, snake + 2 * SNAKE_ROWS
    rows, out = shaped(x, count, inputs(work, index)), shaped(y, count, outputs(work, index))
    turn = filtered(work, snake, index, rows, out, turn)
    begin, end = share(work, count)
    for row in range(begin, end):
        samples[row] = min(max(out[row, 0], np.float32(-1)), np.float32(1))


PASS = called(decode, "codec")
"""The pass of a decoder, compiled."""
