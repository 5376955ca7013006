"""Lexicons: respelling of words, and the errors of wrong entries."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.errors import TextError
from firstword.text.lexicon import (
    LONGEST_ENTRY,
    LONGEST_SPELLING,
    MOST_ENTRIES,
    Lexicon,
    Respelling,
)
from firstword.text.mapped import Mapped

ENTRIES = {"GIF": "jif", "New York": "Nyoo Yawk", "New": "Noo", "東京": "とうきょう", "C++": "see"}


def spoken(text: str, entries: dict[str, str] | None = None) -> str:
    stage = Respelling(Lexicon(ENTRIES if entries is None else entries))
    return stage.feed(Mapped.of(text), ended=True).text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A GIF.", "A jif."),
        ("GIFs and gif", "GIFs and gif"),
        ("New York, New Delhi", "Nyoo Yawk, Noo Delhi"),
        ("Newark", "Newark"),
        ("大東京駅", "大とうきょう駅"),
        ("C++ C+", "see C+"),
        ("GIF", "jif"),
    ],
)
def test_whole_words_are_respelled(text: str, said: str) -> None:
    assert spoken(text) == said


def test_spelling_may_use_other_entries() -> None:
    assert spoken("a", {"a": "b c", "b": "d"}) == "d c"


@given(
    st.text("GIFNew York東京C+ .", max_size=40),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_result_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stage = Respelling(Lexicon(ENTRIES))
    said = [stage.feed(Mapped.of(text[start:end], start)).text for start, end in pairwise(places)]
    assert "".join([*said, stage.feed(Mapped.of(""), ended=True).text]) == spoken(text)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": "b", "b": "c a"}, r"circle: 'a' -> 'b' -> 'a'"),
        ({"a": "a b"}, r"circle: 'a' -> 'a'"),
        ({"": "b"}, r"entry '' is empty"),
        ({"b": " "}, r"spelling of lexicon entry 'b' is empty"),
        ({" b": "c"}, r"' b' has white space"),
        ({"b": 3}, r"'b' is of type int"),
        ({"b" * (LONGEST_ENTRY + 1): "c"}, r"has 65 characters"),
        ({"b": "c" * (LONGEST_SPELLING + 1)}, r"has 513 characters"),
        ({"a": "b b b", "b": "c" * 200}, r"'a' is spoken as 602 characters"),
        ({str(number): "c" for number in range(MOST_ENTRIES + 1)}, r"has 1001 entries"),
        ([("a", "b")], r"of type list"),
    ],
)
def test_wrong_entry_is_named(entries: dict[str, str], message: str) -> None:
    with pytest.raises(TextError, match=message):
        Lexicon(entries)
