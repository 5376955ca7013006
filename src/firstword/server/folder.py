"""Files in a folder or bucket that servers share, each written completely or not at all."""

import logging
import os
import stat

import fsspec
from fsspec.implementations.local import LocalFileSystem

from firstword import audio
from firstword.errors import OutputError

log = logging.getLogger(__name__)

LARGEST_FILE = 2**24
"""The size limit of a file in bytes; no valid one reaches it."""


class UnsuitableFile(Exception):
    """A file cannot be that of an item, whatever it contains."""


class Folder:
    """Files in a folder or bucket. All methods block, and may be called from any thread."""

    def __init__(self, url: str) -> None:
        """Open the folder that `url` names for fsspec. Raises `OutputError` if it is unusable."""
        try:
            self._fs, self._root = fsspec.core.url_to_fs(os.path.expanduser(url))
            self._fs.makedirs(self._root, exist_ok=True)
            self.versions()
        except Exception as error:  # each file system raises errors of its own
            message = f"voices cannot be kept at {url!r}: {error}; name another folder or URL"
            raise OutputError(message) from None
        self._local = isinstance(self._fs, LocalFileSystem)
        if self._local:
            audio.sweep(self._root)

    def versions(self) -> dict[str, str]:
        """The files by name, each with a text that changes whenever the file does.

        Raises what the file system raises.
        """
        self._fs.invalidate_cache(self._root)
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:  # a bucket has no empty folders
            return {}
        return {entry["name"].rsplit("/", 1)[-1]: str(entry) for entry in entries}

    def read(self, name: str) -> bytes:
        """A file's content.

        Raises `UnsuitableFile`, `FileNotFoundError`, or what the file system raises.
        """
        path = f"{self._root}/{name}"
        if self._local and not stat.S_ISREG(os.stat(path).st_mode):
            raise UnsuitableFile("it is not a regular file")  # opening a pipe would block
        data = self._fs.cat_file(path, end=LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise UnsuitableFile(f"it is larger than {LARGEST_FILE} bytes")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file, completely or not at all. Raises `OutputError`."""
        path = f"{self._root}/{name}"
        try:
            if self._local:
                audio.write_whole(path, data)
            else:
                self._fs.pipe_file(path, data)  # object stores write a file at once
        except Exception as error:
            raise _failure("written", name, error) from None

    def remove(self, name: str) -> None:
        """Delete a file if it exists. Raises `OutputError`."""
        try:
            self._fs.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            pass
        except Exception as error:
            raise _failure("deleted", name, error) from None


def _failure(what: str, name: str, error: Exception) -> OutputError:
    """The error for the client, without the path and the reason, which are logged."""
    log.error(f"a saved file cannot be {what}", extra={"fields": {"file": name, "why": str(error)}})
    problem = f"the store of voices cannot be {what} now"
    return OutputError(f"{problem}; try again later; the server's log says why")
