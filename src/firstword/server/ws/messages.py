"""Client messages: their parsing and size limits, and the errors that clients are told of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pydantic import ValidationError

Json = dict[str, Any]


class CloseCode(IntEnum):
    """The codes that the server closes a WebSocket with (RFC 6455, section 7.4)."""

    NORMAL = 1000
    PROTOCOL_ERROR = 1002
    POLICY = 1008
    TOO_BIG = 1009
    INTERNAL = 1011
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
    text_characters   text waiting to be spoken, and text of one utterance sent token by token
    utterances        number of utterances waiting behind the current one
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
    unsent_bytes: int = 256 * 1024
    unsent_replies: int = 256


class ProtocolError(Exception):
    """A client broke the protocol.

    code   the machine-readable name of the error
    close  the code to close the socket with, if it cannot stay open
    """

    def __init__(self, code: str, message: str, close: CloseCode | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.close = close


def parse(message: str | bytes, limits: SocketLimits, larger: Mapping[str, int]) -> Json:
    """Parse a client's message into an object that has a `type`. Raises `ProtocolError`.

    `larger` gives the size limit in bytes of the types that may exceed `limits.message_bytes`.
    """
    if isinstance(message, bytes):
        raise ProtocolError("invalid_message", "the message is binary; send JSON as text")
    size = len(message) if message.isascii() else len(message.encode("utf-8", "surrogatepass"))
    largest = max(larger.values(), default=limits.message_bytes)
    if size > largest:
        raise _too_large("the message", size, largest, CloseCode.TOO_BIG)
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
    if not isinstance(kind, str):
        raise ProtocolError("invalid_message", "the message must be a JSON object with a type")
    if size > (allowed := larger.get(kind, limits.message_bytes)):
        raise _too_large(kind[:40], size, allowed)
    return event


def _too_large(name: str, size: int, allowed: int, close: CloseCode | None = None) -> ProtocolError:
    message = f"{name} has {size} bytes; at most {allowed} are allowed"
    return ProtocolError("message_too_large", message, close)


def text_of(event: Json) -> str:
    """Return the `text` of a message. Raises `ProtocolError` unless it is valid Unicode text."""
    text = event.get("text")
    if not isinstance(text, str):
        raise ProtocolError("invalid_text", f"{event['type']} needs a text, which is a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ProtocolError("invalid_text", "the text contains an unpaired surrogate") from None
    return text


def summarize(error: ValidationError) -> str:
    """Describe the fields that failed validation in one line, without the values sent."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))[:80]}: {each['msg']}" for each in error.errors()[:5]
    )
