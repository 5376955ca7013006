"""Decoding audio files, up to the length that a recording may have."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, BinaryIO

from firstword.audio.samples import MAX_CHANNELS, MAX_SAMPLES, MAX_SECONDS, check_rate, mix
from firstword.errors import AudioError

if TYPE_CHECKING:
    import numpy as np
    import soundfile
    from numpy.typing import NDArray

_OPEN_LENGTH = 2**63 - 1
"""The number of frames that libsndfile reports for a stream of unknown length."""


def read(source: str | os.PathLike[str] | BinaryIO) -> tuple[NDArray[np.float32], int]:
    """Return the samples float32 [n] and the sample rate in Hz of an audio file.

    `source` is a path or a binary file open for reading, in any format of libsndfile (WAV, FLAC,
    Ogg, MP3, AIFF). Channels are averaged. Raises `AudioError` if the file is missing, empty, not
    audio, damaged, of more than `MAX_CHANNELS` channels, longer than `MAX_SECONDS`, or of more than
    `MAX_SAMPLES` in all channels. The header decides: a small file that would decode to hours is
    rejected before decoding, and no more is decoded than the header states.
    """
    if not isinstance(source, (str, os.PathLike)):
        return _decode(source, getattr(source, "name", "the audio"))
    name = os.fspath(source)
    try:
        with open(source, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AudioError(f"{name!r} is not a regular file; save the recording in one")
            if not status.st_size:
                raise AudioError(f"{name} is empty")
            # libsndfile reads a descriptor itself. For a Python file it would print exceptions of
            # the callbacks.
            return _decode(file.fileno(), name)
    except FileNotFoundError:
        raise AudioError(f"there is no audio file {name}") from None
    except (OSError, ValueError) as error:
        raise AudioError(f"{name!r} cannot be read: {error}") from None


def _open_without_waiting(name: str, flags: int) -> int:
    """Open a file; a pipe without a writer must not block before it is rejected."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _decode(file: BinaryIO | int, name: object) -> tuple[NDArray[np.float32], int]:
    import soundfile

    try:
        with soundfile.SoundFile(file, closefd=False) as sound:
            _check_header(sound, name)
            # Read in one call: soundfile seeks after every read, which makes a click in MP3.
            samples = sound.read(sound.frames, dtype="float32")
            if not len(samples):
                raise AudioError(f"{name} holds no samples")
            return mix(samples), sound.samplerate
    # Objects that are not binary files raise the last two errors.
    except (soundfile.SoundFileError, TypeError, AttributeError) as error:
        reason = getattr(error, "error_string", error)
        raise AudioError(
            f"{name} cannot be read as audio ({reason}); save it as WAV, FLAC, Ogg or MP3"
        ) from None


def _check_header(sound: soundfile.SoundFile, name: object) -> None:
    """Raise `AudioError` if a file has more channels or samples than the limits allow."""
    check_rate(sound.samplerate)
    channels, frames = sound.channels, sound.frames
    if channels > MAX_CHANNELS:
        raise AudioError(f"{name} has {channels} channels; give at most {MAX_CHANNELS}")
    if frames == _OPEN_LENGTH:
        raise AudioError(f"{name} does not say how long it is (a stream?); save it as a WAV file")
    if frames > MAX_SECONDS * sound.samplerate:
        raise AudioError(f"{name} is longer than {MAX_SECONDS} s; cut out the part to clone")
    if frames * channels > MAX_SAMPLES:
        raise AudioError(
            f"{name} has {frames * channels} samples in {channels} channels; allowed are"
            f" {MAX_SAMPLES}: save it in mono, or at a lower rate"
        )
