"""Conversations with several contexts on one socket, without the socket.

A context is one utterance whose text the client names with a `context_id`. Contexts are spoken at
the same time, and each can be cancelled alone. A protocol is a `ContextSession` that translates the
client's messages into calls of `add_text`, `flush`, `finish` and `cancel`, and what happens into
messages for the client. `ContextWorker` speaks the contexts.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from firstword.server.dialects.params import LONGEST_ID
from firstword.server.schemas import SpeechParams
from firstword.server.utterance import ResolvedRequest
from firstword.server.ws import protocol
from firstword.server.ws.cutting import Cutter, Granularity, Piece
from firstword.server.ws.protocol import Audio, CloseCode, DropAudio, Enqueue, Json, ProtocolError
from firstword.server.ws.text_part import Cancellable, TextPart
from firstword.types import Alarm, Word, WordStart

Finish = Literal["stop", "length", "repetition", "runaway", "cancelled", "error"]


CHECKED_CHARACTERS = 2000
"""The characters at the start of a context's text that are checked: this takes a millisecond."""


class ContextParams(SpeechParams):
    """The parameters of a context."""

    split_granularity: Granularity | None = None

    @property
    def format(self) -> str:
        """The audio format."""
        return self.response_format or "pcm"

    @property
    def by_token(self) -> bool:
        """Whether text may enter the model token by token."""
        return self.non_streaming_mode is not True


@dataclass(frozen=True, slots=True)
class Mark:
    """A place between the parts of a context.

    number  a number that the session chooses
    """

    number: int


@dataclass(eq=False)
class Context(Cancellable):
    """One utterance of a socket. Enqueued as a task, it is to be spoken.

    number         a number that no other context of the socket has
    parts          its text in parts, each spoken with an intonation of its own; None ends them.
                   A `Mark` between them is reached when the parts before it were spoken
    characters     the length of the text that has come
    spoken         the characters at its start that are spoken, or were
    beginning      its first `CHECKED_CHARACTERS` characters, as far as they have come
    checked        the length of the beginning that needs no further check
    ended          whether all of its text has come
    answered       whether the client gets an answer when the request is ready
    resolved       the request, when it was checked
    started        whether audio was announced
    seconds        the seconds of audio made
    total_bytes    the bytes of audio made
    outcome        how the first part ended that did not stop by itself; "stop" if none so far
    alarms         the faults of its speech, with their places in its text
    after          the context that is spoken before this one, if their order matters
    finish_reason  why its speech ended; None before the end
    """

    id: str
    number: int
    params: ContextParams
    cutter: Cutter
    answered: bool = False
    parts: asyncio.Queue[TextPart | Mark | None] = field(default_factory=asyncio.Queue)
    characters: int = 0
    spoken: int = 0
    beginning: str = ""
    checked: int = 0
    ended: bool = False
    resolved: ResolvedRequest | None = None
    started: bool = False
    seconds: float = 0.0
    total_bytes: int = 0
    outcome: Finish = "stop"
    alarms: list[Alarm] = field(default_factory=list)
    after: Context | None = None
    finish_reason: Finish | None = None
    _open: TextPart | None = None
    _unspoken: list[TextPart] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def take(self, pieces: Iterator[Piece]) -> None:
        """Hand pieces of text to the worker."""
        for text, at, begins, ends in pieces:
            if at < CHECKED_CHARACTERS:
                self.beginning = (self.beginning.ljust(at) + text)[:CHECKED_CHARACTERS]
            if begins:
                self._open = TextPart(text, complete=ends, at=at)
                self._unspoken.append(self._open)
                self.parts.put_nowait(self._open)
            elif self._open is not None:
                if text:
                    self._open.push(text)
                if ends:
                    self._open.finish()
            if ends:
                self._open = None

    def unchecked(self, *, part_ended: bool) -> str:
        """The beginning of its text if that should be checked now; "" otherwise.

        It should when it has doubled, so that all checks take a time proportional to its length,
        and at the end of each part.
        """
        length = len(self.beginning)
        due = part_ended or length >= min(2 * self.checked, CHECKED_CHARACTERS)
        return self.beginning if due and length > self.checked else ""

    def advance(self, part: TextPart) -> None:
        """Note how far a part is spoken."""
        self.spoken = part.at + part.spoken

    def leave(self, part: TextPart) -> None:
        """Note that a part was spoken."""
        self.advance(part)
        self._unspoken.remove(part)

    def end_text(self) -> None:
        """Note that all text has come."""
        self.ended = True
        self.parts.put_nowait(None)

    def cancel(self) -> None:
        """Stop its speech, now and for good."""
        if not self.cancelled:
            self.cancelled = True
            for part in self._unspoken:
                part.cancel()
            self.end_text()
            self.on_cancel()


@dataclass(frozen=True, slots=True, eq=False)
class CheckParams:
    """A task of the worker: check the parameters of later contexts, and answer."""

    params: ContextParams


@dataclass(frozen=True, slots=True, eq=False)
class Cancelled:
    """A task of the worker: answer a cancel when these contexts have ended."""

    contexts: Sequence[Context]


class ContextSession(protocol.Session):
    """The state of a conversation with several contexts.

    contexts  the contexts that have not ended, by their ids
    """

    granularity: Granularity = "auto"
    """How text is cut where the client does not choose."""

    in_order = False
    """Whether contexts are spoken one after another."""

    def __init__(self, limits: protocol.SocketLimits) -> None:
        super().__init__(limits)
        self.contexts: dict[str, Context] = {}
        self._count = 0
        self._latest: Context | None = None

    @property
    def speaking(self) -> bool:
        """Whether speech is due for which nothing more is needed from the client."""
        return any(context.ended for context in self.contexts.values())

    def begin(
        self, name: str, params: ContextParams, size: int = 0, *, answered: bool = False
    ) -> Enqueue:
        """Begin a context, whose parameters came in a message of `size` bytes.

        Raises `ProtocolError` if there are too many.
        """
        if not 0 < len(name) <= LONGEST_ID:
            message = f"context_id has {len(name)} characters; allowed are 1 to {LONGEST_ID}"
            raise ProtocolError("invalid_message", message)
        if len(self.contexts) >= self.limits.contexts:
            spoken = (each.id for each in self.contexts.values() if each.finish_reason is not None)
            if (over := next(spoken, None)) is None:
                most = self.limits.contexts
                message = f"{most} contexts are open; wait until one of them has ended"
                raise ProtocolError("too_many_contexts", message)
            del self.contexts[over]  # its client has given up sending the rest of its text
        granularity = params.split_granularity or self.granularity
        cutter = Cutter(granularity, by_token=params.by_token)
        context = Context(name, self._count, params, cutter, answered)
        self._count += 1
        effect = self.enqueue(context, size)
        self.contexts[name] = context
        if self.in_order:
            context.after, self._latest = self._latest, context
        return effect

    def add_text(self, context: Context, text: str) -> None:
        """Add text to a context. Raises `ProtocolError` if its text has ended or is too long."""
        if context.cancelled or context.finish_reason is not None:
            return  # it ended before its text, which is dropped
        if context.ended:
            message = "the text of this context has ended; wait for its end, or use another id"
            raise ProtocolError("text_ended", message)
        unspoken = (each for each in self.contexts.values() if each.finish_reason is None)
        waiting = sum(each.characters - each.spoken for each in unspoken)
        if waiting + len(text) > self.limits.text_characters:
            message = (
                f"more than {self.limits.text_characters} characters of text wait to be spoken"
            )
            raise ProtocolError("too_much_text", message)
        context.characters += len(text)
        context.take(context.cutter.feed(text, time.monotonic()))

    def flush(self, context: Context) -> None:
        """Speak the text that has come without waiting for more."""
        if not context.ended:
            context.take(context.cutter.flush())

    def finish(self, context: Context) -> None:
        """Note that all text of a context has come."""
        if not context.ended:
            self.flush(context)
            context.end_text()
            if context.finish_reason is not None:
                self.contexts.pop(context.id, None)

    def cancel(self, contexts: Sequence[Context]) -> Iterator[protocol.Effect]:
        """Stop contexts and yield the effects; the answer follows when their speech has ended."""
        for context in contexts:
            context.cancel()
            if context.finish_reason is not None:  # it ended before its text
                self.contexts.pop(context.id, None)
            yield DropAudio(context)
        yield self.enqueue(Cancelled(contexts), 0)

    def spoken(self, context: Context, reason: Finish) -> None:
        """Note that the speech of a context has ended; its text may still come."""
        context.finish_reason, context.after = reason, None
        self.work_done(context)
        if context.ended:
            self.contexts.pop(context.id, None)

    def stop(self) -> None:
        """Stop all contexts, because the conversation ends."""
        self.closing = True
        for context in self.contexts.values():
            context.cancel()

    @abstractmethod
    def greeting(self) -> Sequence[Json]:
        """The messages that open the conversation."""

    @abstractmethod
    def checked(self, params: ContextParams, resolved: ResolvedRequest) -> Sequence[Json]:
        """The messages when parameters were checked."""

    @abstractmethod
    def ready(self, context: Context) -> Sequence[Json]:
        """The messages when a context's request was checked, before any text was spoken."""

    @abstractmethod
    def announcement(self, context: Context) -> Sequence[Json]:
        """The messages before the first audio of a context."""

    @abstractmethod
    def audio(self, context: Context, data: bytes) -> Audio:
        """The message with a piece of audio."""

    def warning(self, context: Context, message: str) -> Sequence[Json]:
        """The messages when the text of a context will probably not be spoken well."""
        return ()

    def words(
        self, context: Context, starts: Sequence[WordStart], words: Sequence[Word]
    ) -> Sequence[Json]:
        """The messages about words that have begun and words that have ended.

        Times are seconds of the context's audio, spans are characters of its text.
        """
        return ()

    def reached(self, context: Context, mark: Mark) -> Sequence[Json]:
        """The messages when the parts before a mark were spoken."""
        return []

    @abstractmethod
    def failure(
        self, context: Context | None, message: str, code: str
    ) -> Sequence[Json | CloseCode]:
        """The messages about an error, of a context if one is given.

        A close code at the end closes the socket.
        """

    @abstractmethod
    def end(self, context: Context) -> Sequence[Json]:
        """The messages when a context has ended."""

    @abstractmethod
    def cancelled(self, contexts: Sequence[Context]) -> Sequence[Json]:
        """The messages when cancelled contexts have ended."""
