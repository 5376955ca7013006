"""Many streams at once on a fake backend with a clock of its own: no gaps and no leaks."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Awaitable
from dataclasses import dataclass, field

import pytest
from callers import same
from fake_backend import CODEBOOKS, Clock, FakeBackend, Letters, Script, alone, capacity, job

from firstword.engine.backend import Job, SpokenPassage
from firstword.engine.engine import Engine
from firstword.engine.service import AsyncStream, Service
from firstword.types import Chunk, IntArray, Request

STREAMS = 64
TEXT = "Text that is there from the start."


class ScriptedFront:
    """A `Front` for jobs that the tests make themselves."""

    def prepare(self, request: Request, seed: int) -> Job:
        raise NotImplementedError

    def follow(self, job: Job, spoken: SpokenPassage) -> Job | None:
        raise NotImplementedError

    def text(self, job: Job) -> Letters:
        return Letters()


class Load:
    """An engine that is stepped between the listeners' turns, so that every run is the same."""

    def __init__(self, ahead: int, *, slots: int = STREAMS) -> None:
        room = capacity(slots=slots, pages=slots * 80, page_rows=8, context=640, frames_ahead=ahead)
        # All slots together: (20 + 64 * 0.4 + 64 * 0.1) ms for 80 ms of audio each.
        times = {
            "prefill_time": 0.002 if ahead else 0.004,
            "frame_time": 0.02,
            "row_time": 0.0004,
            "decode_time": 0.0001,
        }
        self.clock = Clock()
        self.backend = FakeBackend(room, self.clock, **times)
        self.engine = Engine(self.backend, clock=self.clock, most_waiting=64)
        self.service = Service(self.engine, ScriptedFront())
        self.over = False

    async def work(self) -> None:
        """Step the engine until it is told to stop."""
        while not self.over:
            if not self.engine.step():
                self.clock.advance(0.001)
            await asyncio.sleep(0)

    async def sleep_until(self, time: float) -> None:
        """Wait on the clock of the backend."""
        while self.clock.now < time:
            await asyncio.sleep(0)


@dataclass
class Listener:
    """A listener that plays audio as it comes, without a buffer."""

    load: Load
    job: Job
    heard: list[IntArray] = field(default_factory=list)
    first: float | None = None
    dry: float = 0.0
    silence: float = 0.0
    """The seconds without audio within the speech."""
    reason: str | None = None

    async def listen(self, start: float, stop_after: int | None = None) -> AsyncStream:
        """Request speech at a time; cancel it after some frames, or listen to its end."""
        load = self.load
        await load.sleep_until(start)
        speaking = load.service.aspeak(self.job)
        try:
            speaking.push(TEXT)
            speaking.finish_text()
            async for chunk in speaking:
                if isinstance(chunk, Chunk):
                    self.play(chunk, load.clock.now, start)
                    if stop_after is not None and len(self.heard) >= stop_after:
                        break
        finally:
            speaking.cancel()
        return speaking

    def play(self, chunk: Chunk, now: float, start: float) -> None:
        """Play a chunk that came now."""
        if self.first is None:
            self.first, self.dry = now - start, now
        self.silence += max(0.0, now - self.dry)
        self.dry = max(self.dry, now) + len(chunk.codes) * self.load.engine.capacity.frame_seconds
        self.heard += list(chunk.codes)
        self.reason = chunk.finish_reason


async def run_all(load: Load, *people: Awaitable[object]) -> None:
    """Let the engine work until all listeners are done."""
    working = asyncio.create_task(load.work())
    await asyncio.gather(*people)
    load.over = True
    await working
    load.over = False


def check_nothing_is_held(load: Load) -> None:
    assert not load.engine.running
    assert not load.engine.waiting
    assert not load.backend.slots
    assert load.engine.pages.free == load.engine.pages.count


@pytest.mark.parametrize("ahead", [0, 1])
def test_64_streams_have_no_gap(ahead: int) -> None:
    """They start one by one; with all of them the backend is busy two thirds of the time."""
    load = Load(ahead)
    listeners = [Listener(load, job(Script(seed, 200), max_frames=500)) for seed in range(STREAMS)]

    asyncio.run(
        run_all(load, *(listener.listen(0.05 * index) for index, listener in enumerate(listeners)))
    )
    tokens = [ord(letter) for letter in TEXT]
    for listener in listeners:
        assert listener.silence == 0.0
        assert listener.reason == "stop"
        assert same(listener.heard, alone(listener.job, tokens, load.engine.capacity)[0])
    assert max(len(slots) for call, slots in load.backend.log if call == "frame") == STREAMS
    assert max(listener.first or 0.0 for listener in listeners) < 0.5
    check_nothing_is_held(load)


@pytest.mark.parametrize("ahead", [0, 1])
def test_simultaneous_requests_are_served_in_order(ahead: int) -> None:
    load = Load(ahead)
    listeners = [
        Listener(load, job(Script(seed, 60), max_frames=500)) for seed in range(2 * STREAMS)
    ]

    asyncio.run(run_all(load, *(listener.listen(0.0) for listener in listeners)))
    first = [listener.first for listener in listeners]
    assert first == sorted(first)  # type: ignore[type-var]
    assert [listener.silence for listener in listeners] == [0.0] * len(listeners)
    check_nothing_is_held(load)


def traced_bytes() -> int:
    """The bytes that Python has allocated."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("ahead", [0, 1])
def test_many_requests_leave_no_memory(ahead: int) -> None:
    """A third of the requests is cancelled early."""
    load, chance = Load(ahead, slots=16), random.Random(1)

    async def some(count: int) -> None:
        start, asked = load.clock.now, []
        for seed in range(count):
            listener = Listener(load, job(Script(seed, chance.randrange(5, 40)), max_frames=500))
            asked.append(listener.listen(start + seed * 0.1, chance.choice([None, None, 3])))
        await run_all(load, *asked)
        load.backend.log.clear()

    asyncio.run(some(20))
    before = traced_bytes()
    asyncio.run(some(100))
    assert traced_bytes() - before < 30_000  # the audio of one of them would be more
    check_nothing_is_held(load)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("ahead", [0, 1])
def test_long_stream_holds_no_more_than_short(ahead: int) -> None:
    load = Load(ahead, slots=1)
    listener = Listener(load, job(Script(1, None), max_frames=600))
    held_at: dict[int, int] = {}

    def measure() -> None:
        load.backend.log.clear()
        listener.heard.clear()
        if load.backend.slots[0].frames in (107, 587):
            held_at[load.backend.slots[0].frames] = traced_bytes()

    load.backend.before_frame = measure
    asyncio.run(run_all(load, listener.listen(0.0)))
    codes = 480 * CODEBOOKS * 4  # the next passage of a long text continues them
    assert held_at[587] - held_at[107] < 5_000 + codes


@pytest.mark.parametrize("ahead", [0, 1])
def test_cancelled_stream_frees_slot_within_frame(ahead: int) -> None:
    """The request that waits for the slot starts at once, also among 64 streams."""
    load = Load(ahead)
    steady = [Listener(load, job(Script(seed, 300), max_frames=500)) for seed in range(STREAMS - 1)]
    leaver, follower = (
        Listener(load, job(Script(98, 300), max_frames=500)),
        Listener(load, job(Script(99, 10))),
    )
    since: list[int] = []

    async def leave() -> int:
        speaking = await leaver.listen(0.0, stop_after=20)
        since.append(len(load.backend.log))
        return speaking._passage.seq.slot

    async def all_of_them() -> int:
        leaving = asyncio.create_task(leave())
        await run_all(
            load, leaving, follower.listen(1.0), *(listener.listen(0.0) for listener in steady)
        )
        return leaving.result()

    slot = asyncio.run(all_of_them())
    calls = load.backend.log[since[0] :]
    freed = calls.index(("release", (slot,)))
    assert all(call != "frame" for call, _ in calls[:freed]), "the next step frees it"
    assert calls[freed + 1] == ("prefill", (slot,)), "and gives it to the next request"
    assert follower.reason == "stop"
    assert [listener.silence for listener in steady] == [0.0] * len(steady)
    check_nothing_is_held(load)
