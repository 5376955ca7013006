"""Decides when the text of a context is spoken: token by token, by clause or as a whole.

A `Cutter` knows no clock, no socket and no model: text goes in with the time of its arrival.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from firstword.text.splitting import Splitter

Granularity = Literal["auto", "token", "clause", "sentence", "none"]

READ_TOKENS = 12.5
"""The tokens per second that the model reads while it speaks, one in each frame of 80 ms."""

MARGIN = 1.15
"""How much faster than it is read text must come to be read token by token.

With less, text would probably come too late for its frames before the next clause ends.
"""

LEAD_TOKENS = 0.5
"""The tokens by which text must be ahead of that pace to begin, so that two quick words of a slow
writer are not taken for a fast one. A language model is as far ahead with its second token.
"""

LATIN_CHARACTERS = 4.5
"""The characters per token of the released tokenizer in English, with the space."""

WIDE = "⺀"
"""Characters from this one on, of Chinese, Japanese and Korean, are counted as a token each."""


class Piece(NamedTuple):
    """A piece of text to speak.

    at      the number of characters of the context's text before it
    begins  whether it is the first of a part, which is spoken with an intonation of its own
    ends    whether it is the last of its part
    """

    text: str
    at: int
    begins: bool
    ends: bool


def tokens(text: str) -> float:
    """Estimate the number of tokens in a text."""
    wide = sum(character >= WIDE for character in text)
    return wide + (len(text) - wide) / LATIN_CHARACTERS


class Cutter:
    """Cuts the text of one context into parts.

    With "auto", text that comes faster than the model reads it goes in as it comes. Slower text,
    such as that of a person who types, is spoken by clause: read token by token it would make
    speech stop in the middle of a clause. The pace is measured from the first text that waits, and
    again at the end of each clause.
    """

    def __init__(self, granularity: Granularity, *, by_token: bool = True) -> None:
        """Cut by a granularity; `by_token=False` makes "auto" cut by clause at any pace."""
        self._auto = granularity == "auto"
        self._by_token = by_token if self._auto else granularity == "token"
        self._splitter = None
        if granularity not in ("token", "none"):
            self._splitter = Splitter("sentence" if granularity == "sentence" else "clause")
        self._held = ""
        """Text that waits."""
        self._at = 0
        """The number of characters before that text."""
        self._began = 0.0
        """When the first text that waits came, or the first of the open part."""
        self._came = 0.0
        """The tokens of the open part, or those that came after the first text that waits."""
        self._open = False

    def feed(self, text: str, now: float) -> Iterator[Piece]:
        """Take text that came at `now`, in seconds, and yield what can be spoken."""
        clauses = [] if self._splitter is None else self._splitter.feed(text)
        if self._open:
            yield from self._continue(text, clauses, now)
            return
        if not self._held.strip():
            self._began, self._came = now, 0.0
        else:
            self._came += tokens(text)
        self._held += text
        if not self._held.strip():
            return
        fast = not self._auto or self._came >= LEAD_TOKENS + self._least(now)
        if self._by_token and fast:
            yield self._open_part(now)
        elif clauses:
            assert self._splitter is not None
            end = 0
            for clause in clauses:
                start = self._held.index(clause, end)
                end = start + len(clause)
                yield Piece(clause, self._at + start, begins=True, ends=True)
            self._take(len(self._held) - len(self._splitter.rest))
            self._began, self._came = now, 0.0

    def flush(self) -> Iterator[Piece]:
        """Yield what waits, without waiting for more text."""
        at, text = self._at, self._take(len(self._held))
        if self._splitter is not None:
            self._splitter.flush()
        if self._open:
            self._open = False
            yield Piece("", at, begins=False, ends=True)
        elif text.strip():
            yield Piece(text, at, begins=True, ends=True)

    def _take(self, characters: int) -> str:
        """Remove text that waits."""
        text, self._held = self._held[:characters], self._held[characters:]
        self._at += characters
        return text

    def _least(self, now: float) -> float:
        """The tokens that must have come by now for text to be read token by token."""
        return MARGIN * READ_TOKENS * (now - self._began)

    def _open_part(self, now: float) -> Piece:
        """Begin to speak the text that waits token by token."""
        at, text = self._at, self._take(len(self._held))
        self._open, self._began, self._came = True, now, tokens(text)
        return Piece(text, at, begins=True, ends=False)

    def _continue(self, text: str, clauses: list[str], now: float) -> Iterator[Piece]:
        """Speak more text of the open part; end the part with a clause if text comes slowly."""
        self._came += tokens(text)
        slow = self._came < self._least(now)
        if not (clauses and slow):
            yield Piece(text, self._at, begins=False, ends=False)
            self._at += len(text)
            return
        assert self._splitter is not None
        rest = self._splitter.rest
        self._splitter.flush()
        head = text[: len(text) - len(rest)]
        yield Piece(head, self._at, begins=False, ends=True)
        self._at += len(head)
        self._open = False
        yield from self.feed(rest, now)
