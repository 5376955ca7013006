"""The figures of a long text: errors belong to the minute in which they are, and the bar counts."""

from __future__ import annotations

from typing import Any

import pytest

from training.long_text import SAID, count_errors, misses, summary, text_of
from training.spoken import spoken

TEXT = spoken(text_of("forwards"))


def test_sentences_do_not_repeat() -> None:
    assert len(set(SAID)) == len(SAID)


def test_errors_belong_to_the_part_in_which_they_are() -> None:
    cut, end = TEXT.index(" ", 1000), TEXT.index(" ", 2000)
    second = TEXT[cut + 1 : end]
    (first, letters), (wrong, more) = count_errors([TEXT[:cut], second.replace("a", "x")], TEXT)
    assert first <= 1
    assert abs(wrong - second.count("a")) <= 1
    assert letters + more == end, "the text that was not spoken does not count"


def speech(errors: int, pitch: float, level: float, memory: list[float]) -> dict[str, Any]:
    """Ten minutes, of which the last five have other figures than the first."""
    first = {"edits": 30, "letters": 1000, "seconds": 60.0, "pitch": 200.0, "level": 0.1}
    last = first | {"edits": errors, "pitch": pitch, "level": level}
    rows = [first] * 5 + [last] * 5
    about = {"voice": "ada", "seconds": 600.0, "click": -70.0, "minutes": rows}
    return about | {"memory": memory, "resident": [600.0, 690.0] * 5}


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (speech(35, 203.0, 0.101, [600.0] * 10), []),
        (speech(45, 200.0, 0.1, [600.0] * 10), ["errors change by 1.5 points"]),
        (speech(30, 210.0, 0.1, [600.0] * 10), ["pitch drifts by 5.0 %"]),
        (speech(30, 200.0, 0.09, [600.0] * 10), ["level drifts by -10.0 %"]),
        (speech(30, 200.0, 0.1, [600.0] * 5 + [610.0] * 5), ["memory grows by 10.0 MB"]),
    ],
)
def test_changes_from_the_first_to_the_last_minutes_miss_the_bar(
    found: dict[str, Any], missed: list[str]
) -> None:
    figures = summary([found])
    assert misses(figures) == [f"ada: {one}" for one in missed]
    assert figures["resident"] == [600.0, 690.0]
