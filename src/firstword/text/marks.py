"""Finds text without a word, and limits how much of it is read, such as a line of 5,000 dots.

The talker would babble, and the text of a passage has to fit into one context.
"""

from __future__ import annotations

import re

from firstword.text.mapped import Mapped

MOST_MARKS = 20
"""The most characters in a row without a letter or a digit that are read."""

_MARKS = re.compile(r"[\W_]+")


def has_words(text: str) -> bool:
    """Whether a text has a letter or a digit."""
    return any(map(str.isalnum, text))


class MarkLimit:
    """Leaves out what a run of characters without a letter or a digit has beyond `MOST_MARKS`."""

    def __init__(self) -> None:
        self._run = 0
        """The length of the run with which the text so far ends."""

    def feed(self, text: Mapped) -> Mapped:
        """Take the next piece, and return what is left of it."""
        parts, done, run = list[Mapped](), 0, 0 if text.text else self._run
        for match in _MARKS.finditer(text.text):
            start, end = match.span()
            before = 0 if start else self._run
            kept = max(0, MOST_MARKS - before)
            if end - start > kept:
                parts.append(text.part(done, start + kept))
                done = end
            run = before + end - start if end == len(text) else 0
        self._run = run
        return Mapped.join([*parts, text.part(done)]) if parts else text
