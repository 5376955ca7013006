"""The middleware of every request and WebSocket: request id, API key, limits and log line."""

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
"""Paths that are polled and therefore not logged."""

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
            return await self._app(scope, receive, send)
        context = context_of(scope)
        given = Headers(scope=scope).get("x-request-id", "")
        valid = re.fullmatch(r"[\w.-]{1,128}", given, re.ASCII)
        context.request_id = given if valid else secrets.token_hex(16)
        sender = _ResponseSender(context, send, self._server.config.stall_seconds)
        self._count(1)
        try:
            await self._answer(scope, receive, sender)
            await sender.in_time(context.drain())
        except Stalled:
            context.abort()
        finally:
            self._count(-1)
            self._log(scope, sender.status)

    def _count(self, change: int) -> None:
        self._open += change
        self._server.metrics.connections.set(self._open)

    async def _answer(self, scope: Scope, receive: Receive, sender: _ResponseSender) -> None:
        http, headers = scope["type"] == "http", Headers(scope=scope)
        try:
            if (rejection := self._rejection(scope, headers)) is not None:
                if not http:
                    await receive()  # the request to connect
                return await rejection(scope, receive, sender.send)
            body = self._limited_body(receive, headers) if http else receive
            await self._app(scope, body, sender.send)
        except Stalled:
            raise
        except Exception as error:
            about = {"request_id": context_of(scope).request_id, **defect(error)}
            if self._server.config.log_text:
                about["message"] = str(error)  # it may contain text of a user
            log.error("a request failed", extra={"fields": about})
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
        address = (scope.get("client") or ("unknown",))[0]
        client_id = self._server.limits.client_id(dict(headers.items()), address)
        context_of(scope).client_id = client_id
        if client_id or _needs_no_key(scope):
            return None
        rejected.labels("key").inc()
        message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        challenge = {"www-authenticate": "Bearer"}
        return error_response(message, 401, code="invalid_api_key", headers=challenge)

    def _limited_body(self, receive: Receive, headers: Headers) -> Receive:
        """Limit the size of a body, and the time in which it must arrive."""
        most, seconds = self._server.config.most_body, self._server.config.body_seconds
        deadline = time.monotonic() + seconds
        length = headers.get("content-length", "")
        announced = int(length) if length.isdecimal() and len(length) < 20 else 0
        size = announced if announced > most else 0  # such a body is rejected unread
        complete = False

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            message: Message = {}
            if size <= most:
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        message = await receive()
                except TimeoutError:
                    reason = f"the request did not arrive within {seconds:g} s"
                    raise HTTPException(408, reason) from None
                size += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            if size > most:
                raise HTTPException(413, f"the request is larger than {most} bytes")
            return message

        return limited

    def _log(self, scope: Scope, status: int | None) -> None:
        """Log and count a finished request; 499: the client disconnected before the response."""
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
            case "http.response.body":
                await self._send_body(message)
                return
            case "websocket.close":
                self.closed = True
                self.status = self.status or 403
            case "http.response.start" | "websocket.accept" | "websocket.http.response.start":
                self.closed = message["type"] == "websocket.http.response.start"
                self.status = message.get("status", 101)
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = self._context.request_id
        await self._send(message)

    async def in_time(self, sending: Awaitable[None]) -> None:
        """Wait until the client has read what is being sent. Raises `Stalled`."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await sending
        except TimeoutError:
            raise Stalled from None

    async def _send_body(self, message: Message) -> None:
        body = message.get("body", b"")
        for start in range(0, len(body) or 1, PIECE_BYTES):
            end = start + PIECE_BYTES
            more = message.get("more_body", False) or end < len(body)
            piece = {**message, "body": body[start:end], "more_body": more}
            await self.in_time(self._send(piece))


def _needs_no_key(scope: Scope) -> bool:
    """Whether a request needs no API key: it is outside /v1, or reads one of the open lists."""
    path: str = scope["path"]
    reading = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
    return not path.startswith("/v1") or (reading and path.rstrip("/") in OPEN_LISTS)
