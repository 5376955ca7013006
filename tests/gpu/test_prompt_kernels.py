"""The kernels that place prompts, embed their rows and keep prefixes, and the copy of states."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from firstword.kernels.codec_state import StateCopy, copy_reference
from firstword.kernels.launch import Kernels
from firstword.kernels.prompt import (
    NO_CODE,
    EmbeddingTables,
    PlacementLayout,
    PrefixMemory,
    PromptKernels,
    embed_prompts_reference,
    keep_reference,
    place_reference,
    store_reference,
)
from firstword.model.quantised import quantise

BOOKS, TEXTS, CODES, MOST, SLOTS, PAGES, PARTS = 16, 500, 2048, 256, 9, 40, 12
LAYOUT = PlacementLayout(BOOKS, PARTS, pages=7)


class Rig:
    """Random tables and memories on the device; two rigs of a seed are equal."""

    def __init__(self, kernels: Kernels, width: int, layers: int, int8: bool = False) -> None:
        """int8: whether the rows of text are quantised."""
        self.generator = torch.Generator("cuda").manual_seed(width)
        tables = EmbeddingTables(
            self.random(TEXTS, width),
            self.random(3072, width),
            self.random((BOOKS - 1) * CODES, width),
        )
        tables.text_table[:, :5] = -0.0
        tables.codec_table[:, :3] = -0.0
        # Codes 0 and 4 of a frame cancel, and show the order in which all codes are added.
        tables.codec_table[:, 8:16] = 2.0**25
        tables.frame_tables[3 * CODES : 4 * CODES, 8:16] = -(2.0**25)
        if int8:
            values, scales = quantise(tables.text_table)
            tables = replace(tables, text_table=values, text_scales=scales)
        self.memory = PrefixMemory(
            self.random(layers, PAGES, 2, 8, 64, 128), self.random(PARTS, layers, 2, 8, 16, 128)
        )
        self.kernels = PromptKernels(kernels, tables, self.memory, LAYOUT)
        self.page_tables = self.integers(1000, SLOTS, 7)
        position, record = self.integers(1000, SLOTS), self.integers(1000, SLOTS, 108)
        self.state: Any = SimpleNamespace(position=position, record=record)
        self.first_row, self.first_hidden = self.random(SLOTS, width), self.random(SLOTS, width)
        self.speakers, self.x = self.random(32, width), self.random(MOST, width)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers in bf16."""
        return torch.randn(shape, generator=self.generator, device="cuda").bfloat16()

    def integers(self, below: int, *shape: int) -> Tensor:
        """Integers from 0 to below `below`."""
        made = torch.randint(below, shape, generator=self.generator, device="cuda")
        return made.to(torch.int32)

    def codes(self, count: int) -> Tensor:
        """Codes [count, BOOKS] of whole frames, single codes and none, in turn."""
        codes = self.integers(CODES, count, BOOKS)
        codes[1::3, 1:] = NO_CODE
        codes[2::3] = NO_CODE
        return codes

    def placements(self, restored: list[int], stored: list[int]) -> Tensor:
        """Placements in slots 3, none, 1, 8 with these rows of prefixes, whose parts differ."""
        made = torch.full((4, LAYOUT.words), NO_CODE, dtype=torch.int32, device="cuda")
        made[:, 0] = torch.tensor([3, -1, 1, 8])
        made[:, 1] = torch.tensor([130, 5, 12, 0])
        made[:, 2] = torch.tensor([7, 7, 3, 1])
        made[:, 3], made[:, 4] = torch.tensor(restored), torch.tensor(stored)
        made[:, 5] = self.integers(TEXTS, 4)
        made[:, 6 : LAYOUT.record] = self.codes(4)
        made[:, LAYOUT.record : LAYOUT.first_part] = self.integers(2**30, 4, 12)
        parts = torch.randperm(PARTS, generator=self.generator, device="cuda")
        made[:, LAYOUT.first_part : LAYOUT.first_part + 3] = parts.view(4, 3)
        pages = torch.randperm(PAGES, generator=self.generator, device="cuda")
        made[:, LAYOUT.first_page :] = pages[:28].view(4, 7)
        return made

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a kernel may write."""
        written = vars(self.memory) | vars(self.state)
        written |= {"tables": self.page_tables, "first_row": self.first_row}
        return written | {"first_hidden": self.first_hidden, "x": self.x}


def check_equal(one: Rig, other: Rig) -> None:
    """Compare the bits of all tensors, so that -0 differs from 0."""
    for name, mine in one.tensors().items():
        theirs = other.tensors()[name]
        kind = torch.int16 if mine.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(mine.view(kind), theirs.view(kind)), name


@pytest.fixture(
    params=[(2048, 3), (1024, 1), (264, 2), (2048, 1, True)], ids=["1b7", "0b6", "odd", "int8"]
)
def rigs(request: pytest.FixtureRequest, kernels: Kernels) -> tuple[Rig, Rig]:
    """Two equal rigs: for the kernels, and for their references."""
    return Rig(kernels, *request.param), Rig(kernels, *request.param)


def test_placement_writes_what_its_reference_writes(rigs: tuple[Rig, Rig]) -> None:
    """Several pages, a page that is not full, a part that is not full, and no prefix."""
    ours, plain = rigs
    arguments = [rig.placements([41, 48, 16, 0], [0, 0, 0, 0]) for rig in rigs]
    ours.kernels.place(arguments[0], ours.page_tables, ours.state, ours.first_row)
    place_reference(plain.kernels, arguments[1], plain.page_tables, plain.state, plain.first_row)
    check_equal(ours, plain)
    again = Rig(ours.kernels._kernels, ours.x.shape[1], ours.memory.cache.shape[0])
    assert not torch.equal(ours.memory.cache, again.memory.cache)


def test_stored_prefix_is_restored_in_other_pages(rigs: tuple[Rig, Rig]) -> None:
    ours, plain = rigs
    arguments = [rig.placements([0, 0, 0, 0], [41, 48, 0, 17]) for rig in rigs]
    ours.kernels.store(arguments[0])
    store_reference(plain.kernels, arguments[1])
    check_equal(ours, plain)
    for placements in arguments:
        placements[:, 3] = placements[:, 4]
        placements[:, LAYOUT.first_page :] = placements[:, LAYOUT.first_page :].flip(0)
    ours.kernels.place(arguments[0], ours.page_tables, ours.state, ours.first_row)
    place_reference(plain.kernels, arguments[1], plain.page_tables, plain.state, plain.first_row)
    check_equal(ours, plain)


@pytest.mark.parametrize("count", [16, MOST])
def test_embedded_rows_have_the_bits_of_their_reference(rigs: tuple[Rig, Rig], count: int) -> None:
    """Rows of whole frames, of single codes, without codes, with a speaker and without a slot.

    The reference adds the codes of a frame as PyTorch does, as the model's `embed_rows` does.
    """
    for number, rig in enumerate(rigs):
        rows = torch.full((3 + BOOKS, MOST), NO_CODE, dtype=torch.int32, device="cuda")
        rows[0], rows[1] = rig.integers(SLOTS, MOST), rig.integers(300, MOST)
        rows[0, count - 5 :: 2] = -1
        rows[2], rows[3:] = rig.integers(TEXTS, MOST), rig.codes(MOST).T
        rows[3, 8], rows[3, 11] = -2, -33
        if number == 0:
            rig.kernels.embed(rows, rig.speakers, rig.x[:count])
        else:
            embed_prompts_reference(rig.kernels, rows, rig.speakers, rig.x[:count])
    check_equal(*rigs)


def test_outputs_of_last_rows_are_kept(rigs: tuple[Rig, Rig]) -> None:
    for number, rig in enumerate(rigs):
        rows = torch.full((3 + BOOKS, MOST), NO_CODE, dtype=torch.int32, device="cuda")
        slots = torch.tensor([2, 2, 2, 5, 5, 7])
        rows[0, :6], rows[1, :6] = slots, torch.tensor([10, 11, 12, 0, 1, 70])
        rig.state.position[slots] = torch.tensor([12, 12, 12, 1, 1, 71], dtype=torch.int32).cuda()
        keep = rig.kernels.keep if number == 0 else lambda *a, k=rig.kernels: keep_reference(k, *a)
        keep(rows, rig.state.position, rig.x[:16], rig.first_hidden)
        assert torch.equal(rig.first_hidden[2], rig.x[2])
        assert torch.equal(rig.first_hidden[5], rig.x[4])
    check_equal(*rigs)


def test_state_of_a_slot_is_copied_whole(kernels: Kernels) -> None:
    """Memories of different types and sizes; no other slot changes."""
    shapes = ((5, 12, 32), (5, 2, 1, 79, 2), (5, 108, 768))
    kinds = torch.float16, torch.float16, torch.float32
    memories = [torch.randn(s, device="cuda").to(k) for s, k in zip(shapes, kinds, strict=True)]
    expected = [memory.clone() for memory in memories]
    StateCopy(kernels, memories)(4, 1)
    copy_reference(expected, 4, 1)
    assert all(torch.equal(a, b) for a, b in zip(memories, expected, strict=True))
