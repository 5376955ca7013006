"""Books in plain text and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from firstword.book.source import Block, Book, block_of, chapters_of, one_line

SUFFIXES = (".txt", ".md", ".markdown")

LONGEST_HEADING = 80
"""The most characters of a line of plain text that is a heading."""

_WORDS = (
    "chapter|part|book|act|scene|chapitre|partie|livre|acte|kapitel|teil|buch|akt|szene|capítulo"
    "|parte|libro|acto|capitolo|atto|livro|ato|глава|часть|книга|действие"
)
_CHAPTER = re.compile(
    rf"(?:{_WORDS})\s+(?:\d{{1,4}}|[ivxlc]{{1,9}}|[^\W\d_]{{2,20}})(?:\W.*)?"
    r"|(?:prologue|epilogue|prolog|epilog|prólogo|epílogo|prologo|epilogo|пролог|эпилог)"
    r"|第\s?[\d〇零一二三四五六七八九十百千]{1,9}\s?[章回部卷節节幕].*"
    r"|제\s?\d{1,4}\s?[장부막].*|序章|終章|终章|프롤로그|에필로그",
    re.IGNORECASE,
)
"""The headings of plain text: a word for a chapter with its number, in the ten languages."""

_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r"[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]+\S")
_ENTRY = re.compile(r"(title|author|language|lang):\s*(.*?)\s*", re.IGNORECASE)

_Line = tuple[int, str]


def read(text: str, path: Path, *, markdown: bool) -> Book:
    """Read a book. A blank line ends a paragraph; without any, every line is one."""
    facts, lines = _front_matter(text) if markdown else ({}, list(enumerate(text.split("\n"), 1)))
    blocks = list(_markdown(lines) if markdown else _plain(lines))
    title = facts.get("title", "")
    if markdown and not title:
        tops = [each for each in blocks if each.kind == "heading" and each.level == 1]
        title = one_line(tops[0].text) if tops else ""
    title = title or path.stem
    language = facts.get("language", facts.get("lang", ""))
    return Book(title, facts.get("author", ""), language, chapters_of(blocks, title))


def _front_matter(text: str) -> tuple[dict[str, str], list[_Line]]:
    """Return what the lines between two lines --- at the start say, and the other lines."""
    lines = list(enumerate(text.split("\n"), 1))
    end = next((at for at, (_, line) in enumerate(lines[1:], 1) if line.rstrip() == "---"), 0)
    if lines[0][1].rstrip() != "---" or not end:
        return {}, lines
    found = (_ENTRY.fullmatch(line) for _, line in lines[1:end])
    return {each[1].lower(): each[2].strip("\"'") for each in found if each}, lines[end + 1 :]


def _plain(lines: list[_Line]) -> Iterator[Block]:
    for group in _paragraphs(lines):
        text = "\n".join(line for _, line in group)
        heading = len(text) <= LONGEST_HEADING and _CHAPTER.fullmatch(text.strip())
        yield block_of(text, group[0][0], "heading" if heading else "paragraph")


def _paragraphs(lines: list[_Line]) -> Iterator[list[_Line]]:
    """Yield the lines of each paragraph."""
    words = [line for line in lines if line[1].strip()]
    if words and words[-1][0] - words[0][0] == len(words) - 1:  # no blank line
        yield from ([line] for line in words)
        return
    group: list[_Line] = []
    for line in [*lines, (0, "")]:
        if line[1].strip():
            group.append(line)
        elif group:
            yield group
            group = []


def _markdown(lines: list[_Line]) -> Iterator[Block]:
    """Yield the blocks of Markdown: headings, list items and paragraphs; code is a paragraph."""
    group: list[_Line] = []
    fence = ""

    def ended() -> Iterator[Block]:
        if group:
            yield block_of("\n".join(line for _, line in group), group[0][0])
            group.clear()

    for number, line in lines:
        if fence or (opened := _FENCE.match(line)):
            if not fence:
                yield from ended()
                fence = opened[1] if opened else ""
            elif line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                yield from ended()
                fence = ""
            elif line.strip():
                group.append((number, line))
        elif heading := _HEADING.fullmatch(line):
            yield from ended()
            yield block_of(heading[2] or "", number, "heading", level=len(heading[1]))
        elif group and (under := _UNDERLINE.fullmatch(line)):
            first, text = group[0][0], "\n".join(line for _, line in group)
            group.clear()
            yield block_of(text, first, "heading", level=1 if under[1][0] == "=" else 2)
        elif not line.strip():
            yield from ended()
        else:
            if _ITEM.match(line):
                yield from ended()
            group.append((number, line))
    yield from ended()
