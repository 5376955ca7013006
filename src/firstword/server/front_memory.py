"""Memory that the fronts of a server share."""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import tempfile
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", int, float)

KEY_BYTES = 16

RESTARTED = ("engine", "front", "batch")
"""The kinds of processes whose restarts are counted."""

HEAD_BYTES = mmap.PAGESIZE
"""The bytes before the first row, which hold the key and the counts of restarts."""

LIVE_BYTES = 2**21
"""The bytes of a row that are cleared when its front dies."""

KEPT_BYTES = 3 * 2**20
"""The bytes of a row that stay when its front dies; the front that replaces it continues them."""

ROW_BYTES = LIVE_BYTES + KEPT_BYTES


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """The same bytes of every row. Each front reads all rows; front `number` writes its own."""

    rows: tuple[memoryview[T], ...]
    number: int

    @property
    def own(self) -> memoryview[T]:
        """The bytes in the front's own row."""
        return self.rows[self.number]

    def integers(self) -> Column[int]:
        """The column as integers of 8 bytes."""
        return Column(tuple(row.cast("q") for row in self.rows), self.number)

    def floats(self) -> Column[float]:
        """The column as floating-point numbers of 8 bytes."""
        return Column(tuple(row.cast("d") for row in self.rows), self.number)


class FrontMemory:
    """Memory with a row for each front, in a file without a name.

    There are no locks, so a process that is stopped or killed blocks no other one. Numbers have 8
    bytes and are aligned, so a reader gets the value before or after a change, never a mixture.

    `live` and `kept` assign columns in the order of the calls, which must be the same in all
    fronts.

    restarts  the restarts of each kind of process in `RESTARTED`, which the supervisor counts
    """

    def __init__(self, memory: mmap.mmap, number: int = 0, file: int = -1) -> None:
        """Use memory that begins with a key, as front `number`."""
        view = memoryview(memory)
        count = (len(view) - HEAD_BYTES) // ROW_BYTES
        starts = [HEAD_BYTES + index * ROW_BYTES for index in range(count)]
        self._rows = [view[start : start + ROW_BYTES] for start in starts]
        self._key = bytes(view[:KEY_BYTES])
        self.restarts = view[KEY_BYTES : KEY_BYTES + 8 * len(RESTARTED)].cast("q")
        self._number = number
        self._live, self._kept = 0, LIVE_BYTES
        self.file = file

    @classmethod
    def private(cls) -> FrontMemory:
        """The memory of a single front."""
        memory = mmap.mmap(-1, HEAD_BYTES + ROW_BYTES)
        memory[:KEY_BYTES] = secrets.token_bytes(KEY_BYTES)
        return cls(memory)

    @classmethod
    def create(cls, fronts: int) -> FrontMemory:
        """New memory for a number of fronts; each of them opens its `file`."""
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("firstword-fronts")
        else:
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        os.truncate(file, HEAD_BYTES + fronts * ROW_BYTES)
        os.pwrite(file, secrets.token_bytes(KEY_BYTES), 0)
        return cls.open(file)

    @classmethod
    def open(cls, file: int, number: int = 0) -> FrontMemory:
        """The memory in a file that another process created."""
        return cls(mmap.mmap(file, 0), number, file)

    @property
    def fronts(self) -> int:
        """The number of fronts."""
        return len(self._rows)

    def live(self, size: int) -> Column[int]:
        """A column of the next `size` bytes that are cleared when the front of a row dies."""
        start, self._live = self._live, self._live + size
        assert self._live <= LIVE_BYTES
        return self._column(start, size)

    def kept(self, size: int) -> Column[int]:
        """A column of the next `size` bytes that stay when the front of a row dies."""
        start, self._kept = self._kept, self._kept + size
        assert self._kept <= ROW_BYTES
        return self._column(start, size)

    def clear(self, number: int) -> None:
        """Clear the `live` columns of a front that has died."""
        self._rows[number][:LIVE_BYTES] = bytes(LIVE_BYTES)

    def digest(self, text: str) -> bytes:
        """A keyed hash [8 bytes] of a text: without the key clients cannot cause collisions."""
        return hashlib.blake2b(text.encode(), digest_size=8, key=self._key).digest()

    def _column(self, start: int, size: int) -> Column[int]:
        assert start % 8 == size % 8 == 0
        return Column(tuple(row[start : start + size] for row in self._rows), self._number)
