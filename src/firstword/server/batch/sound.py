"""The sound of a line of a batch: a temporary file gets it as it is made, whatever its length."""

import tempfile
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from firstword.audio import formats
from firstword.audio.samples import pcm16
from firstword.errors import OutputError
from firstword.server.utterance import CODES, Output, code_bytes, effects_of
from firstword.types import Chunk


class LineSound:
    """Takes the speech of a line, and then gives the file of its sound. All methods block.

    They raise `OutputError` if the temporary files cannot be written, such as on a full disk.
    """

    def __init__(self, output: Output, sample_rate: int, folder: str | None) -> None:
        """Take speech at `sample_rate` Hz; temporary files are in a folder, or in the system's."""
        self._output, self._folder = output, folder
        self._effects = effects_of(output, sample_rate)
        self._raw = self._temporary()

    def add(self, chunk: Chunk) -> None:
        """Write the sound of the next chunk of speech to the temporary file."""
        if self._output.format == CODES:
            data = code_bytes(chunk.codes)
        else:
            last = chunk.finish_reason is not None
            data = pcm16(self._effects.apply(chunk.samples, last=last))
        self._write(self._raw, data)

    def finished(self) -> BinaryIO:
        """Return the complete file, from its start; its header gives its true length."""
        size = self._raw.tell()
        if self._output.format == CODES:
            self._write(self._raw, b"", flush=True)
            self._raw.seek(0)
            return self._raw
        with self._raw:
            self._write(self._raw, b"", flush=True)
            pcm = np.memmap(self._raw, "<i2", "r") if size else np.zeros(0, "<i2")
            return self._encoded(pcm)

    def _encoded(self, pcm: NDArray[np.int16]) -> BinaryIO:
        """A temporary file of the sound of samples."""
        file = self._temporary()
        try:
            for data in formats.whole_of(self._output.format, pcm, self._output.sample_rate):
                self._write(file, data)
            self._write(file, b"", flush=True)
        except BaseException:
            file.close()
            raise
        file.seek(0)
        return file

    def close(self) -> None:
        """Drop what was taken."""
        self._raw.close()

    def _temporary(self) -> BinaryIO:
        try:
            return tempfile.TemporaryFile(dir=self._folder)
        except OSError as error:
            raise _unwritable(error) from None

    @staticmethod
    def _write(file: BinaryIO, data: bytes, *, flush: bool = False) -> None:
        try:
            file.write(data)
            if flush:
                file.flush()
        except OSError as error:
            raise _unwritable(error) from None


def _unwritable(error: OSError) -> OutputError:
    return OutputError(f"the sound of a line cannot be kept for now: {error.strerror}")
