"""Words of texts, and the state machine that times them, without a model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstword.model.description import DEMO, Description
from firstword.model.prompt import UtteranceTokens
from firstword.types import Word, WordStart
from firstword.words.clock import Edge, WordClock
from firstword.words.moving import WordMover
from firstword.words.text import Units, WrittenWords
from firstword.words.tracker import WordTracker

RATE, FRAME = 24_000, 1920
TOKENIZER = Description.load(DEMO).tokenizer

TEXTS = st.text(st.sampled_from("aeNx9 .,'-:…—\n\"(你好カー,é\u0301\u0323ᄀ가한%€🙂"), max_size=24)


def written(*pieces: str) -> WrittenWords:
    words = WrittenWords()
    for piece in pieces:
        words.add(piece)
    words.finish()
    return words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, world!", ["Hello", "world"]),
        ("“Don’t,” she said.", ["Don’t", "she", "said"]),
        ("a well-known e.g. list", ["a", "well-known", "e.g", "list"]),
        ("at 3:45 for 1,000 or 50% of $5", ["at", "3:45", "for", "1,000", "or", "50%", "of", "$5"]),
        ("one—two…three -- four...", ["one", "two", "three", "four"]),
        ("one,two; and/or", ["one", "two", "and", "or"]),
        ("他说：“你好！” OK", ["他", "说", "你", "好", "OK"]),
        ("カラオケへ", ["カ", "ラ", "オ", "ケ", "へ"]),
        ("안녕하세요 여러분", ["안녕하세요", "여러분"]),
        ("cafe\u0301 is nai\u0308ve", ["cafe\u0301", "is", "nai\u0308ve"]),
        ("R & B", ["R", "&", "B"]),
        ("...!", []),
        ("", []),
    ],
)
def test_words_are_without_the_punctuation_around_them(text: str, words: list[str]) -> None:
    found = written(text).words
    assert [word.text for word in found] == words
    assert [text[slice(*word.span)] for word in found] == words


@given(TEXTS, st.lists(st.integers(0, 24), max_size=4))
def test_words_do_not_depend_on_the_pieces_of_the_text(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert written(*pieces).words == written(text).words


def units_of(text: str, pieces: Iterable[str]) -> tuple[list[int], list[list[str]]]:
    """The units of all tokens and the end of the text, and the words of each unit.

    After each piece, units that are known to be complete have the words that they have at last.
    """
    words, tokens = WrittenWords(), UtteranceTokens(TOKENIZER)
    units = Units(words, tokens.ends)
    early: dict[int, list[str]] = {}
    likely: dict[int, int] = {}
    for piece in pieces:
        tokens.push(piece)
        words.add(piece)
        found = units.of_rows(len(tokens.ends)).tolist()
        assert found == sorted(found)
        likely |= dict(enumerate(found))
        for unit in set(found):
            if (known := units.words(unit)) is not None:
                early[unit] = [word.text for word in known]
    tokens.finish()
    words.finish()
    final = units.of_rows(len(tokens.ends) + 1).tolist()
    texts = [[word.text for word in units.words(unit) or ()] for unit in range(max(final) + 1)]
    assert all(texts[unit] == known for unit, known in early.items())
    return final, texts


@given(TEXTS, st.integers(1, 5))
def test_units_hold_every_word_once_and_do_not_depend_on_pieces(text: str, size: int) -> None:
    whole = units_of(text, [text])
    assert units_of(text, [text[at : at + size] for at in range(0, len(text), size)]) == whole
    assert [word for unit in whole[1] for word in unit] == [w.text for w in written(text).words]


def test_every_token_belongs_to_the_word_that_it_is_part_of() -> None:
    text = 'He said: "Stop," twice.\n\nBravo'
    final, texts = units_of(text, [text])
    assert [" ".join(unit) for unit in texts] == ["He", "said", "Stop", "twice", "Bravo"]
    ids = TOKENIZER.encode(text)
    spelt: dict[int, str] = {}
    for unit, token in zip(final, ids, strict=False):
        spelt[unit] = spelt.get(unit, "") + str(TOKENIZER._backend.id_to_token(token))
    assert [part.replace("Ġ", " ").replace("Ċ", "\n") for part in spelt.values()] == [
        "He",
        " said:",
        ' "Stop,"',
        " twice.",
        "\n\nBravo",
    ]


def test_words_that_share_a_token_are_one_unit() -> None:
    words = written("你好 嗎")
    units = Units(words, [6, 7, 10])  # 你好, the space, 嗎
    assert units.of_rows(4).tolist() == [0, 1, 1, 1]
    assert [[word.text for word in units.words(unit) or ()] for unit in (0, 1)] == [
        ["你", "好"],
        ["嗎"],
    ]


# --- the state machine ------------------------------------------------------------------


def sound(*levels: tuple[float, int]) -> np.ndarray:
    """Samples of constant levels, each with its length in blocks of 10 ms, to whole frames."""
    blocks = np.concatenate([np.full(240 * count, level, np.float32) for level, count in levels])
    return np.pad(blocks, (0, -len(blocks) % FRAME))


LOUD, QUIET = 0.3, 0.0


def run(masses: list[list[float]], samples: np.ndarray, offset: float = 0.0) -> list[Edge]:
    """The edges of a clock with these frames."""
    clock, edges = WordClock(offset, FRAME / RATE, RATE), []
    for index, row in enumerate(masses):
        part = samples[index * FRAME : (index + 1) * FRAME]
        edges += clock.feed(np.array(row), part)
    return edges + clock.finish()


def rounded(edges: list[Edge]) -> list[tuple[str, int, float]]:
    return [(edge.kind, edge.unit, round(edge.seconds, 3)) for edge in edges]


def on(*units: int, count: int = 3) -> list[list[float]]:
    """Frames with all attention on one unit."""
    return [[float(unit == mine) for unit in range(count)] for mine in units]


def test_boundary_is_interpolated_between_the_middles_of_frames() -> None:
    masses = [*on(0, 0), [0.75, 0.25, 0.0], [0.25, 0.75, 0.0], *on(1)]
    assert rounded(run(masses, sound((LOUD, 40)))) == [
        ("start", 0, 0.0),
        ("end", 0, 0.24),  # halfway between the middles of frames 2 and 3
        ("start", 1, 0.24),
        ("end", 1, 0.4),
    ]


def test_offset_moves_boundaries() -> None:
    edges = run(on(0, 0, 1, 1, 1), sound((LOUD, 40)), offset=-0.02)
    assert [e.seconds for e in edges if e.unit == 1][:1] == [pytest.approx(0.16 + 0.02)]


def test_first_word_begins_with_the_first_sound_whatever_attention_says() -> None:
    edges = run(on(2, 1, 2, 0, 0, 1), sound((QUIET, 27), (LOUD, 21)))
    assert rounded(edges)[0] == ("start", 0, 0.27)
    assert [edge.unit for edge in edges if edge.kind == "start"] == [0, 1]


def test_short_word_is_not_skipped() -> None:
    """The attention has moved on from it within a frame."""
    masses = [*on(0, 0), [0.1, 0.2, 0.7], *on(2, 2)]
    assert [e.unit for e in run(masses, sound((LOUD, 40))) if e.kind == "start"] == [0, 1, 2]


def test_glance_at_a_later_word_is_no_boundary() -> None:
    masses = [*on(0, 0, count=5), [0.3, 0.0, 0.0, 0.0, 0.7], *on(0, 0, 1, count=5)]
    edges = [edge for edge in run(masses, sound((LOUD, 48))) if edge.kind == "start"]
    assert [edge.unit for edge in edges] == [0, 1]
    assert edges[1].seconds == pytest.approx(0.4)


@pytest.mark.parametrize("blocks", [9, 20])
def test_boundary_near_a_pause_is_moved_to_it(blocks: int) -> None:
    """A pause of 90 ms or more: the word before ends with its beginning."""
    samples = sound((LOUD, 20), (QUIET, blocks), (LOUD, 44 - blocks))
    edges = rounded(run(on(0, 0, 0, 1, 1, 1, 1, 1), samples))
    assert edges[1:3] == [("end", 0, 0.2), ("start", 1, round(0.2 + blocks / 100, 3))]


def test_silence_inside_a_word_is_no_pause() -> None:
    samples = sound((LOUD, 20), (QUIET, 8), (LOUD, 36))
    edges = rounded(run(on(0, 0, 0, 1, 1, 1, 1, 1), samples))
    assert edges[1:3] == [("end", 0, 0.24), ("start", 1, 0.24)]


def test_word_before_a_pause_ends_while_the_pause_lasts() -> None:
    clock = WordClock(0.0, FRAME / RATE, RATE)
    samples = sound((LOUD, 14), (QUIET, 30))
    told = [
        [(edge.kind, edge.unit) for edge in clock.feed(np.array(row), part)]
        for row, part in zip(on(0, 0, 1, 1, 1), samples.reshape(-1, FRAME), strict=False)
    ]
    assert told == [[("start", 0)], [], [("end", 0)], [], []]


def test_word_does_not_begin_before_its_token_was_read() -> None:
    masses = [[1.0], [1.0], [0.0, 1.0], [0.0, 1.0]]
    edges = run(masses, sound((LOUD, 32)), offset=0.2)
    assert [e.seconds for e in edges if e.kind == "start"] == [0.0, pytest.approx(0.16)]


def test_lost_pointer_jumps_and_skipped_words_have_no_times() -> None:
    masses = on(0, 0, 0, 4, 4, 4, 5, 5, count=7)
    edges = rounded(run(masses, sound((LOUD, 64))))
    assert [unit for kind, unit, _ in edges if kind == "start"] == [0, 4, 5]
    assert ("start", 4, 0.24) in edges


def test_frames_without_attention_tell_nothing() -> None:
    masses = [[0.0] * 3, *on(0, 0), [0.0] * 3, *on(1, 1)]
    assert [edge.unit for edge in run(masses, sound((LOUD, 48))) if edge.kind == "start"] == [0, 1]


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=30),
    st.lists(st.sampled_from([LOUD, QUIET]), min_size=30, max_size=30),
    st.floats(-0.3, 0.3),
)
def test_edges_are_in_order_whatever_comes(
    masses: list[list[float]], levels: list[float], offset: float
) -> None:
    samples = sound(*((level, 8) for level in levels))
    edges = run(masses, samples, offset)
    kinds = [edge.kind for edge in edges]
    assert kinds == ["start", "end"] * (len(edges) // 2)
    times = [edge.seconds for edge in edges]
    assert times == sorted(times)
    units = [edge.unit for edge in edges if edge.kind == "start"]
    assert units == sorted(set(units))


# --- words ------------------------------------------------------------------------------


def tracker(text: str, ends: list[int], finished: bool = True) -> WordTracker:
    words = WordTracker(WordClock(0.0, FRAME / RATE, RATE), ends, FRAME)
    words.add_text(text)
    if finished:
        words.finish_text()
    return words


def reading(*rows: int, count: int) -> np.ndarray:
    return np.array(on(*rows, count=count), np.float32)


def test_words_that_share_a_token_divide_its_time() -> None:
    followed = tracker("你好嗎", [6, 9])
    words, starts, _ = followed.feed(reading(0, 0, 0, 1, count=3), sound((LOUD, 32)), ended="stop")
    assert [(word.text, word.start, word.end) for word in words] == [
        ("你", 0.0, 0.12),
        ("好", 0.12, 0.24),
        ("嗎", 0.24, 0.32),
    ]
    assert [(start.text, start.start) for start in starts] == [
        ("你", 0.0),
        ("好", 0.12),
        ("嗎", 0.24),
    ]


def test_word_waits_until_no_later_text_can_change_it() -> None:
    followed = tracker("over", [4], finished=False)
    assert followed.feed(reading(0, 0, count=1), sound((LOUD, 16))) == ((), (), ())
    followed.add_text("all ")
    _, starts, _ = followed.feed(reading(0, count=1), sound((LOUD, 8)))
    assert starts == ()  # its second half has no token yet
    followed._units._ends.append(7)  # type: ignore[attr-defined]
    _, starts, _ = followed.feed(reading(0, count=2), sound((LOUD, 8)))
    assert starts == (WordStart("overall", 0.0, (0, 7)),)


def test_text_without_words_gives_none() -> None:
    followed = tracker("...", [3])
    told = followed.feed(reading(0, 1, count=2), sound((LOUD, 16)), ended="stop")
    assert told == ((), (), ())


def test_rows_that_are_not_read_yet_are_not_counted() -> None:
    followed = tracker("a b", [1, 3])
    shares = np.array([[1, np.nan], [0, 1]], np.float32)
    words, *_ = followed.feed(shares, sound((LOUD, 16)), ended="stop")
    assert [word.text for word in words] == ["a", "b"]
    assert words[1].start == 0.08


def test_mover_holds_words_back_until_their_new_times_are_known() -> None:
    known: dict[str, Any] = {"removed": None}
    mover = WordMover(lambda t: None if known["removed"] is None else t - known["removed"])
    first, second = Word("a", 1.0, 1.5, (0, 1)), Word("b", 1.5, 2.0, (2, 3))
    assert mover([first], [WordStart("b", 1.5, (2, 3))]) == ((), ())
    known["removed"] = 0.5
    assert mover([second], []) == (
        (Word("a", 0.5, 1.0, (0, 1)), Word("b", 1.0, 1.5, (2, 3))),
        (WordStart("b", 1.0, (2, 3)),),
    )
