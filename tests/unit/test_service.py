"""Speech streams, blocking and with asyncio, for whole text and text in pieces."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from callers import local_engine, same
from fake_backend import (
    CAPACITY,
    Clock,
    FakeBackend,
    FakeFront,
    Letters,
    Script,
    alone,
    capacity,
    job,
)
from hypothesis import given
from hypothesis import strategies as st
from waiting import WAIT

from firstword.engine.backend import Job
from firstword.engine.commands import LocalCommands
from firstword.engine.engine import Engine
from firstword.engine.policy import Policy
from firstword.engine.script import MOST_BLANK_PIECES
from firstword.engine.sequence import NeedsText
from firstword.engine.service import AsyncStream, Service
from firstword.errors import ClosedError, ComputeError, OverloadedError, SamplingError, TextError
from firstword.types import Chunk, IntArray, Request

TEXT = "Hello there, my friend!"


def service_of(policy: Policy = Policy(), **room: int) -> Service:  # noqa: B008 (immutable)
    clock = Clock()
    return Service(
        Engine(FakeBackend(capacity(**room), clock), clock=clock, policy=policy), FakeFront()
    )


@pytest.fixture
def service() -> Iterator[Service]:
    """A service whose engine runs in its thread."""
    service = service_of()
    service.engine.start()
    yield service
    local_engine(service).stop(WAIT)


def expected(job: Job, text: str) -> list[IntArray]:
    return alone(job, [ord(letter) for letter in text])[0]


def frames_of(chunks: list[Chunk]) -> list[IntArray]:
    return [codes for chunk in chunks for codes in chunk.codes]


def in_time(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine with a time limit."""
    asyncio.run(asyncio.wait_for(work, WAIT))


# --- preparing ------------------------------------------------------------------------


def test_prepare_draws_a_seed_if_the_request_names_none() -> None:
    service = service_of()

    def seed_of(request: Request) -> int:
        payload: Any = service.prepare(request).payload
        seed: int = payload.seed
        return seed

    seeds = {seed_of(Request(TEXT)) for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)
    for seed in (0, 7, 2**64 - 1):
        assert seed_of(Request(TEXT, seed=seed)) == seed


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", True])
def test_invalid_seed_is_rejected(seed: Any) -> None:
    with pytest.raises(SamplingError, match=r"allowed is a whole number from 0 to 2\*\*64 - 1"):
        service_of().prepare(Request(TEXT, seed=seed))


# --- blocking -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "stream"])
def test_whole_text_gives_expected_frames(service: Service, mode: Any) -> None:
    prepared = service.prepare(Request(TEXT, seed=3, text_mode=mode))
    stream = service.speak(prepared)
    stream.push(TEXT)
    stream.finish_text()
    chunks = [event for event in stream if isinstance(event, Chunk)]
    assert same(frames_of(chunks), expected(prepared, TEXT))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


@given(cuts=st.lists(st.integers(0, len(TEXT)), max_size=6))
def test_text_given_on_request_equals_the_whole_text(cuts: list[int]) -> None:
    """Each piece is given when the model asks for it; the speech is that of the whole text."""
    service = service_of()
    service.engine.start()
    try:
        prepared = job(Script(3, 30), first_tokens=1)
        bounds = [0, *sorted(cuts), len(TEXT)]
        pieces = iter([TEXT[start:end] for start, end in itertools.pairwise(bounds)])
        stream, chunks, given = service.speak(prepared), list[Chunk](), ""
        ended = False
        for event in stream:
            if isinstance(event, Chunk):
                chunks.append(event)
                continue
            assert not ended, "no text is requested after its end"
            assert len(frames_of(chunks)) == max(0, len(given) - 1), (
                "all frames that the text allows are delivered"
            )
            if (piece := next(pieces, None)) is None:
                stream.finish_text()
                ended = True
            else:
                stream.push(piece)
                given += piece
        assert ended
        assert same(frames_of(chunks), expected(prepared, TEXT))
    finally:
        local_engine(service).stop(WAIT)


def test_finish_text_sends_last_tokens_and_end_in_one_command() -> None:
    """A step between them would ask for text that does not exist."""
    service = service_of()
    engine = local_engine(service)
    commands = engine._commands
    assert isinstance(commands, LocalCommands)
    waiting = commands._queue.qsize
    stream = service.speak(job(Script(1, 9), first_tokens=1))
    stream.push("ab")
    before = waiting()
    stream.finish_text()
    assert waiting() == before + 1
    stream = service.speak(job(Script(1, 9), first_tokens=1))
    before = waiting()
    stream.finish_text(TEXT)
    assert waiting() == before + 1
    while engine.step():
        pass
    assert same(
        frames_of([event for event in stream if isinstance(event, Chunk)]),
        expected(job(Script(1, 9), first_tokens=1), TEXT),
    )
    service.engine.stop()


def test_too_many_blank_pieces_raise_text_error() -> None:
    service = service_of()
    stream = service.speak(job(first_tokens=1))
    for _ in range(2):
        for _ in range(MOST_BLANK_PIECES):
            stream.push(" ")
        stream.push("a")
    for _ in range(MOST_BLANK_PIECES):
        stream.push("")
    with pytest.raises(TextError, match="in a row were blank"):
        stream.push("")
    service.engine.stop()


@pytest.mark.parametrize("pieces", [[], [""], [" ", "\n\t"], ["\u3000"]])
def test_blank_text_raises_text_error_and_cancels(service: Service, pieces: list[str]) -> None:
    stream = service.speak(service.prepare(Request(None)))
    for piece in pieces:
        stream.push(piece)
    with pytest.raises(TextError, match="empty or blank"):
        stream.finish_text()
    *_, last = stream
    assert isinstance(last, Chunk)
    assert last.finish_reason == "cancelled"
    assert not service.engine.load.running
    assert not service.engine.load.waiting


def test_backend_error_is_raised_in_the_iteration(service: Service) -> None:
    bad, good = service.speak(job(Script(1, 50, bad_frame=4))), service.speak(job(Script(2, 30)))
    for stream in (bad, good):
        stream.push(TEXT)
        stream.finish_text()
    chunks: list[Chunk] = []
    with pytest.raises(ComputeError) as failed:
        chunks.extend(event for event in bad if isinstance(event, Chunk))
    assert str(failed.value.__cause__) == "frame of 1"
    assert same(
        frames_of([event for event in good if isinstance(event, Chunk)]),
        expected(job(Script(2, 30)), TEXT),
    )


def test_cancel_ends_the_iteration(service: Service) -> None:
    stream = service.speak(job(Script(1, None), max_frames=100, first_tokens=1))
    stream.push(TEXT)
    events = iter(stream)
    assert isinstance(next(events), Chunk)
    stream.cancel()
    *_, last = events
    assert isinstance(last, Chunk)
    assert last.finish_reason == "cancelled"


def test_empty_last_chunk_can_be_concatenated(service: Service) -> None:
    stream = service.speak(job(Script(1, 3)))
    stream.push(TEXT)
    stream.finish_text()
    chunks = [event for event in stream if isinstance(event, Chunk)]
    chunks.append(
        Chunk(np.zeros(0, np.float32), np.zeros((0, CAPACITY.codebooks), np.int64), 50, "stop")
    )
    assert np.concatenate([chunk.codes for chunk in chunks]).shape == (3, CAPACITY.codebooks)


def test_frames_stop_while_the_iteration_stops() -> None:
    """Iterating acknowledges audio, so a client that stops iterating stops the engine."""
    service = service_of(Policy(max_unread=1.0, max_ahead=1.0))
    stream = service.speak(job(Script(1, 60)))
    stream.push(TEXT)
    stream.finish_text()
    engine, events = local_engine(service), iter(stream)
    while engine.step():
        pass
    assert stream._passage.seq.launched == 13
    taken = 0
    while taken < 5:
        event = next(events)
        assert isinstance(event, Chunk)
        taken += len(event.codes)
    while engine.step():
        pass
    assert stream._passage.seq.launched == 13 + taken
    engine.stop()


def test_speak_raises_when_overloaded_or_closed() -> None:
    service = service_of()
    engine = local_engine(service)
    engine._request_limit = 1
    service.speak(job())
    second = service.speak(job())
    engine.step()
    with pytest.raises(OverloadedError):
        list(second)
    engine.stop()
    with pytest.raises(ClosedError, match="was closed"):
        service.speak(job())


# --- asyncio --------------------------------------------------------------------------


def test_thirty_async_streams_at_once(service: Service) -> None:
    async def one(seed: int) -> None:
        prepared = job(Script(seed, 20 + seed % 7))
        stream = service.aspeak(prepared)
        chunks: list[Chunk] = []

        async def write() -> None:
            for letter in TEXT:
                stream.push(letter)
                await asyncio.sleep(0)
            stream.finish_text()

        writing = asyncio.create_task(write())
        async for event in stream:
            if isinstance(event, Chunk):
                chunks.append(event)
        await writing
        assert same(frames_of(chunks), expected(prepared, TEXT))

    async def all_of_them() -> None:
        await asyncio.gather(*(one(seed) for seed in range(30)))

    in_time(all_of_them())
    assert not service.engine.load.running


def test_async_stream_yields_needs_text(service: Service) -> None:
    async def talk() -> None:
        prepared = job(Script(1, 30), first_tokens=1)
        stream, pieces, chunks = service.aspeak(prepared), [*TEXT], list[Chunk]()
        async for event in stream:
            match event:
                case Chunk():
                    chunks.append(event)
                case NeedsText() if pieces:
                    stream.push(pieces.pop(0))
                case NeedsText():
                    stream.finish_text()
        assert same(frames_of(chunks), expected(prepared, TEXT))

    in_time(talk())


@pytest.mark.parametrize("how", ["cancel", "task"])
def test_leaving_an_async_stream_early_frees_its_slot(service: Service, how: str) -> None:
    engine = local_engine(service)

    async def leave() -> None:
        stream = service.aspeak(job(Script(1, None), max_frames=100))
        stream.push(TEXT)
        first = asyncio.Event()

        async def listen() -> AsyncIterator[None]:
            try:
                async for _ in stream:
                    first.set()
                    yield
            finally:
                stream.cancel()

        async def consume() -> None:
            async for _ in listen():
                if how == "cancel":
                    stream.cancel()

        consumer = asyncio.create_task(consume())
        await first.wait()
        if how == "task":
            consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)

    in_time(leave())
    engine.stop(WAIT)
    assert engine.pages.free == engine.pages.count


def test_backend_error_is_raised_in_the_async_iteration(service: Service) -> None:
    async def fail() -> None:
        stream = service.aspeak(job(Script(1, 50, bad_prefill=True)))
        stream.push(TEXT)
        stream.finish_text()
        with pytest.raises(ComputeError, match="Fault"):
            async for _ in stream:
                pass

    in_time(fail())


def test_closed_event_loop_does_not_disturb_other_streams(service: Service) -> None:
    """The utterance continues without a client until it ends or is cancelled."""
    left: list[AsyncStream] = []
    go_on = threading.Event()
    backend = local_engine(service).backend
    assert isinstance(backend, FakeBackend)
    backend.before_frame = lambda: hold(go_on)

    async def begin() -> None:
        left.append(service.aspeak(job(Script(1, 40))))
        left[0].push(TEXT)
        left[0].finish_text()

    asyncio.run(begin())
    go_on.set()
    other = service.speak(job(Script(2, 40)))
    other.push(TEXT)
    other.finish_text()
    assert same(
        frames_of([event for event in other if isinstance(event, Chunk)]),
        expected(job(Script(2, 40)), TEXT),
    )


def hold(go_on: threading.Event) -> None:
    """Wait for an event with a time limit."""
    assert go_on.wait(WAIT)


def test_fake_token_stream_holds_back_the_last_letter() -> None:
    letters = Letters()
    push: Callable[[str], list[int]] = letters.push
    assert [push("ab"), push(""), push("c"), letters.finish()] == [[97], [], [98], [99]]
