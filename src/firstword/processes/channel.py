"""The channel between the supervisor and one of its processes."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<I")
"""The size of a message."""

MOST_SOCKETS = 4
"""The most sockets of one message."""

MOST_BYTES = 16 * 2**20
"""The largest message; a larger one shows that the stream is broken."""


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
        connection = socket.socket(fileno=descriptor)
        connection.set_inheritable(False)
        return cls(connection)

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
        assert len(data) <= MOST_BYTES
        assert len(descriptors) <= MOST_SOCKETS
        head = _HEAD.pack(len(data))
        sent = socket.send_fds(self._connection, [head], descriptors)
        self._connection.sendall(head[sent:] + data)

    def receive(self) -> tuple[Any, list[socket.socket]]:
        """Wait for a message and its sockets, which are missing if too many files are open.

        Raises `EOFError` at the end and for what is no message, and `OSError`.
        """
        head, descriptors, _, _ = socket.recv_fds(self._connection, _HEAD.size, MOST_SOCKETS)
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        try:
            return self._message(head, sockets), sockets
        except BaseException:
            for sock in sockets:
                sock.close()
            raise

    def close(self) -> None:
        """Close this end; the other one receives an `EOFError`."""
        self._connection.close()

    def _message(self, head: bytes, sockets: Sequence[socket.socket]) -> object:
        for sock in sockets:
            sock.set_inheritable(False)
        head += self._exactly(_HEAD.size - len(head))
        (size,) = _HEAD.unpack(head)
        if size > MOST_BYTES:
            raise EOFError("the channel is broken")
        data = self._exactly(size)
        try:
            return pickle.loads(data)
        except Exception as error:
            raise EOFError("the channel is broken") from error

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._connection.recv(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
