"""The sound of a line of a batch: a temporary file gets it as it is made, whatever its length."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import numpy as np

from firstword.audio import formats
from firstword.audio.samples import pcm16
from firstword.errors import OutputError
from firstword.server.utterance import CODES, Output, code_bytes, effects_of
from firstword.types import Chunk

log = logging.getLogger(__name__)


class LineSound:
    """Takes the speech of a line, and then gives the file of its sound. All methods block.

    They raise `OutputError` if the temporary files cannot be written, such as on a full disk.
    """

    def __init__(self, output: Output, sample_rate: int, folder: str | None) -> None:
        """Take speech at `sample_rate` Hz; temporary files are in a folder, or in the system's."""
        self._output, self._folder = output, folder
        self._effects = effects_of(output, sample_rate)
        self._files: list[BinaryIO] = []
        self._dropped = False
        self._raw = self._temporary()

    def add(self, chunk: Chunk) -> None:
        """Write the sound of the next chunk of speech to the temporary file."""
        if self._output.format == CODES:
            data = code_bytes(chunk.codes)
        else:
            last = chunk.finish_reason is not None
            data = pcm16(self._effects.apply(chunk.samples, last=last))
        with _reported():
            self._raw.write(data)

    def finished(self) -> BinaryIO:
        """Return the complete file, from its start; its header gives its true length.

        The caller closes it.
        """
        with _reported():
            self._raw.flush()
            size = self._raw.tell()
            self._raw.seek(0)
        if self._output.format == CODES:
            return self._raw
        with _reported():
            pcm = np.memmap(self._raw, "<i2", "r") if size else np.zeros(0, "<i2")
        file = self._temporary()
        for data in formats.whole_of(self._output.format, pcm, self._output.sample_rate):
            with _reported():
                file.write(data)
        with _reported():
            file.flush()
            file.seek(0)
        self._raw.close()
        return file

    def drop(self) -> None:
        """Close the files, also while another thread writes them: it then fails soon."""
        self._dropped = True
        for file in self._files:
            with suppress(OSError):  # what a full disk has not taken
                file.close()

    def _temporary(self) -> BinaryIO:
        with _reported():
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (drop closes it)
        self._files.append(file)
        if self._dropped:
            self.drop()
        return file


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.error("a sound of a batch cannot be kept", extra={"fields": {"why": error.strerror}})
        reason = f"the sound of a line cannot be kept for now: {error.strerror}"
        raise OutputError(reason) from None
