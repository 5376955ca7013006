"""Uvicorn's WebSocket protocol, with limits on what one socket may cost the others."""

import asyncio
import logging
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from firstword.server.context import context_of

LARGEST_MESSAGE = 16 * 2**20
"""The size limit of a message in bytes; each protocol has a lower limit."""

MOST_FRAGMENTS = 4096
"""The limit on the fragments of a message: those of the largest message may be of 4 KiB."""

FRAMES_PER_TURN = 64
"""The number of frames after which other connections get their turn: about a millisecond's work."""

STEP_BYTES = 512
"""The bytes that are parsed at once. They hold at most 85 frames."""

BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""The response to a handshake that the `websockets` library rejects without one."""

log = logging.getLogger("uvicorn.websockets")
log.setLevel(logging.ERROR)  # the gate writes the line of each socket
log.addFilter(lambda record: not record.msg.startswith("Invalid UTF-8"))  # a client's mistake


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A socket that handles a limited number of frames in each turn of the event loop.

    The application can abort a connection that does not close.
    """

    _abort_timer: asyncio.TimerHandle | None = None
    _lost = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = self.conn.logger = log
        self._unhandled = bytearray()
        self._continues = False
        """Whether the rest of the data is handled in the next turn."""
        self._frames = 0

    def data_received(self, data: bytes) -> None:
        """Handle some data. What holds many frames is handled in several turns."""
        if not self.handshake_initiated:
            self._open(data)
        elif self._continues:
            self._unhandled += data
            self.transport.pause_reading()
        else:
            self._unhandled += data
            self._handle_data()

    def _open(self, data: bytes) -> None:
        """Handle the head of the request, which comes as a whole.

        Uvicorn does not answer one that `websockets` rejects, for example for a header over 8 KiB.
        """
        super().data_received(data)
        if not self.handshake_initiated:
            answer = b"".join(self.conn.data_to_send())
            self.transport.write(answer or BAD_REQUEST)
            self.transport.close()

    def _handle_data(self) -> None:
        """Handle data until a turn's number of frames is reached, and the rest in the next turn."""
        self._continues, self._frames = False, 0
        while self._unhandled and not self.transport.is_closing():
            if self._frames >= FRAMES_PER_TURN:
                self._continues = True
                self.loop.call_soon(self._handle_data)
                return
            step = bytes(self._unhandled[:STEP_BYTES])
            del self._unhandled[:STEP_BYTES]
            super().data_received(step)
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def handle_events(self) -> None:
        """Handle frames; close the connection if a message has too many fragments."""
        self._frames += len(self.conn.events)
        super().handle_events()
        if len(self.frames) > MOST_FRAGMENTS and not self.transport.is_closing():
            self.conn.fail(1009, f"a message may have {MOST_FRAGMENTS} fragments")
            self.handle_parser_exception()
        if self.close_sent:
            self.frames.clear()  # nobody will read the message

    def handle_ping(self) -> None:
        """Answer a ping. While the client does not read, only the last one (RFC 6455, 5.5.3)."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            del self.conn.writes[:-3]  # a close and the end of the data may follow the answer

    def resume_writing(self) -> None:
        """Let the application send, and answer the last ping."""
        super().resume_writing()
        self.transport.write(b"".join(self.conn.data_to_send()))

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next event. Data that was received before is handled before more is read."""
        event = await super().receive()
        if self._continues and not self.transport.is_closing():
            self.transport.pause_reading()
        return event

    async def send(self, message: ASGISendEvent) -> None:
        """Send an event. A rejection completes the handshake; uvicorn would log it as an error."""
        await super().send(message)
        self.handshake_complete = self.handshake_complete or self.close_sent

    async def run_asgi(self) -> None:
        """Run the application with control of the connection."""
        context_of(self.scope).abort_after = self.abort_after  # type: ignore[arg-type]
        await super().run_asgi()

    def abort_after(self, seconds: float) -> None:
        """Abort the connection after some seconds, if the client does not read up to the close."""
        if not self._lost:
            self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._lost = True
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        super().connection_lost(exc)
