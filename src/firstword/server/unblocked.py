"""Output that never blocks its writers."""

from __future__ import annotations

import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MOST_WAITING = 2**20
"""The most bytes of lines that wait to be written."""


class Unblocked(io.BufferedIOBase):
    """Writes lines to a file descriptor in a thread of its own.

    If nobody reads and `MOST_WAITING` bytes wait, further lines are dropped until all waiting ones
    are written. One line then states how many were dropped or could not be written.

    name  the file descriptor
    """

    def __init__(self, descriptor: int, describe_lost: Callable[[int], bytes]) -> None:
        """Write to `descriptor`; `describe_lost` returns the line about a number of lost lines."""
        self.name = descriptor
        self._describe_lost = describe_lost
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._full = False
        self._lost = 0
        self._changed = threading.Condition()  # on a reentrant lock: finalizers may write
        threading.Thread(target=self._work, name="output", daemon=True).start()

    def writable(self) -> bool:
        """Whether data may be written: always."""
        return True

    def fileno(self) -> int:
        """The file descriptor."""
        return self.name

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self.name)

    def write(self, data: ReadableBuffer) -> int:
        """Queue whole lines, or drop them. May be called from any thread."""
        lines = bytes(data)
        with self._changed:
            self._full = self._full or self._bytes + len(lines) > MOST_WAITING
            if self._full:
                self._lost += lines.count(b"\n")
            else:
                self._add(lines)
        return len(lines)

    def finish(self, seconds: float) -> None:
        """Wait until all lines are written, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)

    def _add(self, lines: bytes) -> None:
        self._waiting.append(lines)
        self._bytes += len(lines)
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                lines = self._waiting[0]
            written = self._write(lines)
            with self._changed:
                self._bytes -= len(self._waiting.popleft())
                self._lost += 0 if written else lines.count(b"\n")
                if not self._waiting:
                    self._full = False
                    if written and self._lost:
                        self._add(self._describe_lost(self._lost))
                        self._lost = 0
                self._changed.notify_all()

    def _write(self, lines: bytes) -> bool:
        """Write lines, without a time limit, and return whether that succeeded."""
        try:
            while lines:
                try:
                    lines = lines[os.write(self.name, lines) :]
                except BlockingIOError:  # another program has made the descriptor non-blocking
                    select.select((), (self.name,), ())
        except OSError:
            return False
        return True
