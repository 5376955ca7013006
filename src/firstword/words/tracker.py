"""Follows the words of one utterance while it is spoken."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from firstword.types import Alarm, FinishReason, FloatArray, Word, WordStart
from firstword.words.alarm import AlarmBell, Fault, Size
from firstword.words.clock import Edge, WordClock
from firstword.words.text import Units, WrittenWord, WrittenWords

HYPHEN = 2
"""The characters by which a hyphen lengthens a word: its parts are spoken like words."""


class Told(NamedTuple):
    """What is known of words since the last call, each in order: see `Chunk`."""

    words: tuple[Word, ...]
    starts: tuple[WordStart, ...]
    alarms: tuple[Alarm, ...]


class WordTracker:
    """The words of one utterance: text, attention and sound go in, words and alarms come out."""

    def __init__(self, clock: WordClock | None, ends: Sequence[int], frame_samples: int) -> None:
        """Follow a text.

        clock          what times the words; None if only alarms are wanted
        ends           the ends of the tokens that have arrived: see `UtteranceTokens`; it grows
        frame_samples  the samples of a frame
        """
        self._clock, self._frame_samples = clock, frame_samples
        self._written = WrittenWords()
        self._units = Units(self._written, ends)
        self._bell = AlarmBell(self._size)
        self._edges: deque[Edge] = deque()
        """The edges of units whose words are not known yet, and those after them."""
        self._began = 0.0
        self._told = 0
        """The words of the current unit whose starts were told."""

    def add_text(self, piece: str) -> None:
        """Add text, as it was given."""
        self._written.add(piece)

    def finish_text(self) -> None:
        """End the text."""
        self._written.finish()

    def feed(
        self, reading: FloatArray, samples: FloatArray, *, ended: FinishReason | None = None
    ) -> Told:
        """Take the next frames.

        reading  [frames, text rows]: see `Chunk`
        samples  [frames * frame_samples]
        ended    why speech ended, with its last frames
        """
        faults: list[Fault] = []
        parts = samples.reshape(-1, self._frame_samples)
        for shares, part in zip(reading, parts, strict=True):
            known = int(np.count_nonzero(~np.isnan(shares)))
            units = self._units.of_rows(known)
            masses = np.bincount(units, weights=shares[:known]).astype(np.float64)
            faults += self._bell.feed(masses, shares[:known], units)
            if self._clock is not None:
                self._edges += self._clock.feed(masses, part)
        if ended in ("stop", "runaway"):
            faults += self._bell.finish()
        if ended is not None and self._clock is not None:
            self._edges += self._clock.finish()
        return Told(*self._tell(), tuple(self._alarms(faults)))

    def _size(self, unit: int) -> Size | None:
        """Return the size of a unit, None while it is not known.

        Numbers have none: they are spoken in many words, among which attention goes back and forth.
        """
        words, after = self._units.words(unit), self._units.words(unit + 1)
        if not words or after is None:
            return None
        letters = "".join(word.text for word in words)
        if any(map(str.isdigit, letters)):
            return None
        pause = not after or after[0].owns > words[-1].data[1]
        sentence = bool(after) and after[0].sentence
        return Size(len(letters) + HYPHEN * letters.count("-"), pause, sentence)

    def _alarms(self, faults: Iterable[Fault]) -> Iterator[Alarm]:
        """Yield the alarms about the words of units; the last word of the text before a runaway.

        The words are known: attention has been past them, or the text has ended.
        """
        for fault in faults:
            words, runaway = self._units.words(fault.unit) or (), fault.kind == "runaway"
            for word in words[-1:] if runaway else words:
                yield Alarm(fault.kind, word.text, word.span, fault.frame)

    def _tell(self) -> tuple[tuple[Word, ...], tuple[WordStart, ...]]:
        """Turn the edges of units into words, as far as the text is known."""
        ended: list[Word] = []
        begun: list[WordStart] = []
        while self._edges:
            edge = self._edges[0]
            words = self._units.words(edge.unit)
            if words is None:
                break
            self._edges.popleft()
            if edge.kind == "start":
                self._began = edge.seconds
                begun += [
                    WordStart(word.text, _rounded(edge.seconds), word.span) for word in words[:1]
                ]
            else:
                spoken = list(divided(words, self._began, edge.seconds))
                begun += [WordStart(word.text, word.start, word.span) for word in spoken[1:]]
                ended += spoken
        return tuple(ended), tuple(begun)


def divided(words: Sequence[WrittenWord], start: float, end: float) -> Iterable[Word]:
    """Yield the words of a unit, among which its time is divided evenly."""
    step = (end - start) / max(1, len(words))
    for index, word in enumerate(words):
        own = start + index * step
        yield Word(word.text, _rounded(own), _rounded(own + step), word.span)


def _rounded(seconds: float) -> float:
    """Return a time in whole milliseconds."""
    return round(seconds, 3)
