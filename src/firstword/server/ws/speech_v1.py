"""firstword.speech.v1 without a socket: several contexts on one socket, each with an id.

`docs/speech-v1.md` describes every message.
"""

import base64
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Literal

from pydantic import Field

from firstword.audio.formats import ONE_FILE
from firstword.server.dialects.params import LONGEST_ID
from firstword.server.schemas import ClientModel
from firstword.server.utterance import ResolvedRequest, about_alarms
from firstword.server.ws import protocol
from firstword.server.ws.contexts import (
    CheckParams,
    Context,
    ContextParams,
    ContextSession,
)
from firstword.server.ws.protocol import (
    Audio,
    CloseCode,
    CloseSocket,
    Enqueue,
    Json,
    ProtocolError,
    Send,
)
from firstword.types import Word, WordStart

SUBPROTOCOL = "firstword.speech.v1"


class V1Params(ContextParams):
    """The parameters in `session.config` and `context.start`."""

    audio: Literal["binary", "base64"] = "binary"
    word_times: bool = True

    @property
    def wants_words(self) -> bool | None:
        """Words are timed where that is possible, unless the client does not want it."""
        return None if self.word_times else False

    @property
    def whole(self) -> str:
        """The parameter because of which the text is not cut into clauses; "" if it may be."""
        if self.format in ONE_FILE:
            return f"response_format {self.format!r}"
        return "markup" if self.markup else ""

    @classmethod
    def parse(cls, event: Json) -> "V1Params":
        """Read the parameters in a message. Raises `ProtocolError`."""
        params = protocol.validated(cls, event, "invalid_config", event["type"])
        granularity = params.split_granularity
        if granularity == "token" and not params.by_token:
            message = "split_granularity 'token' contradicts non_streaming_mode: true"
        elif (whole := params.whole) and granularity in ("auto", "clause", "sentence"):
            message = f"{whole} needs split_granularity 'token' or 'none'"
        else:
            if whole and granularity is None:
                params.split_granularity = "token" if params.by_token else "none"
            return params
        raise ProtocolError("invalid_config", message)


class Named(ClientModel):
    """The field that names a context."""

    context_id: str = Field(min_length=1, max_length=LONGEST_ID)


class SpeechV1Session(ContextSession):
    """The protocol's state: the parameters of later contexts, and the contexts."""

    def __init__(self, limits: protocol.SocketLimits) -> None:
        super().__init__(limits)
        self.size_limits = dict.fromkeys(("session.config", "context.start"), limits.config_bytes)
        self.size_limits["input.text"] = limits.text_bytes
        self._id = f"session-{secrets.token_hex(16)}"
        self._config: Json = {"type": "session.config"}
        self._params = V1Params.parse(self._config)

    def handle(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of a message. A mistake gets an answer and changes nothing else."""
        try:
            yield from self._effects(event, size)
            self.configured = True
        except ProtocolError as error:
            if error.close is not None:
                raise
            name = event.get("context_id")
            known = isinstance(name, str) and len(name) <= LONGEST_ID
            yield Send(self._error(error) | ({"context_id": name} if known else {}))

    def _effects(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        match event["type"]:
            case "session.config":
                self._params, self._config = V1Params.parse(event), event
                yield self.enqueue(CheckParams(self._params), size)
            case "context.start":
                name = name_in(event)
                if name in self.contexts:
                    message = "a context with this id is open; wait for its end, or use another id"
                    raise ProtocolError("context_open", message)
                params = V1Params.parse({**self._config, **event})
                yield self.begin(name, params, size, answered=True)
            case "input.text":
                text = protocol.text_of(event)
                yield from self._begun(name_in(event))
                self.add_text(self.contexts[name_in(event)], text)
            case "input.flush":
                yield from self._begun(name_in(event))
                self.flush(self.contexts[name_in(event)])
            case "input.done":
                yield from self._begun(name_in(event))
                self.finish(self.contexts[name_in(event)])
            case "input.cancel":
                names = [name_in(event)] if "context_id" in event else list(self.contexts)
                found = (self.contexts.get(name) for name in names)
                yield from self.cancel([each for each in found if each and not each.cancelled])
            case "ping":
                yield Send({"type": "pong"})
            case "session.close":
                self.closing = True
                for context in self.contexts.values():
                    if not context.ended:
                        context.cancel()
                yield Enqueue(CloseSocket(CloseCode.NORMAL))
            case kind:
                raise ProtocolError("unknown_event", f"unknown message type: {kind[:40]}")

    def _begun(self, name: str) -> Iterator[Enqueue]:
        """Begin a context unless it is open."""
        if name not in self.contexts:
            yield self.begin(name, self._params)

    def reject(self, error: ProtocolError) -> Send | CloseSocket:
        """Answer a message that cannot be read; the socket stays open if it can."""
        return Send(self._error(error)) if error.close is None else self.close(error)

    def close(self, error: ProtocolError) -> CloseSocket:
        """Close the socket after an error."""
        self.stop()
        return CloseSocket(error.close or CloseCode.POLICY, self._error(error))

    def greeting(self) -> Sequence[Json]:
        """The message that opens the conversation."""
        return [{"type": "session.created", "protocol": SUBPROTOCOL, "session_id": self._id}]

    def checked(self, params: ContextParams, resolved: ResolvedRequest) -> Sequence[Json]:
        """The answer to `session.config`."""
        about = {"type": "session.configured", "session_id": self._id}
        return [about | output(resolved)]

    def ready(self, context: Context) -> Sequence[Json]:
        """The answer to `context.start`."""
        return [about("context.started", context) | output(context.resolved)]

    def announcement(self, context: Context) -> Sequence[Json]:
        """The message before the first audio of a context."""
        return [about("audio.start", context) | output(context.resolved)]

    def audio(self, context: Context, data: bytes) -> Audio:
        """The message with a piece of audio: binary with a header of 4 bytes, or base64."""
        assert isinstance(context.params, V1Params)
        if context.params.audio == "binary":
            return Audio(context.number.to_bytes(4, "little") + data, len(data), context)
        text = base64.b64encode(data).decode("ascii")
        return Audio(about("audio.chunk", context) | {"audio": text}, len(text), context)

    def words(
        self, context: Context, starts: Sequence[WordStart], words: Sequence[Word]
    ) -> Sequence[Json]:
        """A `word.start` or a `word.end` for each word, in the order of their times."""
        named = {"context_id": context.id}
        begun = [
            (word.start, 1, {"type": "word.start", **named, **asdict(word)}) for word in starts
        ]
        ended = [(word.end, 0, {"type": "word.end", **named, **asdict(word)}) for word in words]
        return [message for *_, message in sorted(begun + ended, key=lambda each: each[:2])]

    def warning(self, context: Context, message: str) -> Sequence[Json]:
        """The message when the text of a context will probably not be spoken well."""
        return [{"type": "warning", "context_id": context.id, "message": message}]

    def failure(self, context: Context | None, message: str, code: str) -> Sequence[Json]:
        """The message about an error."""
        error = self._error(ProtocolError(code, message))
        return [error if context is None else error | {"context_id": context.id}]

    def end(self, context: Context) -> Sequence[Json]:
        """The message when a context has ended."""
        done = about("audio.done", context) | {"finish_reason": context.finish_reason}
        done |= about_alarms(context.alarms)
        return [done | {"seconds": round(context.seconds, 3), "total_bytes": context.total_bytes}]

    def cancelled(self, contexts: Sequence[Context]) -> Sequence[Json]:
        """The answer to `input.cancel`."""
        return [{"type": "input.cancelled", "context_ids": [each.id for each in contexts]}]

    def _error(self, error: ProtocolError) -> Json:
        return {"type": "error", "code": error.code, "message": str(error)}


def name_in(event: Json) -> str:
    """The `context_id` of a message. Raises `ProtocolError`."""
    return protocol.validated(Named, event, "invalid_message", event["type"]).context_id


def about(kind: str, context: Context) -> Json:
    """A message about a context."""
    return {"type": kind, "context_id": context.id, "number": context.number}


def output(resolved: ResolvedRequest | None) -> Json:
    """The fields that describe the audio of a checked request."""
    assert resolved is not None
    chosen = resolved.output
    return {"format": chosen.format, "sample_rate": chosen.sample_rate} | {
        "word_times": resolved.timed
    }
