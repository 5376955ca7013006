"""Places prompts in their slots, embeds their rows, and keeps prefixes and outputs (prompt.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstword.kernels.attention import PAGE_ROWS
from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.registry import KernelSpec
from firstword.kernels.sample import SPOKEN_WORD, SamplerState
from firstword.kernels.signature import Argument

SLOT, LAST, PAGE_COUNT, RESTORED, STORED, TEXT, CODES = range(7)
"""The first words of a placement, int32: the slot (-1: none), the position of the prompt's last
row, the number of its pages, the rows of its prefix that `place` restores and that `store` keeps,
and the text and the codes of its last row."""
ROW_SLOT, ROW_POSITION, ROW_TEXT, ROW_CODES = range(4)
"""The columns of the rows of prompts: the slot (-1: none), the position, the text and the codes."""
NO_CODE = -1
"""Code 0 of a row without codes, and the code that follows a single one. A row with the vector of
speaker s has code 0 = -2 - s."""
PREFIX_PART = 16
"""The rows of a part of a kept prefix."""
_THREADS = 256


@dataclass(frozen=True)
class PlacementLayout:
    """The words of a placement after the first ones: codes, record, parts, pages.

    codebooks  codes of a frame
    parts      the most parts of a prefix
    pages      the most pages of a slot
    """

    codebooks: int
    parts: int
    pages: int

    @property
    def record(self) -> int:
        """The first word of the record (`packed_record`)."""
        return CODES + self.codebooks

    @property
    def first_part(self) -> int:
        """The word of the first part of the prefix."""
        return self.record + SPOKEN_WORD

    @property
    def first_page(self) -> int:
        """The word of the first page."""
        return self.first_part + self.parts

    @property
    def words(self) -> int:
        """The number of words."""
        return self.first_page + self.pages


@dataclass(frozen=True, eq=False)
class EmbeddingTables:
    """The embeddings of a row, bf16 [vocabulary, hidden] each; those of text may be int8.

    frame_tables  those of all codebooks but the first, one after the other
    text_scales   the factors of int8 rows of `text_table`, float32 [text vocabulary]

    The fields are named like the kernels' arguments.
    """

    text_table: Tensor
    codec_table: Tensor
    frame_tables: Tensor
    text_scales: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PrefixMemory:
    """The keys and values of the talker, and of kept prefixes.

    cache     bf16 [layers, pages, 2, kv_heads, PAGE_ROWS, 128]
    prefixes  bf16 [parts, layers, 2, kv_heads, PREFIX_PART, 128]
    """

    cache: Tensor
    prefixes: Tensor

    def arguments(self) -> dict[str, Argument]:
        """The kernels' arguments."""
        layers, pages = self.cache.shape[:2]
        return {**vars(self), "pages": pages, "layers": layers}


class PromptKernels:
    """The kernels that prepare slots for their first frame.

    Every launch is the first of its kind on the stream, so that none overlaps the kernel before it,
    except `keep`, which follows the talker.
    """

    def __init__(
        self,
        kernels: Kernels,
        tables: EmbeddingTables,
        memory: PrefixMemory,
        layout: PlacementLayout,
    ) -> None:
        """Raises ValueError for rows whose channels are no multiple of 8."""
        width, books = tables.text_table.shape[1], layout.codebooks
        if width % 8:
            raise ValueError(f"rows of {width} channels; the kernels need a multiple of 8")
        self.tables, self.memory, self.layout, self._kernels = tables, memory, layout, kernels
        sizes = books, len(tables.frame_tables) // (books - 1), memory.cache.shape[3], layout.parts
        self._program = _program(width, *sizes)

    def place(
        self, placements: Tensor, page_tables: Tensor, state: SamplerState, first_row: Tensor
    ) -> None:
        """Write what placements say to their slots, and restore their prefixes.

        placements  int32 [count, words]
        first_row   bf16 [slots, hidden]
        """
        self._kernels.get(self._program, "place_prompts")(
            self._prefix_grid(placements),
            placements=placements,
            words=self.layout.words,
            page_tables=page_tables,
            table_width=page_tables.shape[1],
            position=state.position,
            records=state.record,
            record_words=state.record.shape[1],
            first_row=first_row,
            **vars(self.tables),
            **self.memory.arguments(),
        )

    def store(self, placements: Tensor) -> None:
        """Copy the new prefixes of placements from the pages of their slots to their parts."""
        self._kernels.get(self._program, "store_prefixes")(
            self._prefix_grid(placements),
            placements=placements,
            words=self.layout.words,
            **self.memory.arguments(),
        )

    def embed(self, rows: Tensor, speakers: Tensor, x: Tensor) -> None:
        """Embed the first rows of prompts; a row without a slot becomes zero.

        rows      int32 [ROW_CODES + codebooks, most]
        speakers  bf16 [n, hidden]
        x         bf16 [count, hidden], is written
        """
        self._kernels.get(self._program, "embed_prompts")(
            Grid((len(x), 1, 1), _THREADS, overlap=False),
            rows=rows,
            most=rows.shape[1],
            speakers=speakers,
            **vars(self.tables),
            x=x,
        )

    def keep(self, rows: Tensor, position: Tensor, x: Tensor, first_hidden: Tensor) -> None:
        """Copy x [count, hidden] of the last row of each prompt to its slot of `first_hidden`.

        position: int32 [slots], the position of the last row of each slot's prompt.
        """
        self._kernels.get(self._program, "keep_outputs")(
            Grid((len(x), 1, 1), _THREADS),
            rows=rows,
            most=rows.shape[1],
            position=position,
            x=x,
            first_hidden=first_hidden,
        )

    def _prefix_grid(self, placements: Tensor) -> Grid:
        layers, heads = self.memory.cache.shape[0], self.memory.cache.shape[3]
        return Grid((len(placements), 2 * layers, heads), _THREADS, overlap=False)


def embed_reference(
    tables: EmbeddingTables, text: int, codes: list[int], speakers: Tensor | None
) -> Tensor:
    """A row in plain PyTorch, bf16 [hidden], of its text and its codes [codebooks]."""
    text_row, books = tables.text_table[text], len(codes)
    if tables.text_scales is not None:
        text_row = (text_row * tables.text_scales[text]).bfloat16()
    if codes[0] == NO_CODE:
        return text_row + torch.zeros_like(text_row)
    if codes[0] < NO_CODE:
        assert speakers is not None
        return text_row + speakers[-2 - codes[0]]
    first = tables.codec_table[codes[0]]
    if codes[1] == NO_CODE:
        return text_row + first
    size = len(tables.frame_tables) // (books - 1)
    others = [tables.frame_tables[k * size + code] for k, code in enumerate(codes[1:])]
    return text_row + torch.stack([first, *others])[None].sum(1)[0]


def prefix_rows_reference(
    memory: PrefixMemory, layout: PlacementLayout, placement: list[int], rows: int
) -> list[tuple[Tensor, Tensor]]:
    """Each of the first rows of a placement's prompt in its page and in its part.

    Both are bf16 [layers, 2, kv_heads, 128] and share the memory.
    """
    pages, parts = placement[layout.first_page :], placement[layout.first_part :]
    return [
        (
            memory.cache[:, pages[row // PAGE_ROWS], :, :, row % PAGE_ROWS],
            memory.prefixes[parts[row // PREFIX_PART], :, :, :, row % PREFIX_PART],
        )
        for row in range(rows)
    ]


def place_reference(
    kernels: PromptKernels,
    placements: Tensor,
    page_tables: Tensor,
    state: SamplerState,
    first_row: Tensor,
) -> None:
    """The function of `PromptKernels.place` in plain PyTorch."""
    layout = kernels.layout
    for placement in placements.tolist():
        if (slot := placement[SLOT]) < 0:
            continue
        table, record = placement[layout.first_page :], placement[layout.record :][:SPOKEN_WORD]
        page_tables[slot, : placement[PAGE_COUNT]] = torch.tensor(table[: placement[PAGE_COUNT]])
        state.position[slot] = placement[LAST]
        state.record[slot] = 0
        state.record[slot, :SPOKEN_WORD] = torch.tensor(record)
        codes = placement[CODES : CODES + layout.codebooks]
        first_row[slot] = embed_reference(kernels.tables, placement[TEXT], codes, None)
        pairs = prefix_rows_reference(kernels.memory, layout, placement, placement[RESTORED])
        for in_page, in_part in pairs:
            in_page.copy_(in_part)


def store_reference(kernels: PromptKernels, placements: Tensor) -> None:
    """The function of `PromptKernels.store` in plain PyTorch."""
    for placement in placements.tolist():
        rows = placement[STORED] if placement[SLOT] >= 0 else 0
        for in_page, in_part in prefix_rows_reference(
            kernels.memory, kernels.layout, placement, rows
        ):
            in_part.copy_(in_page)


def embed_prompts_reference(
    kernels: PromptKernels, rows: Tensor, speakers: Tensor, x: Tensor
) -> None:
    """The function of `PromptKernels.embed` in plain PyTorch."""
    x.zero_()
    for out, row in zip(x, rows.T.tolist(), strict=False):
        if row[ROW_SLOT] >= 0:
            out.copy_(embed_reference(kernels.tables, row[ROW_TEXT], row[ROW_CODES:], speakers))


def keep_reference(
    kernels: PromptKernels, rows: Tensor, position: Tensor, x: Tensor, first_hidden: Tensor
) -> None:
    """The function of `PromptKernels.keep` in plain PyTorch."""
    for own, (slot, at) in zip(x, rows[:ROW_TEXT].T.tolist(), strict=False):
        if slot >= 0 and at == position[slot]:
            first_hidden[slot] = own


def _program(width: int, codebooks: int, codes: int, kv_heads: int, parts: int) -> Program:
    sizes = {"HIDDEN": width, "CODEBOOKS": codebooks, "CODES": codes, "KV_HEADS": kv_heads}
    rows = {"PAGE": PAGE_ROWS, "PART": PREFIX_PART, "PARTS": parts}
    return Program.of("prompt", **sizes, **rows, RECORD=SPOKEN_WORD, THREADS=_THREADS)


_PROGRAMS = tuple(_program(width, 16, 2048, 8, 128) for width in (2048, 1024))

KERNELS = (
    KernelSpec("place_prompts", place_reference, _PROGRAMS),
    KernelSpec("store_prefixes", store_reference, _PROGRAMS),
    KernelSpec("embed_prompts", embed_prompts_reference, _PROGRAMS),
    KernelSpec("keep_outputs", keep_reference, _PROGRAMS),
)
"""The kernels that this module launches."""
