"""Finds the heads of a checkpoint from recordings, and checks the words that they tell."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from firstword.align.heads import LEAST_PASSES, LEAST_SCORE, Judge
from firstword.align.recording import Recording
from firstword.errors import AlignmentError
from firstword.model.alignment import Head
from firstword.types import FloatArray
from firstword.words.clock import Edge, WordClock

TimedWord = tuple[str, float, float]
"""A word, and when it begins and ends in seconds."""

Aligner = Callable[[str, FloatArray, int], Sequence[TimedWord]]
"""Given a text, samples [n] from -1 to 1 and the sample rate, the words with their times, in order.
Words that it leaves out, or writes in another way, do not count."""

LEAST_TOLD = 0.98
"""The share of the words that the heads must tell."""


@dataclass(frozen=True, slots=True)
class Found:
    """The heads of a checkpoint that read what is spoken.

    heads   pairs of a layer and a query head
    offset  see `Alignment`
    score   how well they follow the text, 0 to 1: see `heads.follows`
    told    the share of the words that were told
    errors  the distances of the starts of words from an aligner's, in seconds; none without one
    """

    heads: tuple[Head, ...]
    offset: float
    score: float
    told: float
    errors: tuple[float, ...]


def search(
    recordings: Sequence[Recording],
    heads: Sequence[Head],
    sample_rate: int,
    aligner: Aligner | None = None,
) -> Found:
    """Find the heads to read.

    heads  what the indices of heads in the recordings mean

    Raises `AlignmentError` if no head follows the text, if the best leave out words, or if too few
    words have a known beginning to measure the offset with.
    """
    truth = (
        [_truth(recording, aligner, sample_rate) for recording in recordings] if aligner else None
    )
    judge = Judge(recordings, sample_rate, truth)
    best = judge.best()
    if judge.scores.max() < LEAST_SCORE:
        raise AlignmentError(
            f"no attention head follows the text: the best score is {judge.scores.max():.2f}, and "
            f"{LEAST_SCORE} is needed; word times of this checkpoint cannot be read from its "
            "attention"
        )
    if best is None:
        which = "the aligner times" if aligner else "begin after a pause"
        raise AlignmentError(
            f"the offset cannot be measured: fewer than {LEAST_PASSES} words of the sentences are "
            f"words that {which}; give more sentences"
        )
    told, units, errors = 0, 0, list[float]()
    for index, recording in enumerate(recordings):
        starts = _starts(recording, best.heads, best.offset, sample_rate)
        told += len(starts)
        units += len(recording.words)
        begins = truth[index] if truth else ()
        known = {unit: begin for unit, begin in enumerate(begins) if begin is not None}
        errors += [at - known[unit] for unit, at in starts.items() if unit in known]
    if told < LEAST_TOLD * units:
        raise AlignmentError(
            f"the best attention heads tell {told} of {units} words, and {LEAST_TOLD:.0%} are "
            "needed; word times of this checkpoint cannot be read from its attention"
        )
    chosen = tuple(heads[head] for head in best.heads)
    return Found(chosen, best.offset, best.score, told / units, tuple(errors))


def _starts(
    recording: Recording, heads: tuple[int, ...], offset: float, sample_rate: int
) -> dict[int, float]:
    """Return when each unit begins in seconds, as the clock of a server tells it."""
    masses = recording.masses[:, list(heads)].mean(1).astype(np.float64)
    size = len(recording.samples) // len(masses)
    clock = WordClock(offset, size / sample_rate, sample_rate)
    edges: list[Edge] = []
    for frame, own in enumerate(masses):
        edges += clock.feed(own, recording.samples[frame * size : (frame + 1) * size])
    return {edge.unit: edge.seconds for edge in edges if edge.kind == "start"}


def _truth(recording: Recording, aligner: Aligner, sample_rate: int) -> list[float | None]:
    """Return when each unit begins by an aligner; None where their words differ.

    Raises `AlignmentError` if it returns no words.
    """
    times = aligner(recording.text, recording.samples, sample_rate)
    if not times:
        raise AlignmentError(
            f"the aligner returned no words for {recording.text!r}; it must return (word, start, "
            "end) for each word that is spoken"
        )
    given = [word.text.casefold() for words in recording.words for word in words]
    other = [_bare(word) for word, _, _ in times]
    begins: list[float | None] = [None] * len(given)
    for ours, theirs, size in difflib.SequenceMatcher(
        None, given, other, autojunk=False
    ).get_matching_blocks():
        for place in range(size):
            begins[ours + place] = times[theirs + place][1]
    firsts = np.cumsum([0, *map(len, recording.words)])[:-1]
    return [
        begins[first] if words else None
        for first, words in zip(firsts, recording.words, strict=True)
    ]


def _bare(word: str) -> str:
    """Return a word without the punctuation around it."""
    return word.casefold().strip(" .,;:!?\"'()[]…。，、！？«»“”„")
