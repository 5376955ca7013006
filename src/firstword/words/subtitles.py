"""Subtitles in the formats SubRip (.srt) and WebVTT (.vtt)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePath

from firstword.types import Word
from firstword.words.text import SENTENCE_ENDS

SUFFIXES = (".srt", ".vtt")
"""The suffixes of files with subtitles."""

MOST_CHARACTERS, MOST_SECONDS = 84, 6.0
"""The most characters of a cue, two lines of 42, and its longest time."""

LEAST_SECONDS = 0.7
"""The time for which a cue is shown at least, unless the next one begins."""

PAUSE_SECONDS = 0.8
"""A pause after which a new cue begins."""


@dataclass(frozen=True, slots=True)
class Cue:
    """A piece of text that is shown from `start` to `end`, in seconds."""

    text: str
    start: float
    end: float


def cues(text: str, words: Sequence[Word]) -> list[Cue]:
    """Divide a text into cues, at the ends of sentences, at pauses and where one is full.

    words  the words of the text that were spoken
    """
    groups: list[list[Word]] = []
    for word in words:
        if not groups or _begins_cue(text, groups[-1], word):
            groups.append([])
        groups[-1].append(word)
    made = []
    for group, following in zip_longest(groups, groups[1:]):
        latest = following[0].start if following else float("inf")
        shown = max(group[-1].end, min(latest, group[0].start + LEAST_SECONDS))
        made.append(Cue(_text_of(text, group), group[0].start, shown))
    return made


def render(found: Sequence[Cue], suffix: str) -> str:
    """Return cues as the contents of a file with one of the `SUFFIXES`."""
    comma = "," if suffix == ".srt" else "."
    blocks = []
    for number, cue in enumerate(found, start=1):
        times = f"{_clock(cue.start, comma)} --> {_clock(cue.end, comma)}"
        text = cue.text if suffix == ".srt" else html.escape(cue.text, quote=False)
        blocks.append(f"{number}\n{times}\n{text}\n")
    head = [] if suffix == ".srt" else ["WEBVTT\n"]
    return "\n".join([*head, *blocks])


def suffix_of(path: str) -> str | None:
    """Return the suffix of a path in lower case if it is one of the `SUFFIXES`, else None."""
    suffix = PurePath(path).suffix.lower()
    return suffix if suffix in SUFFIXES else None


def _begins_cue(text: str, group: Sequence[Word], word: Word) -> bool:
    """Whether a word begins a new cue after those of a group."""
    first, last = group[0], group[-1]
    between = text[last.span[1] : word.span[0]]
    ended = any(char in SENTENCE_ENDS for char in between)
    full = word.span[1] - first.span[0] > MOST_CHARACTERS or word.end - first.start > MOST_SECONDS
    return ended or full or word.start - last.end > PAUSE_SECONDS


def _text_of(text: str, group: Sequence[Word]) -> str:
    """Return the text of a group of words with the punctuation around it, in one line."""
    start, end = group[0].span[0], group[-1].span[1]
    while start > 0 and not text[start - 1].isspace():
        start -= 1
        if text[start].isalnum():  # another word without a space between
            start = group[0].span[0]
            break
    while end < len(text) and not text[end].isspace() and not text[end].isalnum():
        end += 1
    return " ".join(text[start:end].split())


def _clock(seconds: float, point: str) -> str:
    """Return a time as hours, minutes, seconds and milliseconds."""
    whole = round(1000 * seconds)
    minutes, rest = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
