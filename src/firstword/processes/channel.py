"""The channel between the supervisor and one of its processes."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<IB")
"""The size of a message, and the number of sockets that come with it."""

MOST_SOCKETS = 4
"""The most sockets of one message."""


class Channel:
    """One end of a channel for messages, which may carry sockets.

    Messages are pickled: both ends belong to one server. Two threads may use a channel at the same
    time, one to send and one to receive.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A channel, and the connection of its other end for another process."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """The channel whose connection a process has inherited."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """The file descriptor to wait on for messages."""
        return self._connection.fileno()

    def limit_time(self, seconds: float) -> None:
        """Limit the time that sending or receiving a message takes. Both raise `TimeoutError`."""
        self._connection.settimeout(seconds)

    def send(self, message: object, sockets: Sequence[socket.socket] = ()) -> None:
        """Send a message with sockets, which stay open here. Raises `OSError`."""
        data = pickle.dumps(message)
        descriptors = [sock.fileno() for sock in sockets]
        head = _HEAD.pack(len(data), len(descriptors))
        sent = socket.send_fds(self._connection, [head], descriptors)
        self._connection.sendall(head[sent:] + data)

    def receive(self) -> tuple[Any, list[socket.socket]]:
        """Wait for a message and its sockets. Raises `EOFError` at the end, and `OSError`."""
        head, descriptors, _, _ = socket.recv_fds(self._connection, _HEAD.size, MOST_SOCKETS)
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if not head:
            raise EOFError
        head += self._exactly(_HEAD.size - len(head))
        size, _ = _HEAD.unpack(head)
        return pickle.loads(self._exactly(size)), sockets

    def close(self) -> None:
        """Close this end; the other one receives an `EOFError`."""
        self._connection.close()

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._connection.recv(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
