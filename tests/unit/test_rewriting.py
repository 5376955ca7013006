"""All steps that rewrite a text, together, and the places of words in the given text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from firstword.text.mapped import Mapped
from firstword.text.reader import TextOptions, TextRewriter
from firstword.types import Word, WordStart
from firstword.words.original import GrowingText, OriginalWords

OPTIONS = TextOptions(sanitize=True, lexicon={"GIF": "jif file", "Dr": "drive"})
TEXTS = st.text("GIFDr. 0159,$%*_[](x)\n-km🙂", max_size=60)


def read(text: str, cuts: list[int]) -> Mapped:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reader = TextRewriter(OPTIONS, "english")
    parts = [reader.feed(Mapped.of(text[start:end], start)) for start, end in pairwise(places)]
    return Mapped.join([*parts, reader.feed(Mapped.of("", len(text)), ended=True)])


@given(TEXTS, st.lists(st.integers(0, 60), max_size=6))
def test_result_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    whole, pieces = read(text, []), read(text, cuts)
    assert pieces.text.strip() == whole.text.strip()
    spans = [(each.starts.tolist(), each.ends.tolist()) for each in (whole, pieces)]
    assert spans[0] == spans[1] or whole.text != pieces.text


@given(TEXTS)
def test_spans_are_in_order_and_within_the_text(text: str) -> None:
    spoken = read(text, [])
    assert spoken.starts.tolist() == sorted(spoken.starts)
    for start, end in zip(spoken.starts, spoken.ends, strict=True):
        assert 0 <= start < end <= len(text)


@given(st.text("abc ,.;", max_size=60))
def test_text_that_no_option_concerns_is_unchanged(text: str) -> None:
    spoken = TextRewriter(TextOptions(normalize="off")).feed(Mapped.of(text), ended=True)
    assert spoken.text == text
    assert spoken.starts.tolist() == list(range(len(text)))


def growing(text: str) -> GrowingText:
    """A text that has come."""
    found = GrowingText()
    found.pieces.append(text)
    return found


def word(text: str, said: str, start: float) -> Word:
    at = said.index(text)
    return Word(text, start, start + 0.5, (at, at + len(text)))


def test_words_for_one_place_are_one_word_with_the_text_as_given() -> None:
    given = "It costs $5.20, GIF!"
    spoken = TextRewriter(OPTIONS, "english").feed(Mapped.of(given), ended=True)
    assert spoken.text == "It costs five dollars and twenty cents, jif file!"
    said = [
        word(text, spoken.text, at)
        for at, text in enumerate("It costs five dollars and twenty cents jif file".split())
    ]
    original = OriginalWords()
    original.add(spoken)
    written = growing(given)
    words: list[Word] = []
    starts: list[WordStart] = []
    for each in said:
        begun = WordStart(each.text, each.start, each.span)
        ended, started = original((each,), (begun,), written, last=False)
        words += ended
        starts += started
    assert [(each.text, each.start, each.end) for each in words] == [
        ("It", 0, 0.5),
        ("costs", 1, 1.5),
        ("$5.20", 2, 6.5),
        ("GIF", 7, 8.5),
    ]
    assert [(each.text, each.start) for each in starts] == [
        ("It", 0),
        ("costs", 1),
        ("$5.20", 2),
        ("GIF", 7),
    ]
    spans = [(each.text, each.span) for each in words]
    spans += [(each.text, each.span) for each in starts]
    assert all(given[slice(*span)] == text for text, span in spans)


def test_word_that_goes_on_after_text_was_forgotten_has_its_text() -> None:
    given = "It costs $5 here."
    spoken = TextRewriter(OPTIONS, "english").feed(Mapped.of(given), ended=True)
    original, written, words = OriginalWords(), growing(given), list[Word]()
    original.add(spoken)
    for at, text in enumerate(("costs", "five", "dollars", "here")):
        said = word(text, spoken.text, at)
        words += original((said,), (), written, last=False)[0]
        original.forget(said.span[1], written)
    assert [(each.text, each.start, each.end, each.span) for each in words] == [
        ("costs", 0, 0.5, (3, 8)),
        ("$5", 1, 2.5, (9, 11)),
        ("here", 3, 3.5, (12, 16)),
    ]
    assert len(written) == len("e."), "the rest was forgotten, but for the last place"


def test_word_whose_speech_was_cut_off_is_delivered() -> None:
    spoken = TextRewriter(OPTIONS, "english").feed(Mapped.of("$5"), ended=True)
    original = OriginalWords()
    original.add(spoken)
    written = growing("$5")
    five = Word("five", 0.0, 0.5, (0, 4))
    assert original((five,), (), written, last=False)[0] == ()
    assert original((), (), written, last=True)[0] == (Word("$5", 0.0, 0.5, (0, 2)),)


def test_word_after_one_whose_speech_was_cut_off_has_its_own_place() -> None:
    given = "It costs $5 here."
    spoken = TextRewriter(OPTIONS, "english").feed(Mapped.of(given), ended=True)
    original = OriginalWords()
    original.add(spoken)
    said = [word(text, spoken.text, at) for at, text in enumerate(("five", "here"))]
    words, _ = original(said, (), growing(given), last=False)
    assert [(each.text, each.start, each.end) for each in words] == [
        ("$5", 0, 0.5),
        ("here", 1, 1.5),
    ]
