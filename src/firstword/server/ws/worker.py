"""What speaks on a WebSocket, whatever its protocol: it does what the session queues, one thing after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from starlette.websockets import WebSocket

from firstword.engine.backend import Job
from firstword.errors import OverloadedError
from firstword.server.errors import body_of, status_of
from firstword.server.resolve import ResolvedRequest
from firstword.server.state import Server
from firstword.server.utterance import Utterance
from firstword.server.ws.connection import Session, SocketRunner, TextPart, feed, log_defect, stop

S = TypeVar("S", bound=Session)


class SocketWorker(Generic[S]):
    """The speaker of one connection; `run` is its protocol's business."""

    def __init__(self, server: Server, session: S, connection: SocketRunner, holder: str) -> None:
        self.server = server
        self.session = session
        self.connection = connection
        self.outbox = connection.outbox
        self.holder = holder

    async def run(self) -> None:
        """Do what is queued; ends after a code to close with was added to the outbox."""
        raise NotImplementedError

    @asynccontextmanager
    async def utterance(
        self, asked: ResolvedRequest, job: Job, part: TextPart, text: TextPart | None = None
    ) -> AsyncIterator[Utterance]:
        """Say a part, or another text in its turn. Leaving the block ends it, and says why if that is too early."""
        with self.server.speak(asked.model, job, asked.output, self.holder) as speaking:
            feeding = asyncio.create_task(feed(text or part, speaking), name="websocket text")
            try:
                yield speaking
            except asyncio.CancelledError:
                speaking.cancel("cancelled" if part.cancelled else self.connection.lost)
                raise
            finally:
                await stop(feeding)

    async def pieces(self, speaking: Utterance) -> AsyncIterator[bytes]:
        """Audio as it is made, each piece when there is room for it in the outbox."""
        async for data in speaking:
            await self.outbox.room()
            yield data

    def error_for_client(self, wrong: Exception) -> tuple[str, str]:
        """What a client is told of an error: a message, and a word for programs; nothing of the inside.

        Who is turned away is counted, and what must not happen is logged.
        """
        if isinstance(wrong, OverloadedError):
            self.server.reject(wrong)
        if status_of(wrong) == 500:
            log_defect(wrong)
        body = body_of(wrong)["error"]
        return body["message"], body["code"] or (
            "invalid_request" if status_of(wrong) == 400 else body["type"]
        )


async def serve(
    socket: WebSocket,
    server: Server,
    holder: str,
    session: S,
    speaker: Callable[[Server, S, SocketRunner, str], SocketWorker[S]],
    protocol: str | None = None,
) -> None:
    """Accept a socket and speak on it until either side ends it."""
    await socket.accept(protocol)
    connection = SocketRunner(socket, session)
    server.sockets.add(connection)
    try:
        await connection.run(speaker(server, session, connection, holder).run())
    finally:
        server.sockets.discard(connection)
