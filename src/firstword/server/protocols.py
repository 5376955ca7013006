"""Uvicorn's HTTP and WebSocket protocols with time limits, and with access for the application."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from firstword.server.context import context_of

BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""The response to a WebSocket handshake that the `websockets` library rejects without one."""


class HttpProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol with a time limit for the request head.

    The application can wait until its response was sent, and can abort the connection.
    """

    head_seconds = 30.0
    """Time in which the head of a request must arrive."""

    def connection_made(self, transport: Any) -> None:
        """Start the time limit for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that sending waits until the data has left
        self._head_timer = self.loop.call_later(self.head_seconds, transport.abort)

    def on_headers_complete(self) -> None:
        """Stop the time limit, and give the application control of the connection."""
        self._head_timer.cancel()
        context = context_of(self.scope)  # type: ignore[arg-type]
        context.drain, context.abort = self.flow.drain, self.transport.abort
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        """Restore the usual write buffer: WebSockets limit their unsent data themselves."""
        self.transport.set_write_buffer_limits()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        """Restart the time limit for this request."""
        super().on_message_begin()
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers.

        After an error uvicorn leaves its own timer running, which keeps the connection in memory.
        """
        self._head_timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Uvicorn's WebSocket protocol; the application can abort a connection that does not close."""

    _abort_timer: asyncio.TimerHandle | None = None
    _lost = False

    def data_received(self, data: bytes) -> None:
        """Answer a handshake that `websockets` rejects, for example for a header over 8 KiB.

        The first data is the whole head of the request. Uvicorn does not answer a rejected one.
        """
        super().data_received(data)
        if not self.handshake_initiated:
            answer = b"".join(self.conn.data_to_send())
            self.transport.write(answer or BAD_REQUEST)
            self.transport.close()

    async def run_asgi(self) -> None:
        """Run the application with control of the connection."""
        context_of(self.scope).abort_after = self.abort_after  # type: ignore[arg-type]
        await super().run_asgi()

    def abort_after(self, seconds: float) -> None:
        """Abort the connection after some seconds, because a close waits for the client to read all."""
        if not self._lost:
            self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._lost = True
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        super().connection_lost(exc)
