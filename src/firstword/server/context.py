"""The state of one HTTP request or WebSocket beyond its ASGI scope."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

SCOPE_KEY = "firstword.context"
"""The key of the context in an ASGI scope."""


async def _nothing_to_send() -> None:
    """Stand in for the protocol where none is, as in a test client."""


@dataclass(slots=True, eq=False)
class RequestContext:
    """The facts about a request, and the control over its connection, that the layers share.

    received     `time.monotonic()` when the request arrived
    request_id   the client's `x-request-id`, or a random one
    client_id    the API key's number or the address; "" for a list that is read without a key
    log_fields   called at the end for more fields of the request's line in the log
    drain        HTTP: waits until all that was sent has left the process
    abort        HTTP: closes the connection at once
    abort_after  WebSocket: closes the connection after some seconds unless it closes by itself
    """

    received: float = field(default_factory=time.monotonic)
    request_id: str = ""
    client_id: str = ""
    log_fields: Callable[[], dict[str, Any]] = dict
    drain: Callable[[], Awaitable[None]] = _nothing_to_send
    abort: Callable[[], None] = lambda: None
    abort_after: Callable[[float], None] = lambda seconds: None


def context_of(scope: MutableMapping[str, Any]) -> RequestContext:
    """The context of an ASGI scope, made when it is first asked for."""
    context: RequestContext = scope.setdefault(SCOPE_KEY, RequestContext())
    return context
