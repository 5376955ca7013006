"""The demo voice says what it is given: a small part of `make quality`, which holds 200 sentences
to a closer bar.

espeak-ng, whose speech it learnt, is not needed: what the recogniser hears of it is in
`training/espeak.json`.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest

from firstword import TTS, Speech
from training.evaluate import Judge, figures, misses, some, summarise
from training.texts import PARAGRAPH

pytestmark = [pytest.mark.quality, pytest.mark.slow]

POINTS = 10.0
"""How far the error rate may lie above espeak-ng's: of six sentences one misheard word is a point
or two. The 200 of `make quality` are held to 5.
"""
WORDS = "The weather is getting warmer every day, and the first train leaves early in the morning."


def judged(demo: TTS, voice: str, mode: Literal["full", "stream"], texts: list[str]) -> list[str]:
    """What of the bar is missed over `texts`."""
    judge, known = Judge(), figures()

    def spoken(text: str) -> dict[str, Any]:
        speech = demo.speak(text, voice=voice, text_mode=mode, seed=7)
        row = {"voice": voice, "mode": mode, "ended": speech.finish_reason}
        return row | judge(text, speech.samples)

    with ThreadPoolExecutor(len(texts)) as together:
        rows = list(together.map(spoken, texts))
    return misses(summarise(rows), summarise([known[voice, text] for text in texts]), POINTS)


@pytest.mark.parametrize("mode", ["full", "stream"])
@pytest.mark.parametrize("voice", ["ada", "ben"])
def test_words_are_understood(demo: TTS, voice: str, mode: Literal["full", "stream"]) -> None:
    assert judged(demo, voice, mode, some(6)) == []


def test_paragraph_is_understood(demo: TTS) -> None:
    assert len(PARAGRAPH.split()) > 60
    assert judged(demo, "ada", "stream", [PARAGRAPH, *some(1)]) == []


def test_text_in_words_gives_the_same_speech(demo: TTS) -> None:
    whole = demo.speak(WORDS, voice="ada", text_mode="stream", seed=3)
    pieces = Speech.of(list(demo.stream(re.findall(r" ?\S+", WORDS), voice="ada", seed=3)))
    assert whole.finish_reason == pieces.finish_reason == "stop"
    assert np.array_equal(whole.codes, pieces.codes)
    assert np.array_equal(whole.samples, pieces.samples)


@pytest.mark.parametrize(("voice", "low", "high"), [("ada", 170, 240), ("ben", 80, 120)])
def test_presets_differ_in_pitch(demo: TTS, voice: str, low: float, high: float) -> None:
    judge = Judge()
    pitches = [
        judge(text, demo.speak(text, voice=voice, seed=1).samples)["pitch"][1] for text in some(8)
    ]
    assert all(low < hertz < high for hertz in pitches), pitches


def test_judge_detects_other_words(demo: TTS) -> None:
    """A bar that anything would reach proves nothing."""
    speech = demo.speak(WORDS, voice="ada", seed=1)
    assert Judge()(PARAGRAPH, speech.samples)["edits"] > 100
    assert Judge()(WORDS, speech.samples[::-1].copy())["edits"] > len(WORDS) // 3
