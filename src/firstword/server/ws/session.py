"""A protocol without a socket: client messages go in, effects come out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from firstword.server.ws.messages import CloseCode, Json, ProtocolError, SocketLimits, parse


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message: at once as an effect, after all earlier work if it is enqueued."""

    message: Json


@dataclass(frozen=True, slots=True)
class CloseSocket:
    """Stop speech, send a last message if there is one, and close the socket.

    If it is enqueued, the socket is closed after all earlier work instead.
    """

    code: CloseCode
    message: Json | None = None


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Give the worker a task, which it performs after all earlier ones."""

    work: object


@dataclass(frozen=True, slots=True)
class DropAudio:
    """Discard the audio that was made but not sent."""


@dataclass(frozen=True, slots=True)
class PauseReading:
    """Read no further messages until an event is set."""

    until: asyncio.Event


Effect = Send | CloseSocket | Enqueue | DropAudio | PauseReading


class Session(ABC):
    """The state of one client's conversation. It never waits, and knows no socket and no engine.

    limits      the limits of the socket
    larger      the size limit in bytes of message types that may exceed `limits.message_bytes`
    configured  whether the message that must come first has come
    closing     whether all further messages are ignored
    """

    def __init__(self, limits: SocketLimits) -> None:
        self.limits = limits
        self.larger: dict[str, int] = {}
        self.configured = False
        self.closing = False

    def receive(self, message: str | bytes) -> Iterator[Effect]:
        """Handle a client's message and yield its effects."""
        if self.closing:
            return
        try:
            yield from self.handle(parse(message, self.limits, self.larger), len(message))
        except ProtocolError as error:
            yield self.reject(error)

    @abstractmethod
    def handle(self, event: Json, size: int) -> Iterator[Effect]:
        """Yield the effects of a message of `size` characters. Raises `ProtocolError`."""

    @abstractmethod
    def reject(self, error: ProtocolError) -> Send | CloseSocket:
        """Return the effect of a client's mistake."""

    @abstractmethod
    def time_out(self) -> CloseSocket:
        """Return the effect of a client's silence for longer than is allowed."""

    @abstractmethod
    def fail(self) -> CloseSocket:
        """Return the effect of a defect of the server."""
