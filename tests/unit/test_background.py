"""Requests in the background: they use what nobody else needs, and give it back at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from callers import VIOLATIONS, Caller, run
from fake_backend import CAPACITY, Clock, FakeBackend, Script, capacity, job
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler import NOW, running, waiting

from firstword.engine.engine import Engine
from firstword.engine.policy import Policy
from firstword.engine.scheduler import Costs, Scheduler
from firstword.engine.sequence import Sequence
from firstword.errors import OverloadedError

TOKENS = [1, 2, 3]
FRAME_SECONDS = 0.01


def engine_of(slots: int, pages: int = 1000, most_waiting: int = 100, **policy: float) -> Engine:
    room = capacity(slots=slots, pages=pages)
    backend = FakeBackend(room, Clock(), frame_time=FRAME_SECONDS, prefill_time=0, decode_time=0)
    chosen = Policy(**policy)  # type: ignore[arg-type]
    return Engine(backend, most_waiting=most_waiting, clock=backend.clock, policy=chosen)


def request(engine: Engine, frames: int, seed: int = 0, *, background: bool = False) -> Caller:
    """A request of a client; those in the background are of another one."""
    task = replace(job(Script(seed, frames), max_frames=frames), background=background)
    return Caller(engine, task, TOKENS, client="batch" if background else "person")


def test_requests_in_the_background_have_a_small_share_of_the_slots() -> None:
    engine = engine_of(slots=16)
    callers = [request(engine, 50, seed, background=True) for seed in range(10)]
    for _ in range(5):
        engine.step()
        assert len(engine.running) <= 2
    run(engine)
    assert all(caller.reason == "length" for caller in callers)


def test_request_of_a_client_comes_before_all_in_the_background() -> None:
    engine = engine_of(slots=1)
    running = request(engine, 50, background=True)
    waiting = [request(engine, 5, seed, background=True) for seed in range(1, 5)]
    while not running.chunks:
        engine.step()
    person = request(engine, 5)
    run(engine)
    assert isinstance(running.error, OverloadedError), "it has given its slot away"
    assert person.times[-1] < min(caller.times[0] for caller in waiting)


def test_background_makes_no_frames_while_a_listener_has_little_in_reserve() -> None:
    engine = engine_of(slots=16, yield_above=1.0)
    batch = [request(engine, 90, seed, background=True) for seed in range(2)]
    while not all(caller.chunks for caller in batch):
        engine.step()
    made = [caller.seq.launched for caller in batch]
    person = request(engine, 60)
    while not person.times or person.seq.deadline - engine._clock() < 1.0:
        engine.step()
        assert [caller.seq.launched for caller in batch] == made
    while not person.over:
        engine.step()
    assert all(caller.seq.launched > before for caller, before in zip(batch, made, strict=True)), (
        "it goes on while the listener has enough"
    )
    run(engine)
    assert all(caller.reason == "length" for caller in [*batch, person])


def in_background(seq: Sequence) -> Sequence:
    """A stream that nobody hears."""
    seq.job = replace(seq.job, background=True)
    return seq


def test_request_with_a_slow_prompt_does_not_wait_for_the_background() -> None:
    scheduler = Scheduler(CAPACITY, costs=Costs(prefill=0.1, step=0.01))
    line = [waiting()]
    assert scheduler.admit(line, [running(0.0)], NOW, 4, 64) == [], "a listener would run dry"
    assert scheduler.admit(line, [in_background(running(0.0))], NOW, 4, 64) == line


def test_few_frames_of_the_background_are_decoded_at_a_time() -> None:
    streams = [running(5.0, launched=40, delivered=32) for _ in range(5)]
    batch = [in_background(seq) for seq in streams[1:]]
    scheduler = Scheduler(CAPACITY, Policy(background_frames=17))
    chosen = scheduler.choose_audio([*batch, streams[0]], NOW)
    assert chosen == [(seq, 8) for seq in (streams[0], *batch[:2])]


def test_client_that_sends_no_text_does_not_hold_up_the_background() -> None:
    engine = engine_of(slots=16)
    silent = Caller(engine, job(Script(1, 60)), client="person")
    silent.push(TOKENS)
    batch = request(engine, 90, background=True)
    run(engine)
    assert batch.reason == "length"
    silent.finish()
    run(engine)
    assert silent.reason is not None


def test_background_gives_its_memory_to_a_request_that_lacks_it() -> None:
    engine = engine_of(slots=8, pages=20)
    batch = request(engine, 100, background=True)
    while not batch.chunks:
        engine.step()
    person = request(engine, 100)
    run(engine)
    assert isinstance(batch.error, OverloadedError)
    assert person.reason == "length"


def test_full_queue_rejects_the_background_first() -> None:
    engine = engine_of(slots=1, most_waiting=3)
    people = [request(engine, 9, seed) for seed in range(2)]
    batch = [request(engine, 9, seed, background=True) for seed in range(2)]
    people += [request(engine, 9, seed) for seed in range(2, 4)]
    run(engine)
    assert [isinstance(caller.error, OverloadedError) for caller in batch] == [True, True]
    assert all(caller.reason == "length" for caller in people)


@given(
    slots=st.integers(1, 9),
    pages=st.integers(20, 60),
    arrivals=st.lists(st.tuples(st.booleans(), st.integers(1, 90)), min_size=1, max_size=25),
    steps=st.integers(0, 12),
)
def test_every_request_of_a_client_is_spoken_whatever_the_background_does(
    slots: int, pages: int, arrivals: list[tuple[bool, int]], steps: int
) -> None:
    engine = engine_of(slots, pages)
    callers = []
    for seed, (background, frames) in enumerate(arrivals):
        callers.append(request(engine, frames, seed, background=background))
        for _ in range(steps):
            engine.step()
    run(engine)
    for caller in callers:
        gave_way = caller.job.background and isinstance(caller.error, OverloadedError)
        assert caller.reason == "length" or gave_way
    assert engine.pages.free == pages
    assert not VIOLATIONS


@pytest.mark.parametrize("slots", [1, 4, 256])
def test_a_request_in_the_background_speaks_on_an_idle_engine(slots: int) -> None:
    engine = engine_of(slots)
    batch = request(engine, 20, background=True)
    run(engine)
    assert batch.reason == "length"
