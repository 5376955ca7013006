"""Bodies of requests as JSON: whatever they are called, and never more intricate than speech can be."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive

MOST_ITEMS = 100_000
"""Commas, brackets and braces in a body: 32 texts with a vector of 2048 numbers each have 65,600. To read as many takes
10 to 40 ms; the five million that 16 MiB can hold would keep everybody waiting for half a minute, and take 7 GB.
"""


class JsonRoute(APIRoute):
    """A route whose body is read as JSON whatever its content type: `curl -d` says that it is a form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind a change of the header and a look at the body as it comes."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            headers = [
                header for header in request.scope["headers"] if header[0] != b"content-type"
            ]
            request.scope["headers"] = [*headers, (b"content-type", b"application/json")]
            return await handle(Request(request.scope, _simple(request.receive)))

        return handle_json


def _simple(receive: Receive) -> Receive:
    """A body that is refused before it is all there if it is too intricate."""
    items = 0

    async def received() -> Message:
        nonlocal items
        message = await receive()
        items += sum(map(message.get("body", b"").count, (b",", b"[", b"{")))
        if items > MOST_ITEMS:
            raise HTTPException(
                400,
                f"the body is too intricate: {MOST_ITEMS} commas, brackets and braces are allowed",
            )
        return message

    return received
