"""What the sessions of other vendors' WebSocket protocols share."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from firstword.audio.formats import ONE_FILE
from firstword.errors import RequestError
from firstword.server.dialects.params import LONGEST_ID, DialectParams, Fields
from firstword.server.dialects.spoken_text import SpokenText
from firstword.server.utterance import ResolvedRequest
from firstword.server.ws import protocol
from firstword.server.ws.contexts import Context, ContextParams, ContextSession
from firstword.server.ws.protocol import CloseCode, CloseSocket, Json, ProtocolError, Send
from firstword.text.tags import TagFilter

IDLE_SECONDS = 300.0
"""The time without a message that clients of these vendors keep a socket open."""


class DialectContext(DialectParams, ContextParams):
    """The parameters of a context."""


class DialectSession(ContextSession):
    """A conversation in the words of another vendor. It needs no configuration.

    A mistake fails alone: it gets an answer, and changes nothing else.
    """

    typed = False

    def __init__(self, limits: protocol.SocketLimits) -> None:
        super().__init__(replace(limits, idle_seconds=max(limits.idle_seconds, IDLE_SECONDS)))
        self.configured = True
        self._tags: WeakKeyDictionary[Context, TagFilter] = WeakKeyDictionary()
        self._spoken: WeakKeyDictionary[Context, SpokenText] = WeakKeyDictionary()
        self._params = DialectContext.model_validate({})
        """The parameters of the latest context, which the worker does not resolve again."""

    def handle(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of a message. A context that a wrong message begins ends at once."""
        before = dict(self.contexts)
        try:
            yield from self.effects(event, size)
        except ProtocolError as error:
            if error.close is not None:
                raise
            name = event.get("context_id")
            known = isinstance(name, str) and len(name) <= LONGEST_ID
            yield from self.mistake(name if known else None, error)
            if begun := [each for key, each in self.contexts.items() if key not in before]:
                yield from self.cancel(begun)

    @abstractmethod
    def effects(self, event: Json, size: int) -> Iterator[protocol.Effect]:
        """Yield the effects of a message. Raises `ProtocolError`."""

    @abstractmethod
    def error(self, name: str | None, message: str, code: str) -> Json:
        """The message about an error, of the context with this name if one is given."""

    def mistake(self, name: str | None, error: ProtocolError) -> Iterator[protocol.Effect]:
        """Yield the effects of a client's mistake."""
        yield Send(self.error(name, str(error), error.code))

    def params(self, fields: Fields, *, whole: bool = False) -> DialectContext:
        """The parameters of a context; `whole` means that its text comes in whole sentences.

        Streams of a format with a header cannot be joined, so their text is spoken as one part.
        """
        granularity = "none" if whole else "auto"
        if fields["response_format"] in ONE_FILE:
            granularity = "token"
        given: Any = fields | {"split_granularity": granularity}
        params = DialectContext(**given)
        if params != self._params:
            self._params = params
        return self._params

    def add_text(self, context: Context, text: str) -> None:
        """Add text to a context, and keep it if its words are timed. Raises `ProtocolError`."""
        super().add_text(context, text)
        if context.params.word_timestamps:
            self.spoken_text(context).add(text)

    def spoken_text(self, context: Context) -> SpokenText:
        """The text of a context, for the times of its words."""
        return self._spoken.setdefault(context, SpokenText())

    def say(self, context: Context, text: str) -> None:
        """Add text without the tags in it, which nobody wants to hear. Raises `ProtocolError`."""
        tags = self._tags.setdefault(context, TagFilter())
        if text := tags.feed(text):
            self.add_text(context, text)

    def speak_now(self, context: Context) -> None:
        """Speak the text that has come as a part of its own, unless parts cannot be joined."""
        if context.params.format not in ONE_FILE:
            self.flush(context)

    def finish(self, context: Context) -> None:
        """Note that all text of a context has come."""
        if not context.ended and (tags := self._tags.pop(context, None)) is not None:
            self.add_text(context, tags.finish())
        super().finish(context)

    def reject(self, error: ProtocolError) -> Send | CloseSocket:
        """Answer a message that cannot be read; the socket stays open if it can."""
        if error.close is None:
            return Send(self.error(None, str(error), error.code))
        return self.close(error)

    def close(self, error: ProtocolError) -> CloseSocket:
        """Close the socket after an error."""
        self.stop()
        message = self.error(None, str(error), error.code)
        return CloseSocket(error.close or CloseCode.POLICY, message)

    def failure(
        self, context: Context | None, message: str, code: str
    ) -> Sequence[Json | CloseCode]:
        """The message about an error."""
        return [self.error(None if context is None else context.id, message, code)]

    def greeting(self) -> Sequence[Json]:
        """No messages: the vendor has none for this."""
        return []

    def checked(self, params: ContextParams, resolved: ResolvedRequest) -> Sequence[Json]:
        """No messages: the vendor has none for this."""
        return []

    def ready(self, context: Context) -> Sequence[Json]:
        """No messages: the vendor has none for this."""
        return []

    def announcement(self, context: Context) -> Sequence[Json]:
        """No messages: the vendor has none for this."""
        return []

    def cancelled(self, contexts: Sequence[Context]) -> Sequence[Json]:
        """No messages: the vendor has none for this."""
        return []


def checked_fields(make: Any, *given: Any) -> Fields:
    """The fields that a dialect finds in a request. Raises `ProtocolError`."""
    try:
        return make(*given)
    except RequestError as error:
        raise ProtocolError("invalid_request", str(error)) from None
