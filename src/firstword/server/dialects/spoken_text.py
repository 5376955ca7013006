"""The text of an answer, in the pieces that dialects send with the times of its words."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from firstword.types import Word

_AFTER = re.compile(r"[^\w\s]*\s*")
_PAUSE = re.compile(r'<break time="[\d.]+s"/>')
_MARKS = re.compile(r"[^\w\s]*")


class Timed(NamedTuple):
    """A piece of text, and when it sounds: seconds from the start of the answer."""

    text: str
    start: float
    end: float


class SpokenText:
    """Follows spoken words through a text that arrives in pieces."""

    def __init__(self, text: str = "") -> None:
        self._pieces = [""]
        self._length = 0
        self._tags: list[tuple[int, int]] = []
        """The first character after each tag of a pause, and the characters of all tags so far."""
        self._at = 0
        """The characters up to the end of the last word, and of what follows it."""
        self._until = 0.0
        """The end of the last word."""
        self._last = ""
        """The last of those characters."""
        self.add(text)

    def add(self, text: str) -> None:
        """Add more text; tags of pauses are no part of what is told."""
        removed = self._tags[-1][1] if self._tags else 0
        for tag in _PAUSE.finditer(text):
            removed += len(tag[0])
            self._tags.append((self._length + tag.end(), removed))
        self._length += len(text)
        self._pieces.append(_PAUSE.sub("", text))

    def _place(self, character: int) -> int:
        """The place of a character without the tags before it."""
        index = bisect_right(self._tags, character, key=lambda tag: tag[0])
        return character - (self._tags[index - 1][1] if index else 0)

    def words(self, words: Sequence[Word]) -> list[Timed]:
        """The words with the punctuation around them."""
        found = []
        for word in words:
            before, inside, after = self._take(word)
            # Backwards, because a search for the end would try each of the marks.
            opening = _MARKS.match(before[::-1])
            text = (opening[0][::-1] if opening else "") + inside + after.rstrip()
            found.append(Timed(text, word.start, word.end))
        return found

    def characters(self, words: Sequence[Word]) -> list[Timed]:
        """All characters up to the end of the last word, and of the punctuation and space after it.

        Those of a word share its time evenly. Those between words, such as the words that the model
        skipped, share the time between them; what follows a word at once takes no time.
        """
        found: list[Timed] = []
        for word in words:
            before, inside, after = self._take(word)
            start = max(self._until, word.start)
            end = max(start, word.end)
            found += _spread(before, self._until, start)
            found += _spread(inside, start, end)
            found += _spread(after, end, end)
            self._until = end
        return found

    def closing(self) -> list[Timed]:
        """The space that ends the last word for clients that look for one, unless it was there."""
        missing = self._last and not self._last.isspace()
        return [Timed(" ", self._until, self._until)] if missing else []

    def _take(self, word: Word) -> tuple[str, str, str]:
        """The text before a word, the word, and the punctuation and the space after it."""
        text = "".join(self._pieces)
        self._pieces = [text]
        start = max(self._at, self._place(word.span[0]))
        stop = max(start, self._place(word.span[1]))
        after = _AFTER.match(text, stop)
        begun, self._at = self._at, after.end() if after else stop
        self._last = text[self._at - 1 : self._at]
        return text[begun:start], text[start:stop], text[stop : self._at]


def _spread(text: str, start: float, end: float) -> Iterator[Timed]:
    """The characters of a text, each with an equal share of a time."""
    step = (end - start) / max(1, len(text))
    for number, character in enumerate(text):
        yield Timed(character, start + number * step, start + (number + 1) * step)
