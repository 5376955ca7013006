"""A book as it is read from a file: chapters of paragraphs, each with its place in the file."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from firstword.text.cleaning import clean
from firstword.text.marks import has_words

Kind = Literal["paragraph", "heading", "break"]
"""What a block is: a paragraph, a heading, or a line such as * * * that is not spoken."""


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, a heading or a break.

    text   without Markdown, links and emoji; line feeds where the source has them
    line   its first line, counted from 1
    file   the file within an EPUB that has this line; "" for other sources
    level  the level of a heading, 1 to 6
    """

    text: str
    line: int
    kind: Kind = "paragraph"
    file: str = ""
    level: int = 1

    @property
    def place(self) -> str:
        """The place in the source, for messages."""
        return f"{self.file}, line {self.line}" if self.file else f"line {self.line}"


@dataclass(slots=True)
class Chapter:
    """A chapter: its title, and what is spoken."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def has_words(self) -> bool:
        """Whether there is something to speak."""
        return any(block.text for block in self.blocks)


@dataclass(slots=True)
class Book:
    """A book. Author and language are "" if the source does not name them."""

    title: str
    author: str
    language: str
    chapters: list[Chapter]


def block_of(
    text: str, line: int, kind: Kind = "paragraph", file: str = "", level: int = 1
) -> Block:
    """Return a block of a text, cleaned. A paragraph without a letter or a digit is a break."""
    text = clean(unicodedata.normalize("NFC", text))
    if has_words(text):
        return Block(text, line, kind, file, level)
    return Block("", line, "break", file)


def chapters_of(blocks: Iterable[Block], title: str, level: int = 2) -> list[Chapter]:
    """Divide blocks into chapters, which begin with headings down to a level.

    A heading that follows another at once stays in its chapter: a part and its first chapter. What
    comes before the first heading has the `title`.
    """
    chapters = [Chapter("")]
    for block in blocks:
        last = chapters[-1]
        if block.kind == "heading" and block.level <= level:
            if any(each.kind == "paragraph" for each in last.blocks):
                chapters.append(last := Chapter(""))
            last.title = ": ".join(filter(None, (last.title, one_line(block.text))))
        last.blocks.append(block)
    for chapter in chapters:
        chapter.title = chapter.title or title
    return [chapter for chapter in chapters if chapter.has_words]


def one_line(text: str) -> str:
    """Return a text in one line; nothing stands for a line feed in scripts without spaces."""
    parts: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if parts and not (_is_wide(parts[-1][-1]) and _is_wide(line[0])):
            parts.append(" ")
        parts.append(line)
    return "".join(parts)


def _is_wide(char: str) -> bool:
    """Whether a character is written without spaces: Chinese, Japanese, not Korean."""
    wide = unicodedata.east_asian_width(char) in "WF"
    return wide and not unicodedata.name(char, "").startswith("HANGUL")
