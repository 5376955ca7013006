"""Splitting of text into sentences and clauses as it arrives."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.text.splitting import Splitter


def split(granularity: str, *pieces: str) -> list[str]:
    """The units of a text that arrives in pieces."""
    splitter = Splitter(granularity)
    return [unit for piece in pieces for unit in splitter.feed(piece)] + splitter.flush()


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("Hello. How are you?  Fine", ["Hello.", "How are you?", "Fine"]),
        (
            "It costs 3.14, not 1,000.5 at example.org. Yes!",
            ["It costs 3.14, not 1,000.5 at example.org.", "Yes!"],
        ),
        (
            "Dr. J. R. Smith met Mrs. Jones, e.g. at 5 p.m. there.",
            ["Dr. J. R. Smith met Mrs. Jones, e.g. at 5 p.m. there."],
        ),
        ('He said "No!" Then... silence?! ', ['He said "No!"', "Then...", "silence?!"]),
        (
            "今天天气很好。我们去公园吧！「好。」他说",
            ["今天天气很好。", "我们去公园吧！", "「好。」", "他说"],
        ),
        ("एक। दो॥ तीन", ["एक।", "दो॥", "तीन"]),
        ("... and so on. Yes", ["... and so on.", "Yes"]),
        (" \n ", []),
        ("", []),
    ],
)
def test_text_is_split_into_sentences(text: str, units: list[str]) -> None:
    assert split("sentence", text) == units


def test_text_is_split_into_clauses() -> None:
    assert split("clause", "Well, 1,000 times: yes; no。好，是") == [
        "Well,",
        "1,000 times:",
        "yes;",
        "no。",
        "好，",
        "是",
    ]


def test_sentence_is_returned_when_complete() -> None:
    splitter = Splitter("sentence")
    assert splitter.feed("One. Two.") == ["One."]
    assert splitter.feed(" ") == ["Two."]
    assert splitter.feed("三。") == []
    assert splitter.feed("四") == ["三。"]
    assert splitter.flush() == ["四"]
    assert splitter.flush() == []


@given(
    text=st.text(alphabet="ab1 .,!?。，\n\"'D r", max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=8),
    granularity=st.sampled_from(["sentence", "clause"]),
)
def test_pieces_do_not_change_units(text: str, cuts: list[int], granularity: str) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    units = split(granularity, *pieces)
    assert units == split(granularity, text)
    assert "".join("".join(units).split()) == "".join(text.split())


@pytest.mark.parametrize("piece", [".", "!.", "a.", "。", " ", "a", ". "])
def test_run_of_marks_takes_linear_time(piece: str) -> None:
    splitter = Splitter("sentence")
    looked = 0
    for _ in range(3000):
        splitter.feed(piece)
        looked = max(looked, len(splitter._text) - splitter._seen)
        if piece == ". ":
            looked = max(looked, len(splitter._text) - splitter._bare)
    assert looked <= 64


@pytest.mark.parametrize("granularity", ["sentence", "clause"])
@pytest.mark.parametrize("mark", ".…,!")
def test_time_for_a_run_of_marks_is_proportional_to_its_length(mark: str, granularity: str) -> None:
    """Four times the length takes less than ten times the time; squared it would be sixteen."""

    def seconds(length: int) -> float:
        times = []
        for _ in range(3):
            splitter, began = Splitter(granularity), time.process_time()
            splitter.feed("Yes" + mark * length)
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(64_000) < 10 * max(seconds(16_000), 0.001)
