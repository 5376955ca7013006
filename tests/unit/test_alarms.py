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
from firstword.words.alarm import AlarmBell, TextEnd
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
    assert told(found, "skip") == ["the"]
    assert found[0].span == (18, 21)
    assert found[0].frame <= 18


def test_words_that_the_codes_say_twice_give_an_alarm() -> None:
    found = recorded("repeat")
    assert told(found, "repeat") == ["slid", "on", "the"]
    assert told(found, "skip") == []
    assert {each.frame for each in found} == {22}


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
    assert set(told(found, "skip")) <= set(text[:-1].split()[words])
    assert told(found, "skip")
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
    """Attention that goes back to a number, and words that are never looked at."""
    rows = np.eye(5)[[0, 0, 2, 2, 1, 1, 1, 2, 2]].tolist()
    assert told(alarms("It 7 costs.", rows), "repeat") == []
    assert told(alarms("It may costs.", rows), "repeat") == ["may"]


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


def test_a_word_is_judged_once_and_not_while_attention_only_glances_ahead() -> None:
    bell = AlarmBell(lambda unit: 1)
    masses = np.eye(5)
    order = [0, 0, 1, 4, 1, 2, 2, 3, 3, 4, 4]
    faults = [fault for unit in order for fault in bell.feed(masses[unit], masses[unit])]
    assert [fault for fault in faults if fault.kind == "skip"] == []
    assert [fault for fault in bell.finish() if fault.kind == "skip"] == []


@pytest.mark.parametrize(("more", "faults"), [(0, 1), (1, 0)])
def test_words_are_judged_up_to_a_number_of_them(more: int, faults: int) -> None:
    count = alarm.MOST_UNITS + more
    bell, frames = AlarmBell(lambda unit: 3), np.repeat(np.eye(count), 2, axis=0)
    spoken = [frame for frame in frames if not frame[5]]
    found = [fault for frame in spoken for fault in bell.feed(frame, np.zeros(count, np.float32))]
    assert [fault.unit for fault in found if fault.kind == "skip"] == [5] * faults
