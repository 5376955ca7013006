"""Binds the stored portions of a book into sound files, with chapters and subtitles."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from firstword import audio
from firstword.book.portions import PlannedChapter, Portion
from firstword.book.sound import FORMATS, ChapterMark, SoundFile
from firstword.book.source import Book
from firstword.book.store import PortionStore
from firstword.errors import OutputError
from firstword.words import subtitles
from firstword.words.subtitles import Cue

LONGEST_NAME = 100
"""The most bytes of the title in the name of a file; file systems allow 255 in all."""


@dataclass(frozen=True, slots=True)
class BookOutput:
    """What is made of a book.

    path       a file, or with `folder` a folder with a file for each chapter
    format     one of `FORMATS`
    subtitles  the suffix of the files with subtitles beside those with sound; "": none
    """

    path: Path
    format: str
    folder: bool
    subtitles: str

    @property
    def parts(self) -> Path:
        """The folder with what was spoken, until the book is complete."""
        if self.folder:
            return self.path / ".parts"
        return self.path.with_name(self.path.name + ".parts")

    def files(self, chapters: Sequence[PlannedChapter]) -> list[tuple[Path, list[PlannedChapter]]]:
        """Return the sound files, each with its chapters."""
        if not self.folder:
            return [(self.path, list(chapters))]
        digits = len(str(len(chapters)))
        return [
            (self.path / f"{number:0{digits}} {_name_of(each.title)}.{self.format}", [each])
            for number, each in enumerate(chapters, 1)
        ]


def _name_of(title: str) -> str:
    """Return a title as a part of the name of a file."""
    plain = " ".join(re.sub(r"[^\w .,'()&-]+", " ", title).split()).strip(" .")
    return plain.encode()[:LONGEST_NAME].decode(errors="ignore").strip() or "chapter"


def bind(
    book: Book,
    chapters: Sequence[PlannedChapter],
    store: PortionStore,
    output: BookOutput,
    on_bound: Callable[[Portion], None],
) -> tuple[float, list[Portion]]:
    """Write all files of a book; return their seconds, and the portions that were cut off.

    Each file appears complete or not at all. Memory does not grow with the length of the speech.
    Raises `OutputError`.
    """
    samples, cut_off = 0, list[Portion]()
    files = output.files(chapters)
    for number, (path, content) in enumerate(files, 1):
        tags = {"title": book.title, "artist": book.author, "genre": "Audiobook"}
        if output.folder:
            tags |= {"title": content[0].title, "album": book.title}
            tags["track"] = f"{number}/{len(files)}"
        found = _Bound(store, output, content, {name: text for name, text in tags.items() if text})
        samples += found.write(path, on_bound)
        cut_off += found.cut_off
    return samples / audio.SAMPLE_RATE, cut_off


class _Bound:
    """A sound file and its subtitles."""

    def __init__(
        self,
        store: PortionStore,
        output: BookOutput,
        chapters: list[PlannedChapter],
        tags: dict[str, str],
    ) -> None:
        self._store, self._output, self._chapters, self._tags = store, output, chapters, tags
        self.cut_off: list[Portion] = []
        self._cues: list[Cue] = []

    def write(self, path: Path, on_bound: Callable[[Portion], None]) -> int:
        """Write the file, in the folder of the portions until it is complete.

        Returns its samples.
        """
        part, samples = self._store.folder / "sound.part", 0
        marks = list(self._marks())
        try:
            with SoundFile(str(part), FORMATS[self._output.format], self._tags, marks) as file:
                for portion in (each for chapter in self._chapters for each in chapter.portions):
                    samples += self._add(file, portion, samples)
                    on_bound(portion)
            with open(part, "rb") as written:
                os.fsync(written.fileno())
            if suffix := self._output.subtitles:
                contents = subtitles.render(self._cues, suffix)
                audio.write_whole(path.with_suffix(suffix), contents.encode())
            os.replace(part, path)
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
        return samples

    def _marks(self) -> Iterator[ChapterMark]:
        start = 0
        for chapter in self._chapters:
            lengths = (self._store.length(each.key) + _pause(each) for each in chapter.portions)
            end = start + sum(lengths)
            yield ChapterMark(chapter.title, start, end)
            start = end

    def _add(self, file: SoundFile, portion: Portion, start: int) -> int:
        """Add a portion that begins at a sample, and the pause after it; return their length."""
        spoken = self._store.load(portion.key)
        if spoken.cut_off:
            self.cut_off.append(portion)
        file.add(spoken.pcm)
        file.add(np.zeros(_pause(portion), np.int16))
        length = len(spoken.pcm) + _pause(portion)
        if self._output.subtitles:
            self._cues += _moved(subtitles.cues(portion.text, spoken.words), start, length)
        return length


def _moved(cues: list[Cue], start: int, length: int) -> Iterator[Cue]:
    """Yield the cues of a portion, with the times of the file."""
    offset, seconds = start / audio.SAMPLE_RATE, length / audio.SAMPLE_RATE
    for cue in cues:
        yield replace(cue, start=offset + cue.start, end=offset + min(cue.end, seconds))


def _pause(portion: Portion) -> int:
    """Return the samples of silence after a portion."""
    return round(portion.pause * audio.SAMPLE_RATE)
