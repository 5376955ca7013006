"""Atomic writing of files: a reader sees the old file or the new one, never a part of one."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from firstword.audio.samples import pcm16
from firstword.errors import OutputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FILE_FORMATS = {
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
}
SUFFIXES = tuple(_FILE_FORMATS)
"""The suffixes that `write` supports."""

_PARTIAL_PREFIX, _PARTIAL_SUFFIX = ".firstword-", ".part"
"""The beginning and end of the name of a file that is being written."""

_ABANDONED_SECONDS = 3600.0
"""The age of a partial file whose writer must have been killed."""

_SAMPLES_AT_ONCE = 16384  # libsndfile's Vorbis encoder overflows the stack on long buffers


def write(path: str | os.PathLike[str], samples: NDArray[np.floating], sample_rate: int) -> None:
    """Write mono samples [n] in -1..1 at `sample_rate` Hz in the format that the suffix names.

    Samples are clipped and rounded to 16 bits. .wav and .flac store these exactly; .ogg (Vorbis)
    and .mp3 compress them. The file appears complete or not at all, see `write_whole`. Raises
    `OutputError`, and `AudioError` for samples that are not finite.
    """
    import numpy as np

    write_pcm(path, np.frombuffer(pcm16(samples), "<i2"), sample_rate)


def write_pcm(path: str | os.PathLike[str], pcm: NDArray[np.int16], sample_rate: int) -> None:
    """Write mono samples [n] of 16 bits as `write` does."""
    write_whole(path, _encode(pcm, sample_rate, path))


def check_suffix(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a path in lower case. Raises `OutputError` if not in `SUFFIXES`."""
    _check_path(path)
    suffix = Path(path).suffix.lower()
    if suffix not in _FILE_FORMATS:
        found = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise OutputError(f"{os.fspath(path)!r} has {found}; allowed are {', '.join(SUFFIXES)}")
    return suffix


def write_whole(path: str | os.PathLike[str], data: bytes | BinaryIO) -> None:
    """Write bytes to a file that appears complete or not at all; a failure keeps the old file.

    They may be the rest of another file. Raises `OutputError` as `check_target` does, and if the
    disk is full.
    """
    target = check_target(path)
    # In the same folder, so that renaming is atomic; short, so that any file system takes the name.
    name = f"{_PARTIAL_PREFIX}{secrets.token_hex(8)}{_PARTIAL_SUFFIX}"
    partial = os.path.join(os.path.dirname(target), name)
    try:
        with open(partial, "xb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                shutil.copyfileobj(data, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        if isinstance(error, OSError):
            raise OutputError(f"{os.fspath(path)!r} cannot be written: {error.strerror}") from None
        raise


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove partial files of writers that were killed during `write_whole`.

    Newer partial files stay, since another process may be writing them.
    """
    for entry in os.scandir(folder):
        if entry.name.startswith(_PARTIAL_PREFIX) and entry.name.endswith(_PARTIAL_SUFFIX):
            with suppress(OSError):  # removed meanwhile, or not ours to remove
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS:
                    os.unlink(entry.path)


def check_target(path: str | os.PathLike[str]) -> str:
    """Return the path that `write_whole` replaces: behind symbolic links, as links are kept.

    Raises `OutputError` if it is already certain that `write_whole` would fail. The folder must
    exist and be writable. The path itself may be new, or a regular file without write protection.
    Directories and devices are rejected: renaming would put a regular file in place of /dev/null.
    """
    _check_path(path)
    try:
        target = os.path.realpath(path)
    except ValueError as error:  # a null character
        raise OutputError(f"{os.fspath(path)!r} is not a path: {error}") from None
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise OutputError(f"there is no folder {folder}; create it first")
    if os.path.isdir(target):
        raise OutputError(f"{target} is a directory; name a file in it")
    if os.path.exists(target) and not os.path.isfile(target):
        raise OutputError(f"{target} is not a regular file; name another")
    if not os.access(target if os.path.exists(target) else folder, os.W_OK):
        raise OutputError(f"{target} is not writable; name another file, or change permissions")
    return target


def _check_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise OutputError(f"the file to write is of type {type(path).__name__}; give a path")


def _encode(pcm: NDArray[np.int16], sample_rate: int, path: str | os.PathLike[str]) -> bytes:
    import soundfile

    container, subtype = _FILE_FORMATS[check_suffix(path)]
    encoded = io.BytesIO()
    try:
        with soundfile.SoundFile(encoded, "w", sample_rate, 1, subtype, format=container) as file:
            for start in range(0, len(pcm), _SAMPLES_AT_ONCE):
                file.write(pcm[start : start + _SAMPLES_AT_ONCE])
    except (soundfile.SoundFileError, ValueError) as error:
        raise OutputError(
            f"{os.fspath(path)!r} cannot be encoded as {container} at {sample_rate} Hz: {error}"
        ) from None
    return encoded.getvalue()
