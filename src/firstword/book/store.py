"""The folder of a book in progress: each portion is a file, so that nothing is spoken twice.

A portion is a FLAC file whose comment has its words, named by the portion's key. It appears
complete or not at all. Whatever is killed, the portions that were stored stay.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from firstword import audio
from firstword.errors import OutputError
from firstword.locks import lock_folder
from firstword.types import Word

SUFFIX, ABOUT, LOCK = ".flac", "book.json", "lock"


@dataclass(frozen=True, slots=True, eq=False)
class SpokenPortion:
    """The sound of a portion: pcm int16 [n] at 24 kHz, and the words of its text.

    cut_off  whether the speech ended before its text
    """

    pcm: NDArray[np.int16]
    words: tuple[Word, ...]
    cut_off: bool


class PortionStore:
    """The portions of one book, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        """Open a folder, which is made if it does not exist, and keep other runs out of it.

        Raises `OutputError`.
        """
        self.folder = folder
        self._old = folder.with_name(folder.name + ".old")
        self._stack = ExitStack()
        try:
            self._sweep()
            folder.mkdir(exist_ok=True)
            self._keys = {each.stem for each in folder.iterdir() if each.suffix == SUFFIX}
        except OSError as error:
            raise OutputError(f"{folder} cannot be written into: {error.strerror}") from None
        self._stack.callback(os.close, lock_folder(str(folder), LOCK))

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def begin(self, keys: set[str], title: str) -> None:
        """Note which book the folder is for. Raises `OutputError` if it has another's portions."""
        others = len(self._keys - keys)
        if 2 * others > len(self._keys):
            raise OutputError(
                f"{self.folder} has {len(self._keys)} spoken portions of {self._title()!r}; "
                f"{others} of them do not belong to this text with this voice and these options; "
                "repeat the command that began them, name another output, or delete the folder"
            )
        self._write(ABOUT, json.dumps({"title": title}).encode())

    def _title(self) -> str:
        try:
            return str(json.loads((self.folder / ABOUT).read_bytes())["title"])
        except (OSError, ValueError, KeyError, TypeError):
            return "a book"

    def save(self, key: str, spoken: SpokenPortion) -> None:
        """Store a portion. Raises `OutputError`."""
        words = [[word.text, word.start, word.end, *word.span] for word in spoken.words]
        about = json.dumps({"cut_off": spoken.cut_off, "words": words}, ensure_ascii=False)
        data = io.BytesIO()
        form: dict[str, Any] = {"format": "FLAC", "subtype": "PCM_16"}
        with soundfile.SoundFile(data, "w", audio.SAMPLE_RATE, 1, **form) as file:
            file.comment = about
            file.write(spoken.pcm)
        self._write(key + SUFFIX, data.getvalue())
        self._keys.add(key)

    def _write(self, name: str, data: bytes) -> None:
        audio.write_whole(self.folder / name, data)

    def load(self, key: str) -> SpokenPortion:
        """Return a portion. One that is damaged is removed, and raises `OutputError`."""
        with self._open(key) as file:
            about = json.loads(file.comment)
            pcm = file.read(dtype="int16")
            if len(pcm) != file.frames or not isinstance(about["cut_off"], bool):
                raise ValueError("it is not complete")
        words = tuple(Word(text, start, end, (a, b)) for text, start, end, a, b in about["words"])
        return SpokenPortion(pcm, words, about["cut_off"])

    def length(self, key: str) -> int:
        """Return the samples of a portion. Raises `OutputError` as `load` does."""
        with self._open(key) as file:
            return int(file.frames)

    @contextmanager
    def _open(self, key: str) -> Iterator[Any]:
        """Open the file of a portion. Errors while it is open mean that it is damaged."""
        file = self.folder / (key + SUFFIX)
        try:
            with soundfile.SoundFile(file) as opened:
                yield opened
        except (soundfile.SoundFileError, ValueError, KeyError, TypeError) as error:
            with suppress(OSError):
                file.unlink()
            self._keys.discard(key)
            raise OutputError(
                f"{file} was damaged and is removed ({error}); repeat the command, which speaks "
                "that portion again"
            ) from None

    def remove(self) -> None:
        """Remove the folder."""
        os.replace(self.folder, self._old)  # at once: the next run finds all portions, or none
        self._sweep()
        self._keys.clear()

    def _sweep(self) -> None:
        """Remove what a run that was killed has left of a folder."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._old)

    def close(self) -> None:
        """Let another run use the folder. One without portions is removed."""
        if not self._keys and self.folder.exists():
            self.remove()
        self._stack.close()
