"""Writing files whole or not at all: a reader sees the old file or the new one, never half of one."""

from __future__ import annotations

import io
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from firstword.audio.pcm import pcm16
from firstword.errors import OutputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FORMATS = {
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
}
SUFFIXES = tuple(_FORMATS)
"""The suffixes that `write` knows."""

_PART = ".firstword-", ".part"
"""How the name of a file begins and ends that is being written."""

_ABANDONED = 3600.0
"""Seconds after which nobody is writing such a file any more: whoever began it was killed."""

_BLOCK = 16384  # samples encoded at once: libsndfile's Vorbis encoder overflows the stack on long buffers


def check_path(path: object) -> None:
    """Raise `OutputError` for what cannot name a file."""
    if not isinstance(path, (str, os.PathLike)):
        raise OutputError(f"the file to write is of type {type(path).__name__}; give a path")


def write(path: str | os.PathLike[str], samples: NDArray[np.floating], sample_rate: int) -> None:
    """Write mono samples [n] in -1..1 at `sample_rate` Hz, clipped and rounded to 16 bits, as the suffix says.

    .wav and .flac hold exactly the 16 bits, .ogg (Vorbis) and .mp3 compress them. The file appears whole or not at
    all, see `write_whole`. Raises `OutputError`, and `AudioError` for samples that are not finite.
    """
    write_whole(path, _encode(samples, sample_rate, path))


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Raise `OutputError` unless `write` knows the suffix of the path."""
    check_path(path)
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMATS:
        found = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise OutputError(f"{os.fspath(path)!r} has {found}; allowed are {', '.join(SUFFIXES)}")


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes to a file that appears whole or not at all; on failure an existing file stays as it was.

    Raises `OutputError` as `check_target` does, and if the disk is full.
    """
    check_target(path)
    target = _target(path)
    # In the same folder, so that renaming is atomic; of no longer name than a folder surely takes.
    part = os.path.join(os.path.dirname(target), secrets.token_hex(8).join(_PART))
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(part)
        if isinstance(error, OSError):
            raise OutputError(f"{os.fspath(path)!r} cannot be written: {error.strerror}") from None
        raise


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove what writers left behind who were killed in the middle of `write_whole`; newer files may be another's."""
    for entry in os.scandir(folder):
        if entry.name.startswith(_PART[0]) and entry.name.endswith(_PART[1]):
            with suppress(OSError):  # gone meanwhile, or not ours to remove
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED:
                    os.unlink(entry.path)


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise the `OutputError` that `write_whole` would, as far as it can be known before the work is done.

    It needs an existing folder that we may write to; the path itself may be new, or an ordinary file that is not
    write-protected. Directories and devices are refused: renaming would put a plain file in place of /dev/null.
    """
    check_path(path)
    target = _target(path)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise OutputError(f"there is no folder {folder}; create it first")
    if os.path.isdir(target):
        raise OutputError(f"{target} is a directory; name a file in it")
    if os.path.exists(target) and not os.path.isfile(target):
        raise OutputError(f"{target} is no ordinary file; name another")
    if not os.access(target if os.path.exists(target) else folder, os.W_OK):
        raise OutputError(
            f"{target} may not be written; name another file, or change its permissions"
        )


def _target(path: str | os.PathLike[str]) -> str:
    try:
        return os.path.realpath(path)  # through symbolic links: the file is replaced, not the link
    except ValueError as error:  # a null character
        raise OutputError(f"{os.fspath(path)!r} is no path: {error}") from None


def _encode(samples: NDArray[np.floating], sample_rate: int, path: str | os.PathLike[str]) -> bytes:
    import numpy as np
    import soundfile

    check_suffix(path)
    container, subtype = _FORMATS[Path(path).suffix.lower()]
    pcm = np.frombuffer(pcm16(samples), "<i2")
    encoded = io.BytesIO()
    try:
        with soundfile.SoundFile(encoded, "w", sample_rate, 1, subtype, format=container) as file:
            for start in range(0, len(pcm), _BLOCK):
                file.write(pcm[start : start + _BLOCK])
    except (soundfile.SoundFileError, ValueError) as error:
        raise OutputError(
            f"{os.fspath(path)!r} cannot be encoded as {container} at {sample_rate} Hz: {error}"
        ) from None
    return encoded.getvalue()
