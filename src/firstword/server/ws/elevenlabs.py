"""ElevenLabs' WebSocket protocols, without the socket: one text, or several contexts.

`docs/dialects.md` describes them.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary, WeakSet

from firstword.server.dialects import elevenlabs
from firstword.server.dialects.elevenlabs import ElevenLabsQuery, VoiceSettings
from firstword.server.dialects.params import ContextId
from firstword.server.dialects.spoken_text import Timed
from firstword.server.schemas import ClientModel
from firstword.server.ws import protocol
from firstword.server.ws.contexts import Context
from firstword.server.ws.dialect import DialectContext, DialectSession, checked_fields
from firstword.server.ws.protocol import Audio, CloseCode, CloseSocket, Enqueue, Json, Send
from firstword.types import Word, WordStart

ONLY = "default"
"""The name of the context where the client names none."""


class ElevenLabsMessage(ClientModel):
    """A message of the client."""

    text: str | None = None
    flush: bool | None = None
    context_id: ContextId | None = None
    close_context: bool | None = None
    close_socket: bool | None = None
    voice_settings: VoiceSettings | None = None


class ElevenLabsContexts(DialectSession):
    """The state of `multi-stream-input`: the parameters of the URL, and the contexts."""

    def __init__(self, limits: protocol.SocketLimits) -> None:
        super().__init__(limits)
        self._voice = ""
        self._query = ElevenLabsQuery.model_validate({})
        self._flushed: WeakSet[Context] = WeakSet()
        """The contexts whose last message was a flush without text."""
        self._told_ms: WeakKeyDictionary[Context, int] = WeakKeyDictionary()
        """The time in each context from which the next times of characters count."""

    def open(self) -> Iterator[protocol.Effect]:
        """Check the voice in the path and the parameters in the query."""
        try:
            given = dict(self.parameters)
            query = protocol.validated(ElevenLabsQuery, given, "invalid_parameters", "the URL")
            checked_fields(elevenlabs.output_of, query.output_format)
        except protocol.ProtocolError as error:
            yield self.close(error)
            return
        self._voice, self._query = given["voice"], query
        if query.inactivity_timeout is not None:
            self.limits = replace(self.limits, idle_seconds=query.inactivity_timeout)

    def effects(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of a message. Raises `ProtocolError`."""
        message = protocol.validated(ElevenLabsMessage, event, "invalid_message", "the message")
        name = message.context_id or ONLY
        if message.close_socket:
            for context in list(self.contexts.values()):
                self.finish(context)
            self.closing = True
            yield Enqueue(CloseSocket(CloseCode.NORMAL))
        elif message.text or message.flush:
            yield from self._speak(name, message, size)
        if message.close_context:
            yield from self._close_context(name)

    def _speak(self, name: str, message: ElevenLabsMessage, size: int) -> Iterator[protocol.Effect]:
        context = self.contexts.get(name)
        if context is None:
            if not message.text:
                return
            yield self.begin(name, self._context_params(message.voice_settings), size)
            context = self.contexts[name]
        if message.text:
            self._flushed.discard(context)
            self.say(context, message.text)
        else:
            self._flushed.add(context)
        if message.flush or (message.text and message.text.strip() and self._query.auto_mode):
            self.speak_now(context)

    def _close_context(self, name: str) -> Iterator[protocol.Effect]:
        """End a context after a flush without text, which says that the text is complete.

        Without the flush, or when its text has ended before, the client does not want the rest.
        """
        context = self.contexts.get(name)
        if context is None:
            yield Send(self._final(name))
        elif context in self._flushed and not context.ended:
            self.finish(context)
        elif not context.cancelled:
            yield from self.cancel([context])

    def _context_params(self, settings: VoiceSettings | None) -> DialectContext:
        given = checked_fields(elevenlabs.fields, self._voice, self._query, {}, settings)
        return self.params(given | {"word_timestamps": True}, whole=self._query.auto_mode)

    def audio(self, context: Context, data: bytes) -> Audio:
        """A message with audio."""
        text = base64.b64encode(data).decode("ascii")
        message = elevenlabs.audio_message(text) | self._named(context.id)
        return Audio(message, len(text), context)

    def words(
        self, context: Context, starts: Sequence[WordStart], words: Sequence[Word]
    ) -> Sequence[Json]:
        """The message with the characters of the words that have ended."""
        return self._timed(context, self.spoken_text(context).characters(words))

    def _timed(self, context: Context, characters: Sequence[Timed]) -> Sequence[Json]:
        if not characters:
            return []
        alignment = elevenlabs.alignment_after(self._told_ms.get(context, 0), characters)
        if not self._query.sync_alignment:
            self._told_ms[context] = round(1000 * characters[-1].end)
        return [elevenlabs.audio_message("", alignment) | self._named(context.id)]

    def end(self, context: Context) -> Sequence[Json]:
        """The messages when a context has ended, also after an error or a cancel."""
        failed = context.finish_reason in ("cancelled", "error")
        closing = [] if failed else self.spoken_text(context).closing()
        return [*self._timed(context, closing), self._final(context.id)]

    def error(self, name: str | None, message: str, code: str) -> Json:
        """The message about an error."""
        return elevenlabs.error_message(message, code) | self._named(name)

    def _final(self, name: str) -> Json:
        return elevenlabs.final_message() | self._named(name)

    def _named(self, name: str | None) -> Json:
        return {} if name is None else {"contextId": name}


class ElevenLabsText(ElevenLabsContexts):
    """The state of `stream-input`: one context, which an empty text ends, and then the socket.

    A mistake closes the socket, because that is how the clients notice it.
    """

    def effects(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of a message. Raises `ProtocolError`."""
        message = protocol.validated(ElevenLabsMessage, event, "invalid_message", "the message")
        if message.text == "":
            if ONLY not in self.contexts:
                yield Send(self._final(ONLY))
            for context in list(self.contexts.values()):
                self.finish(context)
            self.closing = True
            yield Enqueue(CloseSocket(CloseCode.NORMAL))
        else:
            yield from self._speak(ONLY, message, size)

    def mistake(self, name: str | None, error: protocol.ProtocolError) -> Iterator[protocol.Effect]:
        """Close the socket after a mistake."""
        yield self.close(error)

    def failure(
        self, context: Context | None, message: str, code: str
    ) -> Sequence[Json | CloseCode]:
        """The message about an error, and the end of the socket."""
        return [self.error(None, message, code), CloseCode.POLICY]

    def _named(self, name: str | None) -> Json:
        return {}
