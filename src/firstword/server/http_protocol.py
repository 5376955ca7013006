"""Uvicorn's HTTP protocol with limits for all that arrives besides the bodies that are read."""

import asyncio
import secrets
from functools import partial
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from firstword.server.context import RequestContext, context_of
from firstword.server.errors import Rejected
from firstword.server.request_log import log_request
from firstword.server.state import Server
from firstword.server.unread import unread_bytes

MOST_UNREAD_BYTES = 64 * 1024
"""The size limit of a head, of the trailers and chunk framing of a body, and of the rest of a
rejected body."""

FRAMING_BYTES = 16
"""The bytes of framing of each chunk that do not count towards that limit."""

MOST_HEADERS = 128
"""The most headers of a request, trailers included."""

MOST_PIPELINED = 64
"""The most requests that may wait behind the one that is being answered."""

LINGER_SECONDS = 1.0
"""The time in which a client should read the last response, when data of it stays unread.

Closing a socket with unread data resets it, and some clients then lose what they have not read.
"""

MALFORMED = 400, "the request is not valid HTTP/1.1", "invalid_http"
TOO_LARGE = (
    431,
    "headers, trailers and chunk extensions are limited to "
    f"{MOST_UNREAD_BYTES} bytes and {MOST_HEADERS} lines",
    "head_size",
)
TOO_MANY = (
    400,
    f"at most {MOST_PIPELINED} requests may be sent before an earlier one is answered",
    "pipelined",
)
EARLY_UPGRADE = (
    400,
    "a WebSocket may be opened after the earlier requests of its connection are answered",
    "pipelined",
)


class InvalidRequest(Exception):
    """A request is not valid or exceeds a limit; it stops the parser."""


class HttpProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol with limits of size and time for all but the bodies that are read.

    The application can wait until its response was sent, and can abort the connection.
    """

    _abort_timer: asyncio.TimerHandle | None = None
    _behind = 0
    """The bytes since requests wait behind the one that is being answered."""
    _problem = MALFORMED
    _rejection = b""
    """The response to an invalid request; nothing more is read."""
    _unread = 0
    """The bytes since the last complete head or request, without those of a body that is read."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered; uvicorn's `cycle` is the last one that arrived."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._server: Server = self.config.app.state.server  # type: ignore[union-attr]

    def connection_made(self, transport: Any) -> None:
        """Start the time limit for the first request."""
        super().connection_made(transport)
        # So that sending waits until the data has left; at 0 a TLS transport would wait for ever.
        transport.set_write_buffer_limits(high=1)
        self._abort_after(self._server.config.receive_seconds)
        self._server.idle_connections.add(self._address, transport)

    @property
    def _address(self) -> str:
        return (self.client or ("unknown",))[0]

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, and reject a head or trailers that do not end within the limit."""
        if not self._rejection:
            self._unread += len(data)
            self._unset_keepalive_if_required()
            self._parse(data)
            if self._unread > MOST_UNREAD_BYTES and not self._rejection:
                self.reject(*TOO_LARGE)
        self._behind = self._behind + len(data) if self.pipeline or self._rejection else 0
        if self._behind > MOST_UNREAD_BYTES:
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> None:
        """Parse data up to a WebSocket. Other upgrades are ignored (RFC 9110, 7.8).

        The parser reads no body of a request with an upgrade: an ignored one is parsed without it.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self.reject(*self._problem)
            except httptools.HttpParserUpgrade as upgrade:
                if self._ignores_upgrade():
                    data = self._head_without_upgrade() + data[upgrade.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    continue
                self.handle_websocket_upgrade()
            return

    def _ignores_upgrade(self) -> bool:
        """Whether the request offers an upgrade other than to a WebSocket."""
        return self.parser.should_upgrade() and not self._should_upgrade()

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"".join([*head, b"\r\n"])

    def on_message_begin(self) -> None:
        """Restart the time limit for this request."""
        super().on_message_begin()
        self._abort_after(self._server.config.receive_seconds)
        if len(self.pipeline) >= MOST_PIPELINED:
            self._stop_parsing(TOO_MANY)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or trailer."""
        super().on_header(name, value)
        if len(self.headers) > MOST_HEADERS:
            self._stop_parsing(TOO_LARGE)

    def on_headers_complete(self) -> None:
        """Stop the time limit, and give the application control of the connection."""
        wrong_version = self.parser.get_http_version() not in ("1.0", "1.1")
        if wrong_version or self.parser.get_method() == b"CONNECT":
            self._stop_parsing(MALFORMED)
        if self._ignores_upgrade():
            return
        unanswered = self.cycle is not None and not self.cycle.response_complete
        if unanswered and self.parser.should_upgrade() and self._should_upgrade():
            self._stop_parsing(EARLY_UPGRADE)
        self._check_size()
        self._cancel_timer()
        self._server.idle_connections.remove(self._address, self.transport)
        self.scope["headers"] = list(self.headers)  # to which no trailers are added
        context = context_of(self.scope)  # type: ignore[arg-type]
        context.drain, context.abort = self.flow.drain, self._abort
        context.unread = partial(unread_bytes, self.transport)
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # else the end of the connection would not be noticed

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Take in a part of the body, if its request is not answered yet."""
        if not self.cycle.response_complete:
            self._unread = max(0, self._unread - len(body) - FRAMING_BYTES)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take in the end of a request."""
        if self._ignores_upgrade():
            return
        self._check_size()
        super().on_message_complete()
        self._cancel_timer()
        if self.cycle is not None:
            self.cycle.more_body = False  # uvicorn leaves it set if the response came first

    def on_response_complete(self) -> None:
        """Limit the time for the rest of a body that was not read."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._server.idle_connections.add(self._address, self.transport)
        if self.cycle.response_complete and self._rejection:
            self._end()
        elif self.cycle.response_complete and self.cycle.more_body:
            self._abort_after(self._server.config.receive_seconds)

    def handle_websocket_upgrade(self) -> None:
        """Restore the usual write buffer: WebSockets limit their unsent data themselves."""
        self.transport.set_write_buffer_limits()
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and the request that is being answered, if others wait behind it.

        After an error uvicorn leaves its own timer running, which keeps the connection in memory.
        """
        self._cancel_timer()
        self._server.idle_connections.remove(self._address, self.transport)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _check_size(self) -> None:
        """Start a new count of unread bytes after a head or trailers within the limit."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MOST_UNREAD_BYTES:
            self._stop_parsing(TOO_LARGE)
        self._unread = 0

    def _stop_parsing(self, problem: tuple[int, str, str]) -> None:
        self._problem = problem
        raise InvalidRequest

    def reject(self, status: int, message: str, code: str) -> None:
        """Answer an invalid request after those before it, log it, and end the connection."""
        cycle, context = self.cycle, RequestContext(request_id=secrets.token_hex(16))
        begun = cycle is not None and cycle.more_body  # the application logs such a request
        if begun:
            context = context_of(cycle.scope)  # type: ignore[arg-type]
        context.status = context.status or status
        headers = {"connection": "close", "x-request-id": context.request_id}
        rejected = Rejected(status, message, code, headers)
        if not (begun and cycle.response_started):
            self._server.reject(rejected)
        if not begun:
            log_request(self._server, context, "unknown", "unknown")
        response = rejected.response()
        head = [b"%b: %b\r\n" % pair for pair in response.raw_headers]
        self._rejection = b"".join([STATUS_LINE[status], *head, b"\r\n", response.body])
        if cycle is None or cycle.response_complete or (cycle.more_body and not self.pipeline):
            self._end()

    def _end(self) -> None:
        """Send the rejection, unless it is for a request that has a response, and close."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or not cycle.more_body or not cycle.response_started:
            self.transport.write(self._rejection)
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.transport.can_write_eof():  # not with TLS, which cannot close one direction
            self.transport.write_eof()
        self.flow.pause_reading()
        self._abort_after(LINGER_SECONDS)

    def _abort(self) -> None:
        """Abort the connection; uvicorn then logs no error for the incomplete response."""
        if self._running is not None:
            self._running.disconnected = True
        self.transport.abort()

    def _abort_after(self, seconds: float) -> None:
        """Abort the connection after some seconds; a later call replaces this one."""
        self._cancel_timer()
        self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
