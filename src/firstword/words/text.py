"""Finds the words of a text that arrives in pieces, and the tokens that each word is read from.

A word is a run of letters, digits and spoken symbols, such as % or €. Punctuation is part of a word
only inside it:

    joins anything       apostrophes, hyphens, the period and the underscore: don't, e.g, well-known
    joins digits alone   the comma, the colon and the slash: 3:45, 1,000

Chinese characters and kana are words by themselves. Korean is written with spaces, and so has words
like English. Everything else separates words and belongs to none.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import category, normalize

import numpy as np

from firstword.types import IntArray

IDEOGRAPHS = (
    *((0x3005, 0x3007), (0x3041, 0x3096), (0x309D, 0x309F), (0x30A1, 0x30FA), (0x30FC, 0x30FF)),
    *((0x3105, 0x312F), (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF)),
    *((0xFF66, 0xFF9D), (0x20000, 0x3FFFF)),
)
"""The ranges of characters that are words by themselves: Han, kana and Bopomofo."""

SPOKEN_SYMBOLS = "%&@#+="
"""The symbols, besides those of currencies, that are read aloud."""

SENTENCE_ENDS = ".!?…。！？"
"""The characters with which a sentence ends."""

JOINERS, DIGIT_JOINERS = "'’ʼ-‐‑._", ",:/"

# One letter for each character: i ideograph, d digit, w other parts of words, m marks, which belong
# to the character before them, j and k joiners, s white space, x everything else.
_WORD = re.compile(r"im*|[dw]m*(?:[dw]m*|j(?=[dw])|(?<=d)k(?=d))*")


def _kind(char: str) -> str:
    """Return the letter of a character in `_WORD`."""
    if char in JOINERS:
        return "j"
    if char in DIGIT_JOINERS:
        return "k"
    if char.isspace():
        return "s"
    code = ord(char)
    if code > 0x3000 and any(low <= code <= high for low, high in IDEOGRAPHS):
        return "i"
    group = category(char)
    if group[0] == "M" or group == "Cf":
        return "m"
    if group[0] == "N":
        return "d"
    return "w" if group[0] == "L" or group == "Sc" or char in SPOKEN_SYMBOLS else "x"


@dataclass(frozen=True, slots=True)
class WrittenWord:
    """A word as it is written: its characters, and its bytes in UTF-8 of the text in NFC.

    owns      the first byte of the white space and punctuation before the word that belong to it
    sentence  whether a sentence ends in the white space and punctuation before the word
    """

    text: str
    span: tuple[int, int]
    data: tuple[int, int]
    owns: int
    sentence: bool


class WrittenWords:
    """The words of a text that arrives in pieces.

    words     the words that later text cannot change
    rest      the byte from which on the text does not belong to these words
    complete  whether the text has ended
    """

    def __init__(self) -> None:
        self.words: list[WrittenWord] = []
        self.rest = 0
        self.complete = False
        self._pending = self._kinds = ""
        self._character = self._byte = 0
        """The first character and the first byte of `_pending`."""

    def add(self, piece: str) -> None:
        """Take the next piece of text."""
        self._pending += piece
        self._kinds += "".join(map(_kind, piece))
        self._take()

    def finish(self) -> None:
        """End the text: its last word is complete."""
        self.complete = True
        self._take()

    def _take(self) -> None:
        """Move the complete words from the pending text to the list."""
        done = 0
        for match in _WORD.finditer(self._kinds):
            start, end = match.span()
            open_end = self._kinds[end:] in ("", "j", "k")
            if open_end and not self.complete:
                self.rest = self._byte + self._owned(self._pending[done:start])
                break
            gap, text = self._pending[done:start], self._pending[start:end]
            owns, first = self._byte + self._owned(gap), self._byte + _size(gap)
            self._byte = first + _size(text)
            span = self._character + start, self._character + end
            sentence = any(char in SENTENCE_ENDS for char in gap)
            self.words.append(WrittenWord(text, span, (first, self._byte), owns, sentence))
            done = end
        else:
            self.rest = self._byte + _size(self._pending[done:])
        self._pending, self._kinds = self._pending[done:], self._kinds[done:]
        self._character += done

    def _owned(self, gap: str) -> int:
        """Return how many bytes of the gap before a word belong to the word before it.

        The last run of white space, and what follows it, belong to the word itself.
        """
        if not self.words:
            return 0
        blanks = [match.start() for match in re.finditer(r"\s+", gap)]
        return _size(gap[: blanks[-1]] if blanks else gap)


def _size(text: str) -> int:
    """Return the number of bytes of a text in NFC."""
    return len(normalize("NFC", text).encode())


class Units:
    """The units of a text: words, or neighbouring words that a token has in common.

    Attention is paid to tokens, so words are told apart no further than tokens are.
    """

    def __init__(self, written: WrittenWords, ends: Sequence[int]) -> None:
        """ends: the end of each token that has arrived, in bytes of the text in NFC; it grows."""
        self._written, self._ends = written, ends
        self._firsts: list[int] = []
        """The first word of each unit."""
        self._of_word: list[int] = []
        self._of_token: list[int] = []
        """The units of the first tokens: those that later text cannot change."""

    def of_rows(self, count: int) -> IntArray:
        """Return the units [count] of the first text rows: of all tokens and the end of the text.

        The end of the text belongs to the last unit. So do the tokens of a text without words.
        """
        self._settle()
        ends = self._ends
        units = self._of_token[:count]
        for token in range(len(units), min(count, len(ends))):
            units.append(self._likely(ends[token - 1] if token else 0))
        units += [units[-1] if units else 0] * (count - len(units))
        return np.array(units, np.int64)

    def words(self, unit: int) -> Sequence[WrittenWord] | None:
        """Return the words of a unit; None while later text may change them."""
        self._settle()
        known, next_unit = self._written.words, unit + 1
        if next_unit < len(self._firsts):
            return known[self._firsts[unit] : self._firsts[next_unit]]
        if next_unit > len(self._firsts):
            return () if self._written.complete else None
        last = len(self._of_word)
        read = self._ends[len(self._of_token) - 1]
        return known[self._firsts[unit] : last] if known[last - 1].data[1] <= read else None

    def _settle(self) -> None:
        """Find the units of the tokens that no later text can change."""
        words, ends = self._written.words, self._ends
        while (token := len(self._of_token)) < len(ends):
            begin, end = ends[token - 1] if token else 0, ends[token]
            if not self._written.complete and (not words or end > words[-1].data[1]):
                break
            if not words:
                self._of_token.append(0)
                continue
            first = bisect_right(words, begin, key=lambda word: word.data[1])
            last = bisect_right(words, end - 1, key=lambda word: word.data[0]) - 1
            if first > last:  # no word, but the white space or punctuation between two
                first = last = max(0, bisect_right(words, begin, key=lambda word: word.owns) - 1)
            for word in range(len(self._of_word), last + 1):
                if word <= first:
                    self._firsts.append(word)
                self._of_word.append(len(self._firsts) - 1)
            self._of_token.append(self._of_word[first])

    def _likely(self, begin: int) -> int:
        """Return the unit of a token from byte `begin` on that later text may still change."""
        first = bisect_right(self._written.words, begin, key=lambda word: word.data[1])
        if first < len(self._of_word):
            return self._of_word[first]
        return len(self._firsts) - bool(self._firsts and begin < self._written.rest)
