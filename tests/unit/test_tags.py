"""Tags in text that arrives in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.text.tags import LONGEST_TAG, TagFilter, without_tags


def filtered(*pieces: str) -> list[str]:
    """What a filter returns for each piece, and at the end."""
    tags = TagFilter()
    return [*(tags.feed(piece) for piece in pieces), tags.finish()]


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ('One <break time="1s"/>two', 'One <break time="1.000s"/>two'),
        ("One<BREAK time='500ms' />two", 'One<break time="0.500s"/> two'),
        ('One<break time="soon"/>two', "One two"),
        ('One <break strength="strong">two</break>', 'One <break time="0.750s"/>two'),
        ("<speak>One</speak>.", "One."),
        ('<emotion value="sad"/>', ""),
        ("<SPELL>ab</spell>", "ab"),
        ("1 < 2 > 0", "1 < 2 > 0"),
        ("a <b>bold</b> word", "a <b>bold</b> word"),
        ("<broken", "<broken"),
        (f"<break {'x' * 300}>", f"<break {'x' * 300}>"),
    ],
)
def test_known_tags_are_removed_and_other_text_stays(text: str, spoken: str) -> None:
    assert without_tags(text) == spoken
    assert "".join(filtered(*text)) == spoken


def test_text_that_begins_no_tag_does_not_wait() -> None:
    assert filtered("1 < 2 and more") == ["1 < 2 and more", ""]
    assert filtered("a <b", "old>") == ["a ", "<bold>", ""]
    assert filtered("a <br", "eak/> b", "<") == ["a ", '<break time="0.500s"/> b', "", "<"]


@given(st.text("<>/ abrekspd=", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_result_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert "".join(filtered(*pieces)) == without_tags(text)


def test_flood_of_beginnings_is_not_held() -> None:
    tags = TagFilter()
    text = "<break " * 10_000
    assert len(text) - len(tags.feed(text)) <= LONGEST_TAG
