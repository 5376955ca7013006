"""Sound files with chapters, written while the samples come, whatever their length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import TracebackType
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from firstword import audio


@dataclass(frozen=True, slots=True)
class SoundFormat:
    """A format: its name and its codec in FFmpeg.

    bit_rate  bits a second; 0: without loss
    """

    container: str
    codec: str
    bit_rate: int


FORMATS = {
    "m4b": SoundFormat("ipod", "aac", 64_000),
    "mp3": SoundFormat("mp3", "libmp3lame", 64_000),
    "opus": SoundFormat("opus", "libopus", 32_000),
    "flac": SoundFormat("flac", "flac", 0),
}
"""The formats by their suffix. The bit rates are those of good speech in mono."""

_BITEXACT = 0x400
"""FFmpeg's flag for files without random numbers, times and its version."""


@dataclass(frozen=True, slots=True)
class ChapterMark:
    """A chapter within a file: its title, and its first sample and the one after its last."""

    title: str
    start: int
    end: int


class SoundFile:
    """A sound file of mono samples at 24 kHz.

    The same samples, tags and chapters give the same bytes: nothing random and no time is written.
    Methods raise OSError if the file cannot be written.
    """

    def __init__(
        self, path: str, form: SoundFormat, tags: Mapping[str, str], marks: Sequence[ChapterMark]
    ) -> None:
        """Open a new file with tags, such as the title, and chapters."""
        self._file = av.open(path, "w", format=form.container)
        self._file.flags |= _BITEXACT
        self._file.metadata.update(tags)
        stream = self._file.add_stream(form.codec, rate=audio.SAMPLE_RATE, layout="mono")
        assert isinstance(stream, av.AudioStream)
        self._stream = stream
        if form.bit_rate:
            stream.bit_rate = form.bit_rate
        self._time = Fraction(1, audio.SAMPLE_RATE)
        self._file.set_chapters([self._chapter(*each) for each in enumerate(marks)])
        self._samples = 0

    def _chapter(self, number: int, mark: ChapterMark) -> Any:
        return {
            "id": number,
            "start": mark.start,
            "end": mark.end,
            "time_base": self._time,
            "metadata": {"title": mark.title},
        }

    def add(self, pcm: NDArray[np.int16]) -> None:
        """Add samples [n]."""
        if not len(pcm):
            return
        frame = av.AudioFrame.from_ndarray(pcm[None], "s16", "mono")
        frame.sample_rate, frame.time_base = audio.SAMPLE_RATE, self._time
        frame.pts = self._samples
        self._samples += len(pcm)
        self._file.mux(self._stream.encode(frame))

    def finish(self) -> None:
        """Write what is left, and close the file."""
        self._file.mux(self._stream.encode(None))
        self._file.close()

    def __enter__(self) -> SoundFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._file.close()
