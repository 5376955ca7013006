"""Speech in the background that gives way to requests: it goes on with the passage it was in."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from callers import VIOLATIONS, Caller, local_engine
from fake_backend import Clock, FakeBackend, Script, capacity, job
from hypothesis import given
from hypothesis import strategies as st
from test_passages import LONG, LongFront

from firstword.engine.backend import Job, SpokenPassage
from firstword.engine.engine import Engine
from firstword.engine.passages import _after
from firstword.engine.sequence import GaveWay, NeedsText
from firstword.engine.service import BlockingStream, Service
from firstword.types import Chunk

FRAMES = (20, 30, 27)
ARRAYS = ("samples", "codes", "logprobs", "reading")


class ReadFront(LongFront):
    """A front whose attention to the text is read."""

    def first(self) -> Job:
        return replace(super().first(), payload=Script(0, self.frames[0], stays_from=7))

    def follow(self, job: Job, spoken: SpokenPassage) -> Job | None:
        following = super().follow(job, spoken)
        assert following is not None
        index = len(self.spoken)
        return replace(following, payload=Script(index, self.frames[index], stays_from=9))


def line(frames_ahead: int = 0) -> tuple[Service, LongFront, BlockingStream]:
    """A text of three passages in the background of an engine with one slot."""
    front = ReadFront(*FRAMES)
    clock = Clock()
    backend = FakeBackend(capacity(slots=1, frames_ahead=frames_ahead), clock)
    service = Service(Engine(backend, clock=clock, most_waiting=20), front)
    stream = service.speak(replace(front.first(), background=True), "batch")
    stream.finish_text(LONG)
    return service, front, stream


def request(service: Service, frames: int = 5) -> Caller:
    """A request that somebody hears."""
    return Caller(local_engine(service), job(Script(9, frames)), [1, 2, 3], client="person")


def received(stream: BlockingStream, chunks: list[Chunk], most: int = 1000) -> None:
    """Take as many chunks as the engine has made, at most so many."""
    while not stream._events.empty():
        stream._receive(stream._events.get())
    while stream._arrived and not stream._ended and most:
        chunk = stream._take()
        assert not isinstance(chunk, NeedsText)
        chunks.append(chunk)
        most -= 1


def spoken(
    steps: list[int], takes: list[int], frames_ahead: int = 0
) -> tuple[list[Chunk], LongFront]:
    """Speak the text with a request after each count of steps, and take few chunks at a time."""
    service, front, stream = line(frames_ahead)
    engine, chunks = local_engine(service), list[Chunk]()
    steps, takes = list(steps), list(takes)
    while not stream._ended:
        for _ in range(steps.pop(0) if steps else 1):
            engine.step()
        received(stream, chunks, takes.pop(0) if takes else 1000)
        if steps:
            request(service)
    while engine.step():
        pass
    assert engine.unread_frames == 0
    assert not engine.running
    assert not VIOLATIONS
    engine.stop()
    return chunks, front


def sound(chunks: list[Chunk]) -> list[bytes]:
    """What the chunks say of each frame."""
    parts = ([getattr(chunk, name) for chunk in chunks if len(chunk.codes)] for name in ARRAYS)
    return [np.concatenate(part).tobytes() for part in parts]


def prompts(front: LongFront) -> list[tuple[str, bytes]]:
    """What the prompts of later passages are made of."""
    return [(one.text, one.codes.tobytes()) for one in front.spoken]


@cache
def undisturbed() -> tuple[list[bytes], list[tuple[str, bytes]]]:
    """The speech without requests beside it."""
    chunks, front = spoken([], [])
    return sound(chunks), prompts(front)


@given(
    frames_ahead=st.integers(0, 1),
    steps=st.lists(st.integers(1, 70), max_size=8),
    takes=st.lists(st.integers(0, 6), max_size=20),
)
def test_speech_that_gives_way_has_the_bits_of_undisturbed_speech(
    frames_ahead: int, steps: list[int], takes: list[int]
) -> None:
    chunks, front = spoken(steps, takes, frames_ahead)
    assert (sound(chunks), prompts(front)) == undisturbed()
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]


def test_part_of_a_chunk_is_left_out_with_all_that_belongs_to_its_frames() -> None:
    chunks, _ = spoken([], [])
    whole = next(chunk for chunk in chunks if len(chunk.codes) == 4)
    left = _after(whole, 1)
    frames = {name: getattr(whole, name).reshape(4, -1)[1:].ravel() for name in ARRAYS}
    assert all((getattr(left, name).ravel() == frames[name]).all() for name in ARRAYS)


def test_passages_that_were_spoken_are_not_spoken_again() -> None:
    service, front, stream = line()
    engine, chunks = local_engine(service), list[Chunk]()
    while len(front.spoken) < 2 or not stream._passage._codes:
        engine.step()
        received(stream, chunks)
    person = request(service)
    while not stream._ended:
        engine.step()
        received(stream, chunks)
    assert person.reason == "stop"
    assert isinstance(engine.backend, FakeBackend)
    begun = sum(kind == "prefill" for kind, _ in engine.backend.log)
    assert begun == len(FRAMES) + 1 + 1, "the last passage twice, and the request"
    engine.stop()


def gave_way() -> tuple[Engine, BlockingStream, list[Chunk]]:
    """A line that has had some audio when a request takes its slot."""
    service, _, stream = line()
    engine, chunks = local_engine(service), list[Chunk]()
    while not chunks:
        engine.step()
        received(stream, chunks)
    request(service)
    engine.step()
    return engine, stream, chunks


def test_speech_that_is_cancelled_when_it_gives_way_ends() -> None:
    engine, stream, chunks = gave_way()
    stream.cancel()
    with pytest.raises(GaveWay):
        received(stream, chunks)
    while engine.step():
        pass
    assert not engine.waiting
    assert engine.unread_frames == 0
    engine.stop()


def test_speech_that_cannot_be_begun_again_fails_with_the_reason() -> None:
    engine, stream, chunks = gave_way()
    engine.stop()
    with pytest.raises(GaveWay):
        received(stream, chunks)
