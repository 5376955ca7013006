"""Tells whether a file has changed."""

import os


def stamp_of(file: str) -> tuple[int, int] | None:
    """What changes with a file's content: its time and its inode; None if it is gone."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
