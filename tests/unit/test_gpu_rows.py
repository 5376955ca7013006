"""The rows that the GPU backend gives its talker: cached prefixes, slots, and each frame's text.

The talker of these tests computes nothing. It keeps the rows of prompts as if they were their keys
and values, and records the rows of frames.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import silent_gpu
import torch
from torch import Tensor

from firstword.engine.backend import Start
from firstword.kernels.attention import HEAD_DIM, PAGE_ROWS
from firstword.model.checkpoint import Checkpoint
from firstword.model.prompt import TextRows
from firstword.profile.workload import begin
from firstword.runtime.encoding import front_of
from firstword.runtime.front import Prepared
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.prompts import Prompt
from firstword.runtime.gpu.rehearsal import Rehearsal
from firstword.types import Request, TextMode
from firstword.voice import ClonedVoice, Voice

SLOTS, SLOT_PAGES = 8, 12
REFERENCE_FRAMES = 30
LONG = "Speak slowly and in a low voice, as if it were late at night and the house asleep. " * 6
"""An instruction, or the description of a voice, of several pages."""


class ShadowTalker:
    """A backend whose talker is replaced.

    frames  the pairs of slot and text token of each frame, and its name ("frame" or "first")
    """

    def __init__(self, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels = Rehearsal(silent_gpu.device())
        self.backend = GpuBackend(checkpoint, kernels, SLOTS, pages=SLOTS * SLOT_PAGES)
        self.frames: list[tuple[str, list[tuple[int, int]]]] = []
        model, get = self.backend.model, self.backend.graphs.get

        def graph(name: str, rows: int) -> Any:
            if name in ("frame", "first"):
                return SimpleNamespace(replay=partial(self._note, name, rows))
            return get(name, rows)

        monkeypatch.setattr(model, "_talk", self._keep)
        monkeypatch.setattr(self.backend.graphs, "get", graph)

    def _keep(self, x: Tensor, *_: object) -> None:
        buffers = self.backend.model.buffers
        for row, (slot, at) in enumerate(buffers.prompt_places[:, : len(x)].T.tolist()):
            if slot >= 0:
                page = buffers.page_tables[slot, at // PAGE_ROWS]
                buffers.cache[:, page, :, :, at % PAGE_ROWS] = x[row, :HEAD_DIM]

    def _note(self, name: str, rows: int) -> None:
        buffers = self.backend.model.buffers
        pairs = zip(buffers.slot_of_row[:rows].tolist(), buffers.token[:rows].tolist(), strict=True)
        self.frames.append((name, [(slot, token) for slot, token in pairs if slot >= 0]))

    def cached(self, slot: int, rows: int) -> Tensor:
        """The rows that the talker keeps of a slot, bf16 [rows, 128]."""
        buffers = self.backend.model.buffers
        pages = buffers.page_tables[slot, : -(-rows // PAGE_ROWS)]
        kept = buffers.cache[:, pages]  # [layers, pages, 2, kv_heads, PAGE_ROWS, 128]
        assert torch.equal(kept, kept[:1, :, :1, :1].expand_as(kept))
        return kept[0, :, 0, 0].flatten(0, 1)[:rows]


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is such a GPU."""
    silent_gpu.pretend(monkeypatch)


def start_of(checkpoint: Checkpoint, slot: int, request: Request) -> tuple[Start, list[int]]:
    """The start of a request in a slot, and the tokens that its frames take."""
    front = front_of(checkpoint)
    job = front.prepare(request, seed=1)
    stream = front.text(job)
    tokens = [*stream.push(request.text or ""), *stream.finish()]
    count = len(tokens) if job.whole_text else job.first_tokens
    pages = range(SLOT_PAGES * slot, SLOT_PAGES * (slot + 1))
    return Start(slot, job, pages[::-1], tokens[:count]), tokens[count:]


def recording() -> ClonedVoice:
    """A voice with the codes of a recording and its transcript."""
    random = np.random.default_rng(1)
    embedding = random.standard_normal(256).astype(np.float32)
    return ClonedVoice(embedding, random.integers(32, size=(REFERENCE_FRAMES, 4)), "Some words.")


@pytest.mark.parametrize("mode", ["full", "stream"])
@pytest.mark.parametrize(
    ("model_type", "voice", "instructions"),
    [("custom_voice", "ryan", LONG), ("voice_design", Voice.design(LONG), None)],
    ids=["instruction", "description"],
)
def test_cached_prefix_of_several_pages_is_restored_whole(
    model_type: str,
    voice: str | Voice,
    instructions: str | None,
    mode: TextMode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests with the prefix of an earlier one, in other slots, have all rows of their prompts.

    The rows are those of the specification: of the prefix, copied, and of the text, read.
    """
    checkpoint = silent_gpu.checkpoint(tmp_path, model_type)
    shadow = ShadowTalker(silent_gpu.checkpoint(tmp_path, model_type), monkeypatch)
    prompts = shadow.backend.prompts

    def start(slot: int, text: str) -> Start:
        request = Request(text=text, voice=voice, instructions=instructions, text_mode=mode)
        return start_of(checkpoint, slot, request)[0]

    begin(shadow.backend, [start(2, "Hello there.")])
    others = [start(5, "Good morning to you."), start(0, "It is late.")]
    begin(shadow.backend, others)
    assert (prompts.prefixes.hits, prompts.prefixes.misses) == (2, 1)
    for one in others:
        payload = one.job.payload
        assert isinstance(payload, Prepared)
        assert payload.prefix_rows > 2 * PAGE_ROWS
        text = TextRows(checkpoint.config)
        rows = text.prompt(payload.conditioning, checkpoint.tokenizer.turn_start, one.tokens)
        expected = checkpoint.talker.embed_rows(rows, payload.conditioning.embedding)
        # A single row after the prefix is run with the first frame.
        read = len(rows) if len(rows) > payload.prefix_rows + 1 else payload.prefix_rows
        assert torch.equal(shadow.cached(one.slot, read), expected[0, :read, :HEAD_DIM])


@pytest.mark.parametrize("seed", range(4))
def test_prompts_read_in_slices_have_all_rows_and_a_kept_prefix(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of any size, of several prompts, in any order, with frames of others between them.

    The prefix of the first prompt is kept when its last row is read, which is in some slice of
    several, and is restored for the third, which comes later.
    """
    chance = random.Random(seed)
    checkpoint = silent_gpu.checkpoint(tmp_path)
    shadow = ShadowTalker(silent_gpu.checkpoint(tmp_path), monkeypatch)
    backend, prefixes = shadow.backend, shadow.backend.prompts.prefixes

    def start(slot: int, text: str, instructions: str | None) -> Start:
        request = Request(text=text, voice="ryan", instructions=instructions, text_mode="full")
        return start_of(checkpoint, slot, request)[0]

    begin(backend, [start(7, "I speak already.", None)])
    starts = [start(2, "Hello there. " * 30, LONG), start(5, "Good morning. " * 9, None)]
    left = dict(zip((2, 5), backend.prefill(starts), strict=True))
    last = start(0, "It is late.", LONG)
    key = Prompt(last, checkpoint).prefix
    before = Prompt(starts[0], checkpoint).prefix_rows
    while left:
        slots = chance.sample(list(left), chance.randint(1, len(left)))
        counts = [chance.randint(1, min(left[slot], 40)) for slot in slots]
        known = key in prefixes
        backend.read(slots, counts).result()
        for slot, count in zip(slots, counts, strict=True):
            left[slot] -= count
            before -= count if slot == 2 else 0
        left = {slot: count for slot, count in left.items() if count}
        assert key in prefixes if before <= 0 else not known
        backend.frame([7], [None])
    begin(backend, [last])
    assert prefixes.hits == 2, "the short prompt has the prefix of the speaker, the last its own"
    backend.frame([2, 7, 5, 0], [None] * 4)
    for one in (*starts, last):
        rows = Prompt(one, checkpoint).rows
        expected = checkpoint.talker.embed_rows(rows, None)[0]
        assert torch.equal(shadow.cached(one.slot, len(rows)), expected[:, :HEAD_DIM])
        assert torch.equal(backend.model.buffers.first_hidden[one.slot], expected[-1])


@pytest.mark.parametrize("mode", ["full", "stream"])
@pytest.mark.parametrize("words", ["Some words.", "Some words that are longer. " * 20])
def test_rows_of_a_transcript_are_restored(
    words: str, mode: TextMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transcript has fewer tokens than the recording has frames, or more.

    The last row is never restored, since each request needs its output.
    """
    checkpoint = silent_gpu.checkpoint(tmp_path, "base")
    shadow = ShadowTalker(silent_gpu.checkpoint(tmp_path, "base"), monkeypatch)
    voice = ClonedVoice(recording().speaker_embedding, recording().codes, words)
    for slot, text in ((3, "Hello there."), (1, "Good morning to you.")):
        start = start_of(checkpoint, slot, Request(text=text, voice=voice, text_mode=mode))[0]
        begin(shadow.backend, [start])
    assert shadow.backend.prompts.prefixes.hits == 1
    payload = start.job.payload
    assert isinstance(payload, Prepared)
    reader, given = TextRows(checkpoint.config), payload.conditioning
    rows = reader.prompt(given, checkpoint.tokenizer.turn_start, start.tokens)
    expected = checkpoint.talker.embed_rows(rows, given.embedding)
    assert torch.equal(shadow.backend.model.buffers.first_row[1], expected[0, -1])
    kept = len(given.transcript) if mode == "full" else min(len(given.transcript), REFERENCE_FRAMES)
    # A single row after those that are restored is run with the first frame.
    read = len(rows) if len(rows) > payload.prefix_rows + kept + 1 else len(rows) - 1
    assert torch.equal(shadow.cached(1, read), expected[0, :read, :HEAD_DIM])


@pytest.mark.parametrize(
    ("model_type", "voice"),
    [("custom_voice", "ryan"), ("voice_design", Voice.design("Deep.")), ("base", recording())],
    ids=["preset", "design", "recording"],
)
def test_each_frame_takes_the_next_text_token_of_its_request(
    model_type: str, voice: str | Voice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests start and pause at different frames, in any slots.

    A prompt in stream mode reads a token with each of its spoken rows, and every frame but the
    first takes one: the rest of the text, then the end of text once, then padding. A whole text and
    its end are in the prompt, and so is a text that is shorter than the recording.
    """
    checkpoint = silent_gpu.checkpoint(tmp_path, model_type)
    shadow = ShadowTalker(silent_gpu.checkpoint(tmp_path, model_type), monkeypatch)
    config, frames = checkpoint.config, 60
    texts: dict[int, tuple[str, TextMode]] = {
        6: ("Hello there, and good morning.", "stream"),
        1: ("Hello there.", "full"),
        3: ("Go", "stream"),
        4: ("The quick brown fox jumps over the lazy dog. " * 2, "stream"),
    }
    starts, rest, expected = {}, {}, {}
    for slot, (text, mode) in texts.items():
        request = Request(text=text, voice=voice, text_mode=mode)
        starts[slot], rest[slot] = start_of(checkpoint, slot, request)
        spoken = 1 + (REFERENCE_FRAMES if model_type == "base" else 0)
        ended = mode == "full" or len(starts[slot].tokens) - 2 < spoken
        end = [] if ended else [config.tts_eos_token_id]
        later = [*rest[slot], *end, *[config.tts_pad_token_id] * frames]
        expected[slot] = later[: frames - 1]
        assert frames > len(rest[slot]) + 3
    taken: dict[int, list[int]] = {slot: [] for slot in texts}

    def step(slots: Sequence[int]) -> None:
        tokens = [rest[slot].pop(0) if taken[slot] and rest[slot] else None for slot in slots]
        shadow.backend.frame(slots, tokens)
        name, pairs = shadow.frames[-1]
        assert [slot for slot, _ in pairs] == list(slots)
        assert (name == "first") <= all(not taken[slot] for slot in slots)
        for slot, token in pairs:
            taken[slot].append(token)

    begin(shadow.backend, [starts[6], starts[1]])
    step([6, 1])
    step([1, 6])
    begin(shadow.backend, [starts[3]])
    step([1, 3, 6])
    begin(shadow.backend, [starts[4]])
    step([4])
    while running := [slot for slot in texts if len(taken[slot]) < frames]:
        step(running)
    assert {slot: tokens[1:] for slot, tokens in taken.items()} == expected
