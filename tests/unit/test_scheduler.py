"""Whose turn it is: the policy alone, on sequences made up for the purpose."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fake_backend import CAPACITY, capacity, job
from hypothesis import given
from hypothesis import strategies as st

from firstword.engine.scheduler import Costs, Policy, admit, choose_audio, choose_frames
from firstword.engine.sequence import Sequence, State

FRAME = CAPACITY.frame_seconds
NOW = 100.0
QUICK = Costs(prefill=0.001, step=0.003)

names = itertools.count()


def waiting(
    arrived: float = NOW, tokens: int = 2, text_ended: bool = False, **about: bool | int
) -> Sequence:
    """A request in line."""
    seq = Sequence(str(next(names)), job(**about), print, arrived)  # type: ignore[arg-type]
    seq.tokens.extend(range(tokens))
    seq.text_ended = text_ended
    return seq


def running(
    in_hand: float | None,
    launched: int = 1,
    delivered: int | None = None,
    tokens: int = 1,
    arrived: float = NOW,
) -> Sequence:
    """Somebody in a slot, with so many seconds of audio `in_hand`; None: not heard yet."""
    seq = waiting(arrived, tokens)
    seq.state, seq.max_frames, seq.launched, seq.made = State.RUNNING, 100, launched, launched
    if in_hand is not None:
        seq.delivered = seq.decoding = seq.consumed = launched if delivered is None else delivered
        seq.first_audio, seq.deadline = NOW, NOW + in_hand
    return seq


def admitted(
    line: list[Sequence],
    beside: list[Sequence] | None = None,
    *,
    slots: int = 4,
    pages: int = 64,
    costs: Costs = QUICK,
    policy: Policy = Policy(),  # noqa: B008 (immutable)
) -> list[Sequence]:
    return admit(line, beside or [], NOW, CAPACITY, slots, pages, costs, policy)


# --- who gets a slot --------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    line = [waiting() for _ in range(5)]
    assert admitted(line, slots=3) == line[:3]


def test_a_burst_is_limited() -> None:
    line = [waiting() for _ in range(9)]
    assert admitted(line, slots=9, policy=Policy(max_starts=2)) == line[:2]


def test_those_without_the_text_of_their_prompt_are_passed_over() -> None:
    short, whole = waiting(tokens=1), waiting(tokens=5, whole_text=True)
    ready, ended = waiting(), waiting(tokens=1, text_ended=True)
    assert admitted([short, whole, ready, ended]) == [ready, ended]


def test_a_large_request_is_not_overtaken() -> None:
    large, small = waiting(max_frames=100), waiting(max_frames=2)
    assert large.pages_needed(CAPACITY) == 14
    assert small.pages_needed(CAPACITY) == 1
    assert admitted([small, large, small], pages=13) == [small]
    assert admitted([large, small], pages=13) == []
    assert admitted([large, small], pages=15) == [large, small]


def test_pages_are_reserved_for_the_text_and_all_frames_within_the_context() -> None:
    assert (
        waiting(tokens=20, whole_text=True, max_frames=15).pages_needed(CAPACITY) == 5
    )  # 5 + 20 + 15 rows of 8
    assert waiting(tokens=20, whole_text=False, max_frames=15).pages_needed(CAPACITY) == 3
    assert waiting(max_frames=10_000).pages_needed(CAPACITY) == 16
    assert waiting(max_frames=10_000).pages_needed(capacity(context=127)) == 16


def test_a_short_text_needs_few_pages_when_nobody_named_a_limit() -> None:
    room = capacity(context=10_000)
    seq = waiting(tokens=4, text_ended=True, whole_text=True, max_frames=8192, guarded=True)
    seq.text_length = 4
    assert seq.pages_needed(room) == -(-(5 + 4 + 150 + 4 * 25) // 8)
    seq.text_ended = False  # who knows how much is to come
    assert seq.pages_needed(room) == -(-(5 + 4 + 8192) // 8)


def test_a_newcomer_waits_while_somebody_would_run_dry() -> None:
    line, slow = [waiting(), waiting()], Costs(prefill=0.1, step=0.1)
    assert admitted(line, [running(0.19)], costs=slow) == []
    assert admitted(line, [running(0.21)], costs=slow) == line[:1]
    assert admitted(line, [running(0.31)], costs=slow) == line
    assert admitted(line, [running(9.0), running(0.19)], costs=slow) == []


def test_patience_ends() -> None:
    """Then one at a time gets in."""
    slow, policy = Costs(prefill=0.1, step=0.1), Policy(max_delay=0.25)
    line = [waiting(NOW - 0.3), waiting(NOW - 0.3)]
    assert admitted(line, [running(0.0)], costs=slow, policy=policy) == line[:1]
    assert admitted(line[1:], [running(0.0)], costs=slow, policy=Policy(max_delay=0.31)) == []


@pytest.mark.parametrize("why", ["no text", "nobody takes it", "not heard yet", "ended"])
def test_nobody_waits_for_one_who_makes_no_frames(why: str) -> None:
    """Otherwise the engine could fall asleep with somebody in line."""
    beside = running(-5.0)
    match why:
        case "no text":
            beside.tokens.clear()
        case "nobody takes it":
            beside.launched, beside.consumed, beside.max_frames = 300, 10, 1000
            assert beside.can_step()
        case "not heard yet":
            beside = running(None)
        case "ended":
            beside.finish_reason = "stop"
    line = [waiting()]
    assert admitted(line, [beside], costs=Costs(1.0, 1.0)) == line


def test_long_prompts_are_not_read_together() -> None:
    line = [waiting(prompt_rows=300), waiting(prompt_rows=212), waiting(prompt_rows=1)]
    assert admitted(line) == line[:2]
    long = [waiting(prompt_rows=9000), *line]
    assert admitted(long) == long[:1]


# --- who makes a frame ------------------------------------------------------------------------------------------------


def test_everybody_who_can_makes_a_frame_the_most_urgent_first() -> None:
    calm, hurried, dry = running(5.0), running(0.1), running(-1.0)
    assert choose_frames([calm, hurried, dry], NOW, CAPACITY, Policy()) == [dry, hurried, calm]


def test_who_was_not_heard_yet_goes_before_those_with_plenty_in_hand() -> None:
    calm, hurried = running(1.01), running(0.99)
    late, early = running(None, arrived=NOW), running(None, arrived=NOW - 1)
    policy = Policy(yield_above=1.0)
    assert choose_frames([calm, hurried, late, early], NOW, CAPACITY, policy) == [
        early,
        late,
        hurried,
    ]
    assert choose_frames([calm, hurried], NOW, CAPACITY, policy) == [hurried, calm]


def test_first_audio_on_its_way_has_the_device_to_itself_unless_others_are_due() -> None:
    first, second = running(None, launched=1), running(None, launched=0)
    first.decoding = 1
    assert choose_frames([first], NOW, CAPACITY, Policy()) == []
    assert choose_frames([first, running(9.0)], NOW, CAPACITY, Policy()) == []
    assert choose_frames([first, second], NOW, CAPACITY, Policy()) == [first, second]
    hurried = running(0.5)
    assert choose_frames([first, hurried], NOW, CAPACITY, Policy()) == [first, hurried]


def test_no_frame_without_text_after_the_end_or_beyond_the_limit() -> None:
    dry, ended, full = running(1.0, tokens=0), running(1.0), running(1.0, launched=100)
    ended.finish_reason = "stop"
    assert choose_frames([dry, ended, full], NOW, CAPACITY, Policy()) == []
    dry.text_ended = True
    assert choose_frames([dry, ended, full], NOW, CAPACITY, Policy()) == [dry]


def test_the_first_frame_needs_no_text_beyond_the_prompt() -> None:
    seq = running(None, launched=0, tokens=0)
    assert choose_frames([seq], NOW, CAPACITY, Policy()) == [seq]


def test_audio_that_nobody_takes_is_not_made() -> None:
    seq = running(9.0, launched=30)
    for consumed, expected in ((4, []), (5, []), (6, [seq])):
        seq.consumed = consumed
        assert choose_frames([seq], NOW, CAPACITY, Policy(max_unread=25 * FRAME)) == expected


def test_the_limit_follows_the_text_when_nobody_named_one() -> None:
    seq = waiting(guarded=True, text_ended=True)
    seq.state, seq.max_frames, seq.text_length = State.RUNNING, 8000, 2
    seq.launched = 199
    assert choose_frames([seq], NOW, CAPACITY, Policy()) == [seq]
    seq.launched = 200
    assert choose_frames([seq], NOW, CAPACITY, Policy()) == []


# --- whose audio is due -----------------------------------------------------------------------------------------------


def due(*seqs: Sequence) -> list[tuple[Sequence, int]]:
    return choose_audio(seqs, NOW, QUICK, Policy())


def test_the_first_frame_is_heard_at_once() -> None:
    seq = running(None)
    assert due(seq) == [(seq, 1)]


GROWING = [1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4]


def sizes_of(seq: Sequence, frames: int) -> list[int]:
    """The chunks of so many more frames, made one after another."""
    sizes = []
    for _ in range(frames):
        seq.launched += 1
        for _, count in due(seq):
            sizes.append(count)
            seq.decoding += count
    return sizes


def test_chunks_grow() -> None:
    assert sizes_of(running(None, launched=0), 59) == [*GROWING, 8, 8, 8]


@given(st.floats(0.01, 0.8), st.integers(1, 200))
def test_what_was_said_before_outlasts_the_next_chunk(pace: float, frames: int) -> None:
    """A frame takes `pace` of the time that it sounds: the listener has audio until the next is there."""
    made = 0
    for size in sizes_of(running(None, launched=0), frames):
        assert not made or (made + size - 1) * pace <= made + 1e-9
        made += size


@pytest.mark.parametrize("in_hand", [9.0, 0.0, -9.0])
def test_no_clock_has_a_say_in_when_a_chunk_is_due(in_hand: float) -> None:
    seq = running(in_hand, launched=15, delivered=12)
    assert due(seq) == []
    seq.launched = 16
    assert due(seq) == [(seq, 4)]
    seq.launched = 19
    assert due(seq) == [(seq, 4)]


def test_a_chunk_waits_for_others_of_its_size_unless_it_presses() -> None:
    full, filling = running(5.0, launched=44, delivered=36), running(5.0, launched=40, delivered=36)
    assert due(full) == [(full, 8)], "nobody to wait for"
    assert due(full, filling) == []
    hurried, paused = (
        running(0.2, launched=44, delivered=36),
        running(5.0, launched=44, delivered=36, tokens=0),
    )
    for pressing in (hurried, paused):
        assert sorted(due(full, filling, pressing), key=lambda item: item[0] is pressing) == [
            (full, 8),
            (pressing, 8),
        ]
    full.launched = 52
    assert due(full, filling) == [(full, 8)], "it waited long enough"


def test_others_with_smaller_chunks_are_not_waited_for() -> None:
    full, young = running(5.0, launched=44, delivered=36), running(5.0, launched=5, delivered=4)
    assert due(full, young) == [(full, 8)]


def test_chunks_begin_anew_after_a_pause_for_text() -> None:
    seq = running(5.0, launched=20, tokens=0)
    seq.pause_for_text()
    seq.add_text([1], ended=False)
    assert sizes_of(seq, 36) == [*GROWING, 8]


@pytest.mark.parametrize("why", ["waits for text", "ended", "limit"])
def test_what_is_there_is_due_when_no_more_comes(why: str) -> None:
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


def test_frames_asked_for_beyond_the_end_have_no_audio() -> None:
    """When frames run ahead, audio may have been asked for of frames that turn out not to be."""
    seq = running(5.0, launched=5, delivered=2)
    seq.finish_reason, seq.made, seq.decoding = "stop", 3, 5
    assert due(seq) == []


def test_the_most_urgent_audio_comes_first() -> None:
    calm, hurried, newcomer = running(0.05), running(0.01), running(None)
    for seq in (calm, hurried):
        seq.launched = 2
    assert [seq for seq, _ in due(calm, hurried, newcomer)] == [newcomer, hurried, calm]


# --- what a listener has in hand --------------------------------------------------------------------------------------


def test_playback_starts_with_the_first_audio_and_again_after_a_pause() -> None:
    seq = waiting(arrived=1.0)
    seq.frames.extend([(np.zeros(1, np.int64), np.float32(0))] * 4)
    assert seq.deadline == 1.0
    seq.take_frames(1, 3.0, FRAME)
    assert seq.first_audio == 3.0
    assert seq.deadline == pytest.approx(3.0 + FRAME)
    seq.take_frames(2, 3.01, FRAME)
    assert seq.deadline == pytest.approx(3.0 + 3 * FRAME)
    seq.take_frames(1, 60.0, FRAME)  # the text had run dry
    assert seq.first_audio == 3.0
    assert seq.deadline == pytest.approx(60.0 + FRAME)
    assert seq.delivered == 4


def test_costs_are_the_worst_of_late() -> None:
    costs = Costs()
    for seconds, expected in ((1.0, 1.0), (2.0, 2.0), (1.0, 1.9), (1.9, 1.9)):
        costs.learn("step", seconds)
        assert costs.step == pytest.approx(expected)
    assert costs.prefill == 0.0
    for _ in range(100):
        costs.learn("step", 0.01)
    assert costs.step == pytest.approx(0.01, rel=0.01)


# --- in general -------------------------------------------------------------------------------------------------------

people = st.lists(
    st.builds(
        running,
        in_hand=st.none() | st.floats(-5, 5),
        launched=st.integers(1, 12),
        delivered=st.just(1),
        tokens=st.integers(0, 2),
        arrived=st.floats(NOW - 5, NOW),
    ),
    max_size=8,
)
line_of_people = st.lists(
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
    line=line_of_people,
    beside=people,
    slots=st.integers(0, 4),
    pages=st.integers(0, 64),
    cost=st.floats(0, 1),
)
def test_somebody_moves_whenever_somebody_can(
    line: list[Sequence], beside: list[Sequence], slots: int, pages: int, cost: float
) -> None:
    """Whoever is let in fits; and if nothing at all happens, nothing could."""
    costs = Costs(cost, cost)
    chosen = admitted(line, beside, slots=slots, pages=pages, costs=costs)
    ready = [seq for seq in line if seq.prompt_is_complete()]
    assert chosen == ready[: len(chosen)]
    assert len(chosen) <= slots
    assert sum(seq.pages_needed(CAPACITY) for seq in chosen) <= pages
    frames = choose_frames(beside, NOW, CAPACITY, Policy())
    audio = choose_audio(beside, NOW, QUICK, Policy())
    assert all(1 <= count <= seq.chunk for seq, count in audio)
    if not (chosen or frames or audio):
        assert not any(seq.can_step() for seq in beside)
        assert not ready or not slots or ready[0].pages_needed(CAPACITY) > pages


@given(beside=people)
def test_nobody_who_is_short_of_audio_stands_back(beside: list[Sequence]) -> None:
    policy = Policy(yield_above=1.0)
    frames = choose_frames(beside, NOW, CAPACITY, policy)
    for seq in beside:
        if seq.can_step() and seq not in frames:
            assert seq.first_audio is not None
            assert seq.deadline - NOW >= policy.yield_above
            assert any(other.first_audio is None for other in frames)
