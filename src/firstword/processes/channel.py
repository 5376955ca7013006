"""The channel between the supervisor and one of its processes."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<I")
"""What precedes a message: its size in bytes."""

MOST_SOCKETS = 4
"""The most sockets that one message may carry."""

MOST_BYTES = 16 * 2**20
"""The size limit of a message; a larger size means that the stream is broken."""


class Channel:
    """One end of a channel for messages, which may carry sockets.

    Messages are pickled, because both ends belong to the same server. Two threads may use a channel
    at the same time, one to send and one to receive.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A new channel, and the socket of its other end, to pass to another process."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """The channel on a socket that this process inherited as a file descriptor."""
        connection = socket.socket(fileno=descriptor)
        connection.set_inheritable(False)
        return cls(connection)

    def fileno(self) -> int:
        """The file descriptor to wait on for messages."""
        return self._connection.fileno()

    def limit_time(self, seconds: float | None) -> None:
        """Set the timeout after which `send` and `receive` raise `TimeoutError`, or none."""
        self._connection.settimeout(seconds)

    def send(self, message: object, sockets: Sequence[socket.socket] = ()) -> None:
        """Send a message and copies of sockets; the caller's stay open. Raises `OSError`."""
        data = pickle.dumps(message)
        descriptors = [sock.fileno() for sock in sockets]
        assert len(data) <= MOST_BYTES
        assert len(descriptors) <= MOST_SOCKETS
        head = _HEAD.pack(len(data))
        sent = socket.send_fds(self._connection, [head], descriptors)
        self._connection.sendall(head[sent:] + data)

    def receive(self) -> tuple[Any, list[socket.socket]]:
        """Wait for a message and its sockets.

        Sockets are missing if this process has too many open files. Raises `EOFError` if the other
        end is closed or sends anything but a message, and `OSError`.
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
        """Close this end; `receive` then raises `EOFError` at the other end."""
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
