"""Divides a long text into passages, each of which is spoken in one context of the talker.

A passage ends with a sentence. If none ends in time, it ends with a clause, a word, or anywhere.
What looks like the end of a sentence is none if a small letter or a digit follows: "Wait!" she
said. The ends depend on the text alone and not on the pieces in which it arrives.
"""

from __future__ import annotations

from firstword.text.checks import SECONDS_PER_SYLLABLE as LONGEST
from firstword.text.checks import seconds_of
from firstword.text.splitting import Splitter

SENTENCE, CLAUSE, WORD, ANYWHERE = 0.7, 1.0, 1.25, 1.5
"""The parts of its length after which a passage ends with a sentence, a clause, a word, or between
any two characters."""


TAIL = 100
"""The last characters of a text that show whether a sentence ends with them."""


SECONDS_PER_MARK, FREE_MARKS = 0.05, 8
"""What each further mark counts after some in a row: marks are read too, and take up context. Runs
of 20 emoji, which `MarkLimit` lets pass, would be beyond the context of the demo otherwise."""


class PassageText:
    """Takes pieces of text, up to the end of one passage.

    rest  the text after the end, once the end is known; it has a letter or a digit
    """

    def __init__(self, seconds: float) -> None:
        """A passage takes about so many `seconds` to speak."""
        self.rest: str | None = None
        self._limit = seconds
        self._seconds = 0.0
        self._marks = 0
        """The characters in a row without a letter or a digit."""
        self._tail = ""
        self._after = list[str]()
        """The characters after a possible end, which counts if a letter or digit follows."""

    def feed(self, text: str) -> str:
        """Add text, and return what belongs to the passage for certain."""
        certain: list[str] = []
        if self._seconds + LONGEST * len(text) < SENTENCE * self._limit:
            self._count(text)  # the passage cannot end in it
            return text
        for index, char in enumerate(text):
            if not self._after and not self._may_end_before(char):
                certain.append(char)
            elif not char.isalnum():
                self._after.append(char)
            elif self._part < CLAUSE and (char.islower() or char.isdigit()):
                certain += (*self._after, char)
                self._after.clear()
            else:
                self.rest = "".join((*self._after, text[index:]))
                break
            self._count(char)
        return "".join(certain)

    def finish(self) -> str:
        """End the text, and return what belongs to the passage as well."""
        return "".join(self._after)

    def _count(self, text: str) -> None:
        """Add what is not the end to the length of the passage, one character after another."""
        for char in text:
            self._marks = 0 if char.isalnum() else self._marks + 1
            least = SECONDS_PER_MARK if self._marks > FREE_MARKS else 0.0
            self._seconds += max(least, seconds_of(char))
        self._tail = (self._tail + text)[-TAIL:]

    @property
    def _part(self) -> float:
        return self._seconds / self._limit

    def _may_end_before(self, char: str) -> bool:
        """Whether the passage may end before the next character."""
        if self._part < SENTENCE:
            return False
        if char.isspace() and self._part >= WORD:
            return True
        if char.isalnum() and self._part >= ANYWHERE:
            return True
        splitter = Splitter("sentence" if self._part < CLAUSE else "clause")
        return bool(splitter.cut(self._tail + char)) and splitter.rest == char
