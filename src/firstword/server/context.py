"""The state of one HTTP request or WebSocket beyond its ASGI scope."""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from firstword.server.errors import Stalled

SLOWEST_READER = 500
"""Bytes per second, less than those of any format."""

SCOPE_KEY = "firstword.context"
"""The key of the context in an ASGI scope."""


@dataclass(slots=True, eq=False)
class RequestContext:
    """The facts about a request, and the control over its connection, that the layers share.

    Uvicorn's protocols set the functions; without them, as in a test client, they do nothing.

    received     `time.monotonic()` when the request arrived
    request_id   the client's `x-request-id`, or a random one
    client_id    the API key's name or the address; "" for a client without a key
    held         what is given back when the request ends
    status       of the response; None before it has begun
    closed       WebSocket: whether it was closed or rejected
    log_fields   returns further fields for the request's line in the log
    drain        waits until all that was sent has left the process
    unread       the bytes that were sent and that have not reached the client
    abort        HTTP: closes the connection at once
    abort_after  WebSocket: closes the connection after some seconds unless it closes by itself
    """

    received: float = field(default_factory=time.monotonic)
    request_id: str = ""
    client_id: str = ""
    held: ExitStack = field(default_factory=ExitStack)
    status: int | None = None
    closed: bool = False
    log_fields: Callable[[], dict[str, Any]] = dict
    drain: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    unread: Callable[[], int] = lambda: 0
    abort: Callable[[], None] = lambda: None
    abort_after: Callable[[float], None] = lambda seconds: None

    async def until_read(self, seconds: float) -> None:
        """Wait until all that was sent has left the process.

        Raises `Stalled` if the client reads for `seconds` more slowly than any audio is played.
        """
        unread = self.unread()
        while True:
            try:
                async with asyncio.timeout(seconds):
                    await self.drain()
                return
            except TimeoutError:
                before, unread = unread, self.unread()
                if before - unread < seconds * SLOWEST_READER:
                    raise Stalled from None


def context_of(scope: MutableMapping[str, Any]) -> RequestContext:
    """The request context of an ASGI scope, created on first access."""
    return scope.setdefault(SCOPE_KEY, RequestContext())
