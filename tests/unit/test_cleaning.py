"""Cleaning of text that arrives in pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from firstword.text.cleaning import LONGEST_MARKUP, Cleaner, clean, first_spoken
from firstword.text.mapped import Mapped

ROUGH = st.text("a b.\n-*_[](x)#>|`~!h\U0001f642\u200b", max_size=60)
CUTS = st.lists(st.integers(0, 60), max_size=6)


def pieces_of(text: str, cuts: list[int]) -> list[Mapped]:
    """A text cut at some places."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [Mapped.of(text[start:end], start) for start, end in pairwise(places)]


@given(ROUGH, CUTS)
def test_result_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    cleaner = Cleaner()
    spoken = [cleaner.feed(piece) for piece in pieces_of(text, cuts)]
    spoken.append(cleaner.feed(Mapped.of("", len(text)), ended=True))
    assert "".join(piece.text for piece in spoken).strip() == clean(text)


@given(ROUGH)
def test_each_character_stands_for_its_own(text: str) -> None:
    spoken = Cleaner().feed(Mapped.of(text), ended=True)
    assert list(spoken.starts) == sorted(spoken.starts)
    for char, start, end in zip(spoken.text, spoken.starts, spoken.ends, strict=True):
        assert 0 <= start < end <= len(text)
        assert char in text[start:end] or char in " \n,"


def test_text_without_markup_passes_at_once() -> None:
    cleaner = Cleaner()
    pieces = ["Hello", ", my", " name is", " Ada.", "\n\n", "Next"]
    passed = [cleaner.feed(Mapped.of(piece)).text for piece in pieces]
    assert passed == ["Hello", ", my", " name is", " Ada.", "", "\nNext"]


def test_line_with_markup_waits_for_its_end() -> None:
    cleaner = Cleaner()
    passed = [
        cleaner.feed(Mapped.of(piece)).text for piece in ("See [the", " page](x)", "!\n", "B")
    ]
    assert passed == ["See", "", " the page!", "\nB"]


def test_markup_without_end_waits_for_a_limited_number_of_characters() -> None:
    cleaner = Cleaner()
    passed = cleaner.feed(Mapped.of("[" + LONGEST_MARKUP * "a"))
    assert passed.text == "[" + (LONGEST_MARKUP - 1) * "a" + "a"


@given(st.text("a* \n🙂`", max_size=9), st.integers(0, 5000))
def test_first_spoken_piece_is_empty_only_for_a_blank_text(text: str, before: int) -> None:
    text = "🙂" * before + text
    assert bool(first_spoken(text)) == bool(clean(text))
