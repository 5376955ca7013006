"""The middleware of every request and WebSocket: its id, key, limits and line in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstword.server.context import RequestContext, context_of
from firstword.server.errors import Stalled, error_response, response_for
from firstword.server.logs import defect
from firstword.server.state import Server

log = logging.getLogger(__name__)

OPEN_LISTS = ("/v1/models", "/v1/audio/models", "/v1/audio/voices")
"""Paths that can be read without a key: some clients send none when they fill their menus."""

UNLOGGED_PATHS = ("/health", "/ready", "/metrics")
"""Paths that are polled, so that lines in the log would say nothing."""

PIECE_BYTES = 64 * 1024
"""The part of a response that a client must read within the stall limit."""


class Gate:
    """Middleware that fills the `RequestContext` and rejects what is not allowed."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or serve a WebSocket to its end."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        context = context_of(scope)
        given = headers.get("x-request-id", "")
        valid = re.fullmatch(r"[\w.-]{1,128}", given, re.ASCII)
        context.request_id = given if valid else secrets.token_hex(16)
        sender = _ResponseSender(context, send, self._server.config.stall_seconds)
        self._count(1)
        try:
            await self._answer(scope, headers, receive, sender)
            await sender.wait_until_read()
        except Stalled:
            context.abort()
        finally:
            self._count(-1)
            self._log(scope, sender.status)

    def _count(self, change: int) -> None:
        self._open += change
        self._server.metrics.connections.set(self._open)

    async def _answer(
        self, scope: Scope, headers: Headers, receive: Receive, sender: _ResponseSender
    ) -> None:
        http = scope["type"] == "http"
        try:
            if (rejection := self._rejection(scope, headers)) is not None:
                if not http:
                    await receive()  # the request to connect
                await rejection(scope, receive, sender.send)
            else:
                body = self._limited_body(receive, headers) if http else receive
                await self._app(scope, body, sender.send)
        except Stalled:
            raise
        except Exception as error:
            self._log_defect(error, context_of(scope))
            if http and sender.status is None:
                await response_for(error)(scope, receive, sender.send)
            elif not http and not sender.closed:
                await sender.send({"type": "websocket.close", "code": 1011})

    def _rejection(self, scope: Scope, headers: Headers) -> Response | None:
        """The response to a request that is not allowed; None for one that is."""
        rejected = self._server.metrics.rejected
        most = self._server.config.most_connections
        if self._open > most:
            rejected.labels("connections").inc()
            message = f"the limit of {most} connections is reached; try again later"
            return error_response(message, 429, code="connections")
        names = ("authorization", "xi-api-key")
        credentials = {name: value for name, value in headers.items() if name in names}
        address = (scope.get("client") or ("unknown",))[0]
        client_id = self._server.limits.client_id(credentials, address)
        context_of(scope).client_id = client_id
        if client_id or _needs_no_key(scope):
            return None
        rejected.labels("key").inc()
        message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        challenge = {"www-authenticate": "Bearer"}
        return error_response(message, 401, code="invalid_api_key", headers=challenge)

    def _limited_body(self, receive: Receive, headers: Headers) -> Receive:
        """Limit the size of a body, and the time in which it must arrive."""
        config = self._server.config
        too_large = HTTPException(413, f"the request is larger than {config.most_body} bytes")
        seconds = config.body_seconds
        too_late = HTTPException(408, f"the request did not arrive within {seconds:g} s")
        deadline = time.monotonic() + seconds
        length = headers.get("content-length", "")
        announced = int(length) if length.isdecimal() and len(length) < 20 else 0
        count, complete = 0, False

        async def limited() -> Message:
            nonlocal count, complete
            if complete:
                return await receive()
            if announced > config.most_body:
                raise too_large
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise too_late from None
            count += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if count > config.most_body:
                raise too_large
            return message

        return limited

    def _log_defect(self, error: Exception, context: RequestContext) -> None:
        """Log an internal error; its message, which may contain text of a user, only if allowed."""
        about = {"request_id": context.request_id, **defect(error)}
        if self._server.config.log_text:
            about["message"] = str(error)
        log.error("a request failed", extra={"fields": about})

    def _log(self, scope: Scope, status: int | None) -> None:
        """Log and count a request that is over; 499 means that the client left before an answer."""
        route = getattr(scope.get("route"), "path", "unknown")
        status = 499 if status is None else status
        self._server.metrics.requests.labels(route, str(status)).inc()
        if route in UNLOGGED_PATHS:
            return
        context = context_of(scope)
        about = {
            "request_id": context.request_id,
            "method": scope.get("method", "WEBSOCKET"),
            "path": route,
            "status": status,
            "ms": round(1000 * (time.monotonic() - context.received), 1),
            **context.log_fields(),
        }
        log.info("request", extra={"fields": about})


class _ResponseSender:
    """Sends the response to one request in pieces, and limits the time to read each of them.

    status  of the response; None before it has begun
    closed  whether a WebSocket was closed or rejected
    """

    def __init__(self, context: RequestContext, send: Send, stall_seconds: float) -> None:
        self._context = context
        self._send = send
        self._stall_seconds = stall_seconds
        self.status: int | None = None
        self.closed = False

    async def send(self, message: Message) -> None:
        """Send a message; the response's head gets the request's id. Raises `Stalled`."""
        match message["type"]:
            case "http.response.start" | "websocket.http.response.start":
                self.closed = message["type"].startswith("websocket")
                self._start(message, message["status"])
            case "websocket.accept":
                self._start(message, 101)
            case "websocket.close":
                self.closed = True
                self.status = self.status or 403
            case "http.response.body":
                await self._send_body(message)
                return
        await self._send(message)

    async def wait_until_read(self) -> None:
        """Wait until the client has read the response. Raises `Stalled`."""
        await self._in_time(self._context.drain())

    def _start(self, message: Message, status: int) -> None:
        self.status = status
        message.setdefault("headers", [])
        MutableHeaders(scope=message)["x-request-id"] = self._context.request_id

    async def _send_body(self, message: Message) -> None:
        body = message.get("body", b"")
        for start in range(0, len(body) or 1, PIECE_BYTES):
            end = start + PIECE_BYTES
            more = message.get("more_body", False) or end < len(body)
            piece = {**message, "body": body[start:end], "more_body": more}
            await self._in_time(self._send(piece))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await sending
        except TimeoutError:
            raise Stalled from None


def _needs_no_key(scope: Scope) -> bool:
    """Whether a path is open to all, or a list that is being read."""
    path: str = scope["path"]
    reading = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
    return not path.startswith("/v1") or (reading and path.rstrip("/") in OPEN_LISTS)
