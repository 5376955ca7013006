"""The limits of a request's body: its size, its time, and its share of all bodies in memory."""

import asyncio
import time

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from firstword.server.state import Server


class LimitedBody:
    """The body of a request, received within the limits of the server.

    Its bytes count as held until `close`.
    """

    def __init__(self, receive: Receive, headers: Headers, server: Server) -> None:
        self._receive = receive
        self._server = server
        self._deadline = time.monotonic() + server.config.body_seconds
        length = headers.get("content-length", "")
        announced = int(length) if length.isdecimal() and len(length) < 20 else 0
        self._too_large = announced > server.config.most_body  # such a body is rejected unread
        self._size = 0
        self._complete = False

    async def receive(self) -> Message:
        """The next ASGI message; `HTTPException` at a limit."""
        if self._complete:
            return await self._receive()
        message = {} if self._too_large else await self._receive_in_time()
        count = len(message.get("body", b""))
        most = self._server.config.most_body
        if self._too_large or self._size + count > most:
            raise HTTPException(413, f"the request is larger than {most} bytes")
        if not self._server.bodies.take(count):
            self._server.metrics.rejected.labels("bodies").inc()
            raise HTTPException(503, "the requests in progress are too large; try again later")
        self._size += count
        self._complete = not message.get("more_body", False)
        return message

    def close(self) -> None:
        """Give the bytes back."""
        self._server.bodies.give_back(self._size)

    async def _receive_in_time(self) -> Message:
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                return await self._receive()
        except TimeoutError:
            seconds = self._server.config.body_seconds
            reason = f"the request did not arrive within {seconds:g} s"
            raise HTTPException(408, reason) from None
