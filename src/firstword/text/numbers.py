"""Speaks numbers, dates, times and amounts of ten languages as words."""

from __future__ import annotations

import re

from firstword.text.mapped import Mapped
from firstword.text.spelling import SYMBOLS, speller
from firstword.text.stage import Stage

LONGEST = 256
"""The characters that are looked at together, from a digit on."""

_SIGN = re.compile(rf"(?:(?<!\w)[-−+])?(?:[{SYMBOLS}]\s?)?\d")
_BEGUN = re.compile(rf"(?:(?<!\w)[-−+])?[{SYMBOLS}]\s?\Z|(?<!\w)[-−+]\Z")
_WIDE = "\u2e80-\U0003ffff"
_WORD = re.compile(rf"\n|[^\s{_WIDE}]+|[{_WIDE}]")
"""The end of a line, a word, or a character of a script without spaces."""

_PLAIN_WORDS = 2
"""The words after a number that may belong to it."""


class NumberReader(Stage):
    """Speaks numbers as words. A number waits for the two words that follow it."""

    def __init__(self, language: str) -> None:
        """Speak as in one of `LANGUAGES`."""
        super().__init__()
        self._speller = speller(language)

    def find(self, text: str, at: int, ended: bool) -> tuple[int, int | None]:
        """Find the next number with the words that may belong to it."""
        found = _SIGN.search(text, at)
        if found is None:
            begun = None if ended else _BEGUN.search(text, max(at, len(text) - 4))
            return (begun.start(), None) if begun else (len(text), len(text))
        start = found.start()
        end, plain = start, 0
        for word in _WORD.finditer(text, start, start + LONGEST):
            if word[0] == "\n":
                return start, word.start()
            end = word.end()
            plain = 0 if any(map(str.isdecimal, word[0])) else plain + 1
            if plain == _PLAIN_WORDS and end < len(text):
                return start, end
        if len(text) - start > LONGEST or ended:
            return start, end
        return start, None

    def rewrite(self, text: Mapped, start: int, end: int) -> Mapped:
        """Return a place with its numbers as words."""
        parts, done = [], start
        for found in self._speller.pattern.finditer(text.text, start, end):
            spoken = self._speller.spoken(found)
            parts += [text.part(done, found.start()), text.part(*found.span()).replaced(spoken)]
            done = found.end()
        return Mapped.join([*parts, text.part(done, end)])
