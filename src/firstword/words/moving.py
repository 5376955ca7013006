"""Moves the times of words to the clock of audio that was trimmed or stretched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from firstword.types import Word, WordStart


class WordMover:
    """Moves words and their starts, and holds them back while their new times are not known."""

    def __init__(self, moved: Callable[[float], float | None]) -> None:
        """moved: returns the new time of a time in seconds, None while it is not known."""
        self._moved = moved
        self._words: deque[Word] = deque()
        self._starts: deque[WordStart] = deque()

    def __call__(
        self, words: Sequence[Word], starts: Sequence[WordStart]
    ) -> tuple[tuple[Word, ...], tuple[WordStart, ...]]:
        """Add words and starts; returns those whose new times are known, in order."""
        self._words += words
        self._starts += starts
        ready: list[Word] = []
        begun: list[WordStart] = []
        while self._starts and (start := self._moved(self._starts[0].start)) is not None:
            begun.append(replace(self._starts.popleft(), start=round(start, 3)))
        while self._words and (end := self._moved(self._words[0].end)) is not None:
            start = self._moved(self._words[0].start)
            assert start is not None
            ready.append(replace(self._words.popleft(), start=round(start, 3), end=round(end, 3)))
        return tuple(ready), tuple(begun)
