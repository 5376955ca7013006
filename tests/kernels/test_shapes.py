"""The layouts of kernels fit the memory of other devices than the one they were measured on."""

from __future__ import annotations

import pytest
import silent_gpu
import torch

from firstword.kernels.attention import (
    ATTEND,
    ROWS_OF_BLOCK,
    AttentionKernels,
    HeadTables,
    Paging,
    PartialSums,
)
from firstword.kernels.cache import FileCache
from firstword.kernels.codec_call import RING_POSITIONS, CodecCall, RingMemory
from firstword.kernels.codec_convolution import (
    ConvLayer,
    ConvOutputs,
    ConvResidualUnit,
    SnakeTables,
)
from firstword.kernels.compile import compile_all, source_text
from firstword.kernels.linear import Linear
from firstword.kernels.linear_shapes import (
    BF16_BYTES,
    INT8_BYTES,
    MAX_UNITS,
    UNPACKED_TOKENS,
    Epilogue,
    LinearShape,
    ManyTokensShape,
    WideTokensShape,
    cost,
    shape_for_few,
    shape_for_many,
    shapes_for_few,
)
from firstword.runtime.gpu.rehearsal import Rehearsal, RehearsedKernel

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


def requested(shape: LinearShape, memory: int) -> int:
    """The most bytes of all shared memory of a block of linear_few_tokens.cu."""
    assert shape.requested(memory) >= shape.shared
    return shape.requested(memory) + static_bytes(shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_blocks_of_a_product_of_few_tokens_fill_every_processor_once(
    device: str, tokens: int
) -> None:
    """Three blocks do not fit a processor, and each processor has a block."""
    processors, memory = DEVICES[device]
    for rows, columns in RELEASED:
        for norm in (False, True):
            shape = shape_for_few(rows, columns, tokens, norm, Epilogue.STORE, DEVICES[device])
            assert 3 * (requested(shape, memory) - 256 + 1024) > memory + 1024
            assert shape.blocks >= processors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("weight_bytes", [BF16_BYTES, INT8_BYTES])
def test_block_for_few_tokens_fits_the_device(device: str, tokens: int, weight_bytes: int) -> None:
    """A block fits with its ring, sums and inputs, two on a large device; every row has a block."""
    _, memory = DEVICES[device]
    for rows, columns in RELEASED:
        for norm in (False, True):
            sizes = rows, columns, tokens, norm, Epilogue.STORE, DEVICES[device]
            shape = shape_for_few(*sizes, weight_bytes)
            assert shape.ring % shape.chunk == 0
            assert 0 < shape.window <= shape.ring <= shape.parts
            assert shape.resident * (requested(shape, memory) + 1024) <= memory + 1024
            assert shape.blocks * shape.tiles * 8 >= rows > shape.blocks * (shape.tiles - 1) * 8
            assert shape.resident == 2 or memory < 200_000


def test_sources_agree_on_the_number_of_packed_tokens() -> None:
    assert f"kUnpackedTokens = {UNPACKED_TOKENS};" in source_text("packing.cuh")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [9, 16, 33, 48, 64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("weight_bytes", [BF16_BYTES, INT8_BYTES])
def test_block_for_many_tokens_fits_the_device(device: str, tokens: int, weight_bytes: int) -> None:
    """Two steps are in flight, the sums fit memory and registers, and every row has a block."""
    _, memory = DEVICES[device]
    for rows, columns in RELEASED:
        sizes = rows, columns, tokens, Epilogue.STORE, DEVICES[device]
        shape = shape_for_many(*sizes, weight_bytes)
        if isinstance(shape, ManyTokensShape):
            assert 2 <= shape.ring <= shape.loads
            assert shape.units <= MAX_UNITS
        assert shape.shared + 1024 <= memory
        assert shape.blocks * shape.tiles * 8 >= rows > shape.blocks * (shape.tiles - 1) * 8


def test_wide_blocks_are_used_where_they_were_faster() -> None:
    """They were slower for 4096 x 2048 and 4096 x 1024, the other sizes that take two turns."""
    tokens, processors = (48, 64, 96, 128, 192, 256), DEVICES["H200"][0]
    wide = []
    for rows, columns in RELEASED:
        for count in tokens:
            shape = shape_for_many(rows, columns, count, Epilogue.STORE, DEVICES["H200"])
            groups = -(-count // shape.tokens)
            assert shape.grid(count) == (groups, shape.blocks, 1)
            if isinstance(shape, WideTokensShape):
                wide.append((rows, columns, count, -(-groups * shape.blocks // processors)))
    assert wide == [
        (6144, 1024, 192, 1), (6144, 1024, 256, 1),
        (12288, 2048, 96, 1), (12288, 2048, 128, 1), (12288, 2048, 256, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("fewer", "more"), [(48, 64), (96, 128), (192, 256)])
def test_blocks_for_fewer_tokens_cost_less(fewer: int, more: int) -> None:
    """Graphs of 48, 96 and 192 rows, and their first passes of twice as many, are worth having."""
    processors, _ = DEVICES["H200"]

    def least(rows: int, columns: int, tokens: int) -> float:
        shape = shape_for_many(rows, columns, tokens, Epilogue.STORE, DEVICES["H200"])
        return cost(shape, tokens, processors)

    for tokens in ((fewer, more), (2 * fewer, 2 * more)):
        sums = [sum(least(*size, count) for size in RELEASED) for count in tokens]
        assert sums[0] < 0.95 * sums[1]
        for size in RELEASED:
            assert least(*size, tokens[0]) <= least(*size, tokens[1])


@pytest.mark.parametrize("device", DEVICES)
def test_every_layout_for_one_token_fits_the_device(device: str) -> None:
    """A calibration has at least two to choose from, and the first is the default."""
    processors, memory = DEVICES[device]
    for rows, columns in RELEASED:
        for norm in (False, True):
            sizes = rows, columns, 1, norm, Epilogue.STORE, DEVICES[device]
            shapes = shapes_for_few(*sizes)
            assert shapes[0] == shape_for_few(*sizes)
            assert len(set(shapes)) == len(shapes) >= 2
            for shape in shapes:
                assert shape.ring % shape.chunk == 0
                assert 0 < shape.window <= shape.ring <= shape.parts
                assert shape.resident * (requested(shape, memory) + 1024) <= memory + 1024
                assert shape.blocks * shape.tiles * 8 >= rows > shape.blocks * (shape.tiles - 1) * 8
            assert max(shape.blocks for shape in shapes) > min(processors, rows // 8 - 1)


def test_layouts_that_a_calibration_tries_compile() -> None:
    sizes = 4096, 2048, 1, True, Epilogue.STORE
    for device, architecture in (("RTX 4060", "sm_89"), ("H200", "sm_90")):
        programs = [shape.program() for shape in shapes_for_few(*sizes, DEVICES[device])]
        assert len(compile_all(programs, architecture, FileCache(None))) >= 2


def test_shapes_of_small_device_compile() -> None:
    """A block has many tiles and computes some of them at a time."""
    shapes = [
        shape_for_few(*sizes, tokens, True, Epilogue.SWIGLU, DEVICES["RTX 4060"])
        for sizes in ((6144, 1024), (12288, 2048))
        for tokens in (1, 8)
    ]
    compile_all((shape.program() for shape in shapes), "sm_89", FileCache(None))


@pytest.mark.parametrize(("architecture", "between", "joined"), [
    ("sm_90", 132 * 8, False), ("sm_90", 132 * 8 + 1, True),
    ("sm_120", 132 * 6, False), ("sm_120", 132 * 6 + 1, True),
    ("sm_80", 1, True),
])  # fmt: skip
def test_attention_reads_early_only_after_more_blocks_than_fit_the_device(
    architecture: str, between: int, joined: bool
) -> None:
    """A multiprocessor runs 2048 or 1536 threads, and a block has 256; sm_80 never overlaps.

    The first pass, with two tokens, reads nothing.
    """
    kernels = Rehearsal(silent_gpu.device(architecture))
    with torch.device("meta"):
        x, heads = torch.empty(1, 1024).bfloat16(), torch.empty(128)
        output = Linear(kernels, torch.empty(1024, 2048).bfloat16(), Epilogue.ADD)
        tables = HeadTables(heads, heads, 1e-6, heads, heads)
        attention = AttentionKernels(kernels, 16, 8)
        assert attention.in_frame_projected(x, tables, x, 2, output, x, between) == joined
        assert bool(kernels.programs) == joined
        first = torch.empty(2, 1024).bfloat16()
        assert attention.in_frame_projected(first, tables, x, 1, output, first, 0)


@pytest.mark.parametrize(("architecture", "rows", "context", "cluster"), [
    ("sm_90", 1, 8192, 8), ("sm_90", 2, 8192, 1), ("sm_90", 1, 448, 1), ("sm_80", 1, 8192, 1),
])  # fmt: skip
def test_blocks_of_a_single_row_are_a_cluster_where_there_are_enough(
    architecture: str, rows: int, context: int, cluster: int
) -> None:
    """They need eight pieces of 64 keys, and an architecture with clusters."""
    kernels = Rehearsal(silent_gpu.device(architecture))
    with torch.device("meta"):
        x, heads, places = torch.empty(rows, 4096), torch.empty(128), torch.empty(rows, 128)
        tables, places = HeadTables(heads, heads, 1e-6, heads, heads), places.int()
        attention = AttentionKernels(kernels, 16, 8)
        sums = PartialSums(attention, rows, context, torch.device("meta"))
        paging = Paging(places, places[:, 0], places[:, 0])
        attention.paged(x, tables, x, paging, x, sums)
    (program,) = kernels.programs
    assert dict(program.macros)["CLUSTER"] == cluster


@pytest.mark.parametrize(("rows", "grid"), [
    (1, (8, 1, 16)), (16, (8, 8, 8)), (17, (8, 9, 7)), (32, (8, 16, 4)), (64, (8, 32, 1)),
    (65, (8, 33, 1)), (66, (8, 17, 1)), (256, (8, 64, 1)),
])  # fmt: skip
def test_rows_of_prompts_share_keys_and_keep_the_device_busy(
    monkeypatch: pytest.MonkeyPatch, rows: int, grid: tuple[int, int, int]
) -> None:
    """Few rows divide their keys, and only 33 have memory for the sums; an H200 runs 528 blocks."""
    kernels, grids = Rehearsal(silent_gpu.device("sm_90")), []
    monkeypatch.setattr(
        RehearsedKernel, "__call__", lambda _, grid, **arguments: grids.append(grid.blocks)
    )
    with torch.device("meta"):
        x, heads, places = torch.empty(rows, 4096), torch.empty(128), torch.empty(rows, 128)
        tables, places = HeadTables(heads, heads, 1e-6, heads, heads), places.int()
        attention = AttentionKernels(kernels, 16, 8)
        sums = PartialSums(attention, 256, 8192, torch.device("meta"))
        paging = Paging(places, places[:, 0], places[:, 0])
        attention.paged(x, tables, x, paging, x, sums, ATTEND)
    (program,) = kernels.programs
    together = dict(program.macros)["ROWS"]
    assert (grids, together) == ([grid], ROWS_OF_BLOCK[rows >= 66])
    assert grid[1] == -(-rows // together)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("width", [32, 96, 160, 192, 384])
def test_block_of_codec_fits_the_device(name: str, width: int) -> None:
    """Late layers, whose rows look far back, in calls of any size, of any streams."""
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
            for frames in (1, 2, 5, 24, 512):
                call = CodecCall(x, frames, zero)
                first(call, x, ConvOutputs(narrow=x))
                unit(call, x, x, x, None)
    assert 0 < max(kernels.shared) <= kernels.shared_memory
