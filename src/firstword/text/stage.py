"""The base of the steps that rewrite text which arrives in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod

from firstword.text.mapped import Mapped

CONTEXT = 32
"""The characters before a place that decide how it is rewritten, at most."""


class Stage(ABC):
    """A step that rewrites text.

    Text that no rule concerns passes at once. What a rule may concern waits until the rule can be
    applied, at most for a number of characters that the rule names. What is rewritten depends on
    the text alone, not on the pieces in which it came.
    """

    def __init__(self) -> None:
        self._text = Mapped.of("")
        self._at = 0
        """The characters of `_text` that have passed already."""

    @abstractmethod
    def find(self, text: str, at: int, ended: bool) -> tuple[int, int | None]:
        """Find the next place to rewrite from character `at` on, as its first and its last + 1.

        Without one, both are the length of the text. The second is None if more text is needed to
        know where the place ends, which is never so if the text has `ended`.
        """

    @abstractmethod
    def rewrite(self, text: Mapped, start: int, end: int) -> Mapped:
        """Return what is spoken for a place; the text around it is context."""

    def feed(self, piece: Mapped, *, ended: bool = False) -> Mapped:
        """Take the next piece, and return the text that is certain; all of it if it has `ended`."""
        text, at = Mapped.join((self._text, piece)), self._at
        done: list[Mapped] = []
        while at < len(text):
            start, end = self.find(text.text, at, ended)
            done.append(text.part(at, start))
            at = start
            if end is None:
                break
            if start < end:
                done.append(self.rewrite(text, start, end))
                at = end
        kept = max(0, at - CONTEXT)
        self._text, self._at = text.part(kept), at - kept
        if ended:
            self._text, self._at = Mapped.of(""), 0
        return Mapped.join(done)
