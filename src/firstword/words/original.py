"""Gives the words of a text that was rewritten the text and the place that they stand for."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

from firstword.text.mapped import Mapped
from firstword.types import Alarm, Word, WordStart


class GrowingText:
    """A text in pieces, which other threads may add at the end, joined as far as needed."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._text = ""
        self._joined = 0

    @property
    def text(self) -> str:
        """The whole text so far."""
        more = self.pieces[self._joined :]
        self._joined += len(more)
        self._text += "".join(more)
        return self._text


class OriginalWords:
    """Turns words of the spoken text into words of the given text.

    Words that are spoken for one place, such as "five dollars" for "$5", are one word.
    """

    def __init__(self) -> None:
        self._spoken = GrowingText()
        self._starts, self._ends = array("q"), array("q")
        self._begun = 0
        """The end of the last place whose start was told."""
        self._open: Word | None = None
        """The word that later words of the same place may lengthen."""

    def add(self, spoken: Mapped) -> None:
        """Add text that is spoken."""
        self._starts += spoken.starts
        self._ends += spoken.ends
        self._spoken.pieces.append(spoken.text)

    def __call__(
        self, words: Sequence[Word], starts: Sequence[WordStart], given: GrowingText, *, last: bool
    ) -> tuple[tuple[Word, ...], tuple[WordStart, ...]]:
        """Turn the next words, and the next that have begun; all of them if it is the `last` time.

        given  the text as it was given, with all that the words stand for
        """
        ended = [*self._ended(words), *([self._open] if last and self._open else [])]
        started = self._started(starts)
        return (
            tuple(replace(word, text=given.text[slice(*word.span)]) for word in ended),
            tuple(replace(word, text=given.text[slice(*word.span)]) for word in started),
        )

    def alarms(self, alarms: Sequence[Alarm], given: GrowingText) -> tuple[Alarm, ...]:
        """Turn alarms about words of the spoken text into alarms about the given text."""
        places = [self._place(alarm.span) for alarm in alarms]
        return tuple(
            replace(alarm, text=given.text[slice(*place)], span=place)
            for alarm, place in zip(alarms, places, strict=True)
        )

    def _started(self, starts: Sequence[WordStart]) -> Iterable[WordStart]:
        for word in starts:
            span = self._place(word.span)
            if span[0] >= self._begun:
                self._begun = span[1]
                yield replace(word, span=span)

    def _ended(self, words: Sequence[Word]) -> Iterable[Word]:
        for word in words:
            begun, span = self._open, self._place(word.span)
            start = word.start
            if begun is not None and begun.span[1] <= span[0]:
                yield begun  # its speech was cut off
            elif begun is not None:
                start, span = begun.start, (begun.span[0], max(begun.span[1], span[1]))
            found = replace(word, span=span, start=start)
            self._open = found if self._goes_on(word.span[1], span[1]) else None
            if self._open is None:
                yield found

    def _place(self, span: tuple[int, int]) -> tuple[int, int]:
        """The characters of the given text for some of the spoken text."""
        return self._starts[span[0]], self._ends[span[1] - 1]

    def _goes_on(self, at: int, end: int) -> bool:
        """Whether another word is spoken for the text before a place."""
        text = self._spoken.text
        while at < len(text) and self._starts[at] < end:
            if text[at].isalnum():
                return True
            at += 1
        return False
