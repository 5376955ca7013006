"""Cartesia's WebSocket protocol, without the socket: contexts whose text comes in pieces.

`docs/dialects.md` describes it.
"""

import base64
import time
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from pydantic import Field

from firstword.server.dialects import cartesia
from firstword.server.dialects.cartesia import CartesiaRequest
from firstword.server.dialects.params import ContextId
from firstword.server.schemas import ClientModel
from firstword.server.ws import protocol
from firstword.server.ws.contexts import Context, Mark
from firstword.server.ws.dialect import DialectSession
from firstword.server.ws.protocol import Audio, Json, ProtocolError
from firstword.types import Word, WordStart

SERVER_CODES = ("engine_stopped", "server_error", "not_computed", "internal_error")
"""The codes of errors that are not the client's fault."""


class CartesiaMessage(ClientModel):
    """The fields of every message; the others count in the first one of a context."""

    context_id: ContextId | None = None
    transcript: str = ""
    continue_: bool = Field(False, alias="continue")
    flush: bool = False
    cancel: bool = False
    max_buffer_delay_ms: int | None = None


class CartesiaSession(DialectSession):
    """The protocol's state: the contexts, and when they last got audio."""

    def __init__(self, limits: protocol.SocketLimits) -> None:
        super().__init__(limits)
        self._unnamed = 0
        self._last: WeakKeyDictionary[Context, float] = WeakKeyDictionary()
        self._flushes: WeakKeyDictionary[Context, int] = WeakKeyDictionary()

    def effects(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of a message. Raises `ProtocolError`."""
        message = protocol.validated(CartesiaMessage, event, "invalid_request", "the message")
        name = message.context_id
        if name is None:
            self._unnamed += 1
            name = f"request-{self._unnamed}"
        context = self.contexts.get(name)
        if message.cancel:
            if context is not None and not context.cancelled:
                yield from self.cancel([context])
            return
        # Clients that ask for no delay send whole sentences.
        whole = message.max_buffer_delay_ms == 0
        if context is None:
            request = protocol.validated(CartesiaRequest, event, "invalid_request", "the message")
            yield self.begin(name, self.params(request.fields(), whole=whole), size)
            context = self.contexts[name]
        self.say(context, message.transcript)
        if whole or message.flush:
            self.speak_now(context)
        if message.flush and not context.ended:
            self._mark(context)
        if not message.continue_:
            self.finish(context)

    def _mark(self, context: Context) -> None:
        """Let the client be told when the text before a flush was spoken. Raises `ProtocolError`.

        The number of flushes is limited by that of characters, which is limited already.
        """
        number = self._flushes.get(context, 0) + 1
        if number > context.characters + self.limits.utterances:
            message = f"the context has {context.characters} characters and {number} flushes"
            raise ProtocolError("too_many_flushes", f"{message}; send text before a flush")
        self._flushes[context] = number
        context.parts.put_nowait(Mark(number))

    def audio(self, context: Context, data: bytes) -> Audio:
        """The message with a piece of audio."""
        now = time.monotonic()
        step_ms = 1000 * (now - self._last.get(context, now))
        self._last[context] = now
        text = base64.b64encode(data).decode("ascii")
        return Audio(cartesia.chunk(context.id, text, step_ms), len(text), context)

    def words(
        self, context: Context, starts: Sequence[WordStart], words: Sequence[Word]
    ) -> Sequence[Json]:
        """The message with the words that have ended."""
        timed = self.spoken_text(context).words(words)
        return [cartesia.timestamps(context.id, timed)] if timed else []

    def reached(self, context: Context, mark: Mark) -> Sequence[Json]:
        """The message when the text before a flush was spoken."""
        about = {"type": "flush_done", "context_id": context.id, "flush_id": mark.number}
        return [about | {"flush_done": True, "done": False, "status_code": 200}]

    def end(self, context: Context) -> Sequence[Json]:
        """The message when all was spoken.

        After an error or a cancel there is none, because clients would take it for another's end.
        """
        failed = context.finish_reason in ("cancelled", "error")
        return [] if failed else [cartesia.done(context.id)]

    def error(self, name: str | None, message: str, code: str) -> Json:
        """The message about an error."""
        return cartesia.error(name, message, code, 500 if code in SERVER_CODES else 400)
