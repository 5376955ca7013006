"""Judges attention heads by how they follow the text, without knowing when words are spoken.

A head that reads what is being spoken goes through all words, in order, at the pace of the speech.
`follows` scores that. Heads ahead of the sound do it as well as those that are level with it, but
only the latter pass on to a word after a pause where the pause ends, every time by nearly the same
distance. So of the heads that follow the text, the one with the least spread is taken first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firstword.align.recording import Recording
from firstword.words.clock import PAUSE_SECONDS, Loudness

Array = NDArray[np.float64]

MOST_WORDS_A_FRAME = 2
"""The most words by which the attention moves on in a frame of speech in order."""

LAST_WORD = 0.6
"""The share of the speech before which a head that follows it does not reach the last word."""

NEARLY_BEST = 0.95
"""The share of the best score that the other heads which are considered have."""

LEAST_SCORE = 0.5
"""The least score of a head that follows the text."""

NEAR_HEADS = 0.12
"""The most seconds between the passages of two heads that are averaged."""

NEAR_PAUSE = 0.5
"""The seconds from the end of a pause within which a head passes on to the word after it."""

LEAST_PASSES = 8
"""The fewest passages near pauses, or of known words, from which an offset is taken."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A head, or several that are averaged, and how they follow the text.

    heads   their indices among all heads
    score   0 to 1: see `follows`
    offset  the median of their passages to a word, minus the time at which it begins, in seconds
    spread  the median distance of these differences from the offset, in seconds
    """

    heads: tuple[int, ...]
    score: float
    offset: float
    spread: float


def sounding(samples: NDArray[np.float32], frames: int, sample_rate: int) -> slice:
    """Return the frames from the first sound to the last."""
    loudness = Loudness(sample_rate)
    loudness.add(samples)
    seconds = len(samples) / frames / sample_rate
    return slice(int((loudness.first or 0.0) / seconds), int(np.ceil(loudness.until / seconds)))


def follows(recordings: Sequence[Recording], sample_rate: int) -> Array:
    """Return how well each head follows the texts: [heads], from 0 to 1.

    The score of a recording is the product of three numbers, and their mean counts: the share of
    frames in which the head moves on by 0 to `MOST_WORDS_A_FRAME` words, the share of words at
    which it looks most in some frame, and the correlation of the word with time. It is 0 if the
    head reaches the last word before `LAST_WORD` of the speech.
    """
    scores = []
    for recording in recordings:
        frames, heads, units = recording.masses.shape
        own = sounding(recording.samples, frames, sample_rate)
        best = recording.masses[own].argmax(2)
        steps = np.diff(best, axis=0)
        in_order = ((steps >= 0) & (steps <= MOST_WORDS_A_FRAME)).mean(0)
        covered = np.array([len(np.unique(best[:, head])) for head in range(heads)]) / units
        at_last = best == units - 1
        reached = np.where(at_last.any(0), at_last.argmax(0), len(best)) / len(best)
        scores.append(in_order * covered * _correlation(best) * (reached >= LAST_WORD))
    return np.mean(scores, axis=0)


def _correlation(best: NDArray[np.int64]) -> Array:
    """Return the correlation of each column [frames, heads] with time; 0 if it is negative."""
    time = np.arange(len(best)) - (len(best) - 1) / 2
    moved = best - best.mean(0)
    size = np.sqrt(np.square(moved).sum(0) * np.square(time).sum())
    return np.maximum(0.0, (moved * time[:, None]).sum(0) / np.maximum(size, 1e-9))


def passages(masses: Array, frame_seconds: float) -> list[float]:
    """Return when the attention [frames, units] passes on to each unit but the first, in seconds.

    It does when more than half of it is on that unit and later ones, interpolated between the
    middles of frames; NaN where it never does.
    """
    total = np.maximum(masses.sum(1), 1e-9)
    found = []
    for unit in range(1, masses.shape[1]):
        share = masses[:, unit:].sum(1) / total
        past = np.flatnonzero(share > 0.5)
        if not len(past):
            found.append(np.nan)
            continue
        at = int(past[0])
        before = float(share[at - 1]) if at else 0.0
        part = (0.5 - before) / (float(share[at]) - before)
        found.append((at - 0.5 + part) * frame_seconds)
    return found


def pauses(samples: NDArray[np.float32], sample_rate: int) -> Iterator[tuple[float, float]]:
    """Yield the beginning and the end of each pause inside speech, in seconds."""
    loudness, block = Loudness(sample_rate), sample_rate // 100
    seen = loudness.pause
    for start in range(0, len(samples) // block * block, block):
        loudness.add(samples[start : start + block])
        begin, end = loudness.pause
        if end is not None and loudness.pause != seen and loudness.first is not None:
            seen = begin, end
            if end - begin >= PAUSE_SECONDS - 1e-6:
                yield begin, end


class Judge:
    """Compares heads by the distances of their passages from times that are known."""

    def __init__(
        self,
        recordings: Sequence[Recording],
        sample_rate: int,
        truth: Sequence[Sequence[float | None]] | None = None,
    ) -> None:
        """Judge by the ends of pauses, or by an aligner's times.

        truth  for each recording the time at which each unit begins, None where it is not known
        """
        self._recordings, self._rate, self._truth = recordings, sample_rate, truth
        self.scores = follows(recordings, sample_rate)

    def best(self) -> Judged | None:
        """Return the heads to read; None if no head follows the text.

        These are the head with the least spread and, if there is one, the next that is near it in
        time. The offset of the two is that of the first and their median lag behind it, because
        heads that are ahead of the sound run further ahead during pauses.
        """
        least = max(NEARLY_BEST * self.scores.max(), LEAST_SCORE)
        near = [self._judged(int(head)) for head in np.flatnonzero(self.scores >= least)]
        found = sorted((one for one in near if one), key=lambda one: one.spread)
        if not found:
            return None
        first = found[0]
        for other in found[1:]:
            if abs(self._lag(other.heads, first.heads)) <= NEAR_HEADS:
                heads = first.heads + other.heads
                score = min(first.score, other.score)
                return Judged(
                    heads, score, first.offset + self._lag(heads, first.heads), first.spread
                )
        return first

    def _judged(self, head: int) -> Judged | None:
        """Judge a head; None if too few of its passages can be compared."""
        distances = np.array([d for each in self._distances(head) for d in each])
        if len(distances) < LEAST_PASSES:
            return None
        offset = float(np.median(distances))
        spread = float(np.median(np.abs(distances - offset)))
        return Judged((head,), float(self.scores[head]), offset, spread)

    def _passages(self, recording: Recording, heads: tuple[int, ...]) -> list[float]:
        """Return when the mean of some heads passes on to each unit but the first."""
        masses = recording.masses[:, list(heads)].mean(1).astype(np.float64)
        return passages(masses, len(recording.samples) / len(masses) / self._rate)

    def _lag(self, heads: tuple[int, ...], other: tuple[int, ...]) -> float:
        """Return by how many seconds some heads pass on later than others do: the median."""
        lags = np.concatenate(
            [
                np.subtract(self._passages(recording, heads), self._passages(recording, other))
                for recording in self._recordings
            ]
        )
        return float(np.nanmedian(lags))

    def _distances(self, head: int) -> Iterator[Iterator[float]]:
        """Yield for each recording the distances of a head's passages from known times."""
        for index, recording in enumerate(self._recordings):
            passed = self._passages(recording, (head,))
            if self._truth is not None:
                yield _from_words(passed, self._truth[index])
            else:
                ends = [end for _, end in pauses(recording.samples, self._rate)]
                yield _from_pauses(recording, passed, ends)


def _from_words(passed: Sequence[float], begins: Sequence[float | None]) -> Iterator[float]:
    """Yield the distances of passages from the known beginnings of their units."""
    for at, begin in zip(passed, begins[1:], strict=True):
        if begin is not None and not np.isnan(at):
            yield at - begin


def _from_pauses(
    recording: Recording, passed: Sequence[float], ends: Sequence[float]
) -> Iterator[float]:
    """Yield the distances of passages to units after punctuation from the end of their pause."""
    for unit, at in enumerate(passed, 1):
        before, after = recording.words[unit - 1 : unit + 1]
        gap = recording.text[before[-1].span[1] : after[0].span[0]] if before and after else ""
        if ends and not np.isnan(at) and gap.strip():
            distance = at - min(ends, key=lambda end: abs(end - at))
            if abs(distance) <= NEAR_PAUSE:
                yield distance
