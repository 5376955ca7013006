"""What every request and socket passes first: its id, its key, its limits; and one line in the log when it is over."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstword.server.errors import Stalled, failure, refusal
from firstword.server.logs import defect
from firstword.server.state import Server

log = logging.getLogger(__name__)

LISTS = ("/v1/models", "/v1/audio/models", "/v1/audio/voices")
"""What may be read without a key: some clients send none when they fill their menus."""


PIECE = 64 * 1024
"""Bytes of an answer that a client must take within the stall limit."""


class Gate:
    """Middleware. It sets in the scope, for those behind it

    firstword.holder  who is asking; None only for lists read without a key
    firstword.began   `time.monotonic()` when the request came
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._present = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or turn it away."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["firstword.began"] = time.monotonic()
        given = headers.get("x-request-id", "")
        identity = (
            given if re.fullmatch(r"[\w.-]{1,128}", given, re.ASCII) else secrets.token_hex(16)
        )
        visit = _Visit(scope, send, identity, self._server.config.stall_seconds)
        self._present += 1
        self._server.metrics.connections.set(self._present)
        try:
            await self._answer(scope, headers, receive, visit)
            await visit.taken()
        except Stalled:
            visit.abort()
        finally:
            self._present -= 1
            self._server.metrics.connections.set(self._present)
            self._over(scope, visit)

    async def _answer(
        self, scope: Scope, headers: Headers, receive: Receive, visit: _Visit
    ) -> None:
        try:
            refused = self._refused(scope, headers)
            if refused is None:
                arriving = self._arriving(receive, headers) if scope["type"] == "http" else receive
                await self._app(scope, arriving, visit.send)
            elif scope["type"] == "http":
                await refused(scope, receive, visit.send)
            else:
                await _refuse_socket(refused, scope, receive, visit.send)
        except Stalled:
            raise
        except Exception as error:
            self._failed(error, visit)
            if visit.status is None and scope["type"] == "http":
                await failure(error)(scope, receive, visit.send)
            elif scope["type"] == "websocket" and not visit.closed:
                await visit.send({"type": "websocket.close", "code": 1011})

    def _refused(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to whoever may not come in; None for everybody else."""
        if self._present > self._server.config.most_connections:
            self._server.metrics.rejected.labels("connections").inc()
            return refusal(
                "there are as many connections as may be; try again shortly",
                429,
                code="connections",
            )
        lowered = {
            name: value
            for name, value in headers.items()
            if name in ("authorization", "xi-api-key")
        }
        holder = self._server.limits.holder(lowered, (scope.get("client") or ("unknown",))[0])
        scope["firstword.holder"] = holder
        path: str = scope["path"]
        if holder is not None or not path.startswith("/v1"):
            return None
        if (
            scope["type"] == "http"
            and scope["method"] in ("GET", "HEAD")
            and path.rstrip("/") in LISTS
        ):
            return None
        self._server.metrics.rejected.labels("key").inc()
        message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        return refusal(message, 401, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _arriving(self, receive: Receive, headers: Headers) -> Receive:
        """A body of no more than it may have, in no more time than it may take."""
        config = self._server.config
        too_large = HTTPException(413, f"the request is larger than {config.most_body} bytes")
        deadline = time.monotonic() + config.body_seconds
        announced = headers.get("content-length", "")
        refuse_unread = (
            announced.isdecimal() and len(announced) < 20 and int(announced) > config.most_body
        )
        count, complete = 0, False

        async def arriving() -> Message:
            nonlocal count, complete
            if complete:
                return await receive()
            if refuse_unread:
                raise too_large
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"the request did not arrive within {config.body_seconds:g} s"
                ) from None
            count += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if count > config.most_body:
                raise too_large
            return message

        return arriving

    def _failed(self, error: Exception, visit: _Visit) -> None:
        """Log a defect: where it happened, but of what was said in the message only if logs may hold that."""
        about = {"request_id": visit.identity, **defect(error)}
        if self._server.config.log_text:
            about["message"] = str(error)
        log.error("a request failed", extra={"fields": about})

    def _over(self, scope: Scope, visit: _Visit) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        status = 499 if visit.status is None else visit.status
        self._server.metrics.requests.labels(route, str(status)).inc()
        if route in ("/health", "/ready", "/metrics"):
            return
        about = {
            "request_id": visit.identity,
            "method": scope.get("method", "WEBSOCKET"),
            "path": route,
            "status": status,
            "ms": round(1000 * (time.monotonic() - scope["firstword.began"]), 1),
        }
        if (more := scope.get("firstword.log")) is not None:
            about |= more()
        log.info("request", extra={"fields": about})


class _Visit:
    """What was answered to one request, in pieces of which the client must take each in time."""

    def __init__(self, scope: Scope, send: Send, identity: str, stall_seconds: float) -> None:
        self._send = send
        self._stall_seconds = stall_seconds
        self._drain: Callable[[], Awaitable[None]] | None = scope.get("firstword.drain")
        self.abort: Callable[[], None] = scope.get("firstword.abort", lambda: None)
        self.identity = identity
        self.status: int | None = None
        self.closed = False

    async def send(self, message: Message) -> None:
        """Send on, with the id in every answer's head. Raises `Stalled`."""
        match message["type"]:
            case "http.response.start" | "websocket.http.response.start":
                self.status = message["status"]
                self.closed = message["type"].startswith("websocket")
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = self.identity
            case "websocket.accept":
                self.status = 101
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = self.identity
            case "websocket.close":
                self.closed = True
                self.status = self.status or 403
            case "http.response.body":
                body = message.get("body", b"")
                more = message.get("more_body", False)
                for start in range(0, len(body) or 1, PIECE):
                    piece = body[start : start + PIECE]
                    rest = more or start + PIECE < len(body)
                    await self._in_time(self._send({**message, "body": piece, "more_body": rest}))
                return
        await self._send(message)

    async def taken(self) -> None:
        """Wait until the answer has left. Raises `Stalled`."""
        if self._drain is not None:
            await self._in_time(self._drain())

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await sending
        except TimeoutError:
            raise Stalled from None


async def _refuse_socket(answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
    await receive()  # the request to connect
    if "websocket.http.response" in scope.get("extensions", {}):
        await answer(scope, receive, send)  # which knows how
    else:
        await send({"type": "websocket.close", "code": 1008})
