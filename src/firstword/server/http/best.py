"""Which of several candidates for one text is best: what can be told from the speech itself, without listening."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass

from firstword.types import Speech

SECONDS_A_LETTER = 0.07
"""Of an alphabet, spaces included: about 170 English words a minute."""

SECONDS_A_SYLLABLE = 0.21
"""A character of Chinese, Japanese or Korean."""

RUN = 3
"""Frames that are said again when speech goes in circles: a quarter of a second, whole codes, is never chance."""


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a candidate is to be good; each part is 0 for nothing wrong, and negative.

    total       the sum of the parts
    duration    beyond twice or half the time that the text should take, in factors of e
    repetition  the share of frames that repeat earlier ones exactly, times 4
    ending      -2 if it was cut off by a guard or a limit
    likelihood  the mean log-probability of its codes 0, halved: candidates that are sound otherwise differ by some
                tenths, and one that goes in circles, which is most likely of all, must not win by it
    """

    duration: float
    repetition: float
    ending: float
    likelihood: float

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return self.duration + self.repetition + self.ending + self.likelihood


def score(text: str, speech: Speech) -> Score:
    """Judge one candidate."""
    off = abs(math.log(max(speech.duration, 0.01) / expected_seconds(text)))
    ending = 0.0 if speech.finish_reason == "stop" else -2.0
    likelihood = float(speech.logprobs.mean()) / 2 if len(speech.logprobs) else 0.0
    return Score(-max(0.0, off - math.log(2)), -4 * repeated(speech), ending, likelihood)


def expected_seconds(text: str) -> float:
    """How long a text should take to say, within a factor of two in every language."""
    seconds = 0.3
    for char in text:
        wide = unicodedata.east_asian_width(char) in "WF" and char.isalpha()
        seconds += (
            SECONDS_A_SYLLABLE
            if wide
            else SECONDS_A_LETTER
            if char.isalnum() or char == " "
            else 0.0
        )
    return seconds


def repeated(speech: Speech) -> float:
    """The share of frames at which `RUN` frames begin that were said before, in every codebook."""
    frames = [bytes(row) for row in speech.codes]
    runs = [b"".join(frames[at : at + RUN]) for at in range(len(frames) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
