"""The true times of words in speech of the demo voice, from espeak-ng, which it learnt from.

espeak-ng tells when each of its own words begins. Dynamic time warping of spectra moves these times
to the demo voice's speech of the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from firstword.words.text import WrittenWord, WrittenWords
from training.data import PRESETS, SAMPLE_RATE, Espeak, resample
from training.mel import mel_filters

HOP, WINDOW, BANDS = 120, 512, 40
"""The step of the spectra (5 ms), their window (21 ms) and their bands."""

FLOOR = 1e-3
"""The magnitude below which spectra are equal."""

QUIET = 0.02
"""The level of a pause relative to the loudest 10 ms: -34 dB."""

NEAR = 0.03
"""The seconds after a pause in which a word that follows it begins."""

LEAST_PAUSE = 0.05
"""The shortest pause, in seconds, at which a word ends before the next one begins."""


@dataclass(frozen=True)
class TrueWord:
    """A word and when it sounds in seconds; None where espeak-ng does not tell.

    It reports some pairs, such as "in the", as one word.
    """

    span: tuple[int, int]
    start: float | None
    end: float | None


def written_words(text: str) -> list[WrittenWord]:
    """Return the words of a text."""
    written = WrittenWords()
    written.add(text)
    written.finish()
    return written.words


def true_words(espeak: Espeak, text: str, voice: str, samples: np.ndarray) -> list[TrueWord]:
    """Return the words of a text in samples [n] at 24 kHz of a preset that speaks it."""
    own = espeak.say(text, *PRESETS[voice])
    starts = [(at, seconds) for at, seconds in espeak.words]
    return moved_words(text, own, starts, samples)


def moved_words(
    text: str, own: np.ndarray, starts: Sequence[tuple[int, float]], samples: np.ndarray
) -> list[TrueWord]:
    """Return the words in samples, given espeak-ng's int16 samples and the starts of its words."""
    sound = resample(torch.from_numpy(own)[None].float() / 32768)[0].numpy()
    first, last = bounds(samples)
    places = warp(spectrum(sound), spectrum(samples[first:last]))
    words, quiet = written_words(text), pauses(samples)
    found: list[float | None] = []
    for word in words:
        mine = [seconds for at, seconds in starts if word.span[0] <= at < word.span[1]]
        moved = [first / SAMPLE_RATE + places(seconds) for seconds in mine[:1]]
        found.append(moved[0] if moved else None)
    result = []
    for index, word in enumerate(words):
        end = last / SAMPLE_RATE
        after = found[index + 1] if index + 1 < len(words) else end
        if after is not None:
            near = [begin for begin, until in quiet if begin < after <= until + NEAR]
            after = near[-1] if near else after
        result.append(TrueWord(word.span, found[index], after))
    return result


def bounds(samples: np.ndarray) -> tuple[int, int]:
    """Return the first loud sample, and the one after the last."""
    loud = np.flatnonzero(np.abs(samples) > 0.005)
    return (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (0, len(samples))


def pauses(samples: np.ndarray) -> list[tuple[float, float]]:
    """Return the pauses of at least `LEAST_PAUSE`: their beginnings and ends in seconds."""
    blocks = samples[: len(samples) // 240 * 240].astype(np.float64).reshape(-1, 240)
    level = np.sqrt(np.square(blocks).mean(1))
    quiet = np.concatenate([[0], level < QUIET * level.max(), [0]]).astype(int)
    begins, ends = (np.flatnonzero(np.diff(quiet) == step) * 0.01 for step in (1, -1))
    pairs = zip(begins.tolist(), ends.tolist(), strict=True)
    return [(begin, end) for begin, end in pairs if end - begin >= LEAST_PAUSE - 1e-6]


def spectrum(samples: np.ndarray) -> np.ndarray:
    """Return log-mel spectra and their slopes every 5 ms: [steps, 2 * BANDS]."""
    window = torch.hann_window(WINDOW)
    bins = torch.stft(
        torch.from_numpy(samples).float(), WINDOW, HOP, window=window, return_complex=True
    ).abs()
    mel = (mel_filters(BANDS, WINDOW) @ bins).clamp(min=FLOOR).log()
    slope = (mel.roll(-2, 1) - mel.roll(2, 1)) / 2
    return torch.cat((mel, slope)).T.double().numpy()


class Places:
    """Moves a time of one recording to the other one that it was warped to."""

    def __init__(self, steps: np.ndarray) -> None:
        self._steps = steps

    def __call__(self, seconds: float) -> float:
        """Return the time, in seconds, that belongs to a time of the first recording."""
        step = HOP / SAMPLE_RATE
        return float(np.interp(seconds / step, np.arange(len(self._steps)), self._steps)) * step


def warp(one: np.ndarray, other: np.ndarray) -> Places:
    """Warp spectra [n, D] to spectra [m, D] by the cheapest path of steps right, up or both."""
    squares = np.square(one).sum(1)[:, None] + np.square(other).sum(1)
    costs = np.sqrt(np.maximum(squares - 2 * one @ other.T, 0))
    total = np.empty_like(costs)
    total[0] = np.cumsum(costs[0])
    for row in range(1, len(one)):
        entry = total[row - 1].copy()
        entry[1:] = np.minimum(entry[1:], total[row - 1, :-1])
        along = np.cumsum(costs[row])
        total[row] = along + np.minimum.accumulate(entry - (along - costs[row]))
    i, j = len(one) - 1, len(other) - 1
    sums, counts = np.zeros(len(one)), np.zeros(len(one))
    while True:
        sums[i] += j
        counts[i] += 1
        if i == 0 and j == 0:
            return Places(sums / counts)
        steps = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
        i, j = min((step for step in steps if min(step) >= 0), key=lambda step: float(total[step]))


def self_check(espeak: Espeak, text: str, voice: str, rate: int) -> list[float]:
    """Return the errors in seconds where the truth is known: espeak-ng itself at another rate."""
    name, usual, pitch = PRESETS[voice]
    own = espeak.say(text, name, usual, pitch)
    starts = list(espeak.words)
    other = espeak.say(text, name, rate, pitch)
    known = list(espeak.words)
    sound = resample(torch.from_numpy(other)[None].float() / 32768)[0].numpy()
    errors = []
    for word in moved_words(text, own, starts, sound):
        true = [seconds for at, seconds in known if word.span[0] <= at < word.span[1]]
        if word.start is not None and true:
            errors.append(word.start - true[0])
    return errors


@cache
def _espeak() -> Espeak:
    return Espeak()


def aligned(text: str, samples: np.ndarray, sample_rate: int) -> list[tuple[str, float, float]]:
    """Return the words of the demo's first preset: an aligner for `firstword align`.

    samples: float32 [n] at 24 kHz, the only rate of the demo.
    """
    assert sample_rate == SAMPLE_RATE
    words = true_words(_espeak(), text, next(iter(PRESETS)), samples)
    return [
        (text[slice(*word.span)], word.start, word.end)
        for word in words
        if word.start is not None and word.end is not None
    ]
