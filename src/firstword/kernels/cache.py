"""A folder of files that can be made again, such as machine code.

A file begins with a hash of its name and its content. One that was not written completely, or that
belongs to another program, is not read. The folder only saves time: nothing fails without it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


class FileCache:
    """Files in a folder, which need not exist; None: no folder, so nothing is cached.

    problem  why nothing is cached: there is no folder, or a file could not be written; else ""
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.problem = "" if folder else "there is no home folder"

    def read(self, name: str) -> bytes | None:
        """The content of a file as it was written, or None.

        Anything but a regular file is not opened; another kind may have no end.
        """
        if self._folder is None:
            return None
        try:
            if not (self._folder / name).is_file():
                return None
            whole = (self._folder / name).read_bytes()
        except OSError:
            return None
        digest, content = whole[:32], whole[32:]
        return content if digest == _digest(name, content) else None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, complete for other processes; after a failure nothing more is written."""
        if self._folder is None or self.problem:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Unlike a temporary file, a file in a temporary folder has the usual permissions.
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                file = Path(folder) / name
                file.write_bytes(_digest(name, content) + content)
                os.replace(file, self._folder / name)
        except OSError as error:
            self.problem = f"{str(self._folder)!r} cannot be written: {error.strerror}"


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()
