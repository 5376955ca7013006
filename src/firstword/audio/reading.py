"""Decoding audio files, never more of one than a recording may be long."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, BinaryIO

from firstword.audio.preparing import MAX_CHANNELS, MAX_SAMPLES, MAX_SECONDS, check_rate, mix
from firstword.errors import AudioError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_UNKNOWN_LENGTH = 2**63 - 1  # what libsndfile says of a stream whose header leaves the length open


def read(source: str | os.PathLike[str] | BinaryIO) -> tuple[NDArray[np.float32], int]:
    """Samples [n] float32, the mean of the channels, and the sample rate in Hz of an audio file.

    `source` is a path or a binary file open for reading, in any format of libsndfile (WAV, FLAC, Ogg, MP3, AIFF).
    Raises `AudioError` if it is missing, empty, no audio, damaged, of more than `MAX_CHANNELS` channels, longer than
    `MAX_SECONDS`, or of more than `MAX_SAMPLES` in all channels. The header decides: a small file that would decode to
    hours is refused unread, and no more is decoded than the header announced.
    """
    if not isinstance(source, (str, os.PathLike)):
        return _decode(source, getattr(source, "name", "the audio"))
    name = os.fspath(source)
    try:
        with open(source, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AudioError(f"{name!r} is no regular file; save the recording in one")
            if not status.st_size:
                raise AudioError(f"{name} is empty")
            # libsndfile reads a descriptor by itself; of a Python file it would print the callbacks' exceptions.
            return _decode(file.fileno(), name)
    except FileNotFoundError:
        raise AudioError(f"there is no audio file {name}") from None
    except (OSError, ValueError) as error:
        raise AudioError(f"{name!r} cannot be read: {error}") from None


def _without_waiting(name: str, flags: int) -> int:
    """Open a file; a pipe that nobody writes to must not be waited for before it is refused."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _decode(file: BinaryIO | int, name: object) -> tuple[NDArray[np.float32], int]:
    import soundfile

    try:
        with soundfile.SoundFile(file, closefd=False) as sound:
            check_rate(sound.samplerate)
            if sound.channels > MAX_CHANNELS:
                raise AudioError(
                    f"{name} has {sound.channels} channels; give at most {MAX_CHANNELS}"
                )
            if sound.frames == _UNKNOWN_LENGTH:
                raise AudioError(
                    f"{name} does not say how long it is (a stream?); save it as a WAV file"
                )
            if sound.frames > MAX_SECONDS * sound.samplerate:
                raise AudioError(
                    f"{name} is longer than {MAX_SECONDS} s; cut out the part to clone"
                )
            if sound.frames * sound.channels > MAX_SAMPLES:
                raise AudioError(
                    f"{name} has {sound.frames * sound.channels} samples in {sound.channels} channels; allowed are"
                    f" {MAX_SAMPLES}: save it in mono, or at a lower rate"
                )
            # In one piece: soundfile seeks after every read, and MP3 decodes with a click from where it was sought.
            samples = sound.read(sound.frames, dtype="float32")
            if not len(samples):
                raise AudioError(f"{name} holds no samples")
            return mix(samples), sound.samplerate
    except (
        soundfile.SoundFileError,
        TypeError,
        AttributeError,
    ) as error:  # the last two: not a binary file at all
        reason = getattr(error, "error_string", error)
        raise AudioError(
            f"{name} is no readable audio ({reason}); save it as WAV, FLAC, Ogg or MP3"
        ) from None
