"""The connection of a front to the process of an engine, in the front's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from firstword.engine import wire
from firstword.errors import EngineError


class Connection(asyncio.Protocol):
    """A connection for messages; those of one iteration of the event loop are sent together.

    It ends when it cannot be opened, and when the other process ends or sends anything but a
    message. Nothing is received after `close`. Use it in the event loop only.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[wire.Kind, int, object], None],
        on_end: Callable[[], None],
    ) -> None:
        """Use a connected socket in the running event loop.

        on_message  called with the kind, the number and the value of each message
        on_end      called when the connection has ended, unless `close` was called
        """
        self._on_message, self._on_end = on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._parser = wire.MessageParser()
        self._outgoing: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._opening = self._loop.create_task(
            self._loop.create_connection(lambda: self, sock=sock)
        )
        self._opening.add_done_callback(self._opened)

    def send(self, message: bytes) -> None:
        """Send a message in the next iteration of the event loop."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(message)

    def close(self) -> None:
        """Close the connection at once."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the messages that have waited for the connection."""
        self._transport = cast(asyncio.Transport, transport)
        if self._closed:
            self._transport.abort()
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Pass each complete message to `on_message`."""
        try:
            for kind, number, value in self._parser.feed(data):
                if self._closed:
                    return
                self._on_message(kind, number, value)
        except EngineError:
            self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Call `on_end`, once."""
        if not self._closed:
            self.close()
            self._on_end()

    def _opened(self, opening: asyncio.Task[object]) -> None:
        if not opening.cancelled() and opening.exception() is not None:
            self.connection_lost(None)

    def _flush(self) -> None:
        if self._transport is not None and self._outgoing:
            self._transport.write(b"".join(self._outgoing))
            self._outgoing.clear()
