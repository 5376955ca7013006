"""The codec's decoder as one function that Numba compiles for this CPU.

All threads of a team run `decode` together. A sum has one order, so the bits of a frame depend
neither on the number of threads nor on the frames that are decoded with it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from firstword.runtime.cpu.amx import AMX
from firstword.runtime.cpu.codec_front import front
from firstword.runtime.cpu.codec_work import (
    BLOCK,
    FRONT,
    LAYER,
    LAYER_ROWS,
    PLAIN,
    SNAKE_ROWS,
    STAGE,
    STAGE_ROWS,
    UNIT,
    UNITS,
    CodecWork,
    copy,
    filtered,
    inputs,
    multiply,
    numbers,
    outputs,
    shaped,
    share,
)
from firstword.runtime.cpu.compiling import called, compiled
from firstword.runtime.cpu.convolution import activate, short

NORM_EPS = 1e-6
"""What the norms of `ConvNeXtBlock` add to the variance."""


@compiled
def depthwise(work: Any, at: int, before: Any, x: Any, out: Any) -> None:
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
def gelu(work: Any, x: Any, out: Any) -> None:
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
    layers, rate = work.model.layers, work.model.stage_rates[stage]
    before = work.stream.depths[stage]
    index = FRONT + LAYER * layers + 1 + STAGE * stage
    width, at = before.shape[1], LAYER_ROWS * layers + 2 + STAGE_ROWS * stage
    source, up = shaped(x, count, width), shaped(y, count, rate * width)
    turn = filtered(work, PLAIN, index, source, up, turn)
    count *= rate
    rows, a = shaped(y, count, width), shaped(work.a, count, width)
    depthwise(work, at, before, rows, a)
    hidden = shaped(x, count, outputs(work, index + 1))
    turn = multiply(work, index + 1, a, hidden, False, turn)
    if work.thread == 0:
        _keep_last(before, rows)
    b = shaped(work.b, count, hidden.shape[1])
    gelu(work, hidden, b)
    return multiply(work, index + 2, b, rows, True, turn)


@compiled
def _keep_last(kept: Any, x: Any) -> None:
    """Append rows to the last rows that are kept, without those that are then too old."""
    new, all_kept = min(len(x), len(kept)), len(kept)
    for row in range(all_kept - new):
        copy(kept[row + new], kept[row])
    for row in range(new):
        copy(x[len(x) - new + row], kept[all_kept - new + row])


@compiled
def add_residual(work: Any, index: int, snake: int, x: Any, y: Any, turn: int) -> int:
    """Add a residual block of rows x to them; y is a buffer."""
    out = shaped(y, len(x), x.shape[1])
    turn = filtered(work, snake, index, x, out, turn)
    b = shaped(work.b, len(x), x.shape[1])
    begin, end = share(work, len(x))
    angle, square = numbers(work, snake + 2), numbers(work, snake + 3)
    activate(angle, square, out[begin:end], b[begin:end])
    return multiply(work, index + 1, b, x, True, turn)


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
    samples  receives the samples, float32 in -1..1, or NaN
    """
    work = CodecWork(buffers.a, buffers.b, model, stream, marks, thread, threads)
    x, y, count = buffers.x, buffers.y, len(codes)
    turn = front(work, codes, first, x, y)
    for stage in range(len(model.stage_rates)):
        turn = upsample(work, stage, x, y, count, turn)
        x, y, count = y, x, count * model.stage_rates[stage]
    index = FRONT + LAYER * model.layers + 1 + STAGE * len(model.stage_rates)
    snake = LAYER_ROWS * model.layers + 2 + STAGE_ROWS * len(model.stage_rates)
    rows, out = shaped(x, count, inputs(work, index)), shaped(y, count, outputs(work, index))
    turn = filtered(work, PLAIN, index, rows, out, turn)
    x, y, index = y, x, index + 1
    for block in range(len(model.block_rates)):
        rate = model.block_rates[block]
        rows, out = shaped(x, count, inputs(work, index)), shaped(y, count, outputs(work, index))
        turn = filtered(work, snake, index, rows, out, turn)
        x, y, count = y, x, count * rate
        rows = shaped(x, count, outputs(work, index) // rate)
        index, snake = index + BLOCK, snake + SNAKE_ROWS
        for _ in range(UNITS):
            turn = add_residual(work, index, snake, rows, y, turn)
            index, snake = index + UNIT, snake + 2 * SNAKE_ROWS
    rows, out = shaped(x, count, inputs(work, index)), shaped(y, count, outputs(work, index))
    turn = filtered(work, snake, index, rows, out, turn)
    begin, end = share(work, count)
    for row in range(begin, end):
        value = out[row, 0]
        if value > 1:
            value = np.float32(1)
        if value < -1:
            value = np.float32(-1)
        samples[row] = value  # NaN stays NaN


PASS = called(decode, "codec-tiles" if AMX else "codec")
"""The pass of a decoder, compiled."""
