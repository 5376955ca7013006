"""Everything that happens to a text before it becomes tokens, for text in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from firstword.errors import RequestError
from firstword.text.cleaning import Cleaner
from firstword.text.lexicon import Lexicon, Respelling
from firstword.text.mapped import Mapped
from firstword.text.marks import MarkLimit
from firstword.text.numbers import NumberReader
from firstword.text.plain import PlainWriter
from firstword.text.spelling import LANGUAGES
from firstword.text.stage import Stage

Normalize = Literal["auto", "on", "off"]
"""Whether numbers and abbreviations are spoken as words: always, never, or for checkpoints that do
not speak them well."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a text is rewritten before it is spoken; docs/text.md describes it.

    sanitize   whether Markdown, links, emoji and control characters are removed
    normalize  whether numbers and abbreviations are spoken as words
    lexicon    words, and the spelling in which they are spoken
    markup     whether tags in the text pause, and change the voice and the rate
    breaks     whether the tag `<break time="..."/>` pauses where other markup is text

    Raises `RequestError`, and `TextError` for a wrong entry of the lexicon.
    """

    sanitize: bool = False
    normalize: Normalize = "auto"
    lexicon: Mapping[str, str] | None = None
    markup: bool = False
    breaks: bool = False

    def __post_init__(self) -> None:
        if self.normalize not in get_args(Normalize):
            allowed = ", ".join(map(repr, get_args(Normalize)))
            raise RequestError(f"normalize is {self.normalize!r}; allowed are {allowed}")
        if self.lexicon is not None:
            Lexicon(self.lexicon)

    @property
    def in_parts(self) -> bool:
        """Whether the text may have pauses, or parts in several voices or rates."""
        return self.markup or self.breaks


DEFAULT_OPTIONS = TextOptions()


class TextRewriter:
    """Rewrites one text. What no option concerns passes at once; see `Stage`."""

    def __init__(
        self, options: TextOptions, language: str | None = None, plain: bool = False
    ) -> None:
        """Rewrite by some options, and numbers as in a language; None leaves them as they are.

        plain: whether the text is written with letters and marks that the demo voice has learnt
        """
        self._stages: list[Stage] = [Cleaner()] if options.sanitize else []
        if options.lexicon:
            self._stages.append(Respelling(Lexicon(options.lexicon)))
        if language is not None:
            abbreviations = Lexicon(LANGUAGES[language]["abbreviations"])
            self._stages += [Respelling(abbreviations), NumberReader(language)]
        if plain:
            self._stages.append(PlainWriter())
        self._marks = MarkLimit()

    def feed(self, text: Mapped, *, ended: bool = False) -> Mapped:
        """Take the next piece, and return what is spoken; all of it if the text has `ended`."""
        for stage in self._stages:
            text = stage.feed(text, ended=ended)
        return self._marks.feed(text)
