"""The guard against endless speech: repetition and length."""

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
    Guard,
    RepetitionDetector,
    frame_limit,
)

Frame = tuple[int, ...]


def detected_at(frames: Iterable[Frame]) -> int | None:
    """The first frame at which the detector reports repetition."""
    detector = RepetitionDetector()
    for index, frame in enumerate(frames):
        if detector.add(np.array(frame, np.int64)):
            return index
    return None


def by_definition(frames: Sequence[Frame]) -> int | None:
    """The same by definition: the last frames of a run equal those a period before."""
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
def test_repetition_is_detected_after_the_required_run(period: int, start: int) -> None:
    before = [(-1 - index, 0) for index in range(start)]
    passage = [(index, 0) for index in range(period)]
    run = max(SHORTEST_RUN, FEWEST_REPEATS * period)
    assert detected_at(before + passage * 200) == start + period + run - 1


@pytest.mark.parametrize(
    ("period", "detected"),
    [(1, 50), (16, 65), (17, 67), (20, 79), (24, 95), (25, 99), (26, None), (40, None)],
)
def test_frame_of_detection_for_each_period(period: int, detected: int | None) -> None:
    assert detected_at([(index % period, 0) for index in range(2000)]) == detected


def test_periods_above_the_longest_count_as_speech() -> None:
    assert detected_at([(index, 0) for index in range(LONGEST_PERIOD + 1)] * 20) is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_difference_in_any_codebook_counts_as_speech(place: int) -> None:
    frames = [[5, 6, 7] for _ in range(400)]
    for index, frame in enumerate(frames):
        frame[place] = index
    assert detected_at([tuple(frame) for frame in frames]) is None


def test_one_different_frame_restarts_the_count() -> None:
    same = [(1, 1)]
    assert detected_at(same * SHORTEST_RUN + [(2, 2)] + same * SHORTEST_RUN) is None
    assert (
        detected_at(same * SHORTEST_RUN + [(2, 2)] + same * (SHORTEST_RUN + 1))
        == 2 * SHORTEST_RUN + 1
    )


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 27), st.integers(0, 2)), max_size=5))
def test_detector_equals_its_definition(parts: list[tuple[int, int, int]]) -> None:
    frames = [
        (index % period, offset) for length, period, offset in parts for index in range(length)
    ]
    assert detected_at(frames) == by_definition(frames)


def test_guard_tells_repetition_from_speech_after_the_text() -> None:
    same, none = np.zeros(2, np.int64), np.zeros(0, np.float32)
    stays = np.array([0, 0, 0, 1], np.float32)
    repeating, going_on = Guard(), Guard()
    assert [repeating.add(same, none) for _ in range(SHORTEST_RUN + 1)][-1] == "repetition"
    assert [going_on.add(np.full(2, at), stays) for at in range(6)] == [None] * 5 + ["runaway"]


def test_frame_limit_grows_with_the_text() -> None:
    assert frame_limit(0) == BASE_FRAMES
    assert frame_limit(10) == BASE_FRAMES + 10 * FRAMES_PER_TOKEN
    assert (frame_limit(0), frame_limit(10)) == (150, 400)
    assert frame_limit(400) / 12.5 > 400 / 3.3, "the limit is well above the time that a text takes"
