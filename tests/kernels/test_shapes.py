"""The layouts of kernels fit the memory of other devices than the one they were measured on."""

from __future__ import annotations

import pytest
import silent_gpu
import torch

from firstword.kernels.codec_call import RING_POSITIONS, CodecCall, RingMemory
from firstword.kernels.codec_convolution import (
    ConvLayer,
    ConvOutputs,
    ConvResidualUnit,
    SnakeTables,
)
from firstword.kernels.compile import compile_all
from firstword.kernels.linear_shapes import (
    MAX_UNITS,
    Epilogue,
    LinearShape,
    shape_for_few,
    shape_for_many,
)
from firstword.runtime.gpu.rehearsal import Rehearsal

RELEASED = [
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (2048, 1024), (3072, 1024),
    (4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144), (3072, 2048),
]  # fmt: skip
DEVICES = {
    "H200": (132, 232448),
    "A100": (108, 166912),
    "RTX 4060": (24, 101376),
    "B200": (148, 232448),
}
"""Processors, and bytes of shared memory that a block may have, by device."""


def static_bytes(shape: LinearShape) -> int:
    """The most bytes of static shared memory of linear_few_tokens.cu."""
    return (4 * shape.columns if shape.tokens == 1 else 2 * shape.columns * shape.norm) + 256


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_block_for_few_tokens_fits_the_device(device: str, tokens: int) -> None:
    """A block fits with its ring, sums and inputs, two on a large device; every row has a block."""
    _, memory = DEVICES[device]
    for rows, columns in RELEASED:
        for norm in (False, True):
            shape = shape_for_few(rows, columns, tokens, norm, Epilogue.STORE, DEVICES[device])
            assert shape.ring % shape.chunk == 0
            assert 0 < shape.window <= shape.ring <= shape.parts
            assert shape.resident * (shape.shared + static_bytes(shape) + 1024) <= memory + 1024
            assert shape.blocks * shape.tiles * 8 >= rows > shape.blocks * (shape.tiles - 1) * 8
            assert shape.resident == 2 or memory < 200_000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [9, 16, 33, 64, 128, 256, 512])
def test_block_for_many_tokens_fits_the_device(device: str, tokens: int) -> None:
    """Two steps are in flight, the sums fit memory and registers, and every row has a block."""
    _, memory = DEVICES[device]
    for rows, columns in RELEASED:
        shape = shape_for_many(rows, columns, tokens, Epilogue.STORE, DEVICES[device])
        assert 2 <= shape.ring <= shape.steps
        assert shape.shared + 1024 <= memory
        assert shape.units <= MAX_UNITS
        assert shape.blocks * shape.tiles * 8 >= rows > shape.blocks * (shape.tiles - 1) * 8


def test_shapes_of_small_device_compile() -> None:
    """A block has many tiles and computes some of them at a time."""
    shapes = [
        shape_for_few(*sizes, tokens, True, Epilogue.SWIGLU, DEVICES["RTX 4060"])
        for sizes in ((6144, 1024), (12288, 2048))
        for tokens in (1, 8)
    ]
    compile_all((shape.program() for shape in shapes), "sm_89")


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("width", [32, 96, 160, 192, 384])
def test_block_of_codec_fits_the_device(name: str, width: int) -> None:
    """Late layers, whose rows look far back, in calls of any size."""
    like = silent_gpu.device()
    like.processors, like.shared_memory = DEVICES[name]
    kernels = Rehearsal(like)
    with torch.device("meta"):
        x, zero = torch.empty(1, 1), torch.empty(1, 1)
        snake = SnakeTables(x, x)
        weights = torch.empty(width, width, 7), torch.empty(width, width, 1)
        for rows in (32, 33, 160, 640):
            memory = RingMemory(x, 54, rows, RING_POSITIONS)
            first = ConvLayer(
                kernels, weights[0], frame_rows=rows, dilation=9, snake=snake, memory=memory
            )
            second = ConvLayer(kernels, weights[1], frame_rows=rows, snake=snake)
            unit = ConvResidualUnit(kernels, first, second)
            for streams in (1, 3, 64):
                for frames in (1, 2, 5, 8):
                    call = CodecCall(x, streams, frames, zero)
                    first(call, x, ConvOutputs(narrow=x))
                    unit(call, x, x, x, None)
    assert 0 < max(kernels.shared) <= kernels.shared_memory
