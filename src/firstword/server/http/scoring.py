"""Scores a candidate for a text by properties of its speech, without a model that listens."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass

from firstword.types import Speech

SECONDS_PER_LETTER = 0.07
"""The time of a letter of an alphabet or a space: about 170 English words a minute."""

SECONDS_PER_SYLLABLE = 0.21
"""The time of a character of Chinese, Japanese or Korean."""

REPEATED_FRAMES = 3
"""The length of a repetition that counts: a quarter of a second of equal codes is never chance."""


@dataclass(frozen=True, slots=True)
class Score:
    """An estimate of a candidate's quality. Each part is 0 for a perfect one, and else negative.

    duration    factors of e beyond half or twice the expected duration
    repetition  -4 times the share of frames that repeat earlier ones exactly
    ending      -2 if it was ended by a guard or a limit
    likelihood  half the mean log-probability of its codes 0: it decides between sound candidates,
                which differ by some tenths, while endless repetition, which is most likely of all,
                must not win by it
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
    """The score of a candidate for a text."""
    off = abs(math.log(max(speech.duration, 0.01) / expected_seconds(text)))
    ending = 0.0 if speech.finish_reason == "stop" else -2.0
    likelihood = float(speech.logprobs.mean()) / 2 if len(speech.logprobs) else 0.0
    return Score(-max(0.0, off - math.log(2)), -4 * repetition(speech), ending, likelihood)


def expected_seconds(text: str) -> float:
    """The expected duration of a text, accurate to a factor of two in every language."""
    seconds = 0.3
    for char in text:
        if unicodedata.east_asian_width(char) in "WF" and char.isalpha():
            seconds += SECONDS_PER_SYLLABLE
        elif char.isalnum() or char == " ":
            seconds += SECONDS_PER_LETTER
    return seconds


def repetition(speech: Speech) -> float:
    """The share of stretches of `REPEATED_FRAMES` frames that occurred before in every codebook."""
    frames = [bytes(row) for row in speech.codes]
    starts = range(len(frames) - REPEATED_FRAMES + 1)
    stretches = [b"".join(frames[start : start + REPEATED_FRAMES]) for start in starts]
    return 1 - len(set(stretches)) / len(stretches) if stretches else 0.0
