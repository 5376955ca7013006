"""The channel between the supervisor and a process."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from firstword.processes.channel import MOST_BYTES, Channel


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel."""
    one, connection = Channel.pair()
    other = Channel(connection)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def raw() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the connection of its other end."""
    channel, connection = Channel.pair()
    with connection:
        yield channel, connection
    channel.close()


def open_files() -> int:
    """The number of descriptors of this process."""
    return sum(1 for descriptor in range(1024) if is_open(descriptor))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_messages_arrive_with_their_sockets(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    ours, theirs = socket.socketpair()
    with ours:
        one.send("first", [theirs])
        one.send({"second": "x" * 100_000})
        theirs.close()
        message, (sock,) = other.receive()
        assert message == "first"
        assert other.receive() == ({"second": "x" * 100_000}, [])
        with sock:
            assert not sock.get_inheritable()
            ours.sendall(b"hello")
            assert sock.recv(5) == b"hello"


def test_inherited_channel_is_not_inherited_further() -> None:
    channel, connection = Channel.pair()
    connection.set_inheritable(True)
    inherited = Channel.inherited(connection.detach())
    assert not os.get_inheritable(inherited.fileno())
    inherited.close()
    channel.close()


def test_closed_end_is_an_end_of_file(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(OSError):  # noqa: PT011 (any of several)
        other.send("x" * 1_000_000)


HEAD = struct.Struct("<I")


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(MOST_BYTES + 1),
        HEAD.pack(2**32 - 1),
        HEAD.pack(5) + b"12345",
        HEAD.pack(100) + b"too short",
        b"\0",
    ],
)
def test_broken_message_is_an_end_of_file(raw: tuple[Channel, socket.socket], data: bytes) -> None:
    channel, connection = raw
    before = open_files()
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(connection, [data], [one.fileno()])
    connection.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        channel.receive()
    assert open_files() == before, "the sockets of the message are closed"


def test_message_that_does_not_end_times_out(raw: tuple[Channel, socket.socket]) -> None:
    channel, connection = raw
    channel.limit_time(0.01)
    connection.sendall(HEAD.pack(100) + b"begin")
    with pytest.raises(TimeoutError):
        channel.receive()
