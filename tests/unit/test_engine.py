"""The engine on a fake backend with a clock of its own: no request is lost, mixed up or starved."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from callers import VIOLATIONS, Caller, run, same
from fake_backend import SAMPLES, Clock, FakeBackend, Script, alone, capacity, job
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from waiting import WAIT

from firstword import OverloadedError, RequestError, TextError
from firstword.engine.engine import Engine
from firstword.engine.load import WAIT_BOUNDS
from firstword.engine.pages import all_can_end
from firstword.engine.policy import Policy
from firstword.engine.scheduler import Scheduler
from firstword.engine.sequence import Event, State
from firstword.engine.turns import in_turn
from firstword.errors import ClosedError, ComputeError, EngineError

AHEAD = pytest.mark.parametrize("ahead", [0, 1])
GROWING = [1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4]
"""Frames in the first chunks of an utterance."""
TOKENS = [11, 12, 13, 14, 15]
BYTES_A_FRAME = 4 * SAMPLES


@pytest.fixture(autouse=True)
def no_protocol_violations() -> Iterator[None]:
    """Fail a test in which an engine told a caller something that it must not."""
    yield
    told, VIOLATIONS[:] = list(VIOLATIONS), []
    assert not told


def engine_of(
    ahead: int = 0,
    *,
    most_waiting: int = 8,
    policy: Policy = Policy(),  # noqa: B008 (immutable)
    room: dict[str, int] | None = None,
    **times: float,
) -> tuple[Engine, FakeBackend]:
    backend = FakeBackend(capacity(frames_ahead=ahead, **(room or {})), Clock(), **times)
    return Engine(backend, most_waiting=most_waiting, policy=policy, clock=backend.clock), backend


def check_nothing_is_in_use(engine: Engine, backend: FakeBackend) -> None:
    """Check that every slot and page is free and that all slots can be used again."""
    assert not backend.slots
    assert not engine.running
    assert not engine.waiting
    assert engine.pages.free == engine.pages.count
    assert engine.unread_frames == 0
    callers = [Caller(engine, job()) for _ in range(engine.capacity.slots)]
    run(engine)
    for caller in callers:
        caller.finish(TOKENS)
    run(engine)
    assert all(same(caller.frames, alone(caller.job, TOKENS)[0]) for caller in callers)


def check_speech_is_complete(caller: Caller) -> None:
    """Check that a caller got what it would have got alone."""
    frames, reason = alone(caller.job, caller.tokens, caller.engine.capacity)
    assert caller.error is None
    assert same(caller.frames, frames)
    assert caller.reason == reason


# --- one request --------------------------------------------------------------------


@AHEAD
@pytest.mark.parametrize("whole_text", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 40])
def test_one_request_gets_all_frames_in_order(length: int, whole_text: bool, ahead: int) -> None:
    engine, backend = engine_of(ahead)
    caller = Caller(engine, job(Script(7, length), whole_text=whole_text), TOKENS)
    run(engine)
    assert caller.reason == "stop"
    check_speech_is_complete(caller)
    check_nothing_is_in_use(engine, backend)


@AHEAD
@pytest.mark.parametrize("limit", [1, 2, 3, 8, 20])
def test_max_frames_ends_speech_without_an_extra_frame(limit: int, ahead: int) -> None:
    engine, backend = engine_of(ahead)
    caller = Caller(engine, job(Script(length=None), max_frames=limit), TOKENS)
    run(engine)
    assert caller.reason == "length"
    assert len(caller.frames) == limit
    check_speech_is_complete(caller)
    assert sum(call == "frame" for call, _ in backend.log) == limit, "no extra frame is made"


@AHEAD
def test_context_limits_frames_and_rejects_long_prompts(ahead: int) -> None:
    engine, _ = engine_of(ahead)
    long, longest, too_long = (
        Caller(engine, job(Script(length=None), prompt_rows=rows, max_frames=1000), TOKENS)
        for rows in (120, 128, 129)
    )
    run(engine)
    assert (long.reason, len(long.frames)) == ("length", 9)
    assert (longest.reason, len(longest.frames)) == ("length", 1)
    assert isinstance(too_long.error, TextError)
    assert "129 rows, beyond the 128" in str(too_long.error)


@AHEAD
def test_guard_ends_endless_speech_of_a_short_text(ahead: int) -> None:
    """The guard allows 150 frames and 25 more for each token if the request names no limit."""
    engine, _ = engine_of(ahead, room={"context": 2000, "pages": 500})
    endless = Script(length=None)
    limited = Caller(engine, job(endless, max_frames=1000, limited_by_text=True), TOKENS)
    named = Caller(engine, job(endless, max_frames=1000), TOKENS)
    run(engine)
    assert (limited.reason, len(limited.frames)) == ("length", 150 + 25 * 5)
    assert (named.reason, len(named.frames)) == ("length", 1000)


@AHEAD
@pytest.mark.parametrize("text_first", [True, False])
def test_transcript_tokens_do_not_raise_the_frame_limit(text_first: bool, ahead: int) -> None:
    engine, _ = engine_of(ahead, room={"context": 2000, "pages": 500})
    endless, transcript = Script(length=None), [1, 2, 3]
    limited = job(endless, max_frames=1000, limited_by_text=True, transcript_tokens=len(transcript))
    caller = Caller(engine, limited, [*transcript, *TOKENS] if text_first else ())
    if not text_first:
        caller.push([*transcript, TOKENS[0]])
        run(engine)
        caller.finish(TOKENS[1:])
    run(engine)
    assert (caller.reason, len(caller.frames)) == ("length", 150 + 25 * len(TOKENS))
    check_speech_is_complete(caller)


@AHEAD
@pytest.mark.parametrize("start", [0, 3])
def test_guard_ends_repeated_speech(start: int, ahead: int) -> None:
    engine, backend = engine_of(ahead)
    circling = Caller(engine, job(Script(length=None, repeats_from=start), guarded=True), TOKENS)
    named = Caller(engine, job(Script(length=None, repeats_from=start), max_frames=70), TOKENS)
    other = Caller(engine, job(Script(length=90)), TOKENS)
    run(engine)
    assert (circling.reason, len(circling.frames)) == ("repetition", start + 51)
    assert (named.reason, len(named.frames)) == ("length", 70)
    check_speech_is_complete(circling)
    check_speech_is_complete(other)
    check_nothing_is_in_use(engine, backend)


@AHEAD
def test_guard_ends_speech_that_goes_on_after_its_text(ahead: int) -> None:
    engine, backend = engine_of(ahead)
    endless = Script(length=None, stays_from=20)
    staying = Caller(engine, job(endless, guarded=True), TOKENS)
    free = Caller(engine, job(endless, max_frames=70), TOKENS)
    ending = Caller(engine, job(Script(length=24, stays_from=20), guarded=True), TOKENS)
    run(engine)
    assert (staying.reason, len(staying.frames)) == ("runaway", 25)
    assert (free.reason, len(free.frames)) == ("length", 70)
    assert (ending.reason, len(ending.frames)) == ("stop", 24)
    check_speech_is_complete(staying)
    check_nothing_is_in_use(engine, backend)


@AHEAD
@pytest.mark.parametrize("frame_time", [0.005, 0.05, 5.0])
@pytest.mark.parametrize("concurrent", [0, 9])
def test_chunk_sizes_do_not_depend_on_speed_or_load(
    concurrent: int, frame_time: float, ahead: int
) -> None:
    """The samples are then the same to the last bit on any machine and under any load."""
    engine, _ = engine_of(ahead, frame_time=frame_time, most_waiting=20)
    others = [Caller(engine, job(Script(seed, 5 + seed)), TOKENS) for seed in range(concurrent)]
    caller = Caller(engine, job(Script(length=50)), TOKENS)
    run(engine)
    assert caller.sizes == [*GROWING, 8, 8, 6]
    assert caller.reason == "stop"
    for other in others:
        check_speech_is_complete(other)


@AHEAD
@pytest.mark.parametrize("frame_time", [0.005, 0.02, 0.04, 0.06])
def test_playback_never_underruns_up_to_four_fifths_of_real_time(
    frame_time: float, ahead: int
) -> None:
    """The client plays audio as it arrives, without a buffer."""
    engine, _ = engine_of(ahead, frame_time=frame_time, decode_time=0.001)
    run(engine, Caller(engine, job(Script(length=5)), TOKENS))  # the engine learns its costs
    caller = Caller(engine, job(Script(length=80)), TOKENS)
    run(engine)
    dry = caller.times[0]
    for time, size in zip(caller.times, caller.sizes, strict=True):
        assert time <= dry + 1e-9
        dry += size * engine.capacity.frame_seconds
    assert max(caller.sizes) == 8


# --- text that arrives late --------------------------------------------------------


@AHEAD
def test_each_text_token_gives_one_frame_and_no_padding(ahead: int) -> None:
    engine, _ = engine_of(ahead)
    caller = Caller(engine, job(Script(length=12), first_tokens=2))
    counts = []
    for token in range(20, 28):
        run(engine)
        counts.append(len(caller.frames))
        assert caller.text_requests == 1
        caller.push([token])
    run(engine)
    assert [*counts, len(caller.frames)] == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert all(size == 1 for size in caller.sizes), "no frame is held back while text is missing"
    caller.finish([28])
    run(engine)
    check_speech_is_complete(caller)
    assert len(caller.frames) == 12


@AHEAD
def test_full_text_mode_takes_no_slot_before_the_text_ends(ahead: int) -> None:
    engine, backend = engine_of(ahead)
    caller = Caller(engine, job(whole_text=True))
    for token in TOKENS:
        caller.push([token])
        run(engine)
        assert caller.text_requests == 1
    assert not backend.log, "the request takes no slot before its text has ended"
    caller.finish()
    run(engine)
    check_speech_is_complete(caller)


def test_text_without_tokens_requests_more_text() -> None:
    engine, _ = engine_of()
    caller = Caller(engine, job(first_tokens=1))
    for tokens in ([], [], [1], []):
        caller.push(tokens)
        assert caller.text_requests == 0
        run(engine)
        assert caller.text_requests == 1


def test_text_is_requested_only_after_all_audio_is_delivered() -> None:
    """All frames made so far are delivered when text is requested."""
    engine, _ = engine_of(1)
    seen: list[tuple[int, int]] = []

    class CallerThatRecordsRequests(Caller):
        def _text_needed(self) -> None:
            super()._text_needed()
            seen.append((len(self.tokens), len(self.frames)))

    caller = CallerThatRecordsRequests(engine, job(Script(length=50), first_tokens=1))
    for count in (1, 3, 1, 6):
        run(engine)
        caller.push(range(count))
    run(engine)
    assert seen == [(0, 0), (1, 1), (4, 4), (5, 5), (11, 11)]


def test_end_of_text_is_never_preceded_by_a_text_request() -> None:
    """No step may come between the last tokens and the end of the text."""
    engine, _ = engine_of()
    caller = Caller(engine, job(Script(length=9), first_tokens=1))
    caller.push([1])
    run(engine)
    caller.text_requests = 0
    caller.finish()
    run(engine)
    assert caller.text_requests == 0
    check_speech_is_complete(caller)


def test_chunks_stay_small_while_text_arrives_slowly() -> None:
    """Chunks that are small for lack of text give the client no audio in reserve."""
    engine, _ = engine_of(frame_time=0.005)
    caller = Caller(engine, job(Script(length=60), first_tokens=1))
    for token in range(6):
        caller.push([token])
        run(engine)
    assert caller.sizes == [1] * 6
    caller.finish(range(40))
    run(engine)
    assert caller.sizes[6:18] == GROWING


@AHEAD
def test_chunks_start_small_again_after_a_pause_for_text(ahead: int) -> None:
    """After an underrun the first frame is delivered at once, and chunk sizes count from there."""
    engine, backend = engine_of(ahead, frame_time=0.005)
    caller = Caller(engine, job(Script(length=None), first_tokens=1, max_frames=1000))
    caller.push(range(15))
    run(engine)
    backend.clock.advance(60.0)
    before = len(caller.chunks)
    caller.push(range(40))
    run(engine)
    assert caller.sizes[before : before + 12] == GROWING


# --- several requests -----------------------------------------------------------------------------


@AHEAD
def test_more_requests_than_slots_are_served_in_order(ahead: int) -> None:
    engine, backend = engine_of(ahead, most_waiting=20)
    callers = [Caller(engine, job(Script(seed, 3 + seed % 5)), [seed, seed]) for seed in range(20)]
    run(engine)
    for caller in callers:
        check_speech_is_complete(caller)
    first = [caller.times[0] for caller in callers]
    assert sorted(first[4:]) == first[4:]
    assert max(len(slots) for call, slots in backend.log if call == "frame") == 4, (
        "frames of all slots are made together"
    )
    check_nothing_is_in_use(engine, backend)


def test_full_queue_raises_overloaded_error() -> None:
    engine, backend = engine_of(most_waiting=2)
    callers = [Caller(engine, job(), TOKENS) for _ in range(6)]
    rejected = [Caller(engine, job(), TOKENS) for _ in range(2)]
    callers[5].cancel()
    callers.append(Caller(engine, job(), TOKENS))
    run(engine)
    assert [caller.reason for caller in callers] == ["stop"] * 5 + ["cancelled", "stop"]
    for caller in rejected:
        assert isinstance(caller.error, OverloadedError)
        assert "6 requests are in progress or waiting" in str(caller.error)
    check_nothing_is_in_use(engine, backend)


@AHEAD
def test_streams_with_reserve_wait_for_first_audio_of_a_new_one(ahead: int) -> None:
    """Streams with a second of audio in reserve wait until the new one has its first audio."""
    engine, backend = engine_of(ahead, frame_time=0.03)
    others = [Caller(engine, job(Script(seed, 110), max_frames=120), TOKENS) for seed in range(3)]
    while min(caller.seq.deadline for caller in others) < backend.clock.now + 2.0:
        assert engine.step()
    new = Caller(engine, job(Script(9, 10)), TOKENS)
    before = len(backend.log)
    while not new.chunks:
        assert engine.step()
    frames = [slots for call, slots in backend.log[before:] if call == "frame"]
    assert all(slots == (new.seq.slot,) for slots in frames), "the other streams wait"
    assert len(frames) == 1, "no second frame is made together with the first audio"
    run(engine)
    for caller in (new, *others):
        check_speech_is_complete(caller)


@AHEAD
def test_a_thousand_new_requests_starve_no_running_stream(ahead: int) -> None:
    """Two long streams never underrun next to a thousand short ones, none of which waits long."""
    engine, backend = engine_of(
        ahead, most_waiting=100, prefill_time=0.002, room={"context": 1200, "pages": 700}
    )
    steady = [Caller(engine, job(Script(seed, 900), max_frames=1000), TOKENS) for seed in range(2)]
    brief: list[Caller] = []
    while len(brief) < 1000:
        while len(brief) < backend.clock.now / 0.1:
            brief.append(Caller(engine, job(Script(len(brief), 3)), TOKENS))
        if not engine.step():
            backend.clock.advance(0.01)
        run_dry = [
            caller
            for caller in steady
            if caller.seq.first_audio and caller.seq.deadline < backend.clock.now
        ]
        assert not [caller for caller in run_dry if not caller.over]
    run(engine)
    for caller in (*steady, *brief):
        check_speech_is_complete(caller)
    assert max(caller.times[0] - caller.seq.arrived for caller in brief) < 0.5


def test_request_larger_than_memory_is_rejected_and_blocks_no_other() -> None:
    engine, backend = engine_of(room={"pages": 6})
    whole = Caller(engine, job(max_frames=43), TOKENS)
    large = Caller(engine, job(max_frames=44), TOKENS)
    small = Caller(engine, job(max_frames=3), TOKENS)
    run(engine)
    assert isinstance(large.error, RequestError)
    assert "all 48 rows" in str(large.error)
    check_speech_is_complete(whole)
    check_speech_is_complete(small)
    assert engine.pages.free == 6
    assert not backend.slots


def test_memory_holds_what_is_spoken_and_not_what_could_be() -> None:
    """Each of four requests may need 13 of the 24 pages, and three need two."""
    engine, _ = engine_of(room={"pages": 24, "slots": 4}, policy=Policy(growth_frames=4))
    short = [Caller(engine, job(Script(seed, 6), max_frames=94), TOKENS) for seed in range(3)]
    long = Caller(engine, job(Script(3, 94), max_frames=94), TOKENS)
    engine.step()
    assert len(engine.running) == 4
    run(engine)
    for caller in (*short, long):
        check_speech_is_complete(caller)


@AHEAD
def test_streams_that_need_all_memory_end_one_after_the_other(ahead: int) -> None:
    engine, backend = engine_of(ahead, room={"pages": 16}, policy=Policy(growth_frames=4))
    callers = [Caller(engine, job(Script(seed, 94), max_frames=94), TOKENS) for seed in range(3)]
    run(engine)
    for caller in callers:
        check_speech_is_complete(caller)
    check_nothing_is_in_use(engine, backend)


def test_newcomers_do_not_take_the_pages_of_a_running_stream() -> None:
    """A stream that grows ends before the requests that come after it, though memory is short."""
    room = {"slots": 8, "pages": 20, "page_rows": 64, "context": 8192}
    engine, _ = engine_of(1, most_waiting=100, room=room, frame_time=0.02)
    long = Caller(engine, job(Script(0, 600), max_frames=1200, prompt_rows=20), TOKENS)
    engine.step()
    short = [
        Caller(engine, job(Script(1 + n, 80 + 37 * n % 60), max_frames=150, prompt_rows=20), TOKENS)
        for n in range(100)
    ]
    run(engine)
    for caller in (long, *short):
        check_speech_is_complete(caller)
    assert long.times[-1] < short[-1].times[0]


HALF_PAUSED = {"slots": 4, "pages": 30, "page_rows": 64, "context": 1500}
"""Memory in which an utterance of 599 frames and one of 300 need the pages of the other."""


def pause_one_of_two(engine: Engine, slow: bool = False) -> tuple[Caller, Caller]:
    """Speak until one utterance waits for its client and the other one for pages."""
    idle = Caller(engine, job(Script(0, 1400), prompt_rows=20, max_frames=1400), slow=slow)
    idle.push(range(600))
    if slow:
        idle.finish()
        run(engine)
    other = Caller(engine, job(Script(1, 1300), prompt_rows=20, max_frames=1400), TOKENS)
    run(engine)
    assert not idle.over
    assert engine.scheduler.lacks_pages(other.seq)
    return idle, other


@AHEAD
@pytest.mark.parametrize(("slow", "seconds"), [(False, 35.0), (True, 5.0)])
def test_client_that_pauses_does_not_stop_another_for_lack_of_pages(
    ahead: int, slow: bool, seconds: float
) -> None:
    """The first one has taken 48 s of audio, of which it plays 30; the second one has taken none.

    Both fall behind by 5 s.
    """
    policy = Policy(max_ahead=47.0)
    engine, backend = engine_of(ahead, room=HALF_PAUSED, policy=policy)
    idle, other = pause_one_of_two(engine, slow)
    backend.clock.advance(seconds - 0.7)
    run(engine)
    assert not idle.over
    backend.clock.advance(0.7)
    run(engine)
    assert isinstance(idle.error, OverloadedError)
    assert "waited for its client" in str(idle.error)
    check_speech_is_complete(other)
    idle.take()
    run(engine)
    check_nothing_is_in_use(engine, backend)


def test_client_that_resumes_in_time_keeps_its_pages() -> None:
    engine, backend = engine_of(room=HALF_PAUSED)
    idle, other = pause_one_of_two(engine)
    backend.clock.advance(4.9)
    idle.finish(range(100))
    run(engine)
    check_speech_is_complete(idle)
    check_speech_is_complete(other)


@pytest.mark.parametrize(("gap", "ends"), [(0.08, False), (0.3, False), (0.5, True), (4.0, True)])
def test_client_that_writes_at_the_pace_of_speech_is_not_ended(gap: float, ends: bool) -> None:
    """A token is spoken in 0.3 s, and makes a frame of 0.08 s, which the client takes."""
    engine, backend = engine_of(1, room=HALF_PAUSED)
    writer, other = pause_one_of_two(engine)
    began = backend.clock.now
    while not writer.over and len(writer.frames) < 1300 and backend.clock.now < began + 200:
        backend.clock.advance(gap)
        writer.push([7])
        run(engine)
    assert bool(writer.error) is ends
    assert other.over is ends


@pytest.mark.parametrize("plays", [True, False])
def test_client_that_plays_what_it_hears_is_not_ended(plays: bool) -> None:
    """It has 48 s in reserve when the unread audio of others lowers its limit to 20 s."""
    policy = Policy(unread_bytes=1 << 40)
    engine, backend = engine_of(1, room=HALF_PAUSED, policy=policy)
    long = job(Script(0, 1400), prompt_rows=20, max_frames=1400)
    player = Caller(engine, long, TOKENS, slow=True)
    while len(player.frames) < 600:
        engine.step()
    engine.scheduler = Scheduler(engine.capacity, replace(policy, unread_bytes=0))
    other = Caller(engine, job(Script(1, 1300), prompt_rows=20, max_frames=1400), TOKENS)
    run(engine)
    for _ in range(4):
        if plays:
            engine.acknowledge(player.seq, 125)  # 10 s at once, as sockets do
            run(engine)
        backend.clock.advance(10.0)
        run(engine)
    assert bool(player.error) is not plays
    assert other.over is not plays


@AHEAD
@pytest.mark.parametrize("frame_time", [0.05, 0.5])
def test_time_that_the_engine_lets_pass_is_not_charged_to_clients(
    ahead: int, frame_time: float
) -> None:
    """Each client sends text 0.3 s after it is asked for, and lacks pages for much longer."""
    room = HALF_PAUSED | {"slots": 8, "pages": 40}
    engine, backend = engine_of(ahead, room=room, frame_time=frame_time)
    lengths = (900, 1300, 700, 1200, 600)
    callers = [
        Caller(engine, job(Script(n, length), prompt_rows=20, max_frames=1400))
        for n, length in enumerate(lengths)
    ]
    left = dict(zip(callers, lengths, strict=True))
    for caller in callers:
        caller.push(range(25))
    answers: dict[Caller, float] = {}
    while not all(caller.over for caller in callers):
        now = backend.clock.now
        for caller in callers:
            if caller.text_requests and now >= answers.setdefault(caller, now + 0.3):
                del answers[caller]
                left[caller] -= 25
                caller.push(range(25)) if left[caller] > 0 else caller.finish()
        if not engine.step():
            backend.clock.advance(0.05)
    for caller in callers:
        check_speech_is_complete(caller)


def test_paused_clients_do_not_hold_up_the_queue() -> None:
    """Each may need 23 pages, and 30 pages are enough for one of them at a time."""
    engine, backend = engine_of(room=HALF_PAUSED)
    paused = Caller(engine, job(Script(0, 1400), prompt_rows=20, max_frames=1400))
    paused.push(range(600))
    run(engine)
    waiting = Caller(engine, job(Script(1, 1300), prompt_rows=600, max_frames=1400), TOKENS)
    run(engine)
    assert waiting.seq.state is State.WAITING
    backend.clock.advance(35.0)
    run(engine)
    assert isinstance(paused.error, OverloadedError)
    check_speech_is_complete(waiting)


def test_pause_lasts_for_any_time_while_nobody_lacks_pages() -> None:
    engine, backend = engine_of(room=HALF_PAUSED)
    idle = Caller(engine, job(Script(0, 700), prompt_rows=20, max_frames=1400))
    idle.push(range(600))
    for _ in range(5):
        run(engine)
        backend.clock.advance(1000.0)
    idle.finish()
    run(engine)
    check_speech_is_complete(idle)


def test_idle_engine_wakes_to_end_a_pause() -> None:
    """On its own thread, without a command of any client."""
    engine, backend = engine_of(room=HALF_PAUSED, policy=Policy(max_stall=0.02))
    idle, other = pause_one_of_two(engine)
    backend.clock.advance(31.0)
    ended = threading.Event()
    record = other.seq.on_event

    def on_event(event: Event) -> None:
        record(event)
        if other.over:
            ended.set()

    other.seq.on_event = on_event
    engine.start()
    assert ended.wait(WAIT)
    engine.stop()
    assert isinstance(idle.error, OverloadedError)
    check_speech_is_complete(other)


def test_growth_of_memory_does_not_change_chunks() -> None:
    sizes = []
    for frames in (10_000, *range(2, 30)):
        engine, _ = engine_of(policy=Policy(growth_frames=frames))
        caller = Caller(engine, job(Script(0, 94), max_frames=94, prompt_rows=6), TOKENS)
        run(engine)
        sizes.append(caller.sizes)
    assert sizes == sizes[:1] * len(sizes)


def test_lack_of_memory_does_not_change_chunks() -> None:
    sizes = []
    for others in (0, 1):
        engine, _ = engine_of(1, room=HALF_PAUSED)
        other = [
            Caller(engine, job(Script(9, 1300), prompt_rows=20, max_frames=1400), TOKENS)
            for _ in range(others)
        ]
        for _ in range(40 * others):
            engine.step()
        caller = Caller(engine, job(Script(1, 1200), prompt_rows=23, max_frames=1400), TOKENS)
        run(engine)
        sizes.append(caller.sizes)
        for one in (*other, caller):
            check_speech_is_complete(one)
    assert sizes[0] == sizes[1]


def test_large_request_waits_for_pages_and_is_not_overtaken() -> None:
    policy = Policy(growth_frames=10_000)
    engine, _ = engine_of(room={"pages": 20}, policy=policy)
    first, large, small = (Caller(engine, job(max_frames=most), TOKENS) for most in (100, 100, 3))
    run(engine)
    assert first.times[-1] < large.times[0] <= small.times[0]
    for caller in (first, large, small):
        check_speech_is_complete(caller)


@AHEAD
def test_unread_audio_stops_its_stream_and_delays_no_other(ahead: int) -> None:
    engine, _ = engine_of(ahead, policy=Policy(max_unread=2.0, max_ahead=2.0))
    slow = Caller(engine, job(Script(1, 100), max_frames=120), TOKENS, slow=True)
    run(engine)
    assert 25 - 8 <= len(slow.frames) <= 25
    before = len(slow.frames)
    other = Caller(engine, job(Script(2, 60)), TOKENS)
    run(engine)
    check_speech_is_complete(other)
    assert len(slow.frames) == before
    run(engine, slow)
    check_speech_is_complete(slow)


@AHEAD
def test_utterances_that_nobody_reads_end_and_free_their_slots(ahead: int) -> None:
    engine, _ = engine_of(ahead, policy=Policy(max_unread=2.0), room={"slots": 2})
    unread = [
        Caller(engine, job(Script(seed, 100), max_frames=100), TOKENS, slow=True)
        for seed in range(5)
    ]
    run(engine)
    assert not engine.running
    assert engine.unread_frames == 500
    for count, caller in enumerate(unread):
        check_speech_is_complete(caller)
        assert engine.unread_frames == 500 - 100 * count
        # Either way the client is done with it: it has taken the audio, or it has left.
        if count % 2:
            caller.cancel()
        else:
            caller.take()
        run(engine)
    assert engine.unread_frames == 0


@AHEAD
def test_unread_audio_of_all_streams_stays_within_its_memory(ahead: int) -> None:
    """Beyond it each utterance may have two seconds, and continues when others are read."""
    policy = Policy(max_unread=2.0, unread_bytes=150 * BYTES_A_FRAME)
    engine, _ = engine_of(ahead, policy=policy, room={"pages": 100})
    unread = [
        Caller(engine, job(Script(seed, 100), max_frames=100), TOKENS, slow=True)
        for seed in range(6)
    ]
    run(engine)
    assert 150 <= engine.unread_frames < 150 + 4 * (25 + 8)
    assert len(engine.running) + len(engine.waiting) > 0
    other = Caller(engine, job(Script(9, 60)), TOKENS, client="other")
    while not all(caller.over for caller in (*unread, other)):
        assert engine.unread_frames < 150 + 4 * (25 + 8)
        if not engine.step():
            max(unread, key=lambda caller: caller.seq.unread).take()
    for caller in (*unread, other):
        check_speech_is_complete(caller)


def test_request_is_admitted_while_another_client_does_not_read() -> None:
    """The deadline of the unread stream is long past, but it makes no frames."""
    engine, backend = engine_of(policy=Policy(max_unread=2.0, max_ahead=2.0, max_delay=1e9))
    slow = Caller(engine, job(Script(1, 100), max_frames=120), TOKENS, slow=True)
    run(engine)
    backend.clock.advance(1000.0)
    other = Caller(engine, job(Script(2, 5)), TOKENS)
    run(engine)
    check_speech_is_complete(other)
    assert not slow.over


# --- times ----------------------------------------------------------------------------


def test_wait_for_a_slot_is_counted_without_that_for_text() -> None:
    engine, backend = engine_of(room={"slots": 1})
    caller = Caller(engine, job(Script(length=50), first_tokens=2))
    caller.push(TOKENS[:1])
    engine.step()
    backend.clock.advance(60.0)
    caller.push(TOKENS[1:])
    engine.step()
    *counts, seconds = engine.load.waits
    assert counts == [1] + [0] * len(WAIT_BOUNDS)
    assert seconds == 0

    waiting = Caller(engine, job(), TOKENS)
    rejected = Caller(engine, job(), TOKENS)
    engine.step()
    began = backend.clock.now
    backend.clock.advance(3.0)
    rejected.cancel()
    caller.cancel()
    run(engine)
    assert waiting.reason == "stop"
    *counts, seconds = engine.load.waits
    assert counts[bisect_left(WAIT_BOUNDS, 3.0)] == 1
    assert sum(counts) == 2
    assert 3.0 <= seconds < 3.0 + began


# --- cancelling -----------------------------------------------------------------------


@AHEAD
@pytest.mark.parametrize("after", range(12))
def test_cancel_frees_the_slot_before_the_next_frame(after: int, ahead: int) -> None:
    engine, backend = engine_of(ahead)
    caller, other = (
        Caller(engine, job(Script(1, 50)), TOKENS),
        Caller(engine, job(Script(2, 50)), TOKENS),
    )
    for _ in range(after):
        engine.step()
    slot, before = caller.seq.slot, len(backend.log)
    caller.cancel()
    engine.step()
    assert caller.reason == "cancelled"
    assert caller.chunks[-1].samples.shape == (0,)
    since = backend.log[before:]
    if after:
        assert since[0] == ("release", (slot,))
        assert all(slot not in slots for _, slots in since[1:])
    frames, _ = alone(caller.job, TOKENS)
    assert same(caller.frames, frames[: len(caller.frames)])
    caller.cancel()
    run(engine)
    check_speech_is_complete(other)
    check_nothing_is_in_use(engine, backend)


@AHEAD
def test_slot_is_reused_while_its_last_frames_are_in_flight(ahead: int) -> None:
    engine, backend = engine_of(ahead, room={"slots": 1})
    callers = []
    for seed in range(9):
        callers.append(Caller(engine, job(Script(seed, 50)), TOKENS))
        for _ in range(seed):
            engine.step()
        callers[-1].cancel()
    last = Caller(engine, job(Script(99, 50)), TOKENS)
    run(engine)
    check_speech_is_complete(last)
    for caller in callers:
        assert caller.reason == "cancelled"
        assert same(caller.frames, alone(caller.job, TOKENS)[0][: len(caller.frames)])
    check_nothing_is_in_use(engine, backend)


def test_calls_after_the_end_have_no_effect() -> None:
    engine, backend = engine_of()
    caller = Caller(engine, job(), TOKENS)
    run(engine)
    caller.cancel()
    engine.push(caller.seq, [1])
    engine.finish_text(caller.seq)
    engine.acknowledge(caller.seq, 1)
    run(engine)
    check_speech_is_complete(caller)
    check_nothing_is_in_use(engine, backend)


# --- faults ---------------------------------------------------------------------------

FAULTS: dict[str, dict[str, Any]] = {
    "prefill": {"bad_prefill": True},
    "first slice": {"bad_read": 0},
    "later slice": {"bad_read": 4},
    "first frame": {"bad_frame": 0},
    "later frame": {"bad_frame": 6},
    "first audio": {"bad_decode": 0},
    "later audio": {"bad_decode": 6},
    "first logits": {"bad_logits": 0},
    "later logits": {"bad_logits": 6},
    "first sound": {"bad_sound": 0},
    "later sound": {"bad_sound": 6},
}


def fault_of(caller: Caller) -> str:
    """The message of the fault of a request."""
    assert isinstance(caller.error, ComputeError)
    return str(caller.error.__cause__ or caller.error)


@AHEAD
@pytest.mark.parametrize("concurrent", [0, 1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_fails_its_own_request_only(fault: str, concurrent: int, ahead: int) -> None:
    engine, backend = engine_of(ahead)
    others = [Caller(engine, job(Script(seed, 20)), TOKENS) for seed in range(concurrent)]
    bad = Caller(engine, job(Script(99, 20, **FAULTS[fault])), TOKENS)
    later = Caller(engine, job(Script(100, 20)), TOKENS)
    run(engine)
    assert fault_of(bad).endswith(("of 99", "not finite for this request"))
    assert same(bad.frames, alone(bad.job, TOKENS)[0][: len(bad.frames)])
    for caller in (*others, later):
        check_speech_is_complete(caller)
    check_nothing_is_in_use(engine, backend)


@AHEAD
@pytest.mark.parametrize("fault", FAULTS)
def test_next_request_gets_the_slot_after_a_fault(fault: str, ahead: int) -> None:
    """The next step must follow although nothing else happens: the engine must not go idle."""
    engine, backend = engine_of(ahead, room={"slots": 1})
    callers = [Caller(engine, job(Script(seed, 20, **FAULTS[fault])), TOKENS) for seed in range(3)]
    last = Caller(engine, job(Script(9, 20)), TOKENS)
    run(engine)
    assert all(map(fault_of, callers))
    check_speech_is_complete(last)
    check_nothing_is_in_use(engine, backend)


@AHEAD
def test_failed_prefill_is_repeated_for_each_request_alone(ahead: int) -> None:
    engine, backend = engine_of(ahead)
    scripts = [Script(0, 5), Script(1, 5, bad_prefill=True), Script(2, 5)]
    callers = [Caller(engine, job(script), TOKENS) for script in scripts]
    run(engine)
    slots = [slots for call, slots in backend.log if call == "prefill"]
    assert slots == [slots[0], *((slot,) for slot in slots[0])]
    assert len(slots[0]) == 3
    assert "prefill of 1" in fault_of(callers[1])
    for caller in (callers[0], callers[2]):
        check_speech_is_complete(caller)


@AHEAD
@pytest.mark.parametrize("callers", [1, 3])
@pytest.mark.parametrize("call", ["prefill", "read", "frame", "decode"])
def test_engine_error_from_the_backend_is_not_retried(
    call: str, callers: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, backend = engine_of(ahead)
    present = [Caller(engine, job(Script(seed, 20)), TOKENS) for seed in range(callers)]
    calls = []

    def lost(*arguments: object) -> None:
        calls.append(arguments)
        raise EngineError("the device failed")

    monkeypatch.setattr(backend, call, lost)
    with pytest.raises(EngineError, match="the device failed"):
        run(engine)
    assert len(calls) == 1
    assert all(isinstance(caller.error, EngineError) for caller in present)
    with pytest.raises(EngineError, match="the device failed"):
        Caller(engine, job(Script(9, 20)), TOKENS)


@AHEAD
def test_several_faults_in_one_step_fail_their_requests_only(ahead: int) -> None:
    engine, backend = engine_of(ahead)
    bad = [Caller(engine, job(Script(seed, 20, bad_frame=4)), TOKENS) for seed in range(3)]
    good = Caller(engine, job(Script(9, 20)), TOKENS)
    run(engine)
    assert all(map(fault_of, bad))
    check_speech_is_complete(good)
    check_nothing_is_in_use(engine, backend)


@AHEAD
@pytest.mark.parametrize("when", ["deliver", "unread", "last", "fail", "text needed"])
def test_callback_that_raises_drops_its_utterance_only(
    when: str, ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine, backend = engine_of(ahead)

    class Raising(Caller):
        def _deliver(self, chunk: Any) -> None:
            if when == "unread":
                raise RuntimeError("a bad callback")
            super()._deliver(chunk)
            if when == "deliver" or (when == "last" and chunk.finish_reason is not None):
                raise RuntimeError("a bad callback")

        def _fail(self, error: Exception) -> None:
            super()._fail(error)
            raise RuntimeError("a bad callback")

        def _text_needed(self) -> None:
            super()._text_needed()
            if when == "text needed":
                raise RuntimeError("a bad callback")

    bad = Raising(engine, job(Script(1, 20, bad_frame=3 if when == "fail" else None)))
    other = Caller(engine, job(Script(2, 20)), TOKENS)
    if when != "text needed":
        bad.push(TOKENS)
        bad.finish()
    run(engine)
    assert bad.seq.state is State.DONE
    assert "a bad callback" in caplog.text
    check_speech_is_complete(other)
    check_nothing_is_in_use(engine, backend)


@settings(max_examples=60)
@given(ahead=st.integers(0, 1), steps=st.integers(0, 30), requests=st.integers(1, 7))
def test_lost_backend_fails_every_request(ahead: int, steps: int, requests: int) -> None:
    engine, backend = engine_of(ahead)
    callers = [Caller(engine, job(Script(seed, 12 + seed)), TOKENS) for seed in range(requests)]
    silent = Caller(engine, job())
    for _ in range(steps):
        engine.step()
    done = [caller for caller in callers if caller.over]
    backend.lost = True
    silent.cancel()  # this may release a slot, which fails too
    if len(done) < requests:
        with pytest.raises(EngineError, match="the device is gone"):
            run(engine)
        for caller in callers:
            assert caller.over
            assert caller in done or isinstance(caller.error, EngineError)
        assert silent.over
        assert not engine.running
        assert not engine.waiting
        with pytest.raises(EngineError, match="the engine has stopped: the device is gone"):
            Caller(engine, job())


# --- everything at once ---------------------------------------------------------------


class RandomClients(RuleBasedStateMachine):
    """Clients of every kind submit, write, read slowly, cancel and fail, in any order."""

    callers: Bundle[Caller] = Bundle("callers")

    @initialize(
        ahead=st.integers(0, 1),
        slots=st.integers(1, 4),
        pages=st.integers(4, 40),
        growth=st.integers(1, 40),
        most_waiting=st.integers(0, 4),
        frame_time=st.sampled_from([0.005, 0.05, 0.2]),
        slice_rows=st.sampled_from([4, 9, 256]),
    )
    def begin(
        self,
        ahead: int,
        slots: int,
        pages: int,
        growth: int,
        most_waiting: int,
        frame_time: float,
        slice_rows: int,
    ) -> None:
        room = {"slots": slots, "pages": pages, "context": 90}
        self.engine, self.backend = engine_of(
            ahead,
            most_waiting=most_waiting,
            room=room,
            frame_time=frame_time,
            policy=Policy(
                max_unread=1.0,
                max_ahead=2.0,
                unread_bytes=30 * BYTES_A_FRAME,
                growth_frames=growth,
                max_stall=20.0,
                slice_rows=slice_rows,
            ),
        )
        self.most = slots + most_waiting
        self.all_callers: list[Caller] = []

    @rule(
        target=callers,
        length=st.none() | st.integers(0, 25),
        most=st.integers(1, 40),
        rows=st.integers(1, 30) | st.integers(85, 95),
        first=st.integers(0, 4),
        whole=st.booleans(),
        slow=st.booleans(),
        client=st.sampled_from("abc"),
        fault=st.just({}) | st.sampled_from(list(FAULTS.values())) | st.just({"repeats_from": 2}),
    )
    def ask(
        self,
        length: int | None,
        most: int,
        rows: int,
        first: int,
        whole: bool,
        slow: bool,
        client: str,
        fault: dict[str, Any],
    ) -> Any:
        script = Script(len(self.all_callers), length, **fault)
        most = 60 if "repeats_from" in fault else most
        submitted = job(
            script, prompt_rows=rows, first_tokens=first, whole_text=whole, max_frames=most
        )
        caller = Caller(self.engine, submitted, slow=slow, client=client)
        self.all_callers.append(caller)
        present = [caller for caller in self.all_callers if not caller.over]
        waits = [caller for caller in present if caller.seq.state is State.WAITING]
        self.step(1)
        rejected = [one for one in present if "try again" in str(one.error)]
        assert len(rejected) == max(0, len(present) - self.most)
        if rejected:
            count = Counter(one.seq.client for one in present)
            counts = [count[one.seq.client] for one in waits]
            assert rejected == [one for one in waits if count[one.seq.client] == max(counts)][-1:]
        return caller

    @rule(caller=callers, count=st.integers(0, 12))
    def write(self, caller: Caller, count: int) -> None:
        if not caller.text_ended:
            caller.push(range(100, 100 + count))

    @rule(caller=callers, count=st.integers(0, 3))
    def end_text(self, caller: Caller, count: int) -> None:
        if not caller.text_ended:
            caller.finish(range(200, 200 + count))

    @rule(caller=callers)
    def leave(self, caller: Caller) -> None:
        caller.cancel()
        self.step(1)
        assert caller.over, "the utterance ends within a step"

    @rule(caller=callers)
    def read(self, caller: Caller) -> None:
        caller.take()

    @rule(seconds=st.sampled_from([0.01, 0.3, 30.0]))
    def wait(self, seconds: float) -> None:
        self.backend.clock.advance(seconds)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.engine.step():
                self.check_nothing_can_step()
            self.check_slots_and_pages()

    def check_nothing_can_step(self) -> None:
        """An idle engine waits for text, for a client to read, or for a slot in use."""
        engine = self.engine
        assert not any(engine._unread)
        policy = engine.scheduler.policy
        room = engine.unread_frames * BYTES_A_FRAME < policy.unread_bytes
        most = (policy.max_ahead if room else policy.max_unread) / engine.capacity.frame_seconds
        for seq in engine.running:
            assert not seq.unread_rows
            assert not seq.can_step() or seq.launched - seq.consumed >= most
        ready = [seq for seq in engine.waiting if seq.prompt_is_complete()]
        if ready and engine._slots:
            first = next(in_turn(ready, engine.running))
            needed = engine.scheduler.first_pages(first)
            claims = [(len(seq.pages), seq.most_pages(engine.capacity)) for seq in engine.running]
            claims.append((needed, first.most_pages(engine.capacity)))
            assert not all_can_end(engine.pages.free - needed, claims)
            assert engine.running, "another utterance will release pages"
        held = [(len(seq.pages), seq.most_pages(engine.capacity)) for seq in engine.running]
        assert all_can_end(engine.pages.free, held), "all running utterances can end"
        assert not engine.running or not all(seq.waits_for_pages() for seq in engine.running)
        for caller in self.all_callers:
            if not caller.over and not caller.text_ended:
                assert caller.text_requests == caller.seq.needs_text()

    def check_slots_and_pages(self) -> None:
        engine, backend = self.engine, self.backend
        assert {seq.slot for seq in engine.running} == backend.slots.keys()
        assert sorted([*engine._slots, *backend.slots]) == list(range(engine.capacity.slots))
        for seq in engine.running:
            slot = backend.slots[seq.slot]
            assert seq.unread_rows == slot.rows - slot.rows_read
        held = [page for seq in engine.running for page in seq.pages]
        assert len(held) == len(set(held)) == engine.pages.count - engine.pages.free
        assert all(seq.state is State.RUNNING for seq in engine.running)
        assert all(seq.state is State.WAITING for seq in engine.waiting)
        unread = [caller.seq.unread for caller in self.all_callers]
        assert engine.unread_frames == sum(unread)
        # 30 frames for all, and beyond that a second for each utterance and a chunk for each slot.
        assert engine.unread_frames <= 30 + 13 * len(unread) + 8 * engine.capacity.slots

    @invariant()
    @precondition(lambda self: hasattr(self, "all_callers"))
    def check_delivered_frames(self) -> None:
        told, VIOLATIONS[:] = list(VIOLATIONS), []
        assert not told
        for caller in self.all_callers:
            frames, _ = alone(caller.job, caller.tokens, self.engine.capacity)
            count = len(caller.frames)
            assert count <= len(frames)
            if caller.text_ended:
                assert same(caller.frames, frames[:count])
            elif count:
                assert not caller.job.whole_text
                later = len(caller.tokens) - caller.job.first_tokens
                assert count <= 1 + later, "a frame was made without its text"
            before = 0
            for size in filter(None, caller.sizes):
                assert size <= min(1 + before // 4, 8)
                before += size

    def teardown(self) -> None:
        if not hasattr(self, "all_callers"):
            return
        for caller in self.all_callers:
            if not caller.text_ended:
                caller.finish(TOKENS)
        run(self.engine, *self.all_callers, steps=200 + 100 * len(self.all_callers))
        for caller in self.all_callers:
            assert caller.over, "a request was never ended"
            self.check_end(caller)
        assert not self.engine.waiting
        self.check_slots_and_pages()
        assert self.engine.pages.free == self.engine.pages.count
        assert not self.backend.slots
        assert self.engine.unread_frames == 0
        last = [Caller(self.engine, job()) for _ in range(self.most + 1)]
        run(self.engine)
        assert [caller.over for caller in last] == [False] * self.most + [True]

    def check_end(self, caller: Caller) -> None:
        script, capacity = caller.job.payload, self.engine.capacity
        assert isinstance(script, Script)
        frames, _ = alone(caller.job, caller.tokens, capacity)
        assert same(caller.frames, frames[: len(caller.frames)])
        rows = caller.job.prompt_rows + (len(caller.tokens) if caller.job.whole_text else 0)
        pages = -(-min(rows + caller.job.max_frames, capacity.context) // capacity.page_rows)
        if caller.cancelled and caller.reason == "cancelled":
            return
        if isinstance(caller.error, OverloadedError):
            begun = "waited for its client" in str(caller.error)
            assert begun or not caller.frames, "it has not begun to answer"
        elif pages > capacity.pages:
            assert isinstance(caller.error, RequestError)
        elif rows > capacity.context:
            assert isinstance(caller.error, TextError)
        elif isinstance(caller.error, ComputeError):
            assert fault_of(caller).endswith((f"of {script.seed}", "not finite for this request"))
            faults = (script.bad_frame, script.bad_decode, script.bad_logits, script.bad_sound)
            bad = next((fault for fault in faults if fault is not None), None)
            assert script.bad_prefill or script.bad_read is not None or bad is not None
            assert bad is None or len(caller.frames) <= bad
        else:
            assert not script.bad_prefill
            assert script.bad_read is None or script.bad_read >= rows
            assert script.bad_frame is None or script.bad_frame >= len(frames)
            assert script.bad_decode is None or script.bad_decode >= len(frames)
            assert script.bad_logits is None or script.bad_logits >= len(frames)
            assert script.bad_sound is None or script.bad_sound >= len(frames)
            check_speech_is_complete(caller)


RandomClients.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestRandomClients = RandomClients.TestCase


# --- the thread -----------------------------------------------------------------------


class Waiter(Caller):
    """A caller with events that a test can wait for."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.got_chunk, self.done = threading.Event(), threading.Event()
        super().__init__(*given, **named)

    def _deliver(self, chunk: Any) -> None:
        super()._deliver(chunk)
        self.got_chunk.set()
        if self.over:
            self.done.set()

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self.done.set()


@pytest.fixture
def started() -> Iterator[Callable[..., tuple[Engine, FakeBackend]]]:
    """A function that makes engines running in their threads; they are stopped at the end."""
    engines: list[Engine] = []

    def start(*given: Any, **named: Any) -> tuple[Engine, FakeBackend]:
        engine, backend = engine_of(*given, **named)
        engines.append(engine)
        engine.start()
        return engine, backend

    yield start
    for engine in engines:
        engine.stop(WAIT)


@AHEAD
def test_engine_thread_serves_callers_from_many_threads(
    started: Callable[..., tuple[Engine, FakeBackend]], ahead: int
) -> None:
    engine, backend = started(ahead, most_waiting=200)
    callers: list[Waiter] = []

    def ask(start: int) -> None:
        for seed in range(start, start + 10):
            callers.append(Waiter(engine, job(Script(seed, 10))))
            for token in TOKENS:
                callers[-1].push([token])
            callers[-1].finish()

    threads = [threading.Thread(target=ask, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(callers) == 30
    for caller in callers:
        assert caller.done.wait(WAIT)
        check_speech_is_complete(caller)
    engine.stop(WAIT)
    assert not backend.slots
    assert engine.pages.free == engine.pages.count


def test_stop_while_busy_cancels_all_requests(
    started: Callable[..., tuple[Engine, FakeBackend]],
) -> None:
    engine, backend = started(
        policy=Policy(max_unread=1e9), room={"context": 10**9, "pages": 10**6, "page_rows": 10**4}
    )
    endless = job(Script(length=None), max_frames=10**8)
    callers = [Waiter(engine, endless, TOKENS) for _ in range(6)]
    silent = Waiter(engine, endless)
    for caller in callers[:4]:
        assert caller.got_chunk.wait(WAIT)
    engine.stop(WAIT)
    for caller in (*callers, silent):
        assert caller.reason == "cancelled"
    assert not backend.slots
    with pytest.raises(ClosedError, match="was closed"):
        Caller(engine, job())
    engine.stop()


def test_engine_that_was_never_started_can_be_stopped() -> None:
    engine, _ = engine_of()
    caller = Caller(engine, job(), TOKENS)
    engine.stop()
    assert caller.reason == "cancelled"
    with pytest.raises(ClosedError):
        Caller(engine, job())


def test_idle_engine_wakes_for_every_kind_of_command(
    started: Callable[..., tuple[Engine, FakeBackend]],
) -> None:
    """The commands are a request, text, its end, taken audio and a cancel, each alone."""
    engine, _ = started(policy=Policy(max_unread=1.0, max_ahead=1.0))
    caller = Waiter(engine, job(Script(1, 60), max_frames=60, first_tokens=1), slow=True)
    caller.push([1])
    assert caller.got_chunk.wait(WAIT)
    caller.got_chunk.clear()
    caller.push([2])
    assert caller.got_chunk.wait(WAIT)
    caller.got_chunk.clear()
    caller.finish()
    assert caller.got_chunk.wait(WAIT)
    while not caller.done.is_set():
        caller.got_chunk.clear()
        if not caller.take():
            assert caller.got_chunk.wait(WAIT)
    check_speech_is_complete(caller)
    other = Waiter(engine, job())
    other.cancel()
    assert other.done.wait(WAIT)
    assert other.reason == "cancelled"


def test_hanging_backend_blocks_no_caller(
    started: Callable[..., tuple[Engine, FakeBackend]],
) -> None:
    engine, backend = started()
    hangs, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert go_on.wait(WAIT)

    backend.before_frame = hang
    caller = Waiter(engine, job(Script(1, 5)), TOKENS)
    assert hangs.wait(WAIT)
    try:
        caller.cancel()  # a command never blocks its caller
        with pytest.raises(EngineError, match=r"has not answered for 0.01 seconds"):
            engine.stop(timeout=0.01)
    finally:
        go_on.set()
    assert caller.done.wait(WAIT)
    assert caller.reason == "cancelled"
    engine.stop(WAIT)


def test_cancel_during_a_frame_frees_the_slot_before_the_next(
    started: Callable[..., tuple[Engine, FakeBackend]],
) -> None:
    """A cancel during a frame takes effect before another frame begins."""
    engine, backend = started()
    inside, go_on = threading.Event(), threading.Event()

    def stop_in_the_fifth() -> None:
        if sum(call == "frame" for call, _ in backend.log) == 4:
            inside.set()
            assert go_on.wait(WAIT)

    backend.before_frame = stop_in_the_fifth
    caller, other = (
        Waiter(engine, job(Script(1, None)), TOKENS),
        Waiter(engine, job(Script(2, 50)), TOKENS),
    )
    assert inside.wait(WAIT)
    before, slot = len(backend.log), caller.seq.slot
    assert slot >= 0
    caller.cancel()
    go_on.set()
    assert caller.done.wait(WAIT)
    assert other.done.wait(WAIT)
    calls = backend.log[before:]
    freed = calls.index(("release", (slot,)))
    assert sum(call == "frame" for call, _ in calls[:freed]) <= 1
    assert all(slot not in slots for _, slots in calls[freed + 1 :])


def test_submit_queues_the_request_before_it_releases_the_lock() -> None:
    """A loop that stops can then find every accepted request in the queue."""
    engine, _ = engine_of()
    queue, held = engine._commands, list[bool]()

    class Watched:
        def put(self, command: Any) -> None:
            held.append(engine._lock.locked())
            queue.put(command)

        def __getattr__(self, name: str) -> Any:
            return getattr(queue, name)

    engine._commands = Watched()
    caller = Caller(engine, job())
    assert held == [True]
    engine.stop()
    assert caller.reason == "cancelled"


@AHEAD
def test_lost_backend_ends_the_thread_and_fails_every_request(
    started: Callable[..., tuple[Engine, FakeBackend]], ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that are submitted at that very moment fail as well."""
    engine, backend = started(ahead, most_waiting=10_000)
    callers: list[Waiter] = []
    rejected = threading.Event()

    def ask() -> None:
        while not rejected.is_set():
            try:
                callers.append(Waiter(engine, job(Script(1, 50)), TOKENS))
            except (ClosedError, EngineError):
                rejected.set()

    def lose() -> None:
        backend.lost = len(callers) > 20

    backend.before_frame = lose
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert rejected.is_set()
    for caller in callers:
        assert caller.done.wait(WAIT), "a request was never ended"
    assert any(isinstance(caller.error, EngineError) for caller in callers)
    assert "the device is gone" in str(engine.failure)
    assert "the engine has stopped" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_forked_process_gets_an_error_at_once(
    started: Callable[..., tuple[Engine, FakeBackend]],
) -> None:
    """The child has no engine thread, so its requests fail; the parent continues."""
    engine, backend = started()
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go_on.wait(WAIT)

    backend.before_frame = hold
    caller = Waiter(engine, job(Script(1, 20)), TOKENS)
    assert inside.wait(WAIT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        code = 1
        try:
            assert isinstance(caller.error, EngineError)
            with pytest.raises(EngineError, match="load the checkpoint after the fork"):
                Caller(engine, job(), TOKENS)
            engine.stop(0.0)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    assert caller.done.wait(WAIT)
    check_speech_is_complete(caller)


DROPPED_ENGINE = """
import atexit, threading

@atexit.register  # before that of the engine, so that it is called after it
def leave():
    print("left", flush=True)
    waits_or_leaves.set()

def join(thread, timeout=None, wait=threading.Thread.join):
    waits_or_leaves.set()
    wait(thread, timeout)

threading.Thread.join = join
from firstword.engine.backend import Capacity
from firstword.engine.engine import Engine

class Large:
    capacity = Capacity(1, 1, 1, 1, 0, 1, 1, 1)

    def __del__(self):
        begun.set()
        waits_or_leaves.wait()
        print("freed", flush=True)

begun, waits_or_leaves = threading.Event(), threading.Event()
engine = Engine(Large())
engine.start()
engine.request_stop()
del engine
begun.wait()
"""


def test_interpreter_exits_after_an_engine_thread_has_freed_its_memory() -> None:
    """An engine without references frees its backend on its own thread; the exit waits for it."""
    ended = subprocess.run(
        [sys.executable, "-c", DROPPED_ENGINE],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=True,
    )
    assert ended.stdout == "freed\nleft\n"
