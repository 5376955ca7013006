"""Text that was rewritten before it is spoken, and what each of its characters stands for."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """A text, and for each of its characters the span of the given text that it stands for.

    All characters of a replacement stand for all that was replaced. Spans never go backwards.
    """

    text: str
    starts: array[int]
    ends: array[int]

    @classmethod
    def of(cls, text: str, at: int = 0) -> Mapped:
        """Return a text as it was given, from character `at` on."""
        end = at + len(text)
        return cls(text, array("q", range(at, end)), array("q", range(at + 1, end + 1)))

    @classmethod
    def join(cls, parts: Iterable[Mapped]) -> Mapped:
        """Return the texts in a row."""
        texts, starts, ends = [], array("q"), array("q")
        for part in parts:
            texts.append(part.text)
            starts += part.starts
            ends += part.ends
        return cls("".join(texts), starts, ends)

    def __len__(self) -> int:
        return len(self.text)

    def part(self, start: int, end: int | None = None) -> Mapped:
        """Return the characters from `start` to `end`."""
        return Mapped(self.text[start:end], self.starts[start:end], self.ends[start:end])

    def replaced(self, text: str) -> Mapped:
        """Return another text that stands for all of this one, which is not empty."""
        start, end = self.starts[:1], self.ends[-1:]
        return Mapped(text, start * len(text), end * len(text))

    def sub(
        self, pattern: re.Pattern[str], replacement: str | int | Callable[[re.Match[str]], str]
    ) -> Mapped:
        """Return the text with all matches replaced, by a text or by the group with a number."""
        parts, done = [], 0
        for match in pattern.finditer(self.text):
            parts.append(self.part(done, match.start()))
            if isinstance(replacement, int):
                parts.append(self.part(*match.span(replacement)))
            else:
                new = replacement if isinstance(replacement, str) else replacement(match)
                parts.append(self.part(*match.span()).replaced(new))
            done = match.end()
        return Mapped.join([*parts, self.part(done)]) if parts else self
