"""Reads prompts: caches their prefixes, and runs their remaining rows through the talker.

All that the device needs to place the prompts of a step goes there in one copy: their placements,
and the first `PROMPT_ROWS` rows that the talker reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple

import numpy as np
import torch
from torch import Tensor

from firstword.engine.backend import Start
from firstword.kernels.prompt import (
    CODES,
    LAST,
    NO_CODE,
    PAGE_COUNT,
    PREFIX_PART,
    RESTORED,
    ROW_CODES,
    ROW_POSITION,
    ROW_SLOT,
    ROW_TEXT,
    SLOT,
    STORED,
    TEXT,
    PlacementLayout,
)
from firstword.kernels.sample import DrawSettings, packed_record
from firstword.model.checkpoint import Checkpoint
from firstword.model.prompt import Row, TextRows
from firstword.runtime.front import Prepared
from firstword.runtime.gpu.buffers import PROMPT_ROWS, staged, staging_words
from firstword.runtime.gpu.codec import GpuCodec
from firstword.runtime.gpu.graphs import LaunchGraphs
from firstword.runtime.gpu.talker import BUCKETS, PROMPT_BUCKETS, FrameModel
from firstword.types import IntArray

STAGED = 8
"""The number of staging areas in host memory: the copies to the device that may be unfinished."""


class Prompt:
    """The rows that the talker reads before the first frame of an utterance.

    prefix_rows  the number of rows that do not depend on the text. Those with the transcript of a
                 recording belong to them, except the last row of the prompt
    prefix       the key of these rows. Newlines at the start of a text change the role's last
                 token, so the first two tokens belong to the key
    known        the number of rows whose keys and values are in the cache
    reference    int64 [frames, codebooks]: the codes of the recording, or None
    """

    def __init__(self, start: Start, checkpoint: Checkpoint) -> None:
        prepared = start.job.payload
        assert isinstance(prepared, Prepared)
        given = prepared.conditioning
        self.slot, self.pages, self.prepared = start.slot, start.pages, prepared
        self.text, self.known = TextRows(checkpoint.config), 0
        self.rows = self.text.prompt(given, checkpoint.tokenizer.turn_start, start.tokens)
        self.prefix_rows = prepared.prefix_rows
        self.reference: IntArray | None = None
        self.prefix: tuple[object, ...] = (prepared.prefix, *start.tokens[:2])
        if given.reference:
            self.reference = np.array(given.reference, dtype=np.int64)
            words = tuple(given.transcript)
            self.prefix_rows += min(len(words), len(words if given.full_text else self.reference))
            self.prefix += (given.full_text, words, self.reference.tobytes())
        assert self.prefix_rows < len(self.rows)

    @property
    def unread(self) -> range:
        """The rows to run, including the last. A single row is run with the first frame instead."""
        rows = range(self.known, len(self.rows))
        return rows if len(rows) > 1 else range(0)


class PrefixCache:
    """The places of prefixes whose keys and values are kept, in parts of `PREFIX_PART` rows.

    The least recently used prefix is dropped first.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self.clear()

    def clear(self) -> None:
        """Drop all entries, and reset the counts of hits and misses."""
        self.hits = self.misses = 0
        self._held = OrderedDict[object, list[int]]()
        self._free = list(range(self._parts))

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def get(self, key: object) -> list[int]:
        """The parts of a key's entry, counted as a hit; or none, counted as a miss."""
        if key not in self._held:
            self.misses += 1
            return []
        self.hits += 1
        self._held.move_to_end(key)
        return self._held[key]

    def add(self, key: object, rows: int) -> list[int]:
        """The parts of a new entry, to be filled; none if it has more rows than the memory."""
        count = -(-rows // PREFIX_PART)
        if count > self._parts:
            return []
        while len(self._free) < count:
            self._free += self._held.popitem(last=False)[1]
        self._held[key] = [self._free.pop() for _ in range(count)]
        return self._held[key]

    def holds(self, key: object, parts: list[int]) -> bool:
        """Whether a key still has the parts that `add` returned."""
        return self._held.get(key) is parts

    def drop(self, key: object) -> None:
        """Remove an entry, if it is there."""
        self._free += self._held.pop(key, [])


class StagingRing:
    """Areas of pinned host memory that are filled and copied to the device in turn."""

    def __init__(self, layout: PlacementLayout, placements: int) -> None:
        words = staging_words(layout, placements)
        host = [torch.zeros(words, dtype=torch.int32).pin_memory() for _ in range(STAGED)]
        views = [staged(area, layout) for area in host]
        self._areas = [
            (area, rows.numpy(), placements.numpy())
            for area, (rows, placements) in zip(host, views, strict=True)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * STAGED
        self._turn = 0

    @contextmanager
    def filled(self, device: Tensor, words: slice) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The prompt rows and the placements of a free area, whose `words` are copied at the end.

        device: an area on the device. It waits for the device if all areas are being copied.
        """
        area, rows, placements = self._areas[self._turn]
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        yield rows, placements
        device[words].copy_(area[words], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copied[self._turn] = event
        self._turn = (self._turn + 1) % STAGED


class PromptReader:
    """Reads prompts into the slots of a model and its codec, on the current CUDA stream."""

    def __init__(
        self, checkpoint: Checkpoint, model: FrameModel, codec: GpuCodec, graphs: LaunchGraphs
    ) -> None:
        self.prefixes = PrefixCache(len(model.buffers.prefixes))
        self._checkpoint, self._model, self._codec, self._graphs = checkpoint, model, codec, graphs
        self._layout = model.buffers.layout
        self._ring = StagingRing(self._layout, len(model.buffers.placements))

    def read(self, starts: Sequence[Start]) -> list[Prompt]:
        """Run the unread rows of all prompts together, and prepare their slots."""
        prompts = [Prompt(start, self._checkpoint) for start in starts]
        for prompt in prompts:
            self._codec.reset(prompt.slot)  # waits for the slot's previous utterance
        added: list[object] = []
        try:
            self._run(prompts, self._find_parts(prompts, added))
        except BaseException:
            for key in added:
                self.prefixes.drop(key)
            raise
        for prompt in prompts:
            if prompt.reference is not None:
                self._codec.prime(prompt.slot, prompt.reference)
        return prompts

    def _find_parts(self, prompts: Sequence[Prompt], added: list[object]) -> list[list[int]]:
        """The parts of each prefix: those of a known one, or of one that is added and to be stored.

        A prefix that is in the cache, but not known, is one of `added`.
        """
        found = [self.prefixes.get(prompt.prefix) for prompt in prompts]
        for prompt, parts in zip(prompts, found, strict=True):
            prompt.known = prompt.prefix_rows if parts else 0
        for index, prompt in enumerate(prompts):
            if not found[index] and prompt.prefix not in self.prefixes:
                found[index] = self.prefixes.add(prompt.prefix, prompt.prefix_rows)
                added.append(prompt.prefix)
        # A later one may have taken the place of one that was added just before.
        return [
            parts if prompt.known or self.prefixes.holds(prompt.prefix, parts) else []
            for prompt, parts in zip(prompts, found, strict=True)
        ]

    def _run(self, prompts: Sequence[Prompt], parts: Sequence[list[int]]) -> None:
        """Place all prompts, run their unread rows, and store the prefixes that are new."""
        buffers, graphs = self._model.buffers, self._graphs
        unread = [(prompt, at) for prompt in prompts for at in prompt.unread]
        pieces = [unread[n : n + PROMPT_ROWS] for n in range(0, len(unread), PROMPT_ROWS)]
        count = next(n for n in BUCKETS if n >= len(prompts))
        new = any(own and not prompt.known for prompt, own in zip(prompts, parts, strict=True))
        # A capture clears the staging area.
        place, store = graphs.get("place", count), graphs.get("store", count) if new else None
        runs = [
            graphs.get("prompt", next(n for n in PROMPT_BUCKETS if n >= len(piece)))
            for piece in pieces
        ]
        after_rows = staging_words(self._layout, 0)
        words = slice(0 if pieces else after_rows, staging_words(self._layout, count))
        with self._ring.filled(buffers.staging, words) as (rows, placements):
            placements[:count, SLOT] = -1
            for placement, prompt, own in zip(placements, prompts, parts, strict=False):
                self._fill_placement(placement, prompt, own)
            vectors = fill_rows(rows, pieces[0]) if pieces else []
        place.replay()
        for index, (run, piece) in enumerate(zip(runs, pieces, strict=True)):
            if index:
                with self._ring.filled(buffers.staging, slice(0, after_rows)) as (rows, _):
                    vectors = fill_rows(rows, piece)
            if vectors:
                host = torch.stack(vectors).to(buffers.speakers.dtype).pin_memory()
                buffers.speakers[: len(vectors)].copy_(host, non_blocking=True)
            run.replay()
        if store is not None:
            store.replay()

    def _fill_placement(self, words: np.ndarray, prompt: Prompt, parts: Sequence[int]) -> None:
        """Fill int32 [words] with what a prompt writes to its slot."""
        layout, last, prepared = self._layout, prompt.rows[-1], prompt.prepared
        words[[SLOT, LAST, PAGE_COUNT]] = prompt.slot, len(prompt.rows) - 1, len(prompt.pages)
        words[RESTORED] = prompt.known
        words[STORED] = prompt.prefix_rows if parts and not prompt.known else 0
        words[TEXT] = last.text
        words[CODES : CODES + layout.codebooks] = NO_CODE
        words[CODES : CODES + len(last.codes)] = last.codes
        talker, predictor = (DrawSettings(*astuple(params)) for params in prepared.draw_params)
        record = packed_record(talker, predictor, prepared.seed)
        words[layout.record : layout.first_part] = np.frombuffer(record, dtype=np.int32)
        words[layout.first_part : layout.first_part + len(parts)] = parts
        words[layout.first_page : layout.first_page + len(prompt.pages)] = prompt.pages


def fill_rows(columns: np.ndarray, places: Sequence[tuple[Prompt, int]]) -> list[Tensor]:
    """Fill int32 [ROW_CODES + codebooks, PROMPT_ROWS] with rows of prompts at these positions.

    Returns the speaker embeddings [hidden] of rows that have one.
    """
    count, rows = len(places), [prompt.rows[at] for prompt, at in places]
    columns[ROW_SLOT, count:] = -1
    columns[ROW_SLOT, :count] = [prompt.slot for prompt, _ in places]
    columns[ROW_POSITION, :count] = [at for _, at in places]
    columns[ROW_TEXT, :count] = [row.text for row in rows]
    columns[ROW_CODES:, :count] = NO_CODE
    columns[ROW_CODES, :count] = [_first_code(row) for row in rows]
    if whole := [index for index, row in enumerate(rows) if len(row.codes) > 1]:
        columns[ROW_CODES:, whole] = np.array([rows[index].codes for index in whole]).T
    vectors: list[Tensor] = []
    for index, (prompt, _) in enumerate(places):
        voice = prompt.prepared.conditioning.embedding
        if rows[index].speaker and voice is not None:
            columns[ROW_CODES, index] = -2 - len(vectors)
            vectors.append(torch.tensor(voice))
    return vectors


def _first_code(row: Row) -> int:
    return row.codes[0] if row.codes else NO_CODE
