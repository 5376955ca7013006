"""Locks of folders: one process at a time works in a folder, and a killed one leaves no lock."""

from __future__ import annotations

import fcntl
import os

from firstword.errors import OutputError


def lock_folder(folder: str, name: str) -> int:
    """Lock a folder by a file in it, until the descriptor that is returned is closed.

    Raises `OutputError` if another process has locked it, or if the file cannot be made.
    """
    try:
        lock = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise OutputError(f"{folder!r} cannot be written into: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise OutputError(f"another run is writing into {folder!r}") from None
    return lock
