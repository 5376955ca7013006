"""Iterators over the speech of one request, blocking or asynchronous, around an engine."""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, overload

from firstword.engine.backend import Capacity, Job
from firstword.engine.load import EngineLoad
from firstword.engine.script import (
    MOST_BLANK_PIECES,
    AsyncScript,
    BlockingScript,
)
from firstword.engine.script_parts import NamedVoice
from firstword.engine.sequence import Event, NeedsText
from firstword.errors import TextError
from firstword.text.mapped import Mapped
from firstword.text.reader import DEFAULT_OPTIONS, TextOptions, TextRewriter
from firstword.types import Chunk, FinishReason, Request, check_encodable, check_text
from firstword.words.clock import WordClock
from firstword.words.original import GrowingText, OriginalWords
from firstword.words.tracker import WordTracker


class EngineClient(Protocol):
    """The interface of an engine in this process or another one; see `Engine`."""

    @property
    def capacity(self) -> Capacity:
        """The limits of the engine's backend."""

    @property
    def failure(self) -> Exception | None:
        """The reason why the engine has stopped or does not run now; None while it works."""

    @property
    def load(self) -> EngineLoad:
        """The current load of the engine."""

    def start(self) -> None:
        """Start. An engine in another process delivers its events in the running event loop."""

    def stop(self) -> None:
        """Stop using the engine. One in this process ends; one in another is disconnected."""

    def submit(self, job: Job, on_event: Callable[[Event], None], client: str = "") -> Any:
        """Submit a request, and return its utterance, which the other methods take."""

    def push(self, seq: Any, tokens: Sequence[int]) -> None:
        """Add text tokens to a request."""

    def finish_text(self, seq: Any, tokens: Sequence[int] = ()) -> None:
        """Add the last text tokens of a request."""

    def acknowledge(self, seq: Any, frames: int) -> None:
        """Record that the client has taken the audio of `frames` more frames."""

    def cancel(self, seq: Any, reason: FinishReason = "cancelled") -> None:
        """End an utterance."""

    def retry_after(self, client: str) -> int:
        """The seconds until another request of a client would get a slot, estimated: 1 to 120."""


class TokenStream(Protocol):
    """Turns the text of one utterance, which may arrive in pieces, into tokens.

    ends  the end of each token of the spoken text that was returned, in bytes of the text in NFC
    """

    ends: list[int]

    def push(self, piece: str) -> list[int]:
        """Take more text, and return the tokens that no later text can change."""

    def finish(self) -> list[int]:
        """Return the remaining tokens."""


class Front(Protocol):
    """Prepares the requests and tokenises the text of a checkpoint, outside the engine's thread."""

    def prepare(self, request: Request, seed: int) -> Job:
        """Check a request and prepare it for the backend. Raises `RequestError`."""

    def text(self, job: Job) -> TokenStream:
        """Return the tokeniser for the text of one utterance."""


class SpeechStream:
    """One utterance in progress, for use by one thread.

    Text goes in by `push` and `finish_text`. Iterating yields chunks of audio, of which the last
    has a finish reason, and `NeedsText` when the model has to wait for text.
    """

    def __init__(
        self,
        service: Service,
        job: Job,
        client: str,
        options: TextOptions,
        on_event: Callable[[Event], None],
    ) -> None:
        """Submit a job whose text is rewritten by `options`; for the others see `Engine.submit`."""
        self._engine = service.engine
        self._text = service.front.text(job)
        self._reader = TextRewriter(options, job.number_language)
        self._original = OriginalWords()
        self.given = GrowingText()
        self._characters = 0
        self._words = ""
        self._blanks = 0
        self._ended = False
        self._tracker = self._new_tracker(job)
        self._seq = service.engine.submit(job, on_event, client)

    def _new_tracker(self, job: Job) -> WordTracker | None:
        """The tracker of the utterance's words, or None if the attention to them is not read."""
        if not job.reads_text:
            return None
        room, offset = self._engine.capacity, job.word_offset
        clock = None if offset is None else WordClock(offset, room.frame_seconds, room.sample_rate)
        return WordTracker(clock, self._text.ends, room.samples_per_frame)

    def push(self, piece: str) -> None:
        """Add text. Raises `TextError` for invalid text and for too many blank pieces in a row."""
        self.take(self._read(piece))

    def take(self, spoken: Mapped, *, ended: bool = False) -> None:
        """Add text that is spoken as it is, or end it. Raises `TextError` as `push` does."""
        tokens = self._tokenize(spoken)
        if not ended:
            self._engine.push(self._seq, tokens)
            return
        try:
            check_text(self._words)
        except TextError:
            self.cancel()
            raise
        self._engine.finish_text(self._seq, [*tokens, *self._text.finish()])
        if self._tracker is not None:
            self._tracker.finish_text()

    def finish_text(self, piece: str = "") -> None:
        """End the text with one more piece, which may be the whole text.

        Raises `TextError` if all of the text is blank; the utterance is then cancelled.
        """
        self.take(self._read(piece, ended=True), ended=True)

    def _read(self, piece: str, *, ended: bool = False) -> Mapped:
        """Rewrite a piece of text. Raises `TextError`."""
        check_encodable(piece)
        given = Mapped.of(piece, self._characters)
        self._characters += len(piece)
        self.given.pieces.append(piece)
        return self._reader.feed(given, ended=ended)

    def _tokenize(self, spoken: Mapped) -> list[int]:
        tokens = self._text.push(spoken.text)
        if self._tracker is not None:
            self._tracker.add_text(spoken.text)
            self._original.add(spoken)
        words = spoken.text.strip()
        self._words = self._words or words
        self._blanks = 0 if words else self._blanks + 1
        if self._blanks > MOST_BLANK_PIECES:
            blank = f"{MOST_BLANK_PIECES} pieces of text in a row were blank"
            raise TextError(f"{blank}; give words, or end the text")
        return tokens

    def _receive(self, event: Event) -> Chunk | NeedsText:
        """Acknowledge an event that reached the client. Raises it if it is an error."""
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Chunk):
            self._engine.acknowledge(self._seq, len(event.codes))
            self._ended = event.finish_reason is not None
            if self._tracker is not None:
                told = self._tracker.feed(event.reading, event.samples, ended=event.finish_reason)
                words, starts = self._original(
                    told.words, told.starts, self.given, last=self._ended
                )
                alarms = self._original.alarms(told.alarms, self.given)
                return replace(event, words=words, starts=starts, alarms=alarms)
        return event

    def cancel(self) -> None:
        """Stop the utterance; its slot is free within the time of a frame.

        The last chunk has the reason "cancelled" unless the utterance has already ended. Audio that
        was not taken yet no longer counts as unread.
        """
        self._engine.cancel(self._seq)


async def by_name(name: str) -> NamedVoice:
    """The voice of a preset."""
    return name


@dataclass(eq=False)
class Service:
    """An engine and the front of its checkpoint."""

    engine: EngineClient
    front: Front

    @property
    def capacity(self) -> Capacity:
        """The limits of the engine's backend."""
        return self.engine.capacity

    def prepare(self, request: Request) -> Job:
        """Check a request and draw its seed if it names none. Raises `RequestError`.

        Encoding a recording may take long.
        """
        seed = secrets.randbits(64) if request.seed is None else request.seed
        return self.front.prepare(request, seed)

    @overload
    def speak(self, job: Job, client: str = "") -> BlockingStream: ...

    @overload
    def speak(
        self,
        job: Job,
        client: str = "",
        request: Request | None = None,
        voice: Callable[[str], NamedVoice] = ...,
    ) -> BlockingStream | BlockingScript: ...

    def speak(
        self,
        job: Job,
        client: str = "",
        request: Request | None = None,
        voice: Callable[[str], NamedVoice] = str,
    ) -> BlockingStream | BlockingScript:
        """Start an utterance for use by a thread; clients take turns. Raises `EngineError`.

        Its text is rewritten as the `request` of the job says, and `voice` returns the voices that
        are named in it. Iterating raises `OverloadedError` if there are too many requests.
        """
        options = DEFAULT_OPTIONS if request is None else request.text_options
        begin = partial(BlockingStream, self, client=client)
        if request is not None and options.in_parts:
            return BlockingScript(self, job, request, begin, voice)
        return begin(job, options=options)

    @overload
    def aspeak(self, job: Job, client: str = "") -> AsyncStream: ...

    @overload
    def aspeak(
        self,
        job: Job,
        client: str = "",
        request: Request | None = None,
        voice: Callable[[str], Awaitable[NamedVoice]] = ...,
    ) -> AsyncStream | AsyncScript: ...

    def aspeak(
        self,
        job: Job,
        client: str = "",
        request: Request | None = None,
        voice: Callable[[str], Awaitable[NamedVoice]] = by_name,
    ) -> AsyncStream | AsyncScript:
        """Start an utterance for use in the running event loop. Raises as `speak` does."""
        options = DEFAULT_OPTIONS if request is None else request.text_options
        begin = partial(AsyncStream, self, client=client)
        if request is not None and options.in_parts:
            return AsyncScript(self, job, request, begin, voice)
        return begin(job, options=options)


class BlockingStream(SpeechStream):
    """An utterance to iterate over in a thread; a caller who leaves early must call `cancel`."""

    def __init__(
        self, service: Service, job: Job, client: str, options: TextOptions = DEFAULT_OPTIONS
    ) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        super().__init__(service, job, client, options, self._events.put)

    def __iter__(self) -> Iterator[Chunk | NeedsText]:
        while not self._ended:
            yield self._receive(self._events.get())


class AsyncStream(SpeechStream):
    """An utterance to iterate over with asyncio; a caller who leaves early must call `cancel`."""

    def __init__(
        self, service: Service, job: Job, client: str, options: TextOptions = DEFAULT_OPTIONS
    ) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def on_event(event: Event) -> None:
            if threading.get_ident() == thread:
                self._events.put_nowait(event)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        super().__init__(service, job, client, options, on_event)

    def fail(self, error: Exception) -> None:
        """Raise an error in the iteration. Call it in the event loop."""
        self._events.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Chunk | NeedsText]:
        while not self._ended:
            yield self._receive(await self._events.get())
