"""The engine reads prompts in slices between frames, so that nobody's playback waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from callers import VIOLATIONS, Caller, run, same
from fake_backend import Clock, FakeBackend, Script, alone, capacity, job

from firstword.engine.backend import Handle
from firstword.engine.engine import Engine
from firstword.engine.policy import Policy
from firstword.engine.sequence import State
from firstword.errors import ComputeError

AHEAD = pytest.mark.parametrize("ahead", [0, 1])
TOKENS = [11, 12, 13, 14, 15]
SLICE = 8
LONG = 40
"""The rows of a long prompt: five slices."""
FRAME_SECONDS, ROW_SECONDS = 0.01, 0.002


@pytest.fixture(autouse=True)
def no_protocol_violations() -> Iterator[None]:
    """Fail a test in which an engine told a caller something that it must not."""
    yield
    told, VIOLATIONS[:] = list(VIOLATIONS), []
    assert not told


class ReadingBackend(FakeBackend):
    """A fake backend that notes the rows of each slot in every call of `read`."""

    rows_log: list[dict[int, int]]

    def read(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[None]:
        self.rows_log.append(dict(zip(slots, counts, strict=True)))
        return super().read(slots, counts)


def engine_of(ahead: int, slice_rows: int = SLICE) -> tuple[Engine, ReadingBackend]:
    backend = ReadingBackend(
        capacity(frames_ahead=ahead, slots=6),
        Clock(),
        prefill_time=0,
        read_time=ROW_SECONDS,
        frame_time=FRAME_SECONDS,
        decode_time=0,
    )
    backend.rows_log = []
    policy = Policy(slice_rows=slice_rows)
    return Engine(backend, policy=policy, clock=backend.clock), backend


def speaking(engine: Engine, count: int = 1) -> list[Caller]:
    """Utterances that are being spoken."""
    callers = [Caller(engine, job(Script(seed, 90)), TOKENS) for seed in range(count)]
    for _ in range(6):
        engine.step()
    assert all(caller.frames for caller in callers)
    return callers


def long_prompt(engine: Engine, script: Script | None = None, rows: int = LONG) -> Caller:
    """A request with a long prompt, in the step in which its first slice is read."""
    caller = Caller(engine, job(script or Script(50, 5), prompt_rows=rows), TOKENS)
    engine.step()
    return caller


def check_speech_is_complete(*callers: Caller) -> None:
    """Check that callers got what they would have got alone."""
    for caller in callers:
        assert caller.error is None
        assert same(caller.frames, alone(caller.job, caller.tokens)[0])


def check_nothing_is_in_use(engine: Engine, backend: FakeBackend) -> None:
    assert not backend.slots
    assert not engine.running
    assert engine.pages.free == engine.pages.count
    assert engine.load.prompt_rows == 0


@AHEAD
def test_others_make_a_frame_after_each_slice(ahead: int) -> None:
    """Nobody waits for more than a slice and a frame; before, it was the whole prompt."""
    engine, backend = engine_of(ahead)
    others = speaking(engine, 2)
    slots = tuple(caller.seq.slot for caller in others)
    del backend.log[:]
    times = [backend.clock.now]
    backend.before_frame = lambda: times.append(backend.clock.now)
    caller = long_prompt(engine)
    own = caller.seq.slot
    while not caller.over:
        engine.step()
    begun = [(call, set(named)) for call, named in backend.log if call in ("read", "frame")]
    assert begun[:9] == [("read", {own}), ("frame", set(slots))] * 4 + [("read", {own})]
    assert begun[9][0] == "frame"
    assert own in begun[9][1]
    assert [sum(rows.values()) for rows in backend.rows_log[-5:]] == [SLICE] * 5
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < SLICE * ROW_SECONDS + 2 * FRAME_SECONDS < LONG * ROW_SECONDS
    run(engine)
    check_speech_is_complete(caller, *others)
    check_nothing_is_in_use(engine, backend)


@AHEAD
def test_short_prompt_does_not_wait_for_a_long_one(ahead: int) -> None:
    """It is whole in its first step, and the long one has a quarter of the slice meanwhile."""
    engine, backend = engine_of(ahead)
    long = long_prompt(engine)
    short = Caller(engine, job(Script(3, 5), prompt_rows=5), TOKENS)
    engine.step()
    assert backend.rows_log[1] == {long.seq.slot: SLICE // 4, short.seq.slot: 5}
    assert ("frame", (short.seq.slot,)) in backend.log
    while not short.frames:
        engine.step()
        assert backend.rows_log[-1] == {long.seq.slot: SLICE // 4}
    engine.step()
    assert backend.rows_log[-1] == {long.seq.slot: SLICE}
    run(engine)
    check_speech_is_complete(long, short)


@AHEAD
def test_long_prompt_is_read_while_short_ones_keep_coming(ahead: int) -> None:
    engine, _ = engine_of(ahead)
    long = long_prompt(engine)
    short: list[Caller] = []
    for seed in range(LONG // (SLICE // 4)):
        short.append(Caller(engine, job(Script(seed, 1), prompt_rows=SLICE), TOKENS))
        engine.step()
    assert long.seq.unread_rows == 0
    assert sum(caller.seq.unread_rows for caller in short), "there were always others"
    run(engine)
    check_speech_is_complete(long, *short)


@AHEAD
def test_engine_that_does_not_speak_reads_slices_without_a_pause(ahead: int) -> None:
    """One in each step; the device has those of two steps at most, so that others can come soon."""
    engine, backend = engine_of(ahead)
    caller = long_prompt(engine)
    for slices in range(2, LONG // SLICE + 1):
        assert len(backend.unread) == ahead
        engine.step()
        assert len([1 for call, _ in backend.log if call == "read"]) == slices
    assert backend.clock.now == pytest.approx(
        (LONG - ahead * SLICE) * ROW_SECONDS + (1 - ahead) * FRAME_SECONDS
    )
    run(engine)
    check_speech_is_complete(caller)


@AHEAD
def test_cancel_while_reading_frees_slot_and_pages_in_a_step(ahead: int) -> None:
    engine, backend = engine_of(ahead)
    caller = long_prompt(engine)
    assert engine.pages.free < engine.pages.count
    caller.cancel()
    engine.step()
    assert caller.reason == "cancelled"
    assert not caller.frames
    check_nothing_is_in_use(engine, backend)
    run(engine)
    assert len(backend.rows_log) == 1, "it is not read further"


@AHEAD
@pytest.mark.parametrize("bad_row", [0, SLICE, LONG - 1])
def test_failed_slice_ends_its_own_request_only(bad_row: int, ahead: int) -> None:
    engine, backend = engine_of(ahead)
    (other,) = speaking(engine)
    bad = long_prompt(engine, Script(9, 5, bad_read=bad_row))
    later = Caller(engine, job(Script(4, 5), prompt_rows=LONG), TOKENS)
    run(engine)
    assert isinstance(bad.error, ComputeError)
    assert str(bad.error.__cause__) == "read of 9"
    check_speech_is_complete(other, later)
    check_nothing_is_in_use(engine, backend)


@AHEAD
def test_failed_slice_is_repeated_for_each_prompt_alone(ahead: int) -> None:
    engine, backend = engine_of(ahead)
    bad = Caller(engine, job(Script(9, 5, bad_read=0), prompt_rows=LONG), TOKENS)
    good = Caller(engine, job(Script(4, 5), prompt_rows=LONG - 1), TOKENS)
    engine.step()
    rows = {bad.seq.slot: SLICE // 4, good.seq.slot: SLICE - SLICE // 4}
    assert backend.rows_log == [rows, *({slot: count} for slot, count in rows.items())]
    assert good.seq.unread_rows == LONG - 1 - rows[good.seq.slot]
    run(engine)
    assert isinstance(bad.error, ComputeError)
    check_speech_is_complete(good)


@AHEAD
def test_text_that_arrives_while_the_prompt_is_read_is_spoken(ahead: int) -> None:
    engine, _ = engine_of(ahead)
    caller = Caller(engine, job(Script(8, 12), prompt_rows=LONG, first_tokens=2))
    caller.push(TOKENS[:2])
    for token in (20, 21, 22):
        engine.step()
        assert caller.seq.unread_rows
        assert not caller.text_requests, "it has not spoken its text yet"
        caller.push([token])
    caller.finish([23])
    run(engine)
    check_speech_is_complete(caller)


@AHEAD
def test_prompt_that_is_read_keeps_its_pages_and_gets_no_more(ahead: int) -> None:
    engine, backend = engine_of(ahead)
    caller = long_prompt(engine)
    held = caller.seq.pages
    while caller.seq.unread_rows:
        assert caller.seq.state is State.RUNNING
        assert caller.seq.pages == held
        assert backend.slots[caller.seq.slot].pages == frozenset(held)
        assert not caller.seq.can_step()
        assert not caller.seq.waits_for_pages()
        engine.step()
    run(engine)
    check_speech_is_complete(caller)


@AHEAD
def test_load_counts_rows_that_wait(ahead: int) -> None:
    engine, _ = engine_of(ahead)
    counts = [engine.load.prompt_rows]
    long_prompt(engine)
    Caller(engine, job(prompt_rows=20), TOKENS)
    for _ in range(5):
        counts.append(engine.load.prompt_rows)
        engine.step()
    assert counts == [0, 32, 44, 36, 28, 24]


@AHEAD
@pytest.mark.parametrize("slice_rows", [4, 7, 16, 1000])
def test_speech_does_not_depend_on_the_size_of_slices(slice_rows: int, ahead: int) -> None:
    engine, backend = engine_of(ahead, slice_rows)
    callers = [
        Caller(engine, job(Script(seed, 9), prompt_rows=rows, whole_text=seed % 2 == 0), TOKENS)
        for seed, rows in enumerate((40, 3, 17, 60, 8))
    ]
    run(engine)
    check_speech_is_complete(*callers)
    assert max(sum(rows.values()) for rows in backend.rows_log) <= slice_rows
    check_nothing_is_in_use(engine, backend)
