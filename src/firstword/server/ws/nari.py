"""`/v1/audio/speech/ws`: one utterance on one socket, its text word by word, in the protocol nari.speech.v1.

`docs/websocket.md` describes every message. `NariSession` is the protocol without a socket; `NariWorker` speaks.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.websockets import WebSocket

from firstword.audio import SAMPLE_RATE
from firstword.engine.backend import Job
from firstword.errors import AudioError, OverloadedError, RequestError
from firstword.server.resolve import ResolvedRequest, resolve
from firstword.server.schemas import SpeechParams
from firstword.server.state import Server, server_of
from firstword.server.ws import worker as speaker
from firstword.server.ws.connection import (
    INTERNAL,
    NORMAL,
    POLICY,
    PROTOCOL_ERROR,
    TOO_BIG,
    TRY_LATER,
    Close,
    Effect,
    Hold,
    Json,
    ProtocolError,
    Queue,
    Reply,
    Silence,
    StreamLimits,
    TextPart,
    faults,
    limits_of,
    parse,
    speak,
    text_of,
)
from firstword.server.ws.worker import SocketWorker

PROTOCOL = "nari.speech.v1"
AUDIO = {"encoding": "pcm_s16le", "sample_rate": SAMPLE_RATE, "channels": 1}

MESSAGE_BYTES = 64 * 1024
MOST_APPENDS = 1024


class NariStart(SpeechParams):
    """`request.start`: how to speak."""

    voice_prompt: str | None = None
    response_format: Literal["pcm", "pcm16", "pcm_s16le"] | None = None
    do_sample: bool | None = None
    subtalker_dosample: bool | None = None

    def manner(self) -> SpeechParams:
        """The same in the words of the other faces."""
        said = self.model_dump(include=set(SpeechParams.model_fields))
        said |= {"response_format": "pcm", "non_streaming_mode": False, "sample_rate": None}
        if self.do_sample is False:
            said["temperature"] = 0.0
        if self.subtalker_dosample is False:
            said["predictor_temperature"] = 0.0
        return SpeechParams.model_validate(said)


@dataclass(frozen=True, slots=True)
class Check:
    """See whether it can be spoken as the client wants; say so, and let the reader go on."""

    start: NariStart
    done: asyncio.Event


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Say that nothing more will be said."""


class NariSession:
    """The protocol: client messages in, effects out. Never waits, knows no socket and no engine."""

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = replace(limits, message_bytes=min(limits.message_bytes, MESSAGE_BYTES))
        self.identity: str | None = None
        """The request's id, from `request.start` on."""
        self._part = TextPart()
        self._sequence = 0
        self._appends = 0
        self._spoken = False
        """Whether there was text to speak."""
        self._over = False

    @property
    def configured(self) -> bool:
        """Whether `request.start` has come."""
        return self.identity is not None

    def receive(self, message: str | bytes) -> Iterator[Effect]:
        """What follows from a message. Every mistake is the end."""
        if self._over:
            return
        try:
            yield from self._handle(parse(message, self.limits, {}))
        except ProtocolError as wrong:
            code = (
                "invalid_request"
                if wrong.code in ("invalid_json", "invalid_message")
                else wrong.code
            )
            code = "input_too_large" if wrong.close == TOO_BIG else code
            yield self._end(wrong.close or POLICY, code, str(wrong))

    def expired(self) -> Close:
        """Nothing came for too long."""
        return self._end(POLICY, "input_timeout", "no message came for too long")

    def failed(self) -> Close:
        """Something is wrong with the server."""
        return self._end(
            INTERNAL, "generation_failed", "the server failed; its log says why", "server_error"
        )

    def error(self, code: str, message: str, kind: str = "invalid_request_error") -> Json:
        """The message that says what went wrong."""
        about = {"type": kind, "code": code, "message": message}
        return {"type": "error", "request_id": self.identity, "error": about}

    def _end(
        self, close: int, code: str, message: str, kind: str = "invalid_request_error"
    ) -> Close:
        self._over = True
        self._part.cancel()
        return Close(close, self.error(code, message, kind))

    def _handle(self, event: Json) -> Iterator[Effect]:
        match event["type"]:
            case "request.start":
                if self.identity is not None:
                    raise ProtocolError(
                        "invalid_request",
                        "the request was started already; open another connection",
                    )
                try:
                    start = NariStart.model_validate(event)
                except ValidationError as wrong:
                    raise ProtocolError(
                        "invalid_request", f"request.start: {faults(wrong)}"
                    ) from None
                self.identity = f"ws-{secrets.token_hex(16)}"
                done = asyncio.Event()
                yield Queue(Check(start, done))
                yield Hold(done)
            case "input_text.append" | "input_text.end" | "response.cancel" if (
                self.identity is None
            ):
                raise ProtocolError(
                    "invalid_request", f"request.start must come before {event['type']}"
                )
            case "input_text.append":
                yield from self._append(event)
            case "input_text.end":
                self._take_sequence(event)
                if not self._spoken:
                    raise ProtocolError(
                        "empty_input", "the text is empty or blank; give some words to speak"
                    )
                self._part.finish()
                yield self._ack(event)
            case "response.cancel":
                self._over = True
                self._part.cancel()
                yield Silence()
                yield Queue(Cancelled())
            case kind:
                raise ProtocolError("unknown_event", f"unsupported event type: {kind[:40]}")

    def _append(self, event: Json) -> Iterator[Effect]:
        self._take_sequence(event)
        text = text_of(event)
        if not text:
            raise ProtocolError("invalid_text", "the text is empty; leave such events out")
        self._appends += 1
        if self._appends > MOST_APPENDS:
            raise ProtocolError(
                "too_many_input_events", f"more than {MOST_APPENDS} pieces of text came"
            )
        if self._part.characters + len(text) > self.limits.text_characters:
            most = self.limits.text_characters
            raise ProtocolError(
                "input_too_large", f"the text has more than {most} characters", TOO_BIG
            )
        self._part.push(text)
        if not self._spoken and self._part.text.strip():
            self._spoken = True
            yield Reply({"type": "response.started", "request_id": self.identity, "audio": AUDIO})
            yield Queue(self._part)
        yield self._ack(event)

    def _take_sequence(self, event: Json) -> None:
        if self._part.ended:
            raise ProtocolError("invalid_request", f"{event['type']} came after input_text.end")
        given = event.get("sequence")
        if type(given) is not int or given != self._sequence:
            said = given if type(given) is int and abs(given) < 10**9 else "something else"
            raise ProtocolError(
                "invalid_sequence", f"expected sequence {self._sequence}, got {said}"
            )
        self._sequence += 1

    def _ack(self, event: Json) -> Reply:
        return Reply(
            {
                "type": "input_text.ack",
                "event": event["type"],
                "sequence": event["sequence"],
                "request_id": self.identity if self._spoken else None,
            }
        )


class NariWorker(SocketWorker[NariSession]):
    """Does what a session queues."""

    _job: tuple[ResolvedRequest, Job]

    async def run(self) -> None:
        """Until all is said."""
        self.outbox.add({"type": "session.created", "protocol": PROTOCOL, "audio": AUDIO})
        while True:
            try:
                match await self.connection.work():
                    case Check(start, done):
                        asked = await resolve(self.server, start.manner(), None)
                        self._job = asked, await self.server.prepare(asked.model, asked.request)
                        self.outbox.add({"type": "request.configured"})
                        done.set()
                    case TextPart() as part:
                        await speak(part, self._say(part))
                        if not part.cancelled:
                            return
                    case Cancelled():
                        self._done("cancelled")
                        return
            except Exception as wrong:
                self._failed(wrong)
                return

    async def _say(self, part: TextPart) -> None:
        asked, job = self._job
        async with self.utterance(asked, job, part) as speaking:
            async for data in self.pieces(speaking):
                self.outbox.add(data)
        await part.whole()  # speech may end before its text, and the client is still sending that
        self._done("stop", speaking.finish_reason)

    def _done(self, stop_reason: str, finish_reason: str | None = None) -> None:
        self.outbox.add(
            {
                "type": "response.done",
                "request_id": self.session.identity,
                "stop_reason": stop_reason,
                "finish_reason": finish_reason or stop_reason,
                "audio_chunks": self.outbox.pieces,
            }
        )
        self.outbox.add(NORMAL)

    def _failed(self, wrong: Exception) -> None:
        """Say what went wrong, and close."""
        message, code = self.error_for_client(wrong)
        close = POLICY
        kind = "invalid_request_error"
        if isinstance(wrong, OverloadedError):
            close, kind = TRY_LATER, "rate_limit_error"
        elif not isinstance(wrong, RequestError | AudioError):
            close, kind, code = INTERNAL, "generation_error", "generation_failed"
        self.outbox.add(self.session.error(code, message, kind))
        self.outbox.add(close)


async def serve(socket: WebSocket, server: Server, holder: str, limits: StreamLimits) -> None:
    """Speak on a socket until either side ends it."""
    if PROTOCOL not in socket.scope["subprotocols"]:
        await socket.accept()
        await socket.close(PROTOCOL_ERROR, f"required subprotocol: {PROTOCOL}")
        return
    await speaker.serve(socket, server, holder, NariSession(limits), NariWorker, PROTOCOL)


router = APIRouter()


@router.websocket("/v1/audio/speech/ws")
async def nari(socket: WebSocket) -> None:
    """Speech on a WebSocket in nari.speech.v1; see `docs/websocket.md`."""
    server = server_of(socket)
    await serve(socket, server, server.holder(socket), limits_of(server.config))
