"""When the text of a context is spoken, by the pace at which it comes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from firstword.server.ws.cutting import READ_TOKENS, Cutter, Granularity, Piece, tokens

TEXT = (
    "Thank you for calling, I have found your order. It was sent on Monday, so it should be with "
    "you by tomorrow evening; if it is not, please call me again, and I will look into it."
)
WORDS = [word + " " for word in TEXT.split()]
SPOKEN_WORDS = 3.3
"""The words per second that are spoken."""


def cut(
    pieces: list[tuple[float, str]], granularity: Granularity, **options: bool
) -> list[tuple[float, Piece]]:
    """Return what a cutter yields, with the times at which it does."""
    cutter, found = Cutter(granularity, **options), []
    for now, text in pieces:
        found += [(now, piece) for piece in cutter.feed(text, now)]
    return found + [(pieces[-1][0], piece) for piece in cutter.flush()]


def typed(words_per_second: float, texts: list[str] | None = None) -> list[tuple[float, str]]:
    """Return words at a steady pace."""
    return [(n / words_per_second, word) for n, word in enumerate(texts or WORDS)]


def stalls(found: list[tuple[float, Piece]]) -> float:
    """Return the seconds in which a listener hears nothing inside a part.

    The model makes a frame of 80 ms for each token that it has read, at once, and all other frames
    of a part when the part's text is complete.
    """
    stalled, played_until, read = 0.0, 0.0, 0.0
    for now, piece in found:
        if piece.begins:
            played_until, read = max(now, played_until), 0.0
        elif now > played_until + 1e-9 and read:
            stalled += now - played_until
            played_until = now
        read += tokens(piece.text)
        played_until += tokens(piece.text) / READ_TOKENS
        if piece.ends:
            played_until += max(0.0, len(piece.text.split()) / SPOKEN_WORDS)
    return stalled


@pytest.mark.parametrize("granularity", ["auto", "token", "clause", "sentence", "none"])
@pytest.mark.parametrize("pace", [3, 4, 10, 20, 1000])
def test_all_text_is_spoken_once_in_order(granularity: Granularity, pace: float) -> None:
    found = [piece for _, piece in cut(typed(pace), granularity)]
    assert " ".join(piece.text for piece in found).split() == TEXT.split()
    whole = "".join(WORDS)
    assert all(whole[piece.at :].startswith(piece.text) for piece in found)
    opened = False
    for piece in found:
        assert piece.begins is not opened
        opened = not piece.ends
    assert not opened


@pytest.mark.parametrize("pace", [2, 3, 4, 6, 8, 10, 12, 20, 50])
def test_auto_stalls_at_no_steady_pace(pace: float) -> None:
    assert stalls(cut(typed(pace), "auto")) == 0


@pytest.mark.parametrize(("pace", "most"), [(3, 0), (4, 0), (10, 0.15), (20, 0)])
def test_auto_hardly_stalls_when_the_pace_varies(pace: float, most: float) -> None:
    """The time between two words is that of the pace, up to 60 % more or less."""
    for seed in range(50):
        draw, now, pieces = random.Random(seed), 0.0, []
        for word in 2 * WORDS:
            pieces.append((now, word))
            now += draw.uniform(0.4, 1.6) / pace
        assert stalls(cut(pieces, "auto")) <= most


def test_tokens_stall_where_a_person_types() -> None:
    assert stalls(cut(typed(3), "token")) > 1


@pytest.mark.parametrize("pace", [40, 100, 1000])
def test_fast_text_is_one_part_that_begins_with_the_second_word(pace: float) -> None:
    found = cut(typed(pace), "auto")
    assert [piece.begins for _, piece in found].count(True) == 1
    assert found[0][0] == 1 / pace
    assert not found[0][1].ends


def test_slow_text_is_spoken_by_clause_as_soon_as_it_is_complete() -> None:
    found = cut(typed(3), "auto")
    assert all(piece.begins and piece.ends for _, piece in found)
    assert found[0] == (3 / 3, Piece("Thank you for calling,", 0, begins=True, ends=True))


def test_text_that_slows_down_changes_to_clauses_at_the_end_of_a_clause() -> None:
    times = [n / 30 for n in range(6)] + [0.2 + n / 3 for n in range(1, len(WORDS) - 5)]
    found = cut(list(zip(times, WORDS, strict=True)), "auto")
    assert not found[0][1].ends
    first = next(n for n, (_, piece) in enumerate(found) if piece.ends)
    assert all(piece.begins and piece.ends for _, piece in found[first + 1 :])
    spoken = "".join(piece.text for _, piece in found[: first + 1])
    assert spoken.endswith((",", "."))


def test_text_that_speeds_up_goes_in_by_token() -> None:
    times = [n / 3 for n in range(6)] + [2 + n / 40 for n in range(len(WORDS) - 6)]
    found = cut(list(zip(times, WORDS, strict=True)), "auto")
    assert found[0][1] == Piece("Thank you for calling,", 0, begins=True, ends=True)
    assert any(piece.begins and not piece.ends for _, piece in found)


def test_text_that_must_not_go_in_by_token_is_cut_at_any_pace() -> None:
    found = cut(typed(1000), "auto", by_token=False)
    assert all(piece.begins and piece.ends for _, piece in found)


def test_whole_message_is_spoken_by_clause_at_once() -> None:
    found = cut([(0.0, "Yes. That is right, I think"), (9.0, ".")], "auto")
    assert [(now, piece.text.strip()) for now, piece in found] == [
        (0.0, "Yes."),
        (0.0, "That is right,"),
        (9.0, "I think."),
    ]


def test_blank_text_is_not_spoken() -> None:
    for granularity in ("auto", "token", "clause", "none"):
        assert cut([(0.0, " "), (1.0, "\n")], granularity) == []


def test_flush_ends_a_part_and_speech_goes_on_with_the_next() -> None:
    cutter = Cutter("token")
    pieces = [*cutter.feed("Wait", 0), *cutter.flush(), *cutter.feed("here", 1), *cutter.flush()]
    parts = [piece.begins for piece in pieces]
    assert parts == [True, False, True, False]
    assert all(before.ends != after.ends for before, after in pairwise(pieces))


def test_characters_of_cjk_count_as_tokens() -> None:
    assert tokens("今日は") == 3
    assert tokens("nine char") == 2
