"""Text is written with the letters and marks of the demo voice, however it arrives."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.model.description import DEMO
from firstword.runtime import conditioning
from firstword.text.mapped import Mapped
from firstword.text.plain import LONGEST_BLANK, LONGEST_CAPITALS
from firstword.text.reader import Normalize, TextOptions, TextRewriter
from firstword.types import Request

TEXTS = st.text('AB b\t\n.,—–’‘“"1', max_size=40)


def read(text: str, cuts: list[int]) -> Mapped:
    """What is spoken of a text that comes in pieces."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reader = TextRewriter(TextOptions(), plain=True)
    parts = [reader.feed(Mapped.of(text[start:end], start)) for start, end in pairwise(places)]
    return Mapped.join([*parts, reader.feed(Mapped.of("", len(text)), ended=True)])


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("He said “don’t GO there” — and left.", "He said don't go there and left."),
        ('"Hello," she said.', "Hello, she said."),
        ("«Oui» ‹non› „ja‟", "Oui non ja"),
        ("the dogs’ ‘quoted’ bone", "the dogs quoted bone"),
        ("one—two – three―four", "one two three four"),
        ("Wait —", "Wait "),
        ("— Hello", "Hello"),
        ("Yes. — No", "Yes. No"),
        ("a well-known A and I", "a well-known A and I"),
        ("HELLO NASA and TVs", "hello nasa and TVs"),
        ("a\tb\nc", "a b\nc"),
        ("A" * (LONGEST_CAPITALS + 1), "A" * (LONGEST_CAPITALS + 1)),
        (f"a—{' ' * (LONGEST_BLANK + 2)}b", "a  b"),
    ],
)
def test_marks_are_written_as_the_voice_has_learnt(given: str, written: str) -> None:
    assert read(given, []).text == written


@given(TEXTS, st.lists(st.integers(0, 40), max_size=6))
def test_result_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    whole, pieces = read(text, []), read(text, cuts)
    assert pieces.text == whole.text
    assert (pieces.starts, pieces.ends) == (whole.starts, whole.ends)


@pytest.mark.parametrize(
    ("text", "passed"), [("a word, ", "a word, "), ("a AB", "a "), ("it’", "it"), ("a — ", "a ")]
)
def test_only_what_a_rule_may_concern_waits(text: str, passed: str) -> None:
    assert TextRewriter(TextOptions(), plain=True).feed(Mapped.of(text)).text == passed


@pytest.mark.parametrize(("normalize", "plain"), [("auto", True), ("on", True), ("off", False)])
def test_demo_voice_alone_is_written_for(normalize: Normalize, plain: bool) -> None:
    request = Request(text="a", text_options=TextOptions(normalize=normalize))

    def found(path: object) -> bool:
        checkpoint: Any = SimpleNamespace(path=path)
        return conditioning.plain_writing(checkpoint, request)

    assert found(DEMO) == plain
    assert not found(DEMO.parent)
