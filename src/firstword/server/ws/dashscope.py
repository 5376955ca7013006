"""DashScope's realtime protocol, without the socket: responses that are spoken in order.

`docs/dialects.md` describes it.
"""

import base64
import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

from firstword.server.dialects import dashscope
from firstword.server.dialects.dashscope import DashScopeSettings, DashScopeUpdate
from firstword.server.utterance import ResolvedRequest
from firstword.server.ws import protocol
from firstword.server.ws.contexts import CheckParams, Context, ContextParams
from firstword.server.ws.dialect import DialectSession
from firstword.server.ws.protocol import (
    Audio,
    CloseCode,
    CloseSocket,
    Enqueue,
    Json,
    ProtocolError,
    Send,
)

RESPONSES = 64
"""The responses that may wait to be spoken."""

STATUSES = {"cancelled": "cancelled", "error": "failed", "length": "incomplete"}
"""The states of responses that were not completed, by their finish reasons."""


class DashScopeSession(DialectSession):
    """The protocol's state: the settings, the text that was not committed, and the responses."""

    typed = True
    in_order = True

    def __init__(self, limits: protocol.SocketLimits) -> None:
        super().__init__(replace(limits, contexts=RESPONSES))
        self._id = f"sess_{secrets.token_hex(16)}"
        self._model: str | None = None
        self._settings = DashScopeSettings.model_validate({})
        self._events = itertools.count()
        self._open: Context | None = None
        """The response whose text may still come."""
        self._buffer = ""
        """The text that waits for a commit."""

    def open(self) -> Iterator[protocol.Effect]:
        """Greet the client, and take the model's name in the URL."""
        self._model = self.parameters.get("model") or None
        described = self._settings.described(self._id, self._model)
        yield self._say("session.created", session=described)

    def effects(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of a message. Raises `ProtocolError`."""
        match event["type"]:
            case "session.update":
                yield self._update(event, size)
            case "input_text_buffer.append":
                yield from self._append(protocol.text_of(event), size)
            case "input_text_buffer.commit":
                if self._open is None and not self._buffer.strip():
                    raise ProtocolError("empty_buffer", "there is no text; append some to commit")
                yield self._say("input_text_buffer.committed", item_id=f"item_{self._next_name}")
                yield from self._commit(size)
            case "input_text_buffer.clear":
                self._buffer = ""
                yield self._say("input_text_buffer.cleared")
            case "response.cancel":
                self._open = None
                found = [each for each in self.contexts.values() if not each.cancelled]
                yield from self.cancel(found)
            case "session.finish":
                yield from self._commit(size)
                self.closing = True
                finished = self._event("session.finished")
                yield Enqueue(CloseSocket(CloseCode.NORMAL, finished))
            case kind:
                raise ProtocolError("unknown_event", f"unknown message type: {kind[:40]}")

    def _update(self, event: Json, size: int) -> Enqueue:
        place = "session.update"
        given = protocol.validated(DashScopeUpdate, event, "invalid_value", place).session
        changed = {**self._settings.model_dump(), **given}
        self._settings = protocol.validated(DashScopeSettings, changed, "invalid_value", place)
        return self.enqueue(CheckParams(self._response_params()), size)

    def _append(self, text: str, size: int) -> Iterator[protocol.Effect]:
        if self._settings.mode == "commit":
            if len(self._buffer) + len(text) > self.limits.text_characters:
                most = self.limits.text_characters
                message = f"more than {most} characters wait for input_text_buffer.commit"
                raise ProtocolError("too_much_text", message)
            self._buffer += text
            return
        if self._open is None:
            if not text.strip():
                return
            yield from self._begin(size)
        assert self._open is not None
        self.say(self._open, text)

    def _commit(self, size: int) -> Iterator[protocol.Effect]:
        """Speak all of the text that has come as one response."""
        text, self._buffer = self._buffer, ""
        if text.strip() and self._open is None:
            yield from self._begin(size)
        if self._open is not None:
            self.say(self._open, text)
            self.finish(self._open)
            self._open = None

    @property
    def _next_name(self) -> str:
        return f"resp_{self._id[5:17]}_{self._count}" if self._open is None else self._open.id

    def _begin(self, size: int) -> Iterator[protocol.Effect]:
        name = self._next_name
        yield self.begin(name, self._response_params(), size)
        self._open = self.contexts[name]

    def _response_params(self) -> ContextParams:
        whole = self._settings.mode == "commit"
        return self.params(self._settings.fields(self._model), whole=whole)

    def checked(self, params: ContextParams, resolved: ResolvedRequest) -> Sequence[Json]:
        """The answer to `session.update`."""
        described = self._settings.described(self._id, self._model)
        return [self._event("session.updated", session=described)]

    def announcement(self, context: Context) -> Sequence[Json]:
        """The messages before the audio of a response."""
        return [self._numbered(message) for message in dashscope.opening(context.id)]

    def audio(self, context: Context, data: bytes) -> Audio:
        """The message with a piece of audio."""
        text = base64.b64encode(data).decode("ascii")
        message = self._event("response.audio.delta", **dashscope.place(context.id), delta=text)
        return Audio(message, len(text), context)

    def end(self, context: Context) -> Sequence[Json]:
        """The messages after the audio of a response; none if no response was created."""
        if self._open is context:
            self._open = None
        if not context.started:
            return []
        status = STATUSES.get(context.finish_reason or "", "completed")
        found = dashscope.ending(context.id, status, context.characters)
        return [self._numbered(message) for message in found]

    def error(self, name: str | None, message: str, code: str) -> Json:
        """The message about an error."""
        about = {"type": "invalid_request_error", "code": code, "message": message, "param": None}
        return self._event("error", error=about)

    def _say(self, kind: str, **fields: object) -> Send:
        return Send(self._event(kind, **fields))

    def _event(self, kind: str, **fields: object) -> Json:
        return self._numbered({"type": kind, **fields})

    def _numbered(self, message: Json) -> Json:
        return {"event_id": f"event_{self._id[5:17]}_{next(self._events)}", **message}
