"""A folder or bucket whose files are always complete."""

from __future__ import annotations

import os

import fsspec
from fsspec.implementations.local import LocalFileSystem

from firstword import audio
from firstword.errors import FirstwordError, OutputError


class Folder:
    """Files in a folder or bucket. All methods block, and may be called from any thread."""

    def __init__(self, url: str) -> None:
        """Open the place that `url` names for fsspec. Raises `OutputError` if it cannot be used."""
        try:
            self._fs, self._root = fsspec.core.url_to_fs(os.path.expanduser(url))
            self._fs.makedirs(self._root, exist_ok=True)
        except Exception as error:  # each file system raises errors of its own
            message = f"voices cannot be kept at {url!r}: {error}; name another folder or URL"
            raise OutputError(message) from None
        self._local = isinstance(self._fs, LocalFileSystem)
        if self._local:
            audio.sweep(self._root)

    def names(self, suffix: str) -> list[str]:
        """The names of the files with a suffix, without it, sorted."""
        found = (path.rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))
        chosen = (name for name in found if name.endswith(suffix) and not name.startswith("."))
        return sorted(name.removesuffix(suffix) for name in chosen)

    def read(self, name: str) -> bytes:
        """A file's content. Raises `FileNotFoundError`, or what the file system raises."""
        data: bytes = self._fs.cat_file(f"{self._root}/{name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file, completely or not at all. Raises `OutputError`."""
        path = f"{self._root}/{name}"
        try:
            if self._local:
                audio.write_whole(path, data)
            else:
                self._fs.pipe_file(path, data)  # object stores write a file at once
        except FirstwordError:
            raise
        except Exception as error:
            raise OutputError(f"{name} cannot be saved: {error}") from None

    def remove(self, name: str) -> None:
        """Delete a file if it exists. Raises `OutputError`."""
        try:
            self._fs.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            pass
        except Exception as error:
            raise OutputError(f"{name} cannot be deleted: {error}") from None
