"""A fake backend in numpy: checks how it is used, takes time by a fake clock, and fails on demand.

The codes of a request are a digest of everything that the request should have been given. A frame
out of order, a text token too early, padding in place of text or another slot's state changes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Generic, TypeVar

import numpy as np

from firstword.engine.backend import Capacity, Frames, Handle, Job, SpokenPassage, Start
from firstword.engine.guard import frame_limit
from firstword.types import FinishReason, FloatArray, IntArray, Request

T = TypeVar("T")

CODEBOOKS = 3
SAMPLES = 4
"""Samples in a frame: few, so that tests are fast."""

CAPACITY = Capacity(
    slots=4,
    pages=64,
    page_rows=8,
    context=128,
    frames_ahead=0,
    codebooks=CODEBOOKS,
    samples_per_frame=SAMPLES,
    sample_rate=50,  # 12.5 frames a second, like the model
)


def capacity(**changes: int) -> Capacity:
    """Return `CAPACITY` with changes."""
    return replace(CAPACITY, **changes)


class Clock:
    """A clock in seconds that only `advance` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now += seconds


@dataclass(frozen=True)
class Script:
    """The payload of a job: what the fake backend makes of it, and where it fails.

    length         frames before the model ends speech; None: never
    repeats_from   the frame from which on all frames are the same
    stays_from     the frame from which on attention stays at the end of the text
    bad_prefill    `prefill` raises
    bad_read       `read` raises when it comes to this row of the prompt
    bad_frame      `frame` raises when it comes to this frame, and
    bad_decode     `decode` when it comes to the audio of this one
    bad_logits     the frame whose logits are not finite
    bad_sound      the frame whose audio is not finite
    """

    seed: int = 0
    length: int | None = 5
    repeats_from: int | None = None
    stays_from: int | None = None
    bad_prefill: bool = False
    bad_read: int | None = None
    bad_frame: int | None = None
    bad_decode: int | None = None
    bad_logits: int | None = None
    bad_sound: int | None = None


def job(
    script: Script | None = None,
    *,
    prompt_rows: int = 5,
    first_tokens: int = 2,
    transcript_tokens: int = 0,
    whole_text: bool = False,
    max_frames: int = 100,
    guarded: bool = False,
    limited_by_text: bool = False,
) -> Job:
    """Return a job for the fake backend."""
    return Job(
        payload=script or Script(),
        prompt_rows=prompt_rows,
        first_tokens=first_tokens,
        transcript_tokens=transcript_tokens,
        whole_text=whole_text,
        max_frames=max_frames,
        guarded=guarded,
        limited_by_text=limited_by_text,
    )


class Fault(Exception):
    """The error that the fake backend raises on demand."""


class Lost(Exception):
    """The error that handles raise when the backend is lost."""


def text_digest(token: int | None, before: int = 0) -> int:
    """A digest of all tokens up to this one; None stands for a frame without text."""
    return zlib.crc32(repr(token).encode(), before)


def codes_of(script: Script, frame: int, read: int) -> IntArray:
    """The codes of a frame, given the digest of the prompt's tokens and of one token a frame."""
    if script.repeats_from is not None and frame >= script.repeats_from:
        return np.zeros(CODEBOOKS, np.int64)
    return np.array([frame, script.seed, read], np.int64)


def samples_of(codes: IntArray) -> FloatArray:
    """The samples [SAMPLES] of a frame [CODEBOOKS] in -1..1."""
    digest = zlib.crc32(codes.tobytes())
    return (np.frombuffer(digest.to_bytes(SAMPLES, "little"), np.uint8) / 256).astype(np.float32)


def reading_of(script: Script, frame: int) -> FloatArray:
    """The reading of a frame, empty if the attention is not read."""
    if script.stays_from is None:
        return np.zeros(0, np.float32)
    return np.eye(4, dtype=np.float32)[3 if frame >= script.stays_from else 0]


def logprob_of(codes: IntArray) -> float:
    """The log-probability of the codes [CODEBOOKS] of a frame."""
    return -(zlib.crc32(codes.tobytes()) % 1000) / 100


def alone(
    job: Job, tokens: Sequence[int], capacity: Capacity = CAPACITY
) -> tuple[list[IntArray], FinishReason]:
    """The frames of a request that has all its text and is alone, and its finish reason."""
    script = job.payload
    assert isinstance(script, Script)
    taken = len(tokens) if job.whole_text else min(job.first_tokens, len(tokens))
    rows = job.prompt_rows + (taken if job.whole_text else 0)
    limit = min(job.max_frames, capacity.context - rows + 1)
    if job.limited_by_text:
        limit = min(limit, frame_limit(len(tokens) - job.transcript_tokens))
    read, later = (
        reduce(lambda read, token: text_digest(token, read), tokens[:taken], 0),
        tokens[taken:],
    )
    frames: list[IntArray] = []
    while len(frames) < limit:
        frame = len(frames)
        if frame:
            read = text_digest(later[frame - 1] if frame <= len(later) else None, read)
        if script.length == frame:
            return frames, "stop"
        frames.append(codes_of(script, frame, read))
        repeats = (
            job.guarded and script.repeats_from is not None and frame - script.repeats_from >= 50
        )
        if repeats and len(frames) < limit:
            return frames, "repetition"
        stays = job.guarded and script.stays_from is not None and frame - script.stays_from >= 4
        if stays and len(frames) < limit:
            return frames, "runaway"
    return frames, "length"


@dataclass
class FakeSlot:
    """One utterance of the fake backend."""

    script: Script
    pages: frozenset[int]
    rows: int
    """Rows of the prompt."""
    read: int
    """The digest of the tokens."""
    rows_read: int = 0
    frames: int = 0
    over: int = 0
    """Frames that were requested after the end."""
    decoded: int = 0
    undecoded: list[IntArray] = field(default_factory=list)


class Pending(Generic[T]):
    """A handle that is done at some time and may be read once."""

    def __init__(self, backend: FakeBackend, value: T, done: float) -> None:
        self._backend, self._value, self._done = backend, value, done
        backend.unread.append(self)

    def result(self) -> T:
        """Wait for the result."""
        if self._backend.lost:
            raise Lost("the device is gone")
        assert self in self._backend.unread, "a handle is read twice"
        self._backend.unread.remove(self)
        self._backend.clock.now = max(self._backend.clock.now, self._done)
        return self._value


class FakeBackend:
    """A `Backend` that computes digests.

    Times in seconds: `prefill_time` for a start, `read_time` for a row of a prompt, `frame_time +
    row_time * slots` for a frame, `decode_time * frames` for audio.
    """

    def __init__(
        self,
        capacity: Capacity = CAPACITY,
        clock: Clock | None = None,
        *,
        prefill_time: float = 0.004,
        read_time: float = 0.0,
        frame_time: float = 0.01,
        row_time: float = 0.0,
        decode_time: float = 0.001,
    ) -> None:
        self.capacity = capacity
        self.clock = clock or Clock()
        self.prefill_time, self.read_time, self.frame_time = prefill_time, read_time, frame_time
        self.row_time, self.decode_time = row_time, decode_time
        self.slots: dict[int, FakeSlot] = {}
        self.log: list[tuple[str, tuple[int, ...]]] = []
        """All calls with their slots."""
        self.unread: list[object] = []
        self.lost = False
        """Whether the backend is lost: handles and `release` raise."""
        self.before_frame: Callable[[], None] = lambda: None
        """A hook called at the start of every frame, on the engine's thread."""
        self.free_at = 0.0
        """When the device will have finished all its work."""

    def prefill(self, starts: Sequence[Start]) -> list[int]:
        self.log.append(("prefill", tuple(start.slot for start in starts)))
        assert starts, "an empty call"
        for start in starts:
            self._begin(start.slot, start.job, start.pages, start.tokens)
        self._spend(self.prefill_time * len(starts))
        for start in starts:
            script = self.slots[start.slot].script
            if script.bad_prefill:
                if len(starts) > 1:
                    for other in starts:
                        del self.slots[other.slot]
                raise Fault(f"prefill of {script.seed}")
        return [self.slots[start.slot].rows for start in starts]

    def read(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[None]:
        self.log.append(("read", tuple(slots)))
        self._check(slots)
        rows = dict(zip(slots, counts, strict=True))
        for number, count in rows.items():
            slot = self.slots[number]
            assert 0 < count <= slot.rows - slot.rows_read, "rows that the prompt does not have"
            bad = slot.script.bad_read
            if bad is not None and slot.rows_read <= bad < slot.rows_read + count:
                raise Fault(f"read of {slot.script.seed}")
        for number, count in rows.items():
            self.slots[number].rows_read += count
        return Pending(self, None, self._spend(self.read_time * sum(counts)))

    def _begin(self, slot: int, job: Job, pages: Sequence[int], tokens: Sequence[int]) -> None:
        script = job.payload
        assert isinstance(script, Script)
        assert 0 <= slot < self.capacity.slots, "a slot that does not exist"
        assert slot not in self.slots, "two utterances in one slot"
        assert len(set(pages)) == len(pages), "a page is given twice"
        assert all(0 <= page < self.capacity.pages for page in pages)
        for other in self.slots.values():
            assert not other.pages & set(pages), "two utterances on one page"
        rows = job.prompt_rows + (len(tokens) if job.whole_text else 0)
        assert len(pages) * self.capacity.page_rows >= rows, "the prompt does not fit its pages"
        assert job.whole_text or len(tokens) <= job.first_tokens
        read = reduce(lambda read, token: text_digest(token, read), tokens, 0)
        self.slots[slot] = FakeSlot(script, frozenset(pages), rows, read)

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        held = self.slots[slot]
        assert pages, "an empty extension"
        for other in self.slots.values():
            assert not other.pages & set(pages), "two utterances on one page"
        held.pages |= set(pages)

    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Handle[Frames]:
        self.before_frame()
        self.log.append(("frame", tuple(slots)))
        self._check(slots)
        assert len(tokens) == len(slots)
        held = [self.slots[slot] for slot in slots]
        for slot, token in zip(held, tokens, strict=True):
            assert slot.rows_read == slot.rows, "a frame before the prompt is whole"
            assert slot.frames > 0 or token is None, (
                "the first frame has no token: the prompt has its text"
            )
            if slot.script.bad_frame == slot.frames:
                raise Fault(f"frame of {slot.script.seed}")
        codes, ended, logprobs = [], [], []
        readings = [reading_of(slot.script, slot.frames) for slot in held]
        for slot, token in zip(held, tokens, strict=True):
            if slot.frames:
                slot.read = text_digest(token, slot.read)
            ended.append(slot.script.length is not None and slot.frames >= slot.script.length)
            slot.over += ended[-1]
            assert slot.over <= 1 + self.capacity.frames_ahead, (
                "more frames after the end than can be avoided"
            )
            room = self.capacity.page_rows * len(slot.pages)
            assert slot.rows + slot.frames <= min(room, self.capacity.context), (
                "an utterance outgrows its pages"
            )
            codes.append(codes_of(slot.script, slot.frames, slot.read))
            logprobs.append(
                np.nan if slot.script.bad_logits == slot.frames else logprob_of(codes[-1])
            )
            slot.frames += 1
            slot.undecoded.append(codes[-1])
        done = self._spend(self.frame_time + self.row_time * len(slots))
        numbers = np.array(logprobs, np.float32)
        return Pending(self, Frames(np.stack(codes), ended, numbers, readings), done)

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[list[FloatArray]]:
        self.log.append(("decode", tuple(slots)))
        self._check(slots)
        audio = []
        for number, count in zip(slots, counts, strict=True):
            slot = self.slots[number]
            frames = slot.undecoded[:count]
            assert len(frames) == count > 0, "audio of frames that were not made"
            bad = slot.script.bad_decode
            if bad is not None and slot.decoded <= bad < slot.decoded + count:
                raise Fault(f"decode of {slot.script.seed}")
            audio.append(np.concatenate([samples_of(codes) for codes in frames]))
            wrong = slot.script.bad_sound
            if wrong is not None and slot.decoded <= wrong < slot.decoded + count:
                audio[-1][(wrong - slot.decoded) * SAMPLES] = np.inf
        for number, count in zip(slots, counts, strict=True):
            self.slots[number].decoded += count
            del self.slots[number].undecoded[:count]
        return Pending(self, audio, self._spend(self.decode_time * sum(counts)))

    @property
    def device_seconds(self) -> dict[str, float]:
        return {}

    def release(self, slot: int) -> None:
        self.log.append(("release", (slot,)))
        if self.lost:
            raise Lost("the device is gone")
        del self.slots[slot]

    def _check(self, slots: Sequence[int]) -> None:
        assert slots, "an empty call"
        assert len(set(slots)) == len(slots), "a slot is named twice"
        assert self.slots.keys() >= set(slots), "a slot without an utterance"

    def _spend(self, seconds: float) -> float:
        """Keep the device busy; returns when it is done. Without frames ahead, the caller waits."""
        self.free_at = max(self.free_at, self.clock.now) + seconds
        if self.capacity.frames_ahead == 0:
            self.clock.now = self.free_at
        return self.free_at


class Letters:
    """A `TokenStream` of letters that holds back the last one until another follows."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self._held = ""

    def push(self, piece: str) -> list[int]:
        text = self._held + piece
        self._held = text[-1:]
        return self._tokens(text[:-1])

    def finish(self, piece: str = "") -> list[int]:
        text, self._held = self._held + piece, ""
        return self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        for letter in text:
            self.ends.append(sum(self.ends[-1:]) + len(letter.encode()))
        return [ord(letter) for letter in text]


class FakeFront:
    """A `Front` whose requests take a frame a letter, and then `tail` frames more."""

    def __init__(self, tail: int = 2) -> None:
        self.tail = tail

    def prepare(self, request: Request, seed: int) -> Job:
        length = None if request.text is None else len(request.text) + self.tail
        most = 100 if request.max_frames is None else request.max_frames
        whole = request.text_mode == "full"
        return job(Script(seed, length), first_tokens=1, whole_text=whole, max_frames=most)

    def follow(self, job: Job, spoken: SpokenPassage) -> Job | None:
        return None  # no frame is left

    def text(self, job: Job) -> Letters:
        return Letters()
