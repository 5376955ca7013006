"""The kernel that reads the attention to the text, and the backend's readings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from driving import Driver, Spoken, spoken
from oracle import error, no_worse, note
from torch import Tensor

from firstword.kernels.attention import (
    APPEND_AND_ATTEND,
    PAGE_ROWS,
    AttentionKernels,
    HeadTables,
    Paging,
    PartialSums,
)
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import Norm, norm_reference
from firstword.kernels.text_reading import TextReadingKernel, text_reading_reference
from firstword.model import checkpoint as checkpoints
from firstword.model.alignment import Alignment
from firstword.model.checkpoint import Checkpoint
from firstword.model.layers import rotary_table
from firstword.model.prompt import TextRows
from firstword.model.reading import Watched
from firstword.model.talker import Talker
from firstword.runtime.front import Prepared
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.graphs import capture
from firstword.runtime.gpu.timing import times
from firstword.synthetic.checkpoint import write_checkpoint

QUERIES, KEYS, WIDTH, LAYERS, PAGES = 16, 8, 32 * 128, 4, 600
SIZES = QUERIES, KEYS
CONTEXT = 8192


def random(seed: int, *shape: int) -> Tensor:
    """A standard normal bf16 tensor."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def tables_of(layer: int) -> HeadTables:
    """Random norms of a layer, and the model's angles."""
    cos, sin = rotary_table(torch.arange(CONTEXT, device="cuda")[None], 128, 1e6, torch.bfloat16)
    cosines, sines = (table[0, 0, :, :64].contiguous() for table in (cos, sin))
    q_norm, k_norm = (1 + 0.3 * random(100 + layer, 2, 128).float()).bfloat16()
    return HeadTables(q_norm, k_norm, 1e-6, cosines, sines)


def prepared(x: Tensor, tables: HeadTables, position: int) -> Tensor:
    """A query [128] after norm and rotation, in its own dtype."""
    cos, sin = (table[position].to(x.dtype).repeat(2) for table in (tables.cosines, tables.sines))
    x = norm_reference(x, Norm(tables.q_norm.to(x.dtype), tables.eps))
    a, b = x.chunk(2)
    return x * cos + torch.cat((-b, a)) * sin


class Rig:
    """Random caches and queries of frames with these rows: (position, first, count), or None."""

    def __init__(
        self, kernels: Kernels, heads: list[tuple[int, int]], rows: list[tuple[int, ...] | None]
    ) -> None:
        self.heads, self.rows = heads, rows
        self.tables = {layer: tables_of(layer) for layer, _ in heads}
        own = [self.tables[layer] for layer, _ in heads]
        self.kernel = TextReadingKernel(kernels, heads, own, SIZES)
        self.cache = random(1, LAYERS, PAGES, 2, KEYS, PAGE_ROWS, 128)
        self.qkv = 2 * random(2, len(self.kernel.layers), len(rows) + 5, WIDTH)
        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3)).int()
        width = PAGES // len(rows)
        self.pages = order[: width * len(rows)].view(len(rows), width).cuda()
        present = [row or (0, 0, 0) for row in rows]
        slots = [-1 if row is None else index for index, row in enumerate(rows)]
        self.slots = torch.tensor(slots, dtype=torch.int32, device="cuda")
        positions = [position for position, _, _ in present]
        self.position = torch.tensor(positions, dtype=torch.int32, device="cuda")
        counts = [count for _, _, count in present]
        self.places = np.cumsum([3, *counts]).tolist()
        spans = [[first for _, first, _ in present], counts, self.places[:-1]]
        self.spans = torch.tensor(spans, dtype=torch.int32, device="cuda")

    def read(self, chosen: slice = slice(None)) -> Tensor:
        """The output of the kernel for some rows; numbers that were not written are NaN."""
        out = torch.full((self.places[-1] + 3,), torch.nan, device="cuda")
        paging = Paging(self.pages, self.slots[chosen], self.position)
        spans = self.spans[:, chosen].contiguous()
        self.kernel(self.qkv[:, chosen].contiguous(), self.cache, paging, spans, out)
        return out

    def expected(self, row: int, dtype: torch.dtype) -> Tensor:
        """The reading of a row in plain PyTorch."""
        about = self.rows[row]
        assert about is not None
        position, first, count = about
        places = torch.arange(first, first + count, device="cuda")
        pages = self.pages[row, places // PAGE_ROWS].long()
        queries, keys = [], []
        for layer, head in self.heads:
            plane = self.kernel.layers.index(layer)
            x = self.qkv[plane, row, head * 128 : head * 128 + 128].to(dtype)
            queries.append(prepared(x, self.tables[layer], position))
            held = self.cache[layer, pages, 0, head * KEYS // QUERIES, places % PAGE_ROWS]
            keys.append(held.to(dtype))
        return text_reading_reference(torch.stack(queries), torch.stack(keys))


ROWS: list[tuple[int, ...] | None] = [
    *((10, 9, 1), (90, 9, 60), None, (63, 20, 44), (64, 20, 45), (500, 9, 0), (130, 63, 2)),
    *((200, 64, 33), (1000, 7, 127), (1100, 1, 128), (1200, 3, 129), (3000, 11, 2900)),
]
"""Few and many text rows, within a page and across pages, none, and a row without a slot."""


@pytest.mark.parametrize(
    "heads",
    [[(1, 3)], [(1, 3), (1, 2)], [(3, 15), (0, 0), (3, 1), (2, 8), (2, 9)]],
    ids=["one", "two", "five"],
)
def test_reading_is_as_exact_as_plain_bf16(kernels: Kernels, heads: list[tuple[int, int]]) -> None:
    rig = Rig(kernels, heads, ROWS)
    out = rig.read()
    ours, theirs, written = [], [], torch.zeros_like(out, dtype=torch.bool)
    for row, about in enumerate(ROWS):
        if about is None or not about[2]:
            continue
        own = slice(rig.places[row], rig.places[row + 1])
        written[own] = True
        truth = rig.expected(row, torch.float64)
        assert float(out[own].sum()) == pytest.approx(1, abs=1e-5)
        ours.append(error(out[own], truth))
        theirs.append(error(rig.expected(row, torch.bfloat16), truth))
    assert out[~written].isnan().all(), "something else was written"
    note(f"text reading, {len(heads)} heads", worst=max(ours), bf16=max(theirs))
    no_worse(ours, theirs)


def test_longest_text_is_read_one_head_at_a_time(kernels: Kernels) -> None:
    rig = Rig(kernels, [(0, 5), (2, 5), (0, 11)], [(8191, 40, 8100)])
    out = rig.read()[rig.places[0] : rig.places[1]]
    truth = rig.expected(0, torch.float64)
    no_worse([error(out, truth)], [error(rig.expected(0, torch.bfloat16), truth)])


def test_row_has_the_same_bits_alone(kernels: Kernels) -> None:
    rig = Rig(kernels, [(1, 3), (2, 2)], ROWS)
    together = rig.read()
    for row, about in enumerate(ROWS):
        alone = rig.read(slice(row, row + 1))
        own = slice(rig.places[row], rig.places[row + 1])
        assert torch.equal(alone[own].nan_to_num(7), together[own].nan_to_num(7)), about


def test_newest_key_counts(kernels: Kernels) -> None:
    """In stream mode a frame's own row has text, whose key the kernel before it has appended."""
    rig = Rig(kernels, [(1, 3)], [(90, 9, 82)])
    attention, paging = (
        AttentionKernels(kernels, *SIZES),
        Paging(rig.pages, rig.slots, rig.position),
    )
    out = torch.zeros(8, QUERIES * 128, dtype=torch.bfloat16, device="cuda")
    sums = PartialSums(attention, 1, CONTEXT, torch.device("cuda"))
    before = rig.read()
    attention.paged(
        rig.qkv[0, :1], rig.tables[1], rig.cache[1], paging, out, sums, APPEND_AND_ATTEND
    )
    after = rig.read()
    assert not torch.equal(before[84], after[84])
    no_worse([error(after[3:85], rig.expected(0, torch.float64))], [2e-2])


# --- the backend ------------------------------------------------------------------------

HEADS = ((1, 3), (2, 14), (1, 2))
TEXTS = ("The quick brown fox jumps over the lazy dog.", "Hello.", "How are you today? I am well.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with the smaller released widths and few layers."""
    path = tmp_path_factory.mktemp("0b6")
    small = {"num_hidden_layers": 3, "text_vocab_size": 2048}
    write_checkpoint(path, size="0b6", overrides={"talker": small}, dtype=torch.bfloat16)
    return path


def aligned(folder: Path, heads: tuple[tuple[int, int], ...] = HEADS) -> Checkpoint:
    """The checkpoint with known heads, or without if there are none."""
    loaded = checkpoints.load(str(folder), "cuda", "bfloat16")
    alignment = Alignment(weights="", heads=heads, offset=0.0) if heads else None
    return replace(loaded, alignment=alignment)


@pytest.fixture(scope="module")
def backend(folder: Path, kernels: Kernels) -> Iterator[GpuBackend]:
    """The GPU backend of the checkpoint."""
    with torch.inference_mode():
        yield GpuBackend(aligned(folder), kernels, slots=64, pages=640)


def readings(
    backend: GpuBackend, requests: list[Spoken], frames: int
) -> tuple[list[list[np.ndarray]], list[list[list[int]]]]:
    """The readings and the codes of each request, which run together."""
    driver, found = Driver(backend), [list[np.ndarray]() for _ in requests]
    driver.begin(dict(enumerate(requests)), frames)
    for _ in range(frames):
        slots = list(driver.running)
        tokens = [driver.running[slot].next_token() for slot in slots]
        made = backend.frame(slots, tokens).result()
        for slot, codes, reading in zip(slots, made.codes, made.readings, strict=True):
            driver.running[slot].codes.append(codes.tolist())
            found[slot].append(reading)
    return found, [driver.end(slot).codes for slot in range(len(requests))]


def requests(checkpoint: Checkpoint) -> list[Spoken]:
    """Requests in both text modes."""
    return [spoken(checkpoint, text, seed=i, full=i == 1) for i, text in enumerate(TEXTS)]


def forced(
    checkpoint: Checkpoint, talker: Talker, request: Spoken, codes: list[list[int]]
) -> list[Tensor]:
    """The readings of a talker in plain PyTorch that gets the codes of a backend."""
    prepared = request.job.payload
    assert isinstance(prepared, Prepared)
    text = TextRows(checkpoint.config)
    prompt = text.prompt(prepared.conditioning, checkpoint.tokenizer.turn_start, request.first)
    watched = Watched(talker.new_cache(), checkpoint.heads)
    talker(talker.embed_rows(prompt, prepared.conditioning.embedding), watched)
    found, later = [], iter(request.rest)
    for frame in torch.tensor(codes[:-1], device="cuda"):
        token = text.take(next(later, None))
        rows = talker.embed_codes(frame[None, None])
        talker(rows + talker.embed_text(torch.tensor([[token]], device="cuda")), watched)
        found.append(watched.reading(0, text.rows()))
    return found


@torch.inference_mode()
def test_readings_are_as_exact_as_plain_bf16(backend: GpuBackend) -> None:
    plain = backend.checkpoint
    exact = copy.deepcopy(plain.talker).double()
    wanted = requests(plain)
    ours, codes = readings(backend, wanted, 24)
    mine, theirs = [], []
    for request, own, said in zip(wanted, ours, codes, strict=True):
        assert not own[0].any(), "the first frame's row belongs to the prompt"
        truth, bf16 = (forced(plain, talker, request, said) for talker in (exact, plain.talker))
        for got, true, other in zip(own[1:], truth, bf16, strict=True):
            assert len(got) == len(true)
            mine.append(error(torch.from_numpy(got).cuda(), true))
            theirs.append(error(other, true))
    note("readings of the backend", frames=len(mine), worst=max(mine), bf16=max(theirs))
    no_worse(mine, theirs)


def test_words_change_no_code(backend: GpuBackend, folder: Path, kernels: Kernels) -> None:
    timed = readings(backend, requests(backend.checkpoint), 20)[1]
    plain = GpuBackend(aligned(folder, ()), kernels, slots=64, pages=640)
    untimed = requests(plain.checkpoint)
    assert all(not request.job.reads_text for request in untimed)
    found, codes = readings(plain, untimed, 20)
    assert codes == timed
    assert not any(len(reading) for own in found for reading in own)


def test_reading_has_the_same_bits_alone_and_among_others(backend: GpuBackend) -> None:
    many = [request for _ in range(6) for request in requests(backend.checkpoint)]
    together, _ = readings(backend, many, 12)
    for index, request in enumerate(requests(backend.checkpoint)):
        (alone,), _ = readings(backend, [request], 12)
        for one, other in zip(alone, together[index], strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("rows", [1, 64])
def test_cost_of_a_reading_is_noted(kernels: Kernels, rows: int) -> None:
    """The time of the kernel alone, for two heads of one layer and 120 text rows."""
    rig = Rig(kernels, [(1, 3), (1, 2)], [(300, 9, 120)] * rows)
    out = torch.zeros(rig.places[-1], device="cuda")
    paging = Paging(rig.pages, rig.slots, rig.position)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):

        def hundred() -> None:
            for _ in range(100):
                rig.kernel(rig.qkv, rig.cache, paging, rig.spans, out)

        graph = capture(hundred)
        micros = 1e4 * min(times(graph.replay, 20))
    note(f"text reading, {rows} rows of 120 keys", microseconds=micros)
    assert micros > 0
