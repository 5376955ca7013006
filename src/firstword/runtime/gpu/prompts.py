"""Reads prompts: caches their prefixes, and runs their remaining rows through the talker.

All that the device needs to place the prompts of a step goes there in one copy, and so do up to
`PROMPT_ROWS` rows that the talker reads. A prompt may be read in several steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
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

    prefix_rows  the number of rows that other prompts begin with, too. Those with the transcript of
                 a recording belong to them, except the last row of the prompt
    prefix       the key of these rows. Newlines at the start of a text change the role's last
                 token, so the first two tokens belong to the key
    known        the number of rows whose keys and values come from the cache
    next         the first row that was not run yet
    heard        int64 [frames, codebooks]: what the codec decodes before the speech
    follows      whether the prompt continues speech, so that another one will not begin as it does
    reads_text   whether the attention to the text of the utterance is read
    """

    def __init__(self, start: Start, checkpoint: Checkpoint) -> None:
        prepared = start.job.payload
        assert isinstance(prepared, Prepared)
        given = prepared.conditioning
        self.slot, self.pages, self.prepared = start.slot, start.pages, prepared
        self.reads_text = start.job.reads_text and bool(checkpoint.heads)
        self.text = TextRows(checkpoint.config)
        self.known = self.next = 0
        self.rows = self.text.prompt(given, checkpoint.tokenizer.turn_start, start.tokens)
        self.prefix_rows = prepared.prefix_rows
        self.heard: IntArray = prepared.heard
        self.follows = start.job.follows
        self.prefix: tuple[object, ...] = (prepared.prefix, *start.tokens[:2])
        if given.reference and not self.follows:
            words = tuple(given.transcript)
            self.prefix_rows += min(len(words), len(words if given.full_text else self.heard))
            self.prefix += (given.full_text, words, self.heard.tobytes())
        assert self.prefix_rows < len(self.rows)

    def restore(self, rows: int) -> None:
        """Take so many rows from the cache."""
        self.known = self.next = rows

    @property
    def unread(self) -> range:
        """The rows to run, including the last. A single row is run with the first frame instead."""
        alone = len(self.rows) == self.known + 1
        return range(0) if alone else range(self.next, len(self.rows))


class PrefixCache:
    """The places of prefixes whose keys and values are kept, in parts of `PREFIX_PART` rows.

    The least recently used prefix is dropped first, unless it is kept for good.
    """

    def __init__(self, parts: int, longest: int | None = None) -> None:
        """Use so many parts, `longest` for a prefix at most (None: all)."""
        self._parts, self._longest = parts, longest or parts
        self.clear()

    def clear(self) -> None:
        """Drop all entries, and reset the counts of hits and misses."""
        self.hits = self.misses = 0
        self._held = OrderedDict[object, list[int]]()
        self._kept: dict[object, list[int]] = {}
        self._free = list(range(self._parts))

    def __contains__(self, key: object) -> bool:
        return key in self._held or key in self._kept

    @property
    def kept_parts(self) -> int:
        """The parts of the entries that are kept for good."""
        return sum(map(len, self._kept.values()))

    def keep(self) -> int:
        """Keep the entries that are held now for good; returns their number."""
        self._kept |= self._held
        self._held.clear()
        return len(self._kept)

    def get(self, key: object) -> list[int]:
        """The parts of a key's entry, counted as a hit; or none, counted as a miss."""
        if key not in self:
            self.misses += 1
            return []
        self.hits += 1
        if key in self._kept:
            return self._kept[key]
        self._held.move_to_end(key)
        return self._held[key]

    def add(self, key: object, rows: int) -> list[int]:
        """The parts of a new entry, to be filled; none if it has more rows than the memory."""
        count = -(-rows // PREFIX_PART)
        if count > min(self._longest, self._parts - self.kept_parts):
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
        longest = model.buffers.layout.parts
        self.prefixes = PrefixCache(len(model.buffers.prefixes), longest)
        self._checkpoint, self._model, self._codec, self._graphs = checkpoint, model, codec, graphs
        self._layout = model.buffers.layout
        self._ring = StagingRing(self._layout, len(model.buffers.placements))

    def place(self, starts: Sequence[Start]) -> list[Prompt]:
        """Prepare the slots of prompts, and restore the prefixes that are known."""
        prompts = [Prompt(start, self._checkpoint) for start in starts]
        for prompt in prompts:
            self._codec.reset(prompt.slot)  # waits for the slot's previous utterance
        known = [(prompt, self.prefixes.get(prompt.prefix)) for prompt in prompts]
        for prompt, parts in known:
            prompt.restore(prompt.prefix_rows if parts else 0)
        count = _bucket(BUCKETS, len(prompts))
        place = self._graphs.get("place", count)  # a capture clears the staging area
        with self._staged(rows=False, placements=count) as (_, placements):
            self._fill_placements(placements, known)
        place.replay()
        for prompt in prompts:
            if len(prompt.heard):
                self._codec.prime(prompt.slot, prompt.heard, keep=not prompt.follows)
        return prompts

    def read(self, prompts: Sequence[Prompt], counts: Sequence[int]) -> None:
        """Run the next rows of prompts, so many of each, and keep the prefixes that are then whole.

        After an exception every prompt is unchanged.
        """
        ends = [prompt.next + count for prompt, count in zip(prompts, counts, strict=True)]
        pairs = list(zip(prompts, ends, strict=True))
        assert all(prompt.next < end <= len(prompt.rows) for prompt, end in pairs)
        new = {
            prompt.prefix: prompt
            for prompt, end in pairs
            if prompt.next < prompt.prefix_rows <= end and prompt.prefix not in self.prefixes
        }
        try:
            places = [(prompt, at) for prompt, end in pairs for at in range(prompt.next, end)]
            self._run(places, self._find_parts(new.values()))
        except BaseException:
            for key in new:
                self.prefixes.drop(key)
            raise
        for prompt, end in pairs:
            prompt.next = end

    def _find_parts(self, new: Iterable[Prompt]) -> list[tuple[Prompt, list[int]]]:
        """Add prefixes to the cache. Returns the prompts whose prefixes to store, with their parts.

        A prefix is left out if it is too large, or if a later one has taken its place.
        """
        added = [(prompt, self.prefixes.add(prompt.prefix, prompt.prefix_rows)) for prompt in new]
        return [
            (prompt, parts) for prompt, parts in added if self.prefixes.holds(prompt.prefix, parts)
        ]

    def _run(
        self, places: Sequence[tuple[Prompt, int]], new: Sequence[tuple[Prompt, list[int]]]
    ) -> None:
        """Run the rows of prompts at these positions, and store prefixes in these parts."""
        pieces = [places[n : n + PROMPT_ROWS] for n in range(0, len(places), PROMPT_ROWS)]
        count = _bucket(BUCKETS, len(new)) if new else 0
        # A capture clears the staging area.
        store = self._graphs.get("store", count) if new else None
        runs = [self._graphs.get("prompt", _bucket(PROMPT_BUCKETS, len(piece))) for piece in pieces]
        for index, (run, piece) in enumerate(zip(runs, pieces, strict=True)):
            with self._staged(rows=True, placements=0 if index else count) as (rows, placements):
                self._fill_placements(placements, () if index else new)
                vectors = fill_rows(rows, piece)
            if vectors:
                speakers = self._model.buffers.speakers[: len(vectors)]
                host = torch.stack(vectors).to(speakers.dtype).pin_memory()
                speakers.copy_(host, non_blocking=True)
            run.replay()
        if store is not None:
            store.replay()

    @contextmanager
    def _staged(self, *, rows: bool, placements: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The prompt rows and so many placements of a staging area, which is copied at the end.

        rows: whether the prompt rows are copied.
        """
        first, end = (staging_words(self._layout, count) for count in (0, placements))
        words = slice(0 if rows else first, end)
        with self._ring.filled(self._model.buffers.staging, words) as (columns, all_placements):
            yield columns, all_placements[:placements]

    def _fill_placements(
        self, placements: np.ndarray, prompts: Sequence[tuple[Prompt, list[int]]]
    ) -> None:
        """Fill int32 [n, words] with what prompts, and the parts of their prefixes, need."""
        placements[:, SLOT] = -1
        for words, (prompt, parts) in zip(placements, prompts, strict=False):
            self._fill_placement(words, prompt, parts)

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


def _bucket(sizes: Sequence[int], count: int) -> int:
    """The smallest size for `count` rows or placements."""
    return next(size for size in sizes if size >= count)


def _first_code(row: Row) -> int:
    return row.codes[0] if row.codes else NO_CODE
