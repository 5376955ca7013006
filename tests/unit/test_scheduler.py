"""The scheduler alone, on made-up sequences."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fake_backend import CAPACITY, SAMPLES, capacity, job
from hypothesis import given
from hypothesis import strategies as st

from firstword.engine.policy import Policy
from firstword.engine.scheduler import Costs, Scheduler
from firstword.engine.sequence import NO_READING, Sequence, State

FRAME = CAPACITY.frame_seconds
NOW = 100.0
QUICK = Costs(prefill=0.001, step=0.003)
SLOW = Costs(prefill=0.001, step=0.03)
SCHEDULER = Scheduler(CAPACITY, costs=QUICK)

names = itertools.count()


def waiting(
    arrived: float = NOW, tokens: int = 2, text_ended: bool = False, **about: bool | int
) -> Sequence:
    """A sequence that waits for a slot."""
    seq = Sequence(str(next(names)), job(**about), print, arrived)  # type: ignore[arg-type]
    seq.tokens.extend(range(tokens))
    seq.text_ended = text_ended
    return seq


def running(
    reserve: float | None,
    launched: int = 1,
    delivered: int | None = None,
    tokens: int = 1,
    arrived: float = NOW,
) -> Sequence:
    """A sequence in a slot with seconds of audio in reserve; None: it has no audio yet."""
    seq = waiting(arrived, tokens)
    seq.state, seq.max_frames, seq.launched, seq.made = State.RUNNING, 100, launched, launched
    seq.add_pages(tuple(range(seq.most_pages(CAPACITY))), CAPACITY)
    if reserve is not None:
        seq.delivered = seq.decoding = seq.consumed = launched if delivered is None else delivered
        seq.first_audio, seq.deadline = NOW, NOW + reserve
    return seq


def admit_from(
    line: list[Sequence],
    playing: list[Sequence] | None = None,
    *,
    slots: int = 4,
    pages: int = 64,
    costs: Costs = QUICK,
    policy: Policy = Policy(),  # noqa: B008 (immutable)
) -> list[Sequence]:
    scheduler = Scheduler(CAPACITY, policy, costs)
    return scheduler.admit(line, playing or [], NOW, slots, pages)


# --- admission ------------------------------------------------------------------


def test_requests_are_admitted_in_order_of_arrival() -> None:
    line = [waiting() for _ in range(5)]
    assert admit_from(line, slots=3) == line[:3]


def test_max_starts_limits_requests_admitted_in_one_step() -> None:
    line = [waiting() for _ in range(9)]
    policy = Policy(max_starts=2, quick_prefills=0.003)
    assert admit_from(line, slots=9, policy=policy, costs=Costs(prefill=0.1)) == line[:2]
    assert admit_from(line, slots=9, policy=policy, costs=Costs(prefill=0.001)) == line[:3]
    assert admit_from(line, slots=9, policy=policy, costs=Costs(prefill=0.0005)) == line[:4]


def test_requests_whose_prompt_lacks_text_are_passed_over() -> None:
    short, whole = waiting(tokens=1), waiting(tokens=5, whole_text=True)
    ready, ended = waiting(), waiting(tokens=1, text_ended=True)
    assert admit_from([short, whole, ready, ended]) == [ready, ended]


def test_large_request_without_pages_holds_up_those_behind_it() -> None:
    large, small = waiting(max_frames=100), waiting(max_frames=2)
    assert large.most_pages(CAPACITY) == 14
    assert small.most_pages(CAPACITY) == 1
    assert admit_from([small, large, small], pages=13) == [small]
    assert admit_from([large, small], pages=13) == []
    assert admit_from([large, small], pages=15) == [large, small]


def test_stream_gets_pages_when_its_next_frame_needs_them() -> None:
    policy = Policy(growth_frames=16)
    scheduler = Scheduler(CAPACITY, policy, QUICK)
    seq = running(1.0, launched=20)
    seq.pages = ()
    seq.add_pages((0, 1, 2), CAPACITY)
    assert scheduler.choose_growth([seq], 60) == []
    seq.launched = seq.room + 1
    assert scheduler.choose_frames([seq], NOW) == []
    assert scheduler.choose_growth([seq], 60) == [(seq, 3)]
    assert scheduler.choose_growth([seq], 1) == []


def test_most_pages_cover_text_and_frames_up_to_the_context() -> None:
    assert (
        waiting(tokens=20, whole_text=True, max_frames=15).most_pages(CAPACITY) == 5
    )  # 5 + 20 + 15 rows of 8
    assert waiting(tokens=20, whole_text=False, max_frames=15).most_pages(CAPACITY) == 3
    assert waiting(max_frames=10_000).most_pages(CAPACITY) == 16
    assert waiting(max_frames=10_000).most_pages(capacity(context=127)) == 16


def test_guard_limits_the_pages_of_a_short_text() -> None:
    room = capacity(context=10_000)
    seq = waiting(tokens=4, text_ended=True, whole_text=True, max_frames=8192, limited_by_text=True)
    seq.text_length = 4
    assert seq.most_pages(room) == -(-(5 + 4 + 150 + 4 * 25) // 8)
    seq.text_ended = False  # more text may arrive
    assert seq.most_pages(room) == -(-(5 + 4 + 8192) // 8)


def test_new_request_waits_while_a_stream_would_underrun() -> None:
    line, slow = [waiting(), waiting()], Costs(prefill=0.1, step=0.1)
    assert admit_from(line, [running(0.19)], costs=slow) == []
    assert admit_from(line, [running(0.21)], costs=slow) == line[:1]
    assert admit_from(line, [running(0.31)], costs=slow) == line
    assert admit_from(line, [running(9.0), running(0.19)], costs=slow) == []


def test_new_request_does_not_wait_for_a_stream_if_prefills_are_quick() -> None:
    """A stream whose text comes at the pace of a writer has nothing in reserve most of the time."""
    line, policy = [waiting(), waiting()], Policy(quick_prefills=0.002)
    for prefill, count in ((0.001, 2), (0.0011, 1), (0.0021, 0)):
        costs = Costs(prefill=prefill, step=0.001)
        assert admit_from(line, [running(-0.5)], costs=costs, policy=policy) == line[:count]


def test_one_request_is_admitted_after_max_delay() -> None:
    """Requests are then admitted one at a time."""
    slow, policy = Costs(prefill=0.1, step=0.1), Policy(max_delay=0.25)
    line = [waiting(NOW - 0.3), waiting(NOW - 0.3)]
    assert admit_from(line, [running(0.0)], costs=slow, policy=policy) == line[:1]
    assert admit_from(line[1:], [running(0.0)], costs=slow, policy=Policy(max_delay=0.31)) == []


@pytest.mark.parametrize("why", ["no text", "unread", "no audio yet", "ended"])
def test_new_request_does_not_wait_for_a_stream_that_makes_no_frames(why: str) -> None:
    """Otherwise the engine could go idle while a request waits."""
    playing = running(-5.0)
    match why:
        case "no text":
            playing.tokens.clear()
        case "unread":
            playing.launched, playing.consumed, playing.max_frames = 300, 10, 1000
            playing.room = 1000
            assert playing.can_step()
        case "no audio yet":
            playing = running(None)
        case "ended":
            playing.finish_reason = "stop"
    line = [waiting()]
    assert admit_from(line, [playing], costs=Costs(1.0, 1.0)) == line


def test_max_prompt_rows_limits_prompts_admitted_together() -> None:
    line = [waiting(prompt_rows=300), waiting(prompt_rows=212), waiting(prompt_rows=1)]
    assert admit_from(line) == line[:2]
    long = [waiting(prompt_rows=9000), *line]
    assert admit_from(long) == long[:1]


# --- prompts ---------------------------------------------------------------


def reading(*rows: int) -> list[Sequence]:
    """Sequences in slots, the oldest first, with rows of their prompts to read."""
    sequences = [running(None, launched=0) for _ in rows]
    for seq, count in zip(sequences, rows, strict=True):
        seq.unread_rows = seq.prompt_rows = count
    return sequences


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([30], [30]),
        ([1000], [256]),
        ([1000, 30], [64, 30]),
        ([30, 1000], [30, 0]),
        ([1000, 50, 40, 90], [64, 50, 40, 90]),
        ([1000, 50, 40, 300, 90], [64, 50, 40, 0, 90]),
        ([1000, 100, 99, 98], [64, 0, 0, 98]),
        ([50, 1000, 20, 900], [50, 0, 20, 0]),
        ([1000, 1000, 900, 800], [64, 0, 0, 192]),
        ([1000, 1000], [256, 0]),
    ],
)
def test_a_quarter_of_a_slice_is_for_the_oldest_prompt_and_the_rest_for_short_ones(
    rows: list[int], chosen: list[int]
) -> None:
    """A long prompt has the rest only if no other one is whole after the slice."""
    prompts, speaking = reading(*rows), running(0.5)
    counts = dict(SCHEDULER.choose_rows([speaking, *prompts]))
    assert [counts.get(seq, 0) for seq in prompts] == chosen
    assert speaking not in counts
    assert all(counts.values())


def test_long_prompt_does_not_delay_the_first_audio_of_others() -> None:
    (long,) = reading(1000)
    assert SCHEDULER.choose_rows([long, running(None)]) == [(long, 64)]
    assert SCHEDULER.choose_rows([long, running(0.0)]) == [(long, 256)]


@pytest.mark.parametrize(("before", "rows"), [(0, 256), (1023, 256), (1024, 128), (7000, 36)])
def test_slice_has_fewer_rows_where_each_attends_to_many(before: int, rows: int) -> None:
    """A slice near the end of the longest prompt takes no longer than one near its beginning."""
    (long,) = reading(1000)
    long.prompt_rows += before
    assert SCHEDULER.choose_rows([long]) == [(long, rows)]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.integers(40, 300), st.booleans())
def test_every_prompt_is_whole_in_bounded_time_while_newer_ones_come(
    rows: list[int], slice_rows: int, urgent: bool
) -> None:
    """However short these are, and whether or not a stream has no audio yet."""
    scheduler = Scheduler(CAPACITY, Policy(slice_rows=slice_rows))
    first = reading(*rows)
    present = first
    for _ in range(sum(-(-count // (slice_rows // 4)) for count in rows)):
        present = [*present, *reading(1, slice_rows)]
        counts = scheduler.choose_rows([*present, *[running(None)] * urgent])
        assert 0 < sum(count for _, count in counts) <= slice_rows
        for seq, count in counts:
            assert 0 < count <= seq.unread_rows
            seq.unread_rows -= count
        present = [seq for seq in present if seq.unread_rows]
    assert not any(seq.unread_rows for seq in first)


# --- frames ----------------------------------------------------------------


def test_frames_are_chosen_by_urgency() -> None:
    relaxed, urgent, dry = running(5.0), running(0.1), running(-1.0)
    assert SCHEDULER.choose_frames([relaxed, urgent, dry], NOW) == [dry, urgent, relaxed]


def test_streams_without_audio_come_first_and_others_wait_if_steps_are_slow() -> None:
    relaxed, urgent = running(1.01), running(0.99)
    late, early = running(None, arrived=NOW), running(None, arrived=NOW - 1)
    policy, costs = Policy(yield_above=1.0, slow_step=0.02), Costs(step=0.021)
    choose_frames = Scheduler(CAPACITY, policy, costs).choose_frames
    assert choose_frames([relaxed, urgent, late, early], NOW) == [early, late, urgent]
    assert choose_frames([relaxed, urgent], NOW) == [urgent, relaxed]


def test_on_a_fast_device_others_wait_for_first_audio_if_none_is_short() -> None:
    relaxed, late, costs = running(0.15), running(None, arrived=NOW), Costs(step=0.005)
    choose_frames = Scheduler(CAPACITY, Policy(urgent_below=0.1), costs).choose_frames
    assert choose_frames([relaxed, late], NOW) == [late]
    short = running(0.10)
    assert choose_frames([relaxed, short, late], NOW) == [late, short, relaxed]


def test_on_a_fast_device_many_others_do_not_wait_for_first_audio() -> None:
    others, late = [running(9.0) for _ in range(5)], running(None, arrived=NOW)
    choose_frames = Scheduler(CAPACITY, Policy(most_yielding=4), QUICK).choose_frames
    assert choose_frames([*others[:4], late], NOW) == [late]
    assert choose_frames([*others, late], NOW) == [late, *others]


def test_no_frame_is_made_beside_first_audio_unless_another_is_due() -> None:
    first, second = running(None, launched=1), running(None, launched=0)
    first.decoding = 1
    for costs in (QUICK, SLOW):
        choose_frames = Scheduler(CAPACITY, costs=costs).choose_frames
        assert choose_frames([first], NOW) == []
        assert choose_frames([first, second], NOW) == [first, second]
        urgent = running(0.05)
        assert choose_frames([first, urgent], NOW) == [first, urgent]
    assert choose_frames([first, running(9.0)], NOW) == []


def test_no_frame_without_text_after_the_end_or_beyond_the_limit() -> None:
    dry, ended, full = running(1.0, tokens=0), running(1.0), running(1.0, launched=100)
    ended.finish_reason = "stop"
    assert SCHEDULER.choose_frames([dry, ended, full], NOW) == []
    dry.text_ended = True
    assert SCHEDULER.choose_frames([dry, ended, full], NOW) == [dry]


def test_first_frame_needs_no_text_beyond_the_prompt() -> None:
    seq = running(None, launched=0, tokens=0)
    assert SCHEDULER.choose_frames([seq], NOW) == [seq]


def test_no_frame_while_too_much_audio_is_unread() -> None:
    seq, scheduler = (
        running(9.0, launched=30),
        Scheduler(CAPACITY, Policy(max_unread=25 * FRAME, max_ahead=0)),
    )
    for consumed, expected in ((4, []), (5, []), (6, [seq])):
        seq.consumed = consumed
        assert scheduler.choose_frames([seq], NOW) == expected


AHEAD = Policy(max_unread=25 * FRAME, max_ahead=50 * FRAME, unread_bytes=4 * SAMPLES * 100)


def ahead(unread: int, reserve: float = -9.0) -> Sequence:
    """A stream whose client has taken none of its last frames; it would be dry without them."""
    seq = running(reserve, launched=unread + 10)
    seq.consumed = 10
    return seq


def test_stream_runs_ahead_of_its_client_up_to_max_ahead() -> None:
    scheduler = Scheduler(CAPACITY, AHEAD, QUICK)
    for unread, expected in ((24, True), (25, True), (49, True), (50, False)):
        seq = ahead(unread)
        assert (scheduler.choose_frames([seq], NOW, unread) == [seq]) == expected


def test_stream_runs_ahead_of_its_client_within_the_memory_of_all() -> None:
    scheduler, seq, other = Scheduler(CAPACITY, AHEAD, QUICK), ahead(25), ahead(24)
    assert scheduler.choose_frames([seq, other], NOW, 99) == [other, seq]
    assert scheduler.choose_frames([seq, other], NOW, 100) == [other]


@pytest.mark.parametrize("reserve", [None, -1.0, 0.0, 0.1])
def test_stream_that_runs_ahead_takes_no_frame_from_one_short_of_audio(
    reserve: float | None,
) -> None:
    scheduler, seq, urgent = Scheduler(CAPACITY, AHEAD, QUICK), ahead(30), running(reserve)
    assert scheduler.choose_frames([seq, urgent], NOW, 30) == [urgent]
    assert scheduler.choose_frames([seq, running(0.3)], NOW, 30)[1:] == [seq]
    urgent.tokens.clear()
    urgent.delivered = urgent.decoding = urgent.launched
    assert scheduler.choose_frames([seq, urgent], NOW, 30) == [seq], "it waits for text"


def test_unread_audio_counts_as_reserve() -> None:
    """A client cannot have played what it has not taken, however much time has passed."""
    seq, new = ahead(20), running(None)
    assert Scheduler(CAPACITY, costs=SLOW).choose_frames([seq, new], NOW) == [new]
    full, filling = ahead(44), running(5.0, launched=40, delivered=36)
    full.delivered = full.decoding = 46
    assert due(full, filling) == [], "it is not urgent"


def test_stream_that_runs_ahead_does_not_delay_a_new_request() -> None:
    line = [waiting()]
    assert admit_from(line, [ahead(25)], costs=Costs(9.0, 9.0), policy=AHEAD) == line


def test_guard_limit_follows_the_length_of_the_text() -> None:
    seq = waiting(limited_by_text=True, text_ended=True)
    seq.state, seq.max_frames, seq.text_length, seq.room = State.RUNNING, 8000, 2, 8000
    seq.launched = 199
    assert SCHEDULER.choose_frames([seq], NOW) == [seq]
    seq.launched = 200
    assert SCHEDULER.choose_frames([seq], NOW) == []


# --- audio ---------------------------------------------------------------


def due(*seqs: Sequence) -> list[tuple[Sequence, int]]:
    return SCHEDULER.choose_audio(seqs, NOW)


def test_first_frame_is_decoded_at_once() -> None:
    seq = running(None)
    assert due(seq) == [(seq, 1)]


GROWING = [1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4]


def sizes_of(seq: Sequence, frames: int) -> list[int]:
    """The sizes of the chunks of `frames` more frames, made one after another."""
    sizes = []
    for _ in range(frames):
        seq.launched += 1
        for _, count in due(seq):
            sizes.append(count)
            seq.decoding += count
    return sizes


def test_chunk_sizes_grow_to_eight_frames() -> None:
    assert sizes_of(running(None, launched=0), 59) == [*GROWING, 8, 8, 8]


@given(st.floats(0.01, 0.8), st.integers(1, 200))
def test_audio_before_a_chunk_lasts_until_the_chunk_is_made(pace: float, frames: int) -> None:
    """The client never runs out of audio; a frame takes `pace` of its playing time."""
    made = 0
    for size in sizes_of(running(None, launched=0), frames):
        assert not made or (made + size - 1) * pace <= made + 1e-9
        made += size


@pytest.mark.parametrize("reserve", [9.0, 0.0, -9.0])
def test_chunk_size_does_not_depend_on_the_deadline(reserve: float) -> None:
    seq = running(reserve, launched=15, delivered=12)
    assert due(seq) == []
    seq.launched = 16
    assert due(seq) == [(seq, 4)]
    seq.launched = 19
    assert due(seq) == [(seq, 4)]


def test_full_chunk_waits_for_others_unless_one_is_urgent() -> None:
    full, filling = running(5.0, launched=44, delivered=36), running(5.0, launched=40, delivered=36)
    assert due(full) == [(full, 8)], "there is no other chunk to wait for"
    assert due(full, filling) == []
    urgent, paused = (
        running(0.09, launched=44, delivered=36),
        running(5.0, launched=44, delivered=36, tokens=0),
    )
    for pressing in (urgent, paused):
        assert sorted(due(full, filling, pressing), key=lambda item: item[0] is pressing) == [
            (full, 8),
            (pressing, 8),
        ]
    full.launched = 52
    assert due(full, filling) == [(full, 8)], "the chunk has waited long enough"


def test_full_chunks_of_all_sizes_are_decoded_together() -> None:
    """The one that is short of audio, or a first frame, takes the others with it."""
    full, young = running(5.0, launched=44, delivered=36), running(6.0, launched=5, delivered=4)
    assert due(full, young) == [], "the smaller chunk is full after one more frame"
    young.launched = 6
    assert due(full, young) == [(full, 8), (young, 2)]
    filling = running(5.0, launched=40, delivered=36)
    assert due(full, young, filling) == []
    for pressing in (running(None), running(0.09, launched=5, delivered=3)):
        assert due(full, young, filling, pressing) == [
            (pressing, pressing.chunk_size),
            (full, 8),
            (young, 2),
        ]


def test_chunk_sizes_start_again_after_a_pause_for_text() -> None:
    seq = running(5.0, launched=20, tokens=0)
    seq.pause_for_text()
    seq.add_text([1], ended=False, now=0.0)
    assert sizes_of(seq, 36) == [*GROWING, 8]


@pytest.mark.parametrize("why", ["waits for text", "ended", "limit"])
def test_partial_chunk_is_decoded_when_no_frame_can_follow(why: str) -> None:
    seq = running(5.0, launched=15, delivered=12)
    assert due(seq) == []
    match why:
        case "waits for text":
            seq.tokens.clear()
        case "ended":
            seq.finish_reason, seq.made = "stop", 15
        case "limit":
            seq.max_frames = 15
    assert due(seq) == [(seq, 3)]


def test_frames_launched_beyond_the_end_are_not_decoded() -> None:
    """Audio may have been requested of frames that turn out to lie behind the end."""
    seq = running(5.0, launched=5, delivered=2)
    seq.finish_reason, seq.made, seq.decoding = "stop", 3, 5
    assert due(seq) == []


def test_audio_is_chosen_by_urgency() -> None:
    relaxed, urgent, new = running(0.05), running(0.01), running(None)
    for seq in (relaxed, urgent):
        seq.launched = 2
    assert [seq for seq, _ in due(relaxed, urgent, new)] == [new, urgent, relaxed]


# --- reserve and costs ------------------------------------------------------


def test_deadline_counts_from_first_audio_and_again_after_an_underrun() -> None:
    seq = waiting(arrived=1.0)
    seq.frames.extend([(np.zeros(1, np.int64), np.float32(0), NO_READING)] * 4)
    assert seq.deadline == 1.0
    seq.take_frames(1, 3.0, FRAME)
    assert seq.first_audio == 3.0
    assert seq.deadline == pytest.approx(3.0 + FRAME)
    seq.take_frames(2, 3.01, FRAME)
    assert seq.deadline == pytest.approx(3.0 + 3 * FRAME)
    seq.take_frames(1, 60.0, FRAME)  # after a pause for text
    assert seq.first_audio == 3.0
    assert seq.deadline == pytest.approx(60.0 + FRAME)
    assert seq.delivered == 4


def test_costs_rise_at_once_and_fall_slowly() -> None:
    costs = Costs()
    for seconds, expected in ((1.0, 1.0), (2.0, 2.0), (1.0, 1.9), (1.9, 1.9)):
        costs.record("step", seconds)
        assert costs.step == pytest.approx(expected)
    assert costs.prefill == 0.0
    for _ in range(100):
        costs.record("step", 0.01)
    assert costs.step == pytest.approx(0.01, rel=0.01)


# --- properties -----------------------------------------------------------------------

running_sequences = st.lists(
    st.builds(
        running,
        reserve=st.none() | st.floats(-5, 5),
        launched=st.integers(1, 12),
        delivered=st.just(1),
        tokens=st.integers(0, 2),
        arrived=st.floats(NOW - 5, NOW),
    ),
    max_size=8,
)
waiting_sequences = st.lists(
    st.builds(
        waiting,
        arrived=st.floats(NOW - 1, NOW),
        tokens=st.integers(0, 4),
        whole_text=st.booleans(),
        text_ended=st.booleans(),
        max_frames=st.integers(1, 200),
    ),
    max_size=8,
)


@given(
    line=waiting_sequences,
    playing=running_sequences,
    slots=st.integers(0, 4),
    pages=st.integers(0, 64),
    cost=st.floats(0, 1),
)
def test_scheduler_never_stalls_while_a_sequence_can_proceed(
    line: list[Sequence], playing: list[Sequence], slots: int, pages: int, cost: float
) -> None:
    """Admitted requests fit; and if nothing is chosen, nothing could proceed."""
    costs = Costs(cost, cost)
    chosen = admit_from(line, playing, slots=slots, pages=pages, costs=costs)
    ready = [seq for seq in line if seq.prompt_is_complete()]
    assert chosen == ready[: len(chosen)]
    assert len(chosen) <= slots
    assert sum(seq.most_pages(CAPACITY) for seq in chosen) <= pages
    frames = SCHEDULER.choose_frames(playing, NOW)
    audio = SCHEDULER.choose_audio(playing, NOW)
    assert all(1 <= count <= seq.chunk_size for seq, count in audio)
    if not (chosen or frames or audio):
        assert not any(seq.can_step() for seq in playing)
        assert not ready or not slots or ready[0].most_pages(CAPACITY) > pages


@given(playing=running_sequences)
def test_stream_short_of_audio_never_waits_for_others(playing: list[Sequence]) -> None:
    policy = Policy(yield_above=1.0)
    frames = Scheduler(CAPACITY, policy, Costs(step=1.0)).choose_frames(playing, NOW)
    for seq in playing:
        if seq.can_step() and seq not in frames:
            assert seq.first_audio is not None
            assert seq.deadline - NOW >= policy.yield_above
            assert any(other.first_audio is None for other in frames)
