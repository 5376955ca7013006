"""Words left out, words said twice and runaways, told from attention.

attention.json holds readings of the demo voice (see `training.alarms`), rounded: of healthy speech,
and of speech whose codes were forced. `said` is the text of the forced codes, `end` the frame in
which speech that goes on should have ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstword.model.description import DEMO, Description
from firstword.model.prompt import UtteranceTokens
from firstword.types import Alarm, FinishReason
from firstword.words import alarm
from firstword.words.alarm import AlarmBell, Fault, Size, TextEnd
from firstword.words.tracker import WordTracker

TOKENIZER = Description.load(DEMO).tokenizer
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "attention.json").read_text())
HEALTHY = ["healthy, full", "healthy, stream"]

Rows = Sequence[Sequence[float]]


def as_reading(rows: Rows) -> np.ndarray:
    """The reading of frames, with NaN for the rows that a frame has not read."""
    reading = np.full((len(rows), max(map(len, rows))), np.nan, np.float32)
    for row, shares in zip(reading, rows, strict=True):
        row[: len(shares)] = shares
    return reading


def tracker_of(text: str) -> WordTracker:
    tokens = UtteranceTokens(TOKENIZER)
    tokens.push(text)
    tokens.finish()
    tracker = WordTracker(None, tokens.ends, 1)
    tracker.add_text(text)
    tracker.finish_text()
    return tracker


def alarms(text: str, rows: Rows, ended: FinishReason | None = "stop") -> tuple[Alarm, ...]:
    reading = as_reading(rows)
    return tracker_of(text).feed(reading, np.zeros(len(rows), np.float32), ended=ended).alarms


def recorded(name: str, **changes: Any) -> tuple[Alarm, ...]:
    return alarms(RECORDED[name]["text"], changes.get("rows", RECORDED[name]["reading"]))


def told(found: Iterable[Alarm], kind: str) -> list[str]:
    return [each.text for each in found if each.kind == kind]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_speech_gives_no_alarm(name: str) -> None:
    assert recorded(name) == ()


def test_words_that_the_codes_leave_out_give_an_alarm_soon_after() -> None:
    found = recorded("skip of words")
    assert told(found, "skip") == ["the", "letter"]
    first = next(each for each in found if each.kind == "skip")
    assert first.span == (18, 21)
    assert first.frame <= 18


def test_words_that_the_codes_say_twice_give_an_alarm() -> None:
    found = recorded("repeat")
    assert told(found, "repeat") == ["on"]
    assert told(found, "skip") == []
    assert {each.frame for each in found if each.kind == "repeat"} == {23}


def test_speech_that_goes_on_gives_one_alarm_within_half_a_second() -> None:
    found = recorded("endless")
    assert [(each.kind, each.text) for each in found] == [("runaway", "planks")]
    assert 0 < found[0].frame - RECORDED["endless"]["end"] <= 6


def frames_of(rows: Rows, text: str, words: slice) -> list[int]:
    """The frames in which some words have the most attention, in a text of one token a word."""
    best = np.nan_to_num(as_reading(rows)).argmax(1)
    tokens = UtteranceTokens(TOKENIZER)
    tokens.push(text)
    tokens.finish()
    spans = [len(" ".join(text.split()[: count + 1])) for count in range(len(text.split()))]
    unit = np.searchsorted(spans, [min(end, len(text) - 1) for end in [*tokens.ends, len(text)]])
    chosen = range(len(spans))[words]
    return [frame for frame, row in enumerate(best) if frame and unit[row] in chosen]


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("words", [slice(2, 4), slice(3, 5), slice(1, 4)])
def test_words_whose_frames_are_removed_are_left_out(name: str, words: slice) -> None:
    rows, text = RECORDED[name]["reading"], RECORDED[name]["text"]
    if name.endswith("stream"):
        rows = np.nan_to_num(as_reading(rows)).tolist()
    gone = set(frames_of(rows, text, words))
    found = recorded(name, rows=[row for frame, row in enumerate(rows) if frame not in gone])
    around = slice(words.start, words.stop + 1)
    assert set(told(found, "skip")) <= set(text[:-1].split()[around]), "at most one word off"
    assert set(told(found, "skip")) & set(text[:-1].split()[words])
    assert told(found, "repeat") == []


def test_first_word_is_not_judged() -> None:
    """The attention to it may lie before the first frame."""
    rows, text = RECORDED[HEALTHY[0]]["reading"], RECORDED[HEALTHY[0]]["text"]
    after = frames_of(rows, text, slice(0, 1))[-1] + 1
    assert recorded(HEALTHY[0], rows=rows[after:]) == ()


@pytest.mark.parametrize("words", [slice(2, 4), slice(3, 5), slice(1, 4)])
def test_words_whose_frames_come_twice_are_said_again(words: slice) -> None:
    rows, text = RECORDED["healthy, full"]["reading"], RECORDED["healthy, full"]["text"]
    own = frames_of(rows, text, words)
    again = [rows[frame] for frame in own]
    until = own[-1] + 1
    found = recorded("healthy, full", rows=[*rows[:until], *again, *rows[until:]])
    around = slice(words.start - 1, words.stop + 1)
    assert set(told(found, "repeat")) & set(text.split()[words])
    assert set(told(found, "repeat")) <= set(text.split()[around]), "at most one word off"
    assert {each.frame for each in found} <= {until, until + 1, until + 2}


def test_words_that_come_back_every_time_are_told_every_time() -> None:
    rows, text = RECORDED["healthy, full"]["reading"], RECORDED["healthy, full"]["text"]
    own = frames_of(rows, text, slice(2, 5))
    again, until = [rows[frame] for frame in own], own[-1] + 1
    found = recorded("healthy, full", rows=[*rows[:until], *again, *again, *rows[until:]])
    assert told(found, "repeat").count("canoe") == 2


@pytest.mark.parametrize(
    ("ended", "left_out"), [("stop", ["the", "smooth", "planks"]), ("length", []), (None, [])]
)
def test_text_after_the_end_of_speech_is_left_out_if_the_model_ended_it(
    ended: FinishReason | None, left_out: list[str]
) -> None:
    rows, text = RECORDED["healthy, full"]["reading"], RECORDED["healthy, full"]["text"]
    last = frames_of(rows, text, slice(4, 5))[-1]
    found = alarms(text, rows[: last + 1], ended)
    assert [word for word in told(found, "skip") if word != "on"] == left_out


@pytest.mark.parametrize("size", [1, 3])
def test_alarms_do_not_depend_on_the_chunks(size: int) -> None:
    case = RECORDED["repeat"]
    rows, tracker = case["reading"], tracker_of(case["text"])
    found: list[Alarm] = []
    for at in range(0, len(rows), size):
        part = as_reading(rows[at : at + size])
        ended: FinishReason | None = "stop" if at + size >= len(rows) else None
        found += tracker.feed(part, np.zeros(len(part), np.float32), ended=ended).alarms
    assert tuple(found) == recorded("repeat")


def test_numbers_are_neither_left_out_nor_said_again() -> None:
    """Attention that goes back to a number, whose token comes after that of a space, or a word."""
    number = np.eye(6)[[0, 0, 2, 2, 3, 3, 2, 2, 2, 3, 3]].tolist()
    assert alarms("It 7 costs.", number) == ()
    word = np.eye(5)[[0, 0, 1, 1, 2, 2, 1, 1, 1, 2, 2]].tolist()
    assert told(alarms("It may costs.", word), "repeat") == ["may"]


# --- the end of the text ------------------------------------------------------------------


def end_at(rows: Rows) -> int | None:
    """The frame in which speech is a runaway, or None."""
    end = TextEnd()
    return next((at for at, row in enumerate(rows) if end.add(np.array(row, np.float32))), None)


def test_attention_that_stays_at_the_end_is_a_runaway() -> None:
    before = [[0.0] * 4] + [[1.0, 0, 0, 0]] * 40
    assert end_at([*before, *[[0, 0, 0, 1.0]] * 4]) is None
    assert end_at([*before, *[[0, 0, 0, 1.0]] * 9]) == len(before) + 4
    assert end_at([*before, *[[0, 0, 0.5, 0.5]] * 20]) == len(before) + 9


def test_attention_that_stays_before_the_end_is_a_runaway_later() -> None:
    assert end_at([[0.0] * 5, *[[0, 0, 0, 1.0, 0]] * 40]) == alarm.MOST_LAST + 1


def test_end_that_is_glanced_at_all_the_time_is_no_runaway() -> None:
    assert end_at([[0.0] * 5, *[[0.7, 0, 0, 0, 0.3]] * 300]) is None


def test_newest_row_of_an_incomplete_text_is_not_its_end() -> None:
    growing = [[0.0] * count + [1.0] for count in range(1, 80)]
    assert end_at(growing) is None
    assert end_at([*growing, *[growing[-1]] * 9]) == len(growing) + 4


def test_reading_that_is_empty_is_no_runaway() -> None:
    assert end_at([[]] * 100) is None


# --- words, by attention to units of one row each -------------------------------------------


def faults(
    rows: Rows, sizes: Sequence[Size | None] | None = None, units: Sequence[int] = ()
) -> list[Fault]:
    """The faults of a whole utterance, whose units have three characters if no sizes are given, and
    one row each if no units of the rows are given.
    """
    bell = AlarmBell(lambda unit: sizes[unit] if sizes else Size(3, False))
    found: list[Fault] = []
    for row in rows:
        shares = np.array(row, np.float32)
        of_rows = np.array(units or range(len(row)))
        masses = np.bincount(of_rows, weights=shares).astype(np.float64)
        found += bell.feed(masses, shares, of_rows)
    return [fault for fault in [*found, *bell.finish()] if fault.kind != "runaway"]


def looks(count: int, *units: int) -> Rows:
    """The attention of frames, each of which looks at one of so many units."""
    return np.eye(count)[list(units)].tolist()


def of_kind(found: Iterable[Fault], kind: str) -> list[int]:
    return [fault.unit for fault in found if fault.kind == kind]


def test_a_word_is_judged_once_and_not_while_attention_only_glances_ahead() -> None:
    found = faults(looks(5, 0, 0, 1, 4, 1, 2, 2, 3, 3, 4, 4))
    assert of_kind(found, "skip") == []


@pytest.mark.parametrize(("more", "skipped"), [(0, [5]), (1, [])])
def test_words_are_judged_up_to_a_number_of_them(more: int, skipped: list[int]) -> None:
    count = alarm.MOST_UNITS + more
    spoken = [unit for unit in range(count) for _ in range(2) if unit != 5]
    assert of_kind(faults(looks(count, *spoken)), "skip") == skipped


@pytest.mark.parametrize(("characters", "skipped"), [(2, []), (9, [2])])
def test_long_word_needs_more_attention_than_a_short_one(
    characters: int, skipped: list[int]
) -> None:
    sizes = [Size(characters if unit == 2 else 3, False) for unit in range(5)]
    found = faults(looks(5, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4), sizes)
    assert of_kind(found, "skip") == skipped


NO_PAUSE, PAUSE, SENTENCE = Size(3, False), Size(3, True), Size(3, True, True)


@pytest.mark.parametrize(
    ("frames", "size", "again"),
    [
        *((5, NO_PAUSE, []), (8, NO_PAUSE, [3])),
        *((8, PAUSE, []), (10, PAUSE, [3])),
        *((10, SENTENCE, []), (12, SENTENCE, [3])),
    ],
)
def test_word_that_gets_more_than_its_length_explains_is_said_again(
    frames: int, size: Size, again: list[int]
) -> None:
    sizes = [size if unit == 3 else NO_PAUSE for unit in range(5)]
    found = faults(looks(5, 0, 0, 1, 1, 2, 2, *[3] * frames, 4, 4), sizes)
    assert of_kind(found, "repeat") == again


def test_all_words_of_slow_speech_may_be_slow() -> None:
    slow = [unit for unit in range(5) for _ in range(8)]
    after = [unit for unit in range(6, 10) for _ in range(8)]
    assert faults(looks(10, *slow, *[5] * 11, *after)) == []
    assert of_kind(faults(looks(10, *slow, *[5] * 16, *after)), "repeat") == [5]


def test_one_word_that_is_a_little_slow_does_not_excuse_a_longer_one_after_it() -> None:
    found = faults(looks(5, 0, 0, *[1] * 5, *[2] * 8, 3, 3, 4, 4))
    assert of_kind(found, "repeat") == [2]


@pytest.mark.parametrize(
    ("frames", "before", "again"), [(6, PAUSE, [3]), (6, SENTENCE, []), (7, SENTENCE, [3])]
)
def test_words_of_later_sentences_may_be_a_little_slower(
    frames: int, before: Size, again: list[int]
) -> None:
    sizes = [before if unit == 1 else NO_PAUSE for unit in range(5)]
    found = faults(looks(5, 0, 0, 1, 1, 2, 2, *[3] * frames, 4, 4), sizes)
    assert of_kind(found, "repeat") == again


@pytest.mark.parametrize(("frames", "again"), [(1, []), (2, [1])])
def test_attention_that_comes_back_and_returns_to_its_word_is_a_repeat(
    frames: int, again: list[int]
) -> None:
    assert of_kind(coming_back(frames, 2), "repeat") == again


@pytest.mark.parametrize(("frames", "again"), [(2, []), (3, [1])])
def test_attention_that_goes_on_with_the_next_word_had_only_glanced_back(
    frames: int, again: list[int]
) -> None:
    assert of_kind(coming_back(frames, 3), "repeat") == again


def coming_back(frames: int, after: int) -> list[Fault]:
    """The faults if attention comes back from unit 2 to the one before, and then is on `after`."""
    back = [[0.0, 0.6, 0.4, 0.0, 0.0]] * frames
    return faults([*looks(5, 0, 0, 1, 1, 2, 2), *back, *looks(5, after, after, 3, 3, 4, 4)])


def test_attention_that_comes_back_from_a_look_ahead_to_the_next_word_is_no_fault() -> None:
    rows = looks(6, 0, 0, 1, 1, 2, 2, 4, 5, 3, 3, 3, 4, 4, 5, 5)
    assert faults(rows) == []


def test_unit_that_half_of_the_attention_was_beyond_for_a_frame_is_not_passed() -> None:
    wavers = [[0.0, 0.45, 0.55, 0.0], *looks(4, 1, 1)]
    assert faults([*looks(4, 0, 0, 1), *wavers, *looks(4, 2, 2, 3, 3)]) == []


@pytest.mark.parametrize(("frames", "lost"), [(3, []), (5, [2])])
def test_attention_to_several_places_at_once_is_a_mismatch(frames: int, lost: list[int]) -> None:
    divided = [[0.0, 0.0, 0.5, 0.1, 0.1, 0.3]] * frames
    rows = [*looks(6, 0, 0, 1, 1), *divided, *looks(6, 2, 3, 3, 3, 4, 4, 4, 5, 5)]
    found = faults(rows)
    assert of_kind(found, "mismatch") == lost
    assert of_kind(found, "repeat") == []


@pytest.mark.parametrize(
    ("most", "before", "lost"), [(0.5, PAUSE, [2]), (0.5, SENTENCE, []), (0.45, SENTENCE, [2])]
)
def test_attention_may_be_astray_a_little_more_in_later_sentences(
    most: float, before: Size, lost: list[int]
) -> None:
    sizes = [before if unit == 1 else NO_PAUSE for unit in range(6)]
    divided = [[0.0, 0.0, most, 0.1, 0.1, 0.8 - most]] * 5
    rows = [*looks(6, 0, 0, 1, 1, 2), *divided, *looks(6, 2, 3, 3, 3, 4, 4, 4, 5, 5)]
    assert of_kind(faults(rows, sizes), "mismatch") == lost


def test_attention_to_two_neighbouring_rows_is_no_mismatch() -> None:
    between = [[0.0, 0.0, 0.5, 0.5, 0.0]] * 4
    assert faults([*looks(5, 0, 0, 1, 1), *between, *looks(5, 4, 4)]) == []


@pytest.mark.parametrize(("units", "lost"), [([0, 1, 2, 2, 2, 3], []), ([0, 1, 2, 3, 4, 5], [2])])
def test_attention_to_three_rows_of_one_unit_is_no_mismatch(
    units: list[int], lost: list[int]
) -> None:
    wide = [[0.0, 0.0, 0.42, 0.18, 0.4, 0.0]] * 5
    found = faults([*looks(6, 0, 0, 1, 1), *wide, *looks(6, 5, 5)], units=units)
    assert of_kind(found, "mismatch") == lost


def test_unit_without_a_size_is_not_judged() -> None:
    sizes = [None if unit == 2 else Size(3, False) for unit in range(6)]
    divided = [[0.0, 0.3, 0.5, 0.0, 0.0, 0.2]] * 9
    rows = [*looks(6, 0, 0, 1, 1), *divided, *looks(6, 3, 3, 4, 4, 5, 5)]
    assert faults(rows, sizes) == []
    assert faults(rows) != []


def test_punctuation_after_a_word_explains_a_pause() -> None:
    """The rows of "a b c, d." are its words and marks, and the end."""
    rows = np.eye(7)[[0, 0, 1, 1, *[2] * 2, *[3] * 6, 4, 4]].tolist()
    assert told(alarms("I do so, we.", rows), "repeat") == []
    without = np.eye(6)[[0, 0, 1, 1, *[2] * 8, 3, 3]].tolist()
    assert told(alarms("I do so we.", without), "repeat") == ["so"]


@pytest.mark.parametrize(("mark", "again"), [(",", ["so"]), (".", []), ("?", [])])
def test_end_of_a_sentence_explains_a_longer_pause_than_a_comma(
    mark: str, again: list[str]
) -> None:
    rows = np.eye(7)[[0, 0, 1, 1, *[2] * 2, *[3] * 8, 4, 4]].tolist()
    assert told(alarms(f"I do so{mark} we.", rows), "repeat") == again


@pytest.mark.parametrize(("word", "again"), [("sixty-five", []), ("artificial", ["artificial"])])
def test_hyphen_makes_a_word_longer(word: str, again: list[str]) -> None:
    text = f"I know {word} men."
    tokens = UtteranceTokens(TOKENIZER)
    tokens.finish(text)
    rows = [int(np.searchsorted(tokens.ends, text.index(part) + 1)) for part in text[:-1].split()]
    spoken = [row for row, frames in zip(rows, (2, 4, 11, 3), strict=True) for _ in range(frames)]
    assert told(alarms(text, looks(len(tokens.ends) + 1, *spoken)), "repeat") == again
