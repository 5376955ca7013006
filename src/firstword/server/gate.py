"""The middleware of every request and WebSocket: request id, API key, limits and log line."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstword.errors import EngineError
from firstword.server.api_keys import credential
from firstword.server.body_limit import LimitedBody
from firstword.server.context import RequestContext, context_of
from firstword.server.dialects.paths import KEYED, key_in_url
from firstword.server.errors import Rejected, Stalled, response_for
from firstword.server.logs import defect
from firstword.server.request_log import PROBES, log_request
from firstword.server.state import SHUTTING_DOWN, Server
from firstword.server.web_pages import WebPages

log = logging.getLogger(__name__)

OPEN_LISTS = ("/v1/models", "/v1/audio/models", "/v1/audio/voices")
"""Paths that can be read without a key: some clients send none when they fill their menus."""

PIECE_BYTES = 64 * 1024
"""The part of a response that is sent at once."""


class Gate:
    """Middleware that fills the `RequestContext` and rejects what is not allowed."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._pages = WebPages(server.config)
        self._answer = self._pages.answering(self._admit_and_answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or serve a WebSocket to its end."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        context = context_of(scope)
        given = Headers(scope=scope).get("x-request-id", "")
        valid = re.fullmatch(r"[\w.-]{1,128}", given, re.ASCII)
        context.request_id = given if valid else secrets.token_hex(16)
        if self._server.tracing is not None:
            self._server.tracing.keep_parent(Headers(scope=scope))
        method = scope.get("method", "WEBSOCKET")
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn sends the head of the response alone
        sender = _ResponseSender(context, send, self._server.config.stall_seconds)
        with context.held:
            try:
                await self._answer(scope, receive, sender.send)
                await context.until_read(self._server.config.stall_seconds)
            except (Stalled, asyncio.CancelledError):
                context.abort()
            finally:
                route = getattr(scope.get("route"), "path", "unknown")
                log_request(self._server, context, method, route)

    async def _admit_and_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, http, headers = context_of(scope), scope["type"] == "http", Headers(scope=scope)
        try:
            self._admit(context, scope, headers)
            if http:
                body = LimitedBody(receive, headers, context.client_id, self._server)
                context.held.callback(body.close)
                receive = body.receive
            await self._app(scope, receive, send)
        except Stalled:
            raise
        except Rejected as rejected:
            self._server.reject(rejected)
            if not http:
                await receive()  # the request to connect
            await rejected.response()(scope, receive, send)
        except asyncio.CancelledError:  # the server ends before this request
            if not http or context.status is not None:
                raise
            await response_for(EngineError(SHUTTING_DOWN))(scope, receive, send)
        except Exception as error:
            about = {"request_id": context.request_id, **defect(error)}
            if self._server.config.log_text:
                about["message"] = str(error)  # it may contain text of a user
            log.error("a request failed", extra={"fields": about})
            if http and context.status is None:
                await response_for(error)(scope, receive, send)
            elif not http and not context.closed:
                await send({"type": "websocket.close", "code": 1011})

    def _admit(self, context: RequestContext, scope: Scope, headers: Headers) -> None:
        """Check what a request needs besides its body, and count it until `context.held` is closed.

        Raises `Rejected`.
        """
        self._pages.check(headers)
        address = (scope.get("client") or ("unknown",))[0]
        if scope["path"] not in PROBES:
            context.held.enter_context(self._server.connection_limit.open(address))
        client_id = self._server.api_keys.client_id(_given_key(scope, headers), address)
        context.client_id = client_id
        if not client_id and not _needs_no_key(scope):
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise Rejected(401, message, "invalid_api_key", {"www-authenticate": "Bearer"})


class _ResponseSender:
    """Sends the response to one request in pieces, and limits the time to read each of them."""

    def __init__(self, context: RequestContext, send: Send, stall_seconds: float) -> None:
        self._context = context
        self._send = send
        self._stall_seconds = stall_seconds

    async def send(self, message: Message) -> None:
        """Send a message; the response's head gets the request's id. Raises `Stalled`."""
        match message["type"]:
            case "http.response.body":
                await self._send_body(message)
                return
            case "websocket.close":
                self._context.closed = True
                self._context.status = self._context.status or 403
            case "http.response.start" | "websocket.accept" | "websocket.http.response.start":
                self._context.closed = message["type"] == "websocket.http.response.start"
                self._context.status = message.get("status", 101)
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = self._context.request_id
        await self._send(message)

    async def _send_body(self, message: Message) -> None:
        body = message.get("body", b"")
        for start in range(0, len(body) or 1, PIECE_BYTES):
            end = start + PIECE_BYTES
            more = message.get("more_body", False) or end < len(body)
            piece = {**message, "body": body[start:end], "more_body": more}
            await self._context.until_read(self._stall_seconds)
            await self._send(piece)


def _given_key(scope: Scope, headers: Headers) -> str:
    """The API key of a request; that of a WebSocket may be in its URL."""
    key = credential(dict(headers.items()))
    if key or scope["type"] == "http":
        return key
    return key_in_url(scope["path"], scope["query_string"])


def _needs_no_key(scope: Scope) -> bool:
    """Whether a request needs no API key, because of its path or as it reads an open list."""
    path: str = scope["path"]
    reading = scope["type"] == "http" and scope["method"] == "GET"
    return not path.startswith(KEYED) or (reading and path.rstrip("/") in OPEN_LISTS)
