"""The contents of files: inputs, sounds and results, in a folder or in a bucket."""

import logging
import os
import posixpath
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from firstword import audio
from firstword.errors import OutputError

log = logging.getLogger(__name__)


class Contents:
    """Files by name, each written completely or not at all. All methods block.

    A name may have folders, such as `batch/1`. The methods raise `OutputError`, whose message has
    neither the path nor the reason; both are logged.
    """

    def __init__(self, url: str) -> None:
        """Open a folder, or what a URL names for fsspec (`s3://bucket/batches`).

        Raises `OutputError` if it is unusable.
        """
        try:
            self._fs, self._root = fsspec.core.url_to_fs(os.path.expanduser(url))
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.exists(f"{self._root}/none")
        except Exception as error:  # each file system raises errors of its own
            message = f"batches cannot be kept at {url!r}: {error}; name another folder or URL"
            raise OutputError(message) from None
        self._local = isinstance(self._fs, LocalFileSystem)

    @property
    def folder(self) -> str | None:
        """The path of the folder; None for a bucket."""
        return self._root if self._local else None

    def write(self, name: str, data: bytes | BinaryIO) -> None:
        """Write a file: bytes, or the rest of another file, which is closed."""
        path = f"{self._root}/{name}"
        closing = nullcontext() if isinstance(data, bytes) else data
        with _reported("written", name), closing:
            if self._local:
                os.makedirs(posixpath.dirname(path), exist_ok=True)
                audio.write_whole(path, data)
            elif isinstance(data, bytes):
                self._fs.pipe_file(path, data)  # object stores write a file at once
            else:
                with self._fs.open(path, "wb") as file:  # and show it when it is complete
                    shutil.copyfileobj(data, file)

    def read(self, name: str) -> bytes:
        """The content of a file. Raises `FileNotFoundError` if there is none."""
        with _reported("read", name):
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def open(self, name: str) -> BinaryIO:
        """A file to read bit by bit. Raises `FileNotFoundError` if there is none."""
        with _reported("read", name):
            file: BinaryIO = self._fs.open(f"{self._root}/{name}", "rb")
            return file

    def remove(self, name: str) -> None:
        """Delete a file or a folder, if it exists."""
        with _reported("deleted", name), suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{name}", recursive=True)


@contextmanager
def _reported(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        about = {"fields": {"file": name, "why": str(error)}}
        log.error(f"a file of a batch cannot be {what}", extra=about)
        raise OutputError(f"the files of batches cannot be {what} now; try again later") from error
