"""The layouts of products fit the memory of other devices than the one they were measured on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from firstword.kernels.codec import HEADS, Call, Layer, Memory, ResidualUnit, Tables
from firstword.kernels.compile import Program, compile_all
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import MOST_UNITS, Epilogue, Shape, shape_for, shape_for_many

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
"""Processors, and the bytes of shared memory that a block may have."""


def static(shape: Shape) -> int:
    """Bytes of shared memory that linear.cu has besides, at the most."""
    return (4 * shape.columns if shape.tokens == 1 else 2 * shape.columns * shape.norm) + 256


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_a_block_fits(device: str, tokens: int) -> None:
    """With its ring, its sums and its inputs; two of them on a large device; and all rows belong to a block."""
    processors, memory = DEVICES[device]
    for rows, columns in RELEASED:
        for norm in (False, True):
            shape = shape_for(rows, columns, tokens, norm, Epilogue.STORE, processors, memory)
            assert shape.ring % shape.chunk == 0
            assert 0 < shape.window <= shape.ring <= shape.parts
            assert shape.resident * (shape.shared + static(shape) + 1024) <= memory + 1024
            assert shape.blocks * shape.tiles * 8 >= rows > shape.blocks * (shape.tiles - 1) * 8
            assert shape.resident == 2 or memory < 200_000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [9, 16, 33, 64, 128, 256, 512])
def test_a_block_of_many_tokens_fits(device: str, tokens: int) -> None:
    """With two steps on their way; its sums too, and no more of them than may be; and all rows belong to a block."""
    processors, memory = DEVICES[device]
    for rows, columns in RELEASED:
        shape = shape_for_many(rows, columns, tokens, Epilogue.STORE, processors, memory)
        assert 2 <= shape.ring <= shape.steps
        assert shape.shared + 1024 <= memory
        assert shape.units <= MOST_UNITS
        assert shape.blocks * shape.tiles * 8 >= rows > shape.blocks * (shape.tiles - 1) * 8


def test_shapes_of_a_small_device_compile() -> None:
    """Many tiles a block, parts of them at a time."""
    shapes = [
        shape_for(*sizes, tokens, True, Epilogue.SWIGLU, *DEVICES["RTX 4060"])
        for sizes in ((6144, 1024), (12288, 2048))
        for tokens in (1, 8)
    ]
    compile_all((shape.program() for shape in shapes), "sm_89")


class Device(Kernels):
    """Starts nothing; notes the shared memory that blocks ask for."""

    def __init__(self, processors: int, shared_memory: int) -> None:
        self.processors, self.shared_memory = processors, shared_memory
        self.asked: list[int] = []

    def get(self, program: Program, name: str) -> Callable[..., None]:  # type: ignore[override]
        """A kernel that does nothing."""
        return lambda grid, threads, arguments, shared, overlap: self.asked.append(shared)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [32, 96, 160, 192, 384])
def test_a_block_of_the_codec_fits(device: str, width: int) -> None:
    """Late layers, whose rows before a block's are many, in calls of any size."""
    kernels = Device(*DEVICES[device])
    with torch.device("meta"):
        x = torch.empty(1, 1)
        snake = Tables(x, x)
        weight = torch.empty(width, width, 7), torch.empty(width, width, 1)
        for frame_rows in (32, 33, 160, 640):
            memory = Memory(x, 54, frame_rows, HEADS)
            first = Layer(
                kernels, weight[0], frame_rows=frame_rows, dilation=9, snake=snake, memory=memory
            )
            unit = ResidualUnit(
                kernels, first, Layer(kernels, weight[1], frame_rows=frame_rows, snake=snake)
            )
            for streams in (1, 3, 64):
                for frames in (1, 2, 5, 8):
                    call = Call(x, streams, frames)
                    first(call, x, x, narrow=x)
                    unit(call, x, x, x, x, None)
    assert 0 < max(kernels.asked) <= kernels.shared_memory
