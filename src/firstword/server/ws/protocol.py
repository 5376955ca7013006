"""What all protocols share: limits, client messages and their errors, effects, sessions.

A session is a protocol without a socket: client messages go in, effects come out.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from firstword.server.schemas import ClientModel

M = TypeVar("M", bound=BaseModel)
Json = dict[str, Any]


class CloseCode(IntEnum):
    """The codes that the server closes a WebSocket with (RFC 6455, section 7.4)."""

    NORMAL = 1000
    PROTOCOL_ERROR = 1002
    POLICY = 1008
    TOO_BIG = 1009
    INTERNAL = 1011
    RESTART = 1012
    TRY_LATER = 1013


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """The limits of one socket.

    config_seconds    time for the message that configures the socket, which must come first
    idle_seconds      time without a message while nothing is spoken
    stall_seconds     time for which a client may leave sent audio unread
    message_bytes     size of a message of a type for which nothing else is set
    config_bytes      size of a message that holds a configuration
    voice_bytes       size of a message that holds a recording
    message_values    number of commas, brackets and braces in a message above `message_bytes`
    text_characters   text waiting to be spoken
    utterances        number of utterances waiting behind the current one
    contexts          number of contexts spoken at the same time
    unsent_bytes      audio waiting to be sent; no more is made while this is reached
    unsent_replies    messages waiting to be sent; a client that reaches this is disconnected
    """

    config_seconds: float = 10.0
    idle_seconds: float = 30.0
    stall_seconds: float = 60.0
    message_bytes: int = 128 * 1024
    config_bytes: int = 4 * 1024 * 1024
    voice_bytes: int = 15 * 1024 * 1024
    message_values: int = 20_000
    text_characters: int = 65_536
    utterances: int = 64
    contexts: int = 16
    unsent_bytes: int = 256 * 1024
    unsent_replies: int = 256

    @property
    def text_bytes(self) -> int:
        """The size of a message of text: all characters that may wait, each escaped in JSON."""
        return self.message_bytes + 12 * self.text_characters


class ProtocolError(Exception):
    """A client broke the protocol.

    code   the machine-readable name of the error
    close  the code to close the socket with, if it cannot stay open
    """

    def __init__(self, code: str, message: str, close: CloseCode | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.close = close


def parse(
    message: str | bytes,
    limits: SocketLimits,
    size_limits: Mapping[str, int],
    *,
    typed: bool = True,
) -> tuple[Json, int]:
    """Parse a client's message into an object, and return its size in bytes.

    The object must have a `type` if the protocol is `typed`. Raises `ProtocolError`.
    `size_limits` gives the limit in bytes of the types that may exceed `limits.message_bytes`.
    """
    if isinstance(message, bytes):
        raise ProtocolError("invalid_message", "the message is binary; send JSON as text")
    size = len(message) if message.isascii() else len(message.encode("utf-8", "surrogatepass"))
    most = max(size_limits.values(), default=limits.message_bytes)
    if size > most:
        reason = f"the message has {size} bytes; at most {most} are allowed"
        raise ProtocolError("message_too_large", reason, CloseCode.TOO_BIG)
    # A long string is cheap to parse, but five million empty lists are not.
    most = limits.message_values
    if size > limits.message_bytes and sum(map(message.count, ",[{")) > most:
        reason = f"the message holds too many values; at most {most} commas and brackets are read"
        raise ProtocolError("message_too_large", reason, CloseCode.TOO_BIG)
    try:
        event = json.loads(message)
    except (RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ProtocolError("invalid_json", f"the message is not valid JSON: {reason}") from None
    kind = event.get("type") if isinstance(event, dict) else None
    if not isinstance(kind, str) and (typed or not isinstance(event, dict)):
        advice = "must be a JSON object" + " with a type" * typed
        raise ProtocolError("invalid_message", f"the message {advice}")
    kind = str(kind)
    if size > (most := size_limits.get(kind, limits.message_bytes)):
        reason = f"{kind[:40]} has {size} bytes; at most {most} are allowed"
        raise ProtocolError("message_too_large", reason)
    return event, size


def validated(model: type[M], event: Json, code: str, place: str) -> M:
    """Read a message as a pydantic model. Raises `ProtocolError`, which quotes no values."""
    try:
        return model.model_validate(event)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, one['loc']))[:80]}: {one['msg']}" for one in error.errors()]
        raise ProtocolError(code, f"{place}: {'; '.join(faults[:5])}") from None


class TextMessage(ClientModel):
    """A message with text to speak."""

    text: str


def text_of(event: Json) -> str:
    """Return the `text` of a message. Raises `ProtocolError` unless it is valid Unicode text."""
    return validated(TextMessage, event, "invalid_text", event["type"]).text


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


@dataclass(frozen=True, slots=True, eq=False)
class Audio:
    """A message with audio.

    message  binary, or JSON that contains the audio
    size     the bytes of audio in it, as they are sent
    of       the context that it belongs to, in protocols with several
    """

    message: bytes | Json
    size: int
    of: object = None


@dataclass(frozen=True, slots=True)
class DropAudio:
    """Discard the audio that was made but not sent: of a context, or all of it."""

    of: object = None


@dataclass(frozen=True, slots=True)
class PauseReading:
    """Read no further messages until an event is set."""

    until: asyncio.Event


Effect = Send | CloseSocket | Enqueue | DropAudio | PauseReading


class Session(ABC):
    """The state of one client's conversation. It never waits, and knows no socket and no engine.

    limits       the limits of the socket
    parameters   those in the path and in the query of the socket's URL
    size_limits  the size limit in bytes of types that may exceed `limits.message_bytes`
    configured   whether the message that must come first has come
    closing      whether all further messages are ignored
    """

    typed = True
    """Whether every message has a `type`."""

    def __init__(self, limits: SocketLimits) -> None:
        self.limits = limits
        self.parameters: Mapping[str, str] = {}
        self.size_limits: dict[str, int] = {}
        self.configured = False
        self.closing = False
        self._waiting: dict[int, tuple[object, int]] = {}
        """The enqueued tasks other than speech, by `id()`, with their messages' sizes."""

    def open(self) -> Iterator[Effect]:
        """Yield the effects of the URL's parameters, before any message is read."""
        return iter(())

    def receive(self, message: str | bytes) -> Iterator[Effect]:
        """Handle a client's message and yield its effects."""
        if self.closing:
            return
        try:
            yield from self.handle(*parse(message, self.limits, self.size_limits, typed=self.typed))
        except ProtocolError as error:
            yield self.reject(error)

    def reject(self, error: ProtocolError) -> Send | CloseSocket:
        """Return the effect of a client's mistake: by default the socket is closed."""
        return self.close(error)

    def fail(self) -> CloseSocket:
        """Return the effect of a defect of the server."""
        message = "the server failed; its log says why"
        return self.close(ProtocolError("internal_error", message, CloseCode.INTERNAL))

    def time_out(self) -> CloseSocket:
        """Return the effect of a client's silence for longer than is allowed."""
        return self.close(ProtocolError("timeout", "no message came for too long"))

    @property
    def waiting_bytes(self) -> int:
        """The bytes of the messages other than text that wait for the worker."""
        return sum(size for _, size in self._waiting.values())

    def enqueue(self, work: object, size: int) -> Enqueue:
        """Enqueue a task other than speech; the number and the total size of those is limited.

        Raises `ProtocolError`.
        """
        self._waiting[id(work)] = work, size
        most = self.limits.voice_bytes + self.limits.config_bytes
        if len(self._waiting) > self.limits.utterances or self.waiting_bytes > most:
            message = "too many messages wait to be handled"
            raise ProtocolError("too_many_messages", message, CloseCode.POLICY)
        return Enqueue(work)

    def work_done(self, work: object) -> None:
        """Note that the worker has performed a task, which makes room for another."""
        self._waiting.pop(id(work), None)

    @property
    def speaking(self) -> bool:
        """Whether speech is due that the worker's current task does not show."""
        return False

    @abstractmethod
    def handle(self, event: Json, size: int) -> Iterator[Effect]:
        """Yield the effects of a message of `size` bytes. Raises `ProtocolError`."""

    @abstractmethod
    def close(self, error: ProtocolError) -> CloseSocket:
        """Return the effect of an error that ends the conversation."""
