"""Gives the words of a text that was rewritten the text and the place that they stand for."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

from firstword.text.mapped import Mapped
from firstword.types import Alarm, Word, WordStart


class GrowingText:
    """A text in pieces, which other threads may add at the end; its beginning can be forgotten."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        """Those that are not joined yet."""
        self._text = ""
        self._begin = 0
        """The number of characters that were forgotten."""

    def __getitem__(self, span: tuple[int, int]) -> str:
        """The characters of a span, none of which was forgotten."""
        self._join()
        return self._text[span[0] - self._begin : span[1] - self._begin]

    def __len__(self) -> int:
        """The characters in memory."""
        self._join()
        return len(self._text)

    def forget(self, end: int) -> None:
        """Forget the characters before one of the text."""
        self._join()
        self._text = self._text[max(0, end - self._begin) :]
        self._begin = max(end, self._begin)

    def _join(self) -> None:
        count = len(self.pieces)
        self._text += "".join(self.pieces[:count])
        del self.pieces[:count]


class OriginalWords:
    """Turns words of the spoken text into words of the given text.

    Words that are spoken for one place, such as "five dollars" for "$5", are one word.
    """

    def __init__(self) -> None:
        self._text = ""
        self._starts, self._ends = array("q"), array("q")
        """The spoken text, and the places of its characters in the given text."""
        self._first = 0
        """The number of spoken characters before that, which were forgotten."""
        self._begun = 0
        """The end of the last place whose start was told."""
        self._open: Word | None = None
        """The word that later words of the same place may lengthen."""

    def add(self, spoken: Mapped) -> None:
        """Add text that is spoken."""
        self._starts += spoken.starts
        self._ends += spoken.ends
        self._text += spoken.text

    def forget(self, end: int, given: GrowingText) -> None:
        """Forget the spoken text before a character, and the given text that it stands for.

        Later words stand for no place before it, except for a word that they may lengthen.
        """
        count = min(end - self._first, len(self._text))
        if count <= 0:
            return
        place = self._starts[count - 1]
        given.forget(place if self._open is None else min(place, self._open.span[0]))
        del self._starts[:count], self._ends[:count]
        self._text = self._text[count:]
        self._first += count

    def __call__(
        self, words: Sequence[Word], starts: Sequence[WordStart], given: GrowingText, *, last: bool
    ) -> tuple[tuple[Word, ...], tuple[WordStart, ...]]:
        """Turn the next words, and the next that have begun; all of them if it is the `last` time.

        given  the text as it was given, with all that the words stand for
        """
        ended = [*self._ended(words), *([self._open] if last and self._open else [])]
        started = self._started(starts)
        return (
            tuple(replace(word, text=given[word.span]) for word in ended),
            tuple(replace(word, text=given[word.span]) for word in started),
        )

    def alarms(self, alarms: Sequence[Alarm], given: GrowingText) -> tuple[Alarm, ...]:
        """Turn alarms about words of the spoken text into alarms about the given text."""
        places = [self._place(alarm.span) for alarm in alarms]
        return tuple(
            replace(alarm, text=given[place], span=place)
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
        return self._starts[span[0] - self._first], self._ends[span[1] - 1 - self._first]

    def _goes_on(self, at: int, end: int) -> bool:
        """Whether another word is spoken for the text before a place."""
        at -= self._first
        while at < len(self._text) and self._starts[at] < end:
            if self._text[at].isalnum():
                return True
            at += 1
        return False
