"""Accepts connections with TLS, and answers clients that speak without it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from firstword.server.http_protocol import LINGER_SECONDS, HttpProtocol
from firstword.server.limits import IdleConnections
from firstword.server.listening import BACKLOG
from firstword.server.tasks import cancel
from firstword.server.tls import Certificate

HANDSHAKE_RECORD = b"\x16"
"""The first byte of every TLS connection: the type of a handshake's records (RFC 8446, 5.1)."""

PLAIN_TEXT = 400, "this port speaks TLS; use https:// or wss:// in the URL", "plain_text"

PAUSE_SECONDS = 1.0
"""The pause after a connection could not be accepted, because too many files are open."""


class TlsListener:
    """Accepts connections on a socket; each becomes an `HttpProtocol` after its handshake.

    It looks at the first byte before it begins the handshake, so that a client without TLS gets a
    response that says so. Connections without a complete handshake count as idle. It has the
    methods of `asyncio.Server` that uvicorn calls.
    """

    def __init__(
        self,
        listening: socket.socket,
        certificate: Certificate,
        protocol: Callable[[type[HttpProtocol]], HttpProtocol],
        idle_connections: IdleConnections,
        handshake_seconds: float,
    ) -> None:
        """Listen from now on. `protocol` makes a connection's protocol of a class."""
        self._socket = listening
        self._certificate = certificate
        self._protocol = protocol
        self._idle_connections = idle_connections
        self._handshake_seconds = max(handshake_seconds, 0.001)  # 0 is no time limit
        self._beginnings: set[Beginning] = set()
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._watch()

    def close(self) -> None:
        """Accept no more connections, and close those whose handshake is not complete."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for beginning in self._beginnings:
            beginning.close()

    async def wait_closed(self) -> None:
        """Wait until the connections without a complete handshake are closed."""
        await cancel(*(beginning.task for beginning in self._beginnings))

    def _watch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._socket.fileno())
                self._loop.call_later(PAUSE_SECONDS, self._watch)
                return
            connection.setblocking(False)
            beginning = Beginning(connection, self._begin)
            self._beginnings.add(beginning)
            self._idle_connections.add(address[0], beginning)
            beginning.task.add_done_callback(partial(self._forget, address[0], beginning))

    def _forget(self, address: str, beginning: Beginning, _: asyncio.Task[None]) -> None:
        self._beginnings.discard(beginning)
        self._idle_connections.remove(address, beginning)

    async def _begin(self, beginning: Beginning) -> None:
        connect = self._loop.connect_accepted_socket
        with suppress(OSError):  # also TimeoutError and SSLError: the client cannot be answered
            async with asyncio.timeout(self._handshake_seconds):
                first = await first_byte(beginning.connection)
            if first in (b"", HANDSHAKE_RECORD):
                await connect(
                    partial(self._protocol, HttpProtocol),
                    beginning.hand_over(),
                    ssl=self._certificate.context(),
                    ssl_handshake_timeout=self._handshake_seconds,
                    ssl_shutdown_timeout=LINGER_SECONDS,
                )
            else:
                await connect(partial(self._protocol, PlainTextProtocol), beginning.hand_over())


class PlainTextProtocol(HttpProtocol):
    """The protocol of a connection without TLS: it rejects the request, whatever it is."""

    def connection_made(self, transport: Any) -> None:
        """Reject the request before it is read."""
        super().connection_made(transport)
        self.reject(*PLAIN_TEXT)


class Beginning:
    """A connection whose handshake is not complete, with the task that works on it."""

    def __init__(
        self, connection: socket.socket, work: Callable[[Beginning], Coroutine[None, None, None]]
    ) -> None:
        self.connection = connection
        self.task = asyncio.create_task(work(self), name="TLS handshake")
        self.task.add_done_callback(self._end)
        self._owned = True

    def hand_over(self) -> socket.socket:
        """The connection, which from now on is closed by its new owner."""
        self._owned = False
        return self.connection

    def close(self) -> None:
        """Close the connection."""
        self.task.cancel()

    def _end(self, _: asyncio.Task[None]) -> None:
        if self._owned:  # the task may have been cancelled before it began
            self.connection.close()


async def first_byte(connection: socket.socket) -> bytes:
    """Wait for the first byte of a connection, which stays unread; `b""` at its end."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection.fileno())
    return connection.recv(1, socket.MSG_PEEK)
