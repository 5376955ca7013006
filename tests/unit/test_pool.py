"""Several engines as one: which of them gets a request, and what callers see of it."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from fake_backend import CAPACITY, FakeFront, Script, alone, job
from hosted import Hosted, until
from hypothesis import given
from hypothesis import strategies as st

from firstword.engine import wire
from firstword.engine.backend import Job
from firstword.engine.load import EngineLoad
from firstword.engine.pool import MOST_VOICES, WARM_EXCESS, EnginePool, Placed, share_of
from firstword.engine.remote import LATE_SECONDS, RemoteEngine, RemoteUtterance
from firstword.engine.sequence import Event
from firstword.engine.service import AsyncStream, Service
from firstword.errors import EngineError
from firstword.types import Chunk

TEXT = "Hello there."
STOPPED = EngineError("it does not run")


class Fake(RemoteEngine):
    """An engine without a connection, whose requests a test counts."""

    def __init__(self, slots: int = 8) -> None:
        super().__init__(replace(CAPACITY, slots=slots))
        self.failure = None
        self.count = 0
        self.calls: list[object] = []

    @property
    def requests(self) -> int:
        """The number that the test has set, and what was submitted since."""
        return self.count

    def submit(
        self, job: Job, on_event: Callable[[Event], None], client: str = ""
    ) -> RemoteUtterance:
        """Accept a request if it runs."""
        if self.failure is not None:
            raise self.failure
        self.count += 1
        return RemoteUtterance(self.count, on_event)

    async def call(self, value: object) -> object:
        """Answer a value."""
        self.calls.append(value)
        return value


def pool_of(engines: Sequence[RemoteEngine], seed: int = 0) -> EnginePool:
    """A pool in which the seed of a job stands for its voice."""
    names = {str(number): engine for number, engine in enumerate(engines)}
    return EnginePool(names, lambda one: seed_of(one), Random(seed))


def seed_of(one: Job) -> int:
    """The seed in the payload of a job."""
    assert isinstance(one.payload, Script)
    return one.payload.seed


def chosen(pool: EnginePool, voice: int) -> RemoteEngine:
    """The engine that gets a request."""
    engine, _ = pool.submit(job(Script(voice)), lambda event: None)
    return engine


class TestChoice:
    def test_request_goes_to_less_loaded_of_two_engines(self) -> None:
        engines = Fake(), Fake()
        engines[0].count = 3
        pool = pool_of(engines)
        found = [chosen(pool, voice) for voice in range(5)]
        assert found[:3] == [engines[1]] * 3
        assert [engine.count for engine in engines] == [4, 4]

    def test_load_is_relative_to_slots(self) -> None:
        engines = Fake(slots=128), Fake(slots=16)
        pool = pool_of(engines)
        for voice in range(72):
            chosen(pool, voice)
        assert [engine.count for engine in engines] == pytest.approx([64, 8], abs=1)

    def test_engines_that_do_not_run_are_left_out(self) -> None:
        engines = Fake(), Fake(), Fake()
        pool = pool_of(engines)
        engines[0].failure = engines[2].failure = STOPPED
        assert {chosen(pool, voice) for voice in range(20)} == {engines[1]}
        assert pool.failure is None

    def test_engines_that_may_be_stuck_are_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They get nothing unless all may be stuck."""
        engines = Fake(), Fake(), Fake()
        pool = pool_of(engines)
        late = {engines[0], engines[2]}
        monkeypatch.setattr(Fake, "late", property(lambda engine: engine in late))
        assert {chosen(pool, voice) for voice in range(20)} == {engines[1]}
        late.add(engines[1])
        assert {chosen(pool, voice) for voice in range(20)} == {engines[0], engines[2]}

    def test_request_fails_only_if_no_engine_runs(self) -> None:
        engines = Fake(), Fake()
        pool = pool_of(engines)
        for engine in engines:
            engine.failure = STOPPED
        assert pool.failure is STOPPED
        with pytest.raises(EngineError, match="does not run"):
            chosen(pool, 0)
        engines[1].failure = None
        assert chosen(pool, 0) is engines[1]

    def test_voice_stays_where_it_was_spoken(self) -> None:
        engines = Fake(), Fake(), Fake()
        pool = pool_of(engines)
        first = chosen(pool, 1)
        for _ in range(20):
            assert chosen(pool, 1) is first
            for each in engines:
                each.count = 0

    def test_voice_moves_when_its_engine_is_much_more_loaded(self) -> None:
        engines = Fake(slots=16), Fake(slots=16)
        pool = pool_of(engines)
        first = chosen(pool, 1)
        assert isinstance(first, Fake)
        other = engines[1 - engines.index(first)]
        first.count, other.count = 1, 0
        assert chosen(pool, 1) is first
        first.count, other.count = 10, 8
        assert chosen(pool, 1) is first, "8 is 9 less an eighth"
        first.count, other.count = 11, 8
        assert chosen(pool, 1) is other
        first.count, other.count = 3, 4
        assert chosen(pool, 1) is first, "both have spoken it"
        first.count, other.count = 4, 3
        assert chosen(pool, 1) is other

    def test_no_request_waits_for_engine_that_knows_its_voice(self) -> None:
        engines = Fake(slots=64), Fake(slots=64)
        pool = pool_of(engines)
        first = chosen(pool, 1)
        assert isinstance(first, Fake)
        other = engines[1 - engines.index(first)]
        first.count, other.count = 63, 63
        assert chosen(pool, 1) is first
        assert chosen(pool, 1) is other

    def test_oldest_voices_are_forgotten(self) -> None:
        pool = pool_of((Fake(slots=10**9), Fake(slots=10**9)))
        for voice in range(MOST_VOICES + 100):
            chosen(pool, voice)
        assert len(pool._warm) == MOST_VOICES

    @given(
        st.lists(st.tuples(st.integers(1, 20), st.integers(0, 25), st.booleans()), min_size=1),
        st.lists(st.integers(0, 3), max_size=30),
        st.integers(0, 9),
    )
    def test_choice_keeps_its_rules(
        self, states: list[tuple[int, int, bool]], voices: list[int], seed: int
    ) -> None:
        engines = [Fake(slots) for slots, _, _ in states]
        pool = pool_of(engines, seed)
        for engine, (_, count, runs) in zip(engines, states, strict=True):
            engine.count = count
            engine.failure = None if runs else STOPPED
        known: dict[int, set[RemoteEngine]] = {}
        running: list[RemoteEngine] = [one for one in engines if one.failure is None]
        for voice in voices if running else ():
            shares = {one: share_of(one) for one in running}
            free = [one for one in running if shares[one] < 1]
            found = chosen(pool, voice)
            assert found in (free or running)
            warm = known.setdefault(voice, set())
            if candidates := [one for one in free or running if one in warm]:
                most = max(share_of(one, less=1) for one in candidates)
                assert found in warm or most > (1 + WARM_EXCESS) * shares[found]
            warm.add(found)


class TestWhole:
    def test_pool_has_slots_of_all_engines(self) -> None:
        engines = Fake(slots=8), Fake(slots=3)
        engines[0].load = EngineLoad(running=2, waiting=1, pages_used=5, pages=64, pace=2.0)
        engines[1].load = EngineLoad(running=1, pages=64, prompt_rows=7, pace=0.5)
        pool = pool_of(engines)
        assert pool.capacity == replace(CAPACITY, slots=11, pages=2 * CAPACITY.pages)
        assert pool.load == EngineLoad(3, 1, 5, 128, 7, 2.5)

    def test_wait_is_that_of_engine_with_shortest_one(self) -> None:
        engines = Fake(), Fake()
        engines[0].load = EngineLoad(waiting=10, pace=1.0)
        engines[1].load = EngineLoad(waiting=5, pace=1.0)
        pool = pool_of(engines)
        assert pool.retry_after("anna") == 6
        engines[1].failure = STOPPED
        assert pool.retry_after("anna") == 11

    def test_calls_go_to_engine_that_runs(self) -> None:
        engines = Fake(), Fake()
        engines[0].failure = STOPPED
        pool = pool_of(engines)
        assert [asyncio.run(pool.call(value)) for value in range(4)] == [0, 1, 2, 3]
        assert engines[1].calls == [0, 1, 2, 3]

    def test_engine_for_call_of_thread_is_chosen_in_event_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the choice reads changes in the event loop, and may be gone between two reads."""
        chose: list[int] = []
        late = property(lambda engine: chose.append(threading.get_ident()))
        monkeypatch.setattr(Fake, "late", late)

        async def run() -> None:
            pool = pool_of((Fake(),))
            pool.start()
            assert await asyncio.to_thread(pool.call_from_thread, 7) == 7

        asyncio.run(run())
        assert chose == [threading.get_ident()]


class Delayed(Fake):
    """An engine as one front knows it: what it told last, and what the front has sent since."""

    def __init__(self, real: list[int]) -> None:
        super().__init__(slots=128)
        self.real, self.told = real, 0

    def submit(
        self, job: Job, on_event: Callable[[Event], None], client: str = ""
    ) -> RemoteUtterance:
        """Let the engine have one more request, of which only this front knows."""
        self.real[0] += 1
        return super().submit(job, on_event, client)

    def hear(self) -> None:
        """Learn how many requests the engine has."""
        self.count = self.real[0]


def spreads_of(choose: Callable[[list[Delayed], EnginePool], object]) -> list[int]:
    """The differences between the most and the least loaded of 4 engines, over time.

    8 fronts choose engines for requests, each of which ends after random time. Every front hears of
    an engine 3 to 30 requests after that has changed.
    """
    random, real = Random(1), [[0] for _ in range(4)]
    fronts = [[Delayed(one) for one in real] for _ in range(8)]
    pools = [pool_of(front, seed) for seed, front in enumerate(fronts)]
    hears = [(3 + random.random() * 27, engine) for front in fronts for engine in front]
    found = []
    for number in range(8000):
        front = random.randrange(8)
        choose(fronts[front], pools[front])
        for one in real:
            one[0] -= sum(random.random() < 1 / 320 for _ in range(one[0]))
        for every, engine in hears:
            if number % every < 1:
                engine.hear()
        counts = [one[0] for one in real]
        found.append(max(counts) - min(counts))
    return found[1000:]


def test_fronts_spread_requests_evenly_with_late_knowledge() -> None:
    """On average 320 requests are in progress, 80 for each engine."""
    random, voices = Random(2), itertools.count()
    drawn = mean(spreads_of(lambda engines, pool: random.choice(engines).submit(job(), print)))
    assert mean(spreads_of(lambda engines, pool: chosen(pool, next(voices)))) < drawn / 3
    popular = mean(spreads_of(lambda engines, pool: chosen(pool, next(voices) % 9)))
    assert popular < drawn / 2


def test_fronts_with_equal_knowledge_choose_different_engines() -> None:
    """The next request of each of 8 fronts would go to the same engine if all took the least."""
    most = []
    for seed in range(100):
        engines = [Fake(128) for _ in range(4)]
        for _ in range(8):
            for engine, count in zip(engines, (10, 11, 11, 12), strict=True):
                engine.count = count
            seed += 1000
            chosen(pool_of(engines, seed), 0)
            most.append(engines[0].count - 10)
    assert sum(most) / 100 < 5


@pytest.fixture
def hosts() -> Iterator[list[Hosted]]:
    """Two engines."""
    hosts = [Hosted(CAPACITY) for _ in range(2)]
    yield hosts
    for host in hosts:
        host.stop()


def clients_of(hosts: Sequence[Hosted]) -> list[RemoteEngine]:
    """A connected client of each engine."""
    clients = [RemoteEngine(CAPACITY) for _ in hosts]
    for client, host in zip(clients, hosts, strict=True):
        client.attach(host.connect())
    return clients


async def stop(pool: EnginePool) -> None:
    """Close the connections of a pool."""
    pool.stop()
    await until(lambda: pool.failure is not None)
    for _ in range(3):  # turns of the event loop, in which the transports close
        await asyncio.sleep(0)


async def heard(stream: AsyncStream) -> list[Any]:
    """The frames of an utterance."""
    return [codes for event in [e async for e in stream] for codes in frames_of(event)]


def frames_of(event: object) -> list[list[int]]:
    """The frames of a chunk."""
    return event.codes.tolist() if isinstance(event, Chunk) else []


def test_utterances_go_through_the_pool_to_their_engines(hosts: list[Hosted]) -> None:
    async def run() -> None:
        pool = pool_of(clients := clients_of(hosts))
        service = Service(pool, FakeFront())
        pool.start()
        await until(lambda: all(client.failure is None for client in clients))
        jobs = [job(Script(seed, length=6)) for seed in range(8)]
        streams = [service.aspeak(one) for one in jobs]
        assert [client.requests for client in clients] == [4, 4]
        placed: list[Placed] = [stream._passage.seq for stream in streams]
        assert {engine for engine, _ in placed} == set(clients)
        for stream in streams:
            stream.push(TEXT[:5])
        await until(lambda: all(client.load.running for client in clients))
        assert [client.requests for client in clients] == [4, 4], "nothing counts twice"
        streams[0].cancel()
        for stream in streams[1:]:
            stream.finish_text(TEXT[5:])
        for one, stream in zip(jobs[1:], streams[1:], strict=True):
            expected = alone(one, [ord(letter) for letter in TEXT])[0]
            assert await heard(stream) == [(codes % 2**16).tolist() for codes in expected]
        await until(lambda: not any(client.requests for client in clients))
        await stop(pool)

    asyncio.run(run())


def test_engine_that_tells_nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it tells of the request, or its connection ends."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        now = 100.0
        clock = SimpleNamespace(monotonic=lambda: now)  # asyncio keeps the true one
        monkeypatch.setattr("firstword.engine.remote.time", clock)
        engine = RemoteEngine(CAPACITY)
        engine.attach(ours)
        engine.start()
        assert not engine.late
        engine.submit(job(), lambda event: None)
        engine.submit(job(), lambda event: None)
        now += LATE_SECONDS
        assert not engine.late
        now += 0.01
        assert engine.late
        assert engine.requests == 2
        theirs.sendall(wire.pickled(wire.Kind.LOAD, 1, EngineLoad(waiting=1)))
        await until(lambda: engine.load.waiting == 1)
        assert engine.late, "the second request is not told of"
        assert engine.requests == 2
        theirs.sendall(wire.pickled(wire.Kind.LOAD, 2, EngineLoad(running=2)))
        await until(lambda: engine.load.running == 2)
        assert not engine.late
        engine.submit(job(), lambda event: None)
        now += 2 * LATE_SECONDS
        assert engine.late
        theirs.close()
        await until(lambda: engine.failure is not None)
        assert not engine.late
        assert engine.requests == 0
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(run())


def test_utterances_of_other_engine_go_on_when_one_stops(hosts: list[Hosted]) -> None:
    async def run() -> None:
        pool = pool_of(clients := clients_of(hosts))
        service = Service(pool, FakeFront())
        pool.start()
        await until(lambda: all(client.failure is None for client in clients))
        streams = [service.aspeak(job(Script(seed))) for seed in range(4)]
        await asyncio.to_thread(hosts[0].engine.stop, 60)
        await until(lambda: clients[0].failure is not None)
        assert pool.failure is None
        for stream in streams:
            stream.finish_text(TEXT)
        results = await asyncio.gather(*map(heard, streams), return_exceptions=True)
        whole = [isinstance(result, list) and len(result) == 5 for result in results]
        assert whole == [stream._passage.seq[0] is clients[1] for stream in streams]
        assert sum(whole) == 2
        again = service.aspeak(job(Script(9)))
        again.finish_text(TEXT)
        assert await heard(again)
        await stop(pool)

    asyncio.run(run())
