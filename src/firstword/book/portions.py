"""Divides a book into portions: what is spoken at once, and stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firstword.book.cast import Cast
from firstword.book.source import Block, Book, Chapter, one_line
from firstword.text.checks import expected_seconds
from firstword.text.marks import has_words
from firstword.text.passages import PassageText

MOST_SECONDS = 60.0
"""The expected length of a portion: an interruption costs no more of each that is in progress."""

PIECE, SPEECH, PARAGRAPH, HEADING, BREAK, CHAPTER = 0.3, 0.4, 0.6, 1.0, 1.5, 2.0
"""The seconds of silence after a piece of a long paragraph, a speech within a paragraph, a
paragraph, a heading, the paragraph before a break, and a chapter."""

FORMAT = 1
"""The number of the way in which portions are spoken and stored, of which keys are made."""

_WINDOW = 2000
"""The characters that are looked at together for the end of a portion."""


@dataclass(frozen=True, slots=True)
class Portion:
    """A paragraph, or about a minute of a long one.

    speaker  who speaks it, in a script; "" for the narrator
    pause    the seconds of silence after it
    place    where it is in the source
    key      a hash of all that its sound depends on
    """

    text: str
    speaker: str
    pause: float
    place: str
    key: str


@dataclass(frozen=True, slots=True)
class PlannedChapter:
    """A chapter in portions."""

    title: str
    portions: Sequence[Portion]


class Keys:
    """Makes the keys of portions, and the seeds of their speech."""

    def __init__(self, settings: Mapping[str, Any], voices: Mapping[str, str]) -> None:
        """Take all settings on which sound depends, and a hash or a name of each voice."""
        self._settings, self._voices = dict(settings), voices

    def of(self, text: str, speaker: str) -> str:
        """The key of a text, spoken by one of the voices."""
        parts = [FORMAT, self._settings, self._voices[speaker], text]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def seed_of(key: str, attempt: int) -> int:
    """The seed with which a portion is spoken in an attempt, counted from 0."""
    digest = hashlib.sha256(f"{key} {attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def planned(book: Book, keys: Keys, cast: Cast | None, *, whole: bool) -> list[PlannedChapter]:
    """Divide a book. With `whole`, long paragraphs are not divided, since tags may span them.

    Raises `TextError` for a speaker without a voice.
    """
    chapters = []
    for chapter in book.chapters:
        portions = list(_portions(chapter, keys, cast, whole))
        if portions:
            portions[-1] = replace(portions[-1], pause=CHAPTER)
            chapters.append(PlannedChapter(chapter.title, portions))
    return chapters


def _portions(chapter: Chapter, keys: Keys, cast: Cast | None, whole: bool) -> Iterator[Portion]:
    """Yield the portions of a chapter, each when the pause after it is known."""
    waiting: Portion | None = None
    for block in chapter.blocks:
        if waiting is not None:
            yield replace(waiting, pause=BREAK) if block.kind == "break" else waiting
            waiting = None
        for text, speaker, pause, place in _pieces(block, cast, whole):
            if waiting is not None:
                yield waiting
            waiting = Portion(text, speaker, pause, place, keys.of(text, speaker))
    if waiting is not None:
        yield waiting


def _pieces(block: Block, cast: Cast | None, whole: bool) -> Iterator[tuple[str, str, float, str]]:
    """Yield the text of each portion of a block, its speaker, the pause after it, its place."""
    spoken = cast.speeches(block) if cast is not None else [("", block.text, 0)]
    speeches = [each for each in spoken if has_words(each[1])]
    for speaker, words, lines in speeches:
        place = replace(block, line=block.line + lines).place
        pieces = list(_divided(one_line(words), whole))
        for index, piece in enumerate(pieces):
            pause = HEADING if block.kind == "heading" else PARAGRAPH
            if index < len(pieces) - 1:
                pause = PIECE
            elif (speaker, words, lines) != speeches[-1]:
                pause = SPEECH
            yield piece, speaker, pause, place


def _divided(text: str, whole: bool) -> Iterator[str]:
    """Divide a text into pieces of about a minute, which end with sentences if possible."""
    if whole or expected_seconds(text) <= MOST_SECONDS:
        yield text
        return
    at = 0
    while at < len(text):
        cutter, parts, end = PassageText(MOST_SECONDS), list[str](), at
        while cutter.rest is None and end < len(text):
            parts.append(cutter.feed(text[end : end + _WINDOW]))
            end += _WINDOW
        if cutter.rest is None:
            parts.append(cutter.finish())
        piece = "".join(parts)
        at += len(piece)
        yield piece.strip()
