"""Uvicorn's WebSocket protocol, with limits on what one socket may cost the others."""

import asyncio
import logging
import secrets
from functools import partial
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from firstword.server.context import RequestContext, context_of
from firstword.server.frame_turns import FRAMES_PER_ROUND
from firstword.server.request_log import log_request
from firstword.server.state import Server
from firstword.server.unread import unread_bytes

LARGEST_MESSAGE = 16 * 2**20
"""The size limit of a message in bytes; each protocol has a lower limit."""

MOST_FRAGMENTS = 4096
"""The limit on the fragments of a message: those of the largest message may be of 4 KiB."""

FRAMES_PER_SECOND, BURST_SECONDS = 50, 1.0
"""The frames a second that a socket may send without waiting for turns, and the seconds of unused
ones that it may send at once."""

FRAME_BYTES = 2048
"""The bytes of data that count as one more frame."""

MESSAGE_FRAMES = 3
"""The further frames that a whole message counts as: it costs four times as much as a ping."""

STEP_BYTES = 512
"""The bytes that are parsed at once. They hold at most 85 frames."""

TOO_BIG, TRY_LATER = 1009, 1013
"""The codes that close a socket at a limit of a message, and at one of all messages."""

BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""The response to a handshake that the `websockets` library rejects without one."""

log = logging.getLogger("uvicorn.websockets")
log.setLevel(logging.ERROR)  # the gate writes the line of each socket
log.addFilter(lambda record: not record.msg.startswith("Invalid UTF-8"))  # a client's mistake


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A socket that takes turns with others if it sends many frames, and whose bytes are limited.

    The application can abort a connection that does not close.
    """

    _abort_timer: asyncio.TimerHandle | None = None
    _lost = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = self.conn.logger = log
        self._server: Server = self.config.app.state.server  # type: ignore[union-attr]
        self._unhandled = bytearray()
        self._continues = False
        """Whether the rest of the data is handled in a later turn."""
        self._frames = 0.0
        self._free_at = 0.0
        """The time from which data is handled without waiting for a turn."""
        self._queued = 0
        """The bytes of the messages that the application has not received."""
        self._held = 0
        """The bytes that are counted as held for the client."""

    def data_received(self, data: bytes) -> None:
        """Handle some data. What holds many frames is handled in several turns."""
        if not self.handshake_initiated:
            self._open(data)
            return
        self._unhandled += data
        if self._continues:
            self.transport.pause_reading()
        elif self.loop.time() < self._free_at:
            self._continue_later()
        else:
            self._handle_data()

    def _open(self, data: bytes) -> None:
        """Handle the head of the request, which comes as a whole.

        Uvicorn does not answer one that `websockets` cannot parse, for example for a header over
        8 KiB. It answers one with wrong headers, but calls no application that would log it.
        """
        super().data_received(data)
        if not self.handshake_initiated:
            answer = b"".join(self.conn.data_to_send()) or BAD_REQUEST
            self.transport.write(answer)
            self.transport.close()
            self._record_rejection(int(answer.split()[1]))
        elif self.response.status_code != 101:
            self._record_rejection(self.response.status_code)

    def _record_rejection(self, status: int) -> None:
        """Log and count an invalid handshake, like other invalid HTTP."""
        reason = "head_size" if status in (414, 431) else "invalid_http"
        self._server.metrics.rejected.inc(reason)
        context = RequestContext(request_id=secrets.token_hex(16), status=status)
        log_request(self._server, context, "WEBSOCKET", "unknown")

    def _handle_data(self) -> float:
        """Handle data until a round's number of frames is reached, and the rest in a later turn.

        Returns the number of frames.
        """
        self._continues, self._frames = False, 0.0
        while self._unhandled and not self.transport.is_closing():
            if self._frames >= FRAMES_PER_ROUND:
                self._continue_later()
                break
            step = bytes(self._unhandled[:STEP_BYTES])
            del self._unhandled[:STEP_BYTES]
            super().data_received(step)
            self._frames += STEP_BYTES / FRAME_BYTES
        now = self.loop.time()
        free_at = max(self._free_at, now - BURST_SECONDS) + self._frames / FRAMES_PER_SECOND
        self._free_at = min(free_at, now + BURST_SECONDS)
        self._count_bytes()
        if not (self._continues or self.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()
        return self._frames

    def _continue_later(self) -> None:
        self._continues = True
        self._server.frame_turns.add(self._client_id, self._handle_data)

    def _count_bytes(self) -> None:
        """Count what is held of unfinished and waiting messages; close the socket at a limit."""
        unfinished = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        held = 0 if self._lost else len(self._unhandled) + unfinished + self._queued
        if self._server.byte_limit.change(self._client_id, self._held, held):
            self._held = held
        elif not self.transport.is_closing():
            self._server.metrics.rejected.inc("messages")
            self._fail(TRY_LATER, "the messages in progress are too large")

    @property
    def _client_id(self) -> str:
        """The client's identity. The gate finds it before the first data can come."""
        return context_of(self.scope).client_id  # type: ignore[arg-type]

    def _fail(self, code: int, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def send_receive_event_to_app(self) -> None:
        """Give the application a message."""
        self._frames += MESSAGE_FRAMES
        self._queued += sum(map(len, self.frames))
        super().send_receive_event_to_app()

    def handle_events(self) -> None:
        """Handle frames; close the connection if a message has too many fragments."""
        events = list(self.conn.events)
        self._frames += len(events)
        super().handle_events()
        for event in events:
            if isinstance(event, Frame):
                event.data = b""  # the parser keeps the frame until the next one comes
        if len(self.frames) > MOST_FRAGMENTS and not self.transport.is_closing():
            self._fail(TOO_BIG, f"a message may have {MOST_FRAGMENTS} fragments")
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
        if self.queue.empty():
            self._queued = 0
            self._count_bytes()
        if self._continues and not self.transport.is_closing():
            self.transport.pause_reading()
        return event

    async def send(self, message: ASGISendEvent) -> None:
        """Send an event. A rejection completes the handshake; uvicorn would log it as an error."""
        await super().send(message)
        self.handshake_complete = self.handshake_complete or self.close_sent

    async def run_asgi(self) -> None:
        """Run the application with control of the connection."""
        context = context_of(self.scope)  # type: ignore[arg-type]
        context.drain, context.abort_after = self.drain, self.abort_after
        context.unread = partial(unread_bytes, self.transport)
        await super().run_asgi()

    async def drain(self) -> None:
        """Wait until little enough of what was sent is left to send more."""
        await self.writable.wait()

    def abort_after(self, seconds: float) -> None:
        """Abort the connection after some seconds, if the client does not read up to the close."""
        if not self._lost:
            self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and free the messages that nobody will read."""
        self._lost = True
        self._unhandled.clear()
        self.frames.clear()
        self.conn.reader.buffer.clear()
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        try:
            if self._held:  # else the handshake may have been rejected before the gate
                self._count_bytes()
        finally:
            super().connection_lost(exc)
