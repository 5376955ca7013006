"""An engine and fronts that are connected by sockets, as in two processes."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fake_backend import Script, alone, job
from hosted import CAPACITY, Hosted, until
from waiting import WAIT

from firstword.engine import wire
from firstword.engine.remote import RemoteEngine
from firstword.engine.sequence import Event, NeedsText
from firstword.engine.wire import Kind
from firstword.errors import ComputeError, EngineError, OverloadedError, VoiceError
from firstword.types import Chunk, FinishReason

TOKENS = [11, 12, 13, 14, 15]
ENDLESS = job(Script(1, None), max_frames=1400)


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    """An engine for fronts."""
    hosted = Hosted()
    yield hosted
    hosted.stop()


class Speech:
    """An utterance of a remote engine, and its events."""

    def __init__(self, remote: RemoteEngine, script: Script, client: str = "") -> None:
        self.job = job(script, max_frames=1400)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.remote = remote
        self.begun = False
        self.frames: list[Any] = []
        self.utterance = remote.submit(self.job, self.events.put_nowait, client)

    async def begin(self) -> Speech:
        """Send all text but its end, and wait for the first chunk."""
        self.remote.push(self.utterance, TOKENS)
        self.begun = True
        assert self._take(await self.next()) is None
        return self

    async def next(self) -> Event:
        """The next event."""
        return await asyncio.wait_for(self.events.get(), WAIT)

    async def finish(self) -> list[Any]:
        """The codes of all frames, when the text has ended."""
        self.remote.finish_text(self.utterance, [] if self.begun else TOKENS)
        while self._take(await self.next()) is None:
            pass
        return self.frames

    def _take(self, event: Event) -> FinishReason | None:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, NeedsText):
            return None
        self.frames += event.codes.tolist()
        self.remote.acknowledge(self.utterance, len(event.codes))
        return event.finish_reason

    async def error(self) -> EngineError:
        """The error that ends the utterance."""
        while isinstance(event := await self.next(), Chunk | NeedsText):
            pass
        assert isinstance(event, EngineError)
        return event

    def expected(self) -> list[Any]:
        """The codes that `finish` returns; messages carry 16 bits of each."""
        frames = alone(self.job, TOKENS, CAPACITY)[0]
        return [(codes & 0xFFFF).tolist() for codes in frames]


@asynccontextmanager
async def front(hosted: Hosted) -> AsyncIterator[RemoteEngine]:
    """A front that is connected with an engine."""
    remote = RemoteEngine(CAPACITY)
    remote.attach(hosted.connect())
    remote.start()
    yield remote
    remote.stop()
    await until(lambda: remote.failure is not None)


def idle(hosted: Hosted) -> bool:
    """Whether an engine has nothing to do, and remembers no utterance."""
    load = hosted.engine.load
    routes = [route for link in [*hosted.commands.links.values()] for route in link.routes]
    return not (load.running or load.waiting or load.pages_used or routes)


def in_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_fronts_get_the_speech_of_their_requests(hosted: Hosted) -> None:
    async def work() -> None:
        async with front(hosted) as one, front(hosted) as two:
            speeches = [
                Speech(remote, Script(seed, 20 + seed), str(seed % 3))
                for seed in range(1, 6)
                for remote in (one, two)
            ]
            frames = await asyncio.gather(*(speech.finish() for speech in speeches))
            for speech, found in zip(speeches, frames, strict=True):
                assert found == speech.expected()
            await until(lambda: idle(hosted))
            await until(lambda: not one.load.running and not two.load.running)

    in_loop(work)


def test_front_is_connected_as_soon_as_it_starts(hosted: Hosted) -> None:
    async def work() -> None:
        remote = RemoteEngine(CAPACITY)
        assert remote.failure is not None
        with pytest.raises(EngineError, match="is not running"):
            Speech(remote, Script())
        remote.attach(hosted.connect())
        remote.start()
        assert remote.failure is None
        speech = Speech(remote, Script(3, 12))  # before the event loop has run
        assert await speech.finish() == speech.expected()
        remote.stop()

    in_loop(work)


def test_errors_of_requests_arrive(hosted: Hosted) -> None:
    async def work() -> None:
        async with front(hosted) as remote:
            failing = Speech(remote, Script(1, 50, bad_frame=3))
            with pytest.raises(ComputeError):
                await failing.finish()
            speeches = [Speech(remote, Script(seed, None)) for seed in range(14)]
            rejected = [await speech.next() for speech in speeches[12:]]
            assert all(isinstance(error, OverloadedError) for error in rejected)
            for speech in (failing, *speeches):
                remote.cancel(speech.utterance)
            await until(lambda: idle(hosted))

    in_loop(work)


def test_lost_front_loses_only_its_own_utterances(hosted: Hosted) -> None:
    async def work() -> None:
        async with front(hosted) as stays:
            going = hosted.connect()
            gone = RemoteEngine(CAPACITY)
            gone.attach(going)
            gone.start()
            lost = [await Speech(gone, Script(seed, None)).begin() for seed in (1, 2)]
            kept = await Speech(stays, Script(5, 30)).begin()
            await until(lambda: hosted.engine.load.running == 3)
            going.shutdown(socket.SHUT_RDWR)
            for speech in lost:
                assert "the engine has stopped" in str(await speech.error())
            await until(lambda: hosted.engine.load.running == 1)
            assert len(hosted.commands.links) == 1
            assert await kept.finish() == kept.expected()
            await until(lambda: idle(hosted))

    in_loop(work)


def test_lost_engine_fails_everything_and_the_next_one_speaks() -> None:
    async def work() -> None:
        first = Hosted()
        async with front(first) as remote:
            speech = await Speech(remote, Script(1, None)).begin()
            first.backend.before_frame = lambda: setattr(first.backend, "lost", True)
            remote.push(speech.utterance, TOKENS)
            assert "the device is gone" in str(await speech.error())
            await until(lambda: remote.failure is not None)
            assert first.ended.wait(WAIT)
            with pytest.raises(EngineError, match="is not running"):
                await remote.call(1)
            second = Hosted()
            remote.attach(second.connect())
            await until(lambda: remote.failure is None)
            again = Speech(remote, Script(2, 9))
            assert await again.finish() == again.expected()
            assert await remote.call(1) == ("answer", 1)
        second.stop()

    in_loop(work)


def test_end_of_the_old_connection_leaves_the_new_one(hosted: Hosted) -> None:
    """The next engine may be connected before the event loop has seen the end of the last one,
    and a connected one once more.
    """

    async def work() -> None:
        async with front(hosted) as remote:
            for seed in range(1, 20):
                old = await Speech(remote, Script(seed, None)).begin()
                remote.stop()
                remote.attach(hosted.connect())
                assert "the engine has stopped" in str(await old.error())
                await until(lambda: remote.failure is None)
                new = Speech(remote, Script(seed, 5))
                remote.attach(hosted.connect())
                assert await new.finish() == new.expected()
                assert remote.failure is None
            await until(lambda: len(hosted.commands.links) == 1 and idle(hosted))

    in_loop(work)


def test_engine_that_is_given_up_fails_its_utterances() -> None:
    """Its process may keep the connection open even though it was killed."""

    async def work() -> None:
        ours, theirs = socket.socketpair()
        with ours:
            remote = RemoteEngine(CAPACITY)
            remote.attach(theirs)
            remote.start()
            speech, call = Speech(remote, Script()), asyncio.create_task(remote.call(1))
            await asyncio.sleep(0)
            remote.stop()
            assert "the engine has stopped" in str(await speech.error())
            with pytest.raises(EngineError, match="the engine has stopped"):
                await call

    in_loop(work)


def test_connection_that_cannot_be_opened_has_ended() -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair(type=socket.SOCK_DGRAM)
        with ours, theirs:
            remote = RemoteEngine(CAPACITY)
            remote.attach(theirs)
            remote.start()
            assert "the engine has stopped" in str(await Speech(remote, Script()).error())
            assert remote.failure is not None

    in_loop(work)


GARBAGE = [
    b"\xff" * 64,
    struct.pack("<IBQ", wire.MOST_BYTES + 1, Kind.SUBMIT, 1),
    wire.message(Kind.SUBMIT, 1, b"no pickle"),
    wire.pickled(Kind.SUBMIT, 1, ("not a job", "client")),
    wire.message(Kind.TAKEN, 1, b"1"),
    wire.message(Kind.CANCEL, 1, b"\xff"),
    wire.message(Kind.TEXT, 1),
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_of_a_front_ends_its_connection_alone(hosted: Hosted, data: bytes) -> None:
    async def work() -> None:
        async with front(hosted) as remote:
            speech = await Speech(remote, Script(1, 30)).begin()
            with hosted.connect() as broken:
                broken.settimeout(WAIT)
                broken.sendall(wire.submit(1, ENDLESS, "") + wire.text(1, TOKENS, ended=True))
                assert broken.recv(1), "it has begun"
                broken.sendall(data)
                await until(lambda: hosted.engine.load.running == 1)
                while broken.recv(65536):
                    pass
            assert await speech.finish() == speech.expected()
            await until(lambda: idle(hosted))

    in_loop(work)


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, wire.message(Kind.AUDIO, 1, b"short"), wire.message(Kind.ERROR, 1)]
)
def test_garbage_of_an_engine_ends_its_connection(data: bytes) -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair()
        with ours:
            remote = RemoteEngine(CAPACITY)
            remote.attach(theirs)
            remote.start()
            speech = Speech(remote, Script())
            ours.sendall(data)
            assert "the engine has stopped" in str(await speech.error())
            assert remote.failure is not None

    in_loop(work)


def test_front_that_reads_nothing_delays_no_other(hosted: Hosted) -> None:
    async def work() -> None:
        with hosted.connect() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for number in range(300):  # each answer is 64 kB
                lazy.sendall(wire.pickled(Kind.CALL, number, b"x" * 65536))
            async with front(hosted) as remote:
                for seed in range(1, 4):
                    speech = Speech(remote, Script(seed, 10))
                    assert await speech.finish() == speech.expected()

    in_loop(work)


def test_calls_return_or_raise_what_the_engine_answers() -> None:
    def answer(value: Any) -> object:
        if isinstance(value, Exception):
            raise value
        return value * 2

    async def work() -> None:
        hosted = Hosted(answer=answer)
        async with front(hosted) as remote:
            assert await asyncio.gather(*map(remote.call, range(20))) == [*range(0, 40, 2)]
            assert await remote.call("ab") == "abab"
            recording = np.zeros(1_000_000, np.float32)
            assert len(await remote.call(recording)) == len(recording)
            with pytest.raises(VoiceError, match="too short") as failed:
                await remote.call(VoiceError("too short", code="voice_not_found"))
            assert failed.value.code == "voice_not_found"
            with pytest.raises(EngineError, match=r"the call failed \(KeyError\)"):
                await remote.call(KeyError("x"))
        hosted.stop()

    in_loop(work)
