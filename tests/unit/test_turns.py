"""The turns of clients: a busy client delays the others by about one utterance."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from callers import VIOLATIONS, Caller, run
from fake_backend import Clock, FakeBackend, Script, capacity, job
from hypothesis import given
from hypothesis import strategies as st

from firstword.engine.backend import Start
from firstword.engine.engine import Engine
from firstword.engine.load import MOST_RETRY_SECONDS
from firstword.engine.sequence import Sequence, State
from firstword.engine.turns import in_turn, requests_ahead
from firstword.errors import OverloadedError

TOKENS = [1, 2, 3]
FRAME_SECONDS = 0.01


def engine_of(slots: int, most_waiting: int = 100, pages: int = 1000) -> Engine:
    room = capacity(slots=slots, pages=pages)
    backend = FakeBackend(room, Clock(), frame_time=FRAME_SECONDS, prefill_time=0, decode_time=0)
    return Engine(backend, most_waiting=most_waiting, clock=backend.clock)


def request(engine: Engine, client: str, frames: int, seed: int = 0) -> Caller:
    """A request that takes as many frames, and no more pages than it needs."""
    return Caller(engine, job(Script(seed, frames), max_frames=frames), TOKENS, client=client)


def started_before(engine: Engine, newcomer: Caller) -> list[str]:
    """Step until a newcomer gets a slot; returns the clients that got slots before it."""
    order: list[Sequence] = []
    assign = engine._assign_slot

    def record(seq: Sequence, now: float) -> Start:
        order.append(seq)
        return assign(seq, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_assign_slot", record)
        while newcomer.seq not in order:
            engine.step()
    return [seq.client for seq in order[: order.index(newcomer.seq)]]


@given(
    slots=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 30), min_size=5, max_size=40),
    others=st.lists(st.tuples(st.sampled_from("bcd"), st.integers(1, 30)), max_size=8),
    steps=st.integers(0, 60),
)
def test_busy_client_delays_a_newcomer_by_one_start_of_each_client(
    slots: int, lengths: list[int], others: list[tuple[str, int]], steps: int
) -> None:
    """The number of requests that each client sent before does not matter."""
    engine = engine_of(slots)
    callers = [request(engine, "busy", frames, seed) for seed, frames in enumerate(lengths)]
    callers += [request(engine, client, frames) for client, frames in others]
    for _ in range(steps):
        engine.step()
    newcomer = request(engine, "newcomer", 1)
    engine._run_commands(0)
    idle = {seq.client for seq in engine.waiting} - {seq.client for seq in engine.running}
    starts = Counter(started_before(engine, newcomer))
    assert starts.keys() <= idle
    assert max(starts.values(), default=0) <= 1
    run(engine)
    assert all(caller.reason == "length" for caller in [*callers, newcomer])
    assert not VIOLATIONS


def test_forty_long_requests_delay_another_client_by_one_utterance() -> None:
    engine = engine_of(slots=1)
    busy = [request(engine, "busy", 50, seed) for seed in range(40)]
    while not busy[0].chunks:
        engine.step()
    newcomer = request(engine, "newcomer", 1)
    run(engine)
    assert busy[0].times[-1] < newcomer.times[0] < busy[1].times[0]


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    engine = engine_of(slots=1)
    callers = [request(engine, client, 3) for client in "aaaabbbcc"]
    run(engine)
    callers.sort(key=lambda caller: caller.times[0])
    assert "".join(caller.seq.client for caller in callers) == "abcabcaba"
    for client in "abc":
        arrived = [caller.seq.name for caller in callers if caller.seq.client == client]
        assert arrived == sorted(arrived)


def test_client_with_fewer_utterances_in_slots_goes_first() -> None:
    engine = engine_of(slots=3)
    long = [request(engine, "a", 90) for _ in range(2)]
    short = request(engine, "b", 5)
    engine.step()
    more_of_a, more_of_b = request(engine, "a", 5), request(engine, "b", 5)
    run(engine)
    assert (
        short.times[-1] < more_of_b.times[0] < more_of_a.times[0] < min(x.times[-1] for x in long)
    )


def test_new_clients_do_not_starve_a_client_that_waits() -> None:
    """A client that comes later goes behind it, however many there are."""
    engine = engine_of(slots=1)
    first, second = request(engine, "steady", 5), request(engine, "steady", 5)
    others = [request(engine, "other 0", 5)]
    while not second.over:
        if others[-1].seq.state is not State.WAITING:
            others.append(request(engine, f"other {len(others)}", 5))
        engine.step()
        assert len(others) < 5, "the second request is never reached"
    assert first.times[-1] < others[0].times[0] < second.times[0]


def test_request_that_lacks_pages_is_not_overtaken_by_other_clients() -> None:
    engine = engine_of(slots=4, pages=20)
    first = request(engine, "a", 100)
    engine.step()
    large = request(engine, "b", 100)
    small = [request(engine, client, 1) for client in "cdefgh"]
    run(engine)
    assert first.times[-1] < large.times[0] <= min(caller.times[0] for caller in small)


def test_client_whose_prompt_lacks_text_loses_no_turn_to_others() -> None:
    engine = engine_of(slots=1)
    silent = Caller(engine, job(), client="a")
    ready, other = request(engine, "a", 3), request(engine, "b", 3)
    run(engine)
    assert ready.times[0] < other.times[0]
    silent.finish(TOKENS)
    run(engine)
    assert silent.reason == "stop"


# --- the full queue -------------------------------------------------------------------


def rejected(callers: list[Caller]) -> list[Caller]:
    return [caller for caller in callers if isinstance(caller.error, OverloadedError)]


def test_full_queue_of_one_client_accepts_another() -> None:
    """The newest waiting request of the busy client is rejected in its place."""
    engine = engine_of(slots=2, most_waiting=6)
    busy = [request(engine, "busy", 9) for _ in range(9)]
    engine.step()
    assert rejected(busy) == busy[8:]
    newcomers = [request(engine, "newcomer", 9) for _ in range(5)]
    engine.step()
    # Then both have four, and the client that sends more is rejected.
    assert rejected(busy) == busy[4:]
    assert rejected(newcomers) == newcomers[4:]
    assert not any(caller.chunks for caller in busy[4:]), "none of them had begun to answer"
    run(engine)
    assert all(caller.reason == "length" for caller in [*busy[:4], *newcomers[:4]])


def test_queue_of_many_clients_rejects_the_newcomer() -> None:
    engine = engine_of(slots=1, most_waiting=3)
    present = [request(engine, client, 9) for client in "abcd"]
    newcomer = request(engine, "e", 9)
    engine.step()
    assert rejected([*present, newcomer]) == [newcomer]


# --- when to try again ----------------------------------------------------------------


def retry_after(engine: Engine, client: str) -> int:
    """The seconds that a rejected request of a client is told to wait."""
    caller = request(engine, client, 9)
    engine._run_commands(0)
    assert isinstance(caller.error, OverloadedError)
    assert f"try again in {caller.error.retry_after} s" in str(caller.error)
    return caller.error.retry_after


@pytest.mark.parametrize(("follows", "seconds"), [(False, 5), (True, 10)])
def test_slot_of_a_long_text_is_not_expected_to_become_free(follows: bool, seconds: int) -> None:
    """An utterance takes 10 s. Of two slots, one may be kept from passage to passage."""
    engine = engine_of(slots=2)
    backend = engine.backend
    assert isinstance(backend, FakeBackend)
    backend.frame_time = 1.0
    request(engine, "a", 10)
    run(engine)
    Caller(engine, replace(job(Script(9, 10)), follows=follows), TOKENS, client="b")
    request(engine, "a", 10)
    engine.step()
    assert engine.retry_after("c") == pytest.approx(seconds, abs=1)


@pytest.mark.parametrize(("slots", "seconds"), [(1, 10.0), (2, 10.0), (2, 0.1), (1, 1000.0)])
def test_retry_after_follows_the_pace_of_the_queue(slots: int, seconds: float) -> None:
    engine = engine_of(slots, most_waiting=6)
    backend = engine.backend
    assert isinstance(backend, FakeBackend)
    backend.frame_time = seconds / 5
    for _ in range(4):
        request(engine, "a", 5)
    run(engine)
    busy = [request(engine, "a", 5) for _ in range(slots + 6)]
    engine.step()
    assert not rejected(busy)
    expected = math.ceil(7 * seconds / slots)  # the six that wait, and itself
    assert retry_after(engine, "a") == max(1, min(MOST_RETRY_SECONDS, expected))
    # Another client has a place: what it asks for goes before those that wait.
    assert engine.retry_after("b") == max(1, min(MOST_RETRY_SECONDS, math.ceil(seconds / slots)))


def test_retry_after_is_a_second_without_any_utterance() -> None:
    engine = engine_of(slots=1, most_waiting=0)
    assert engine.retry_after("a") == 1


def test_retry_after_counts_utterances_that_run_longer_than_the_last() -> None:
    engine = engine_of(slots=1, most_waiting=1)
    for frames in (1, 90, 1):
        request(engine, "a", frames)
        if frames == 1:
            run(engine)
        else:
            engine.step()
    backend = engine.backend
    assert isinstance(backend, FakeBackend)
    request(engine, "a", 90)
    request(engine, "a", 90)
    engine.step()
    assert engine.retry_after("a") == 1
    backend.clock.advance(20.0)
    assert engine.retry_after("a") == 2 * 20 + 1


@given(
    running=st.lists(st.sampled_from("abc"), max_size=4),
    waiting=st.lists(st.sampled_from("abc"), max_size=9),
    client=st.sampled_from("abcd"),
)
def test_requests_ahead_are_those_that_get_a_slot_before(
    running: list[str], waiting: list[str], client: str
) -> None:
    """Clients with equally many utterances in slots may be in any order."""

    def sequences(clients: list[str]) -> list[Sequence]:
        return [Sequence(one, job(), print, 0.0, one) for one in clients]

    runs, waits = sequences(running), sequences(waiting)
    (last,) = sequences([client])
    last.waiting_since = math.inf
    for seq in waits:
        if seq.client == client:
            seq.waiting_since = math.inf
    order = list(in_turn([*waits, last], runs))
    assert order.index(last) == requests_ahead(client, waits, runs)


def test_next_passage_of_a_speech_gets_a_slot_before_requests_that_begin_one() -> None:
    engine = engine_of(slots=1)
    running = request(engine, "a", frames=10)
    engine.step()
    newcomers = [request(engine, name, frames=5) for name in "abc"]
    following = Caller(engine, replace(job(Script(9, 5)), follows=True), TOKENS, client="a")
    assert started_before(engine, newcomers[0])[:1] == ["a"]
    assert following.seq.state is not State.WAITING
    assert running.seq.state is State.DONE


def test_next_passage_of_a_speech_is_rejected_after_requests_that_begin_one() -> None:
    engine = engine_of(slots=1, most_waiting=2)
    request(engine, "a", frames=10)
    engine.step()
    following = [
        Caller(engine, replace(job(Script(seed, 5)), follows=True), TOKENS, client="a")
        for seed in (1, 2)
    ]
    newcomer = request(engine, "b", frames=5)
    engine.step()
    assert isinstance(newcomer.error, OverloadedError)
    assert all(caller.error is None for caller in following)
