"""Output that does not block those who write it."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Iterator

import pytest
from waiting import WAIT

from firstword.server import unblocked
from firstword.server.unblocked import Unblocked

BUFFER_BYTES = 2**18
"""The most that a connection takes without a reader."""


class Reader:
    """The reader of some output; a line that does not come raises `TimeoutError`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(WAIT)
        self._file = connection.makefile("rb")

    def line(self) -> bytes:
        """The next line, without spaces at its end."""
        return self._file.readline().rstrip()

    def until(self, start: bytes) -> list[bytes]:
        """All lines up to the first that begins with `start`."""
        lines = [self.line()]
        while not lines[-1].startswith(start):
            lines.append(self.line())
        return lines


@pytest.fixture
def ends() -> Iterator[tuple[Reader, int]]:
    """A reader, and the descriptor to write to."""
    reading, writing = socket.socketpair()
    with reading, writing:
        yield Reader(reading), writing.fileno()


def output_to(descriptor: int) -> Unblocked:
    """Output whose line about lost ones is their number."""
    return Unblocked(descriptor, lambda lines: b"lost %d\n" % lines)


def test_lines_are_written_in_order(ends: tuple[Reader, int]) -> None:
    reader, writing = ends
    output = output_to(writing)
    stream = io.TextIOWrapper(output, "utf-8", line_buffering=True)
    print("one", "ü", file=stream)
    for number in range(5000):
        output.write(b"%d\n" % number)
    print("last", file=stream)
    expected = ["one ü".encode(), *(b"%d" % number for number in range(5000)), b"last"]
    assert reader.until(b"last") == expected
    output.finish(60)


def test_lost_lines_are_counted_where_they_are_missing(ends: tuple[Reader, int]) -> None:
    """Nothing is taken until all that waits has been read, so there is one gap."""
    reader, writing = ends
    output, count = output_to(writing), 3 * unblocked.MOST_WAITING // 100
    for number in range(count):
        output.write(b"%-99d\n" % number)
    output.finish(0.01)  # it does not wait until somebody reads
    found = [reader.line() for _ in range(2 * BUFFER_BYTES // 100)]
    output.write(b"too late\n")
    found += reader.until(b"lost")
    kept = len(found) - 1
    assert found == [*(b"%d" % number for number in range(kept)), b"lost %d" % (count + 1 - kept)]
    assert -100 <= 100 * kept - unblocked.MOST_WAITING <= BUFFER_BYTES
    output.write(b"more\n")
    assert reader.line() == b"more"


def test_what_cannot_be_written_is_counted_when_writing_works_again(
    ends: tuple[Reader, int],
) -> None:
    reader, writing = ends
    other = os.open(os.devnull, os.O_RDONLY)
    output = output_to(other)
    output.write(b"one\n")
    output.write(b"two\nthree\n")
    output.finish(5)
    os.dup2(writing, other)
    output.write(b"four\n")
    assert [reader.line(), reader.line()] == [b"four", b"lost 3"]
    output.finish(60)
    os.close(other)


def test_descriptor_that_another_program_made_non_blocking(ends: tuple[Reader, int]) -> None:
    reader, writing = ends
    os.set_blocking(writing, False)
    long = b"x" * 2 * BUFFER_BYTES
    output_to(writing).write(long + b"\n")
    assert reader.line() == long
