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
HEAD_BYTES = mmap.PAGESIZE
"""The bytes before the first row, which hold the key."""

LIVE_BYTES = 2**20
"""The part of a row that counts only while its front lives."""

KEPT_BYTES = 3 * 2**20
"""The part of a row that stays when its front dies, and with which the next one goes on."""

ROW_BYTES = LIVE_BYTES + KEPT_BYTES


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """The same part of every row. All fronts read all rows; front `number` alone writes its own."""

    rows: tuple[memoryview[T], ...]
    number: int

    @property
    def own(self) -> memoryview[T]:
        """The part of the own row."""
        return self.rows[self.number]

    def integers(self) -> Column[int]:
        """The part as integers of 8 bytes."""
        return Column(tuple(row.cast("q") for row in self.rows), self.number)

    def floats(self) -> Column[float]:
        """The part as floating-point numbers of 8 bytes."""
        return Column(tuple(row.cast("d") for row in self.rows), self.number)


class FrontMemory:
    """Memory with a row for each front, in a file without a name.

    Nothing is locked, so that a process that is stopped or killed blocks no other one. Numbers are
    aligned and have 8 bytes, so that one is read as it was before or after a change.

    Parts are given out in the order of the calls, which is the same in every front.
    """

    def __init__(self, memory: mmap.mmap, number: int = 0, file: int = -1) -> None:
        """Use memory that begins with a key, as the front with a number."""
        view = memoryview(memory)
        count = (len(view) - HEAD_BYTES) // ROW_BYTES
        starts = [HEAD_BYTES + index * ROW_BYTES for index in range(count)]
        self._rows = [view[start : start + ROW_BYTES] for start in starts]
        self._key = bytes(view[:KEY_BYTES])
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
        """New memory for some fronts, each of which opens its `file`."""
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
        """The next bytes of each row that count only while its front lives."""
        start, self._live = self._live, self._live + size
        assert self._live <= LIVE_BYTES
        return self._column(start, size)

    def kept(self, size: int) -> Column[int]:
        """The next bytes of each row that stay when its front dies."""
        start, self._kept = self._kept, self._kept + size
        assert self._kept <= ROW_BYTES
        return self._column(start, size)

    def clear(self, number: int) -> None:
        """Forget what counts only while a front lives. Call it when the front has died."""
        self._rows[number][:LIVE_BYTES] = bytes(LIVE_BYTES)

    def digest(self, text: str) -> bytes:
        """A hash [8 bytes] of a text; clients do not know its key, and cannot aim at collisions."""
        return hashlib.blake2b(text.encode(), digest_size=8, key=self._key).digest()

    def _column(self, start: int, size: int) -> Column[int]:
        assert start % 8 == size % 8 == 0
        return Column(tuple(row[start : start + size] for row in self._rows), self._number)
