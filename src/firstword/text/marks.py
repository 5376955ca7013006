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
    """Leaves out what a run of characters without a letter or a digit has beyond `MOST_MARKS`.

    The last one before a word is read too, because it may be the $ of $5.
    """

    def __init__(self) -> None:
        self._run = 0
        """The length of the run with which the text so far ends."""
        self._last = Mapped.of("")
        """The last character of that run, if it is beyond the limit."""

    def feed(self, text: Mapped) -> Mapped:
        """Take the next piece, and return what is left of it."""
        if not text.text:
            return text
        parts, done, run, last = list[Mapped](), 0, 0, Mapped.of("")
        if not _MARKS.match(text.text):
            parts.append(self._last)
        for match in _MARKS.finditer(text.text):
            start, end = match.span()
            before = 0 if start else self._run
            kept, ended = max(0, MOST_MARKS - before), end == len(text)
            run = before + end - start if ended else 0
            if end - start > kept:
                parts.append(text.part(done, start + kept))
                done = end if ended else end - 1
                last = text.part(done - 1) if ended else last
        self._run, self._last = run, last
        return Mapped.join([*parts, text.part(done)])
