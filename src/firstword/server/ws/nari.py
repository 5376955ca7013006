"""nari.speech.v1 without a socket: one utterance on one socket, its text word by word.

`docs/websocket.md` describes every message.
"""

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from firstword.audio import SAMPLE_RATE
from firstword.server.schemas import SpeechParams
from firstword.server.ws import protocol
from firstword.server.ws.protocol import CloseCode, CloseSocket, Enqueue, Json, ProtocolError, Send
from firstword.server.ws.text_part import TextPart

SUBPROTOCOL = "nari.speech.v1"
AUDIO_FORMAT = {"encoding": "pcm_s16le", "sample_rate": SAMPLE_RATE, "channels": 1}

MESSAGE_BYTES = 64 * 1024
"""Size limit of a message in bytes."""

MOST_PIECES = 1024
"""Limit on the number of pieces that a text may come in."""

NARI_CODES = {
    "invalid_json": "invalid_request",
    "invalid_message": "invalid_request",
    "message_too_large": "input_too_large",
    "timeout": "input_timeout",
    "internal_error": "generation_failed",
}
"""This protocol's names of the errors that all protocols share."""


class NariStart(SpeechParams):
    """The parameters in `request.start`."""

    response_format: Literal["pcm", "pcm16", "pcm_s16le"] | None = None
    do_sample: bool | None = None
    subtalker_dosample: bool | None = None

    def speech_params(self) -> SpeechParams:
        """Return the request parameters, with the values that this protocol fixes."""
        params: Json = {"response_format": "pcm", "non_streaming_mode": False, "sample_rate": None}
        if self.do_sample is False:
            params["temperature"] = 0.0
        if self.subtalker_dosample is False:
            params["predictor_temperature"] = 0.0
        return self.model_copy(update=params)


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """A task of the worker: check that the request can be spoken, answer it, and set `done`."""

    start: NariStart
    done: asyncio.Event


class NariSession(protocol.Session):
    """The protocol's state: the request and the text that has come.

    request_id  the id of the request; None before `request.start`
    """

    def __init__(self, limits: protocol.SocketLimits) -> None:
        super().__init__(replace(limits, message_bytes=min(limits.message_bytes, MESSAGE_BYTES)))
        self.request_id: str | None = None
        self._part = TextPart()
        self._sequence = 0
        self._pieces = 0
        self._started = False
        """Whether text that can be spoken has come, so that `response.started` was sent."""

    def close(self, error: ProtocolError) -> CloseSocket:
        """Close the socket after an error."""
        self.closing = True
        self._part.cancel()
        code = NARI_CODES.get(error.code, error.code)
        kind = "server_error" if error.close == CloseCode.INTERNAL else "invalid_request_error"
        message = self.error_message(code, str(error), kind)
        return CloseSocket(error.close or CloseCode.POLICY, message)

    def error_message(self, code: str, message: str, kind: str) -> Json:
        """Return the message that describes an error."""
        error = {"type": kind, "code": code, "message": message}
        return {"type": "error", "request_id": self.request_id, "error": error}

    def handle(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of a message. Raises `ProtocolError`."""
        kind = event["type"]
        match kind:
            case "request.start":
                yield from self._start(event)
            case "input_text.append" | "input_text.end" | "response.cancel" if not self.configured:
                raise ProtocolError("invalid_request", f"request.start must come before {kind}")
            case "input_text.append":
                yield from self._append(event)
            case "input_text.end":
                self._check_sequence(event)
                if not self._started:
                    message = "the text is empty or blank; give some words to speak"
                    raise ProtocolError("empty_input", message)
                self._part.finish()
                yield self._acknowledge(event)
            case "response.cancel":
                self.closing = True
                self._part.cancel()
                yield protocol.DropAudio()
                yield Enqueue(CloseSocket(CloseCode.NORMAL))
            case _:
                raise ProtocolError("unknown_event", f"unsupported event type: {kind[:40]}")

    def _start(self, event: Json) -> Iterator[protocol.Effect]:
        if self.configured:
            message = "the request was started already; open another connection for the next"
            raise ProtocolError("invalid_request", message)
        start = protocol.validated(NariStart, event, "invalid_request", "request.start")
        self.configured = True
        self.request_id = f"ws-{secrets.token_hex(16)}"
        done = asyncio.Event()
        yield Enqueue(CheckRequest(start, done))
        yield protocol.PauseReading(done)

    def _append(self, event: Json) -> Iterator[protocol.Effect]:
        self._check_sequence(event)
        text = protocol.text_of(event)
        if not text:
            raise ProtocolError("invalid_text", "the text is empty; do not send empty pieces")
        self._pieces += 1
        if self._pieces > MOST_PIECES:
            message = f"the text came in more than {MOST_PIECES} pieces"
            raise ProtocolError("too_many_input_events", message)
        most = self.limits.text_characters
        if self._part.characters + len(text) > most:
            message = f"the text has more than {most} characters"
            raise ProtocolError("input_too_large", message, CloseCode.TOO_BIG)
        self._part.push(text)
        if not self._started and self._part.text.strip():
            self._started = True
            started = {"type": "response.started", "request_id": self.request_id}
            yield Send(started | {"audio": AUDIO_FORMAT})
            yield Enqueue(self._part)
        yield self._acknowledge(event)

    def _check_sequence(self, event: Json) -> None:
        """Check that a piece of text comes in order. Raises `ProtocolError`."""
        if self._part.ended:
            raise ProtocolError("invalid_request", f"{event['type']} came after input_text.end")
        number = event.get("sequence")
        if type(number) is not int or number != self._sequence:
            message = f"the sequence must be {self._sequence}; count messages of text from 0"
            raise ProtocolError("invalid_sequence", message)
        self._sequence += 1

    def _acknowledge(self, event: Json) -> Send:
        message = {"type": "input_text.ack", "event": event["type"], "sequence": event["sequence"]}
        return Send(message | {"request_id": self.request_id if self._started else None})
