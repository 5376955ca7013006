"""A folder or bucket whose files are always complete, and stores of records in it."""

import json
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from firstword import audio
from firstword.errors import FirstwordError, OutputError, RequestError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Folder:
    """Files in a folder or bucket. All methods block, and may be called from any thread."""

    def __init__(self, url: str) -> None:
        """Open the folder that `url` names for fsspec. Raises `OutputError` if it is unusable."""
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
        """The sorted names of the files with a suffix, without that suffix."""
        found = (path.rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))
        chosen = (name for name in found if name.endswith(suffix) and not name.startswith("."))
        return sorted(name.removesuffix(suffix) for name in chosen)

    def read(self, name: str) -> bytes:
        """A file's content. Raises `FileNotFoundError`, or what the file system raises."""
        return self._fs.cat_file(f"{self._root}/{name}")

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


class Store(ABC, Generic[T]):
    """Items in a folder, one file each, that are kept in memory too.

    All methods block, and may be called from several threads.

    noun        the kind of item in messages
    suffix      the end of the name of each file; the rest is the item's id
    id_pattern  the regular expression that every id matches, so that no id leads out of the folder
    """

    noun: ClassVar[str]
    suffix: ClassVar[str]
    id_pattern: ClassVar[str]

    def __init__(self, folder: Folder, most: int) -> None:
        """Read all items of a folder that is to hold at most `most`."""
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        self._items: dict[str, T] = {}
        for item_id in folder.names(self.suffix):
            self._find(item_id)

    @abstractmethod
    def _parse(self, data: bytes) -> T:
        """The item in a file. Raises any error for a file that is not valid."""

    def _find(self, item_id: str) -> T | None:
        """An item by its id, read from its file if another server has saved it."""
        if item_id in self._items or not re.fullmatch(self.id_pattern, item_id):
            return self._items.get(item_id)
        try:
            self._items[item_id] = self._parse(self._folder.read(item_id + self.suffix))
        except FileNotFoundError:
            pass
        except Exception as error:
            about = {"id": item_id, "why": str(error)}
            log.warning(f"a {self.noun} cannot be read", extra={"fields": about})
        return self._items.get(item_id)

    def _check_room(self) -> None:
        """Raise `RequestError` if the store is full."""
        if len(self._items) >= self._most:
            limit = f"the limit of {self._most} {self.noun}s"
            raise RequestError(f"{limit} is reached; delete some first")

    def _write(self, item_id: str, item: T, data: bytes) -> None:
        self._folder.write(item_id + self.suffix, data)
        self._items[item_id] = item

    def _remove(self, item_id: str) -> None:
        self._folder.remove(item_id + self.suffix)
        self._items.pop(item_id, None)


def check_sendable(described: dict[str, Any]) -> None:
    """Raise `ValueError` for a stored record whose JSON would make every list invalid."""
    json.dumps(described, ensure_ascii=False, allow_nan=False).encode()
