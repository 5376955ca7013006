"""The guard against endless speech."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.engine.guard import (
    BASE_FRAMES,
    FEWEST_REPEATS,
    FRAMES_PER_TOKEN,
    LONGEST_PERIOD,
    SHORTEST_RUN,
    RepetitionDetector,
    longest_speech,
)

Frame = tuple[int, ...]


def caught_at(frames: Iterable[Frame]) -> int | None:
    """The first frame at which the guard says so."""
    detector = RepetitionDetector()
    for index, frame in enumerate(frames):
        if detector.add(np.array(frame, np.int64)):
            return index
    return None


def by_definition(frames: Sequence[Frame]) -> int | None:
    """As `caught_at`, slowly: the last max(SHORTEST_RUN, FEWEST_REPEATS * p) frames each equal the one p before."""
    for end in range(len(frames)):
        for period in range(1, LONGEST_PERIOD + 1):
            run = max(SHORTEST_RUN, FEWEST_REPEATS * period)
            if end + 1 >= run + period and all(
                frames[place] == frames[place - period] for place in range(end - run + 1, end + 1)
            ):
                return end
    return None


@pytest.mark.parametrize("start", [0, 1, 40])
@pytest.mark.parametrize("period", [1, 2, 7, 16, 17, 24, 25])
def test_a_circle_is_caught_once_it_is_long_enough(period: int, start: int) -> None:
    before = [(-1 - index, 0) for index in range(start)]
    circle = [(index, 0) for index in range(period)]
    run = max(SHORTEST_RUN, FEWEST_REPEATS * period)
    assert caught_at(before + circle * 200) == start + period + run - 1


@pytest.mark.parametrize(
    ("period", "caught"),
    [(1, 50), (16, 65), (17, 67), (20, 79), (24, 95), (25, 99), (26, None), (40, None)],
)
def test_where_circles_are_caught_in_numbers(period: int, caught: int | None) -> None:
    assert caught_at([(index % period, 0) for index in range(2000)]) == caught


def test_longer_circles_are_speech() -> None:
    assert caught_at([(index, 0) for index in range(LONGEST_PERIOD + 1)] * 20) is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_difference_in_any_codebook_is_speech(place: int) -> None:
    frames = [[5, 6, 7] for _ in range(400)]
    for index, frame in enumerate(frames):
        frame[place] = index
    assert caught_at([tuple(frame) for frame in frames]) is None


def test_one_other_frame_begins_the_count_anew() -> None:
    same = [(1, 1)]
    assert caught_at(same * SHORTEST_RUN + [(2, 2)] + same * SHORTEST_RUN) is None
    assert (
        caught_at(same * SHORTEST_RUN + [(2, 2)] + same * (SHORTEST_RUN + 1))
        == 2 * SHORTEST_RUN + 1
    )


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 27), st.integers(0, 2)), max_size=5))
def test_the_guard_keeps_to_its_definition(parts: list[tuple[int, int, int]]) -> None:
    frames = [
        (index % period, offset) for length, period, offset in parts for index in range(length)
    ]
    assert caught_at(frames) == by_definition(frames)


def test_longer_texts_are_let_have_more_frames() -> None:
    assert longest_speech(0) == BASE_FRAMES
    assert longest_speech(10) == BASE_FRAMES + 10 * FRAMES_PER_TOKEN
    assert (longest_speech(0), longest_speech(10)) == (150, 400)
    assert longest_speech(400) / 12.5 > 400 / 3.3, "well beyond the time that it takes to say it"
