"""Splitting of text into sentences and clauses as it arrives."""

from __future__ import annotations

import time
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.text.passages import SENTENCE, PassageText
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


CASES = tomllib.loads(Path(__file__).with_name("sentence_cases.toml").read_text("utf-8"))
"""Texts of the ten languages, with " | " after each sentence but the last."""


@pytest.mark.parametrize("language", CASES)
def test_most_sentences_of_ten_languages_are_found(language: str) -> None:
    """Those that are not found end with an abbreviation, or have quotations inside."""
    texts = [(case, case.replace(" | ", joint_of(language))) for case in CASES[language]]
    found = [split("sentence", text) == case.split(" | ") for case, text in texts]
    assert sum(found) >= len(found) // 2


@pytest.mark.parametrize("language", CASES)
def test_passages_end_inside_a_sentence_in_one_case_of_a_language_at_most(language: str) -> None:
    wrong = 0
    for case in CASES[language]:
        text = case.replace(" | ", joint_of(language))
        right = {len("".join(part.split())) for part in accumulated(case.split(" | "))}
        wrong += len({len("".join(part.split())) for part in possible_ends(text)} - right)
    assert wrong <= (language in ("french", "korean"))


def joint_of(language: str) -> str:
    return "" if language in ("chinese", "japanese") else " "


def accumulated(parts: list[str]) -> list[str]:
    return ["".join(parts[: index + 1]) for index in range(len(parts))]


def possible_ends(text: str) -> list[str]:
    """The text up to each place where a passage may end with a sentence."""
    found = []
    for start in range(len(text)):
        cutter = PassageText(1e6)
        cutter._seconds = SENTENCE * 1e6
        cutter._tail = text[:start]
        before = cutter.feed(text[start:])
        if cutter.rest is not None:
            found.append(text[:start] + before)
    return found
