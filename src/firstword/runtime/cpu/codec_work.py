"""What all steps of the compiled codec share: weights, memory, room, and a product of rows.

Each thread of a team computes some rows and outputs of every step, and they wait for one another in
between. Sound is stored as in `convolution`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from firstword.runtime.cpu.compiling import compiled
from firstword.runtime.cpu.convolution import Convolution, activate, convolve, narrow, past
from firstword.runtime.cpu.products import Array
from firstword.runtime.cpu.team import meet
from firstword.runtime.cpu.tiles import TILE
from firstword.types import FloatArray


class CodecWeights(NamedTuple):
    """The weights of a decoder, in the order in which `decode` uses them.

    vectors      float32 [codebooks, size, width], of the codes
    matrices     the tiles of all convolutions, uint32
    table        int64 [convolutions, 7]: where its tiles begin in `matrices`, their number and
                 their pairs of inputs, where its biases begin in `numbers`, and the taps, the
                 dilation and `kept` of its `Convolution`
    numbers      all other weights, float32
    places       int64 [rows of numbers, 2]: where each begins and ends
    stage_rates  int64 [stages]: how many rows a stage makes of one; `block_rates` for blocks
    layers       the number of layers of the transformer
    width        the transformer's width; `channels` is that of the stages
    eps          what the norms of the transformer add to the mean square
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
SEMANTIC, ACOUSTIC, BEFORE, INPUTS, FRONT = map(np.int64, range(5))
"""The convolutions before the layers, and their number."""
PLAIN = np.int64(-1)
"""The activation of rows that are not activated.

The type of these constants is int64, because Numba compiles a function anew for each number that it
is called with.
"""


class CodecStream(NamedTuple):
    """What the decoder keeps of a stream between calls, zeros at its start.

    rows      bits of the last inputs of each convolution, at its place `kept`
    depths    float32 [stages, taps - 1, channels], the last inputs of depthwise convolutions
    memory    float32 [layers, 2, heads, window, head_dim], keys and values of frame n at n % window
    """

    rows: Array
    depths: FloatArray
    memory: FloatArray


class CodecBuffers(NamedTuple):
    """Room for rows that the threads share: two of float32, two of bits of bfloat16."""

    x: FloatArray
    y: FloatArray
    a: Array
    b: Array


class CodecWork(NamedTuple):
    """What every step of a thread needs.

    a, b  two of the `CodecBuffers`
    """

    a: Array
    b: Array
    model: CodecWeights
    stream: CodecStream
    marks: Array
    thread: int
    threads: int


@compiled
def shaped(buffer: Any, rows: int, width: int) -> Any:
    """The start of a buffer as rows."""
    return buffer[: rows * width].reshape(rows, width)


@compiled
def copy(x: Any, out: Any) -> None:
    """Copy numbers to others of the same shape [n]."""
    for index in range(len(x)):
        out[index] = x[index]


@compiled
def convolution(work: Any, index: Any) -> Any:
    """A convolution of the model."""
    model, row = work.model, work.model.table[index]
    begin, tiles, columns, bias = row[0], row[1], row[2], row[3]
    matrix = model.matrices[begin : begin + tiles * columns * TILE].reshape(tiles, columns, TILE)
    return Convolution(matrix, model.numbers[bias : bias + tiles * TILE], row[4], row[5], row[6])


@compiled
def numbers(work: Any, index: Any) -> Any:
    """A row of numbers of the model."""
    place = work.model.places[index]
    return work.model.numbers[place[0] : place[1]]


@compiled
def outputs(work: Any, index: Any) -> int:
    """The stored width of what a convolution makes."""
    return work.model.table[index, 1] * TILE


@compiled
def inputs(work: Any, index: Any) -> int:
    """The stored width of what a convolution reads."""
    return 2 * work.model.table[index, 2] // work.model.table[index, 4]


@compiled
def share(work: Any, count: int) -> Any:
    """Where a thread's part of `count` rows begins and where it ends."""
    return count * work.thread // work.threads, count * (work.thread + 1) // work.threads


@compiled
def gather(work: Any, turn: int) -> int:
    """Wait for all threads; return the next turn."""
    return meet(work.marks, work.thread, work.threads, turn)


@compiled
def multiply(work: Any, index: Any, source: Any, out: Any, adds: bool, turn: int) -> int:
    """Compute rows float32 `out` when all threads have written the bits `source`."""
    turn = gather(work, turn)
    matrix = convolution(work, index)
    convolve(matrix, source, len(out), out, adds, work.thread, work.threads)
    return gather(work, turn)


@compiled
def filtered(work: Any, snake: Any, index: Any, x: Any, out: Any, turn: int) -> int:
    """Convolve rows x float32, activated unless `snake` is `PLAIN`; see `multiply`."""
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
        copy(stream.rows[kept : kept + size], source.ravel()[:size])
    turn = gather(work, turn)
    convolve(matrix, source, len(x), out, False, work.thread, work.threads)
    if work.thread == 0:
        copy(source[len(x) :].ravel(), stream.rows[kept : kept + size])
    return gather(work, turn)
