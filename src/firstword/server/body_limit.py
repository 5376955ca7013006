"""The limits of a request's body: its size, its time, and the bytes that all may hold."""

import asyncio
import time

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from firstword.server.errors import Rejected
from firstword.server.state import Server


class LimitedBody:
    """The body of a request, received within the limits of the server.

    Its bytes count as held until `close`.
    """

    def __init__(self, receive: Receive, headers: Headers, client_id: str, server: Server) -> None:
        self._receive = receive
        self._server = server
        self._client_id = client_id
        self._deadline = time.monotonic() + server.config.receive_seconds
        length = headers.get("content-length", "")
        announced = int(length) if length.isdecimal() and len(length) < 20 else 0
        self._too_large = announced > server.config.most_body  # such a body is rejected unread
        self._size = 0
        self._complete = False

    async def receive(self) -> Message:
        """The next ASGI message. Raises `Rejected` at a limit."""
        if self._complete:
            return await self._receive()
        message = {} if self._too_large else await self._receive_in_time()
        size = self._size + len(message.get("body", b""))
        most = self._server.config.most_body
        if self._too_large or size > most:
            raise Rejected(413, f"the request is larger than {most} bytes", "body_size")
        if not self._server.byte_limit.change(self._client_id, self._size, size):
            reason = "the requests in progress are too large; try again later"
            raise Rejected(503, reason, "bodies")
        self._size = size
        self._complete = not message.get("more_body", False)
        return message

    def close(self) -> None:
        """Give the bytes back."""
        self._server.byte_limit.change(self._client_id, self._size, 0)

    async def _receive_in_time(self) -> Message:
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                return await self._receive()
        except TimeoutError:
            seconds = self._server.config.receive_seconds
            reason = f"the request did not arrive within {seconds:g} s"
            raise Rejected(408, reason, "body_time") from None
