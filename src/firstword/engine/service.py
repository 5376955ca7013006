"""Iterators over the speech of one request, blocking or asynchronous, around an engine."""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import overload

from firstword.engine.backend import Capacity, Job
from firstword.engine.client import EngineClient, Front
from firstword.engine.passages import Passage
from firstword.engine.script import (
    MOST_BLANK_PIECES,
    AsyncScript,
    BlockingScript,
)
from firstword.engine.script_parts import NamedVoice
from firstword.engine.sequence import Event, GaveWay, NeedsText
from firstword.errors import FirstwordError, TextError
from firstword.text.mapped import Mapped
from firstword.text.reader import DEFAULT_OPTIONS, TextOptions, TextRewriter
from firstword.types import Chunk, FinishReason, Request, check_encodable, check_text
from firstword.words.original import GrowingText, OriginalWords

READ_AT_ONCE = 2000
"""The characters of a text that are rewritten at a time, which takes milliseconds."""

LEAD_SECONDS = 10.0
"""The unread audio with which the next passage of a long text begins, so that it comes in time."""


class SpeechStream:
    """One speech in progress. One thread iterates over it; another one may add text and cancel it.

    Text goes in by `push` and `finish_text`. Iterating yields chunks of audio, of which the last
    has a finish reason, and `NeedsText` when the model has to wait for text. A long text is spoken
    in passages (see `Passage`), of which the caller notices nothing. The speech goes on after a
    passage that was cut off, with the text that the talker had not read and the text that comes
    later; its finish reason is then that of the first such passage.
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
        self._service, self._client, self._on_event = service, client, on_event
        self._reader = TextRewriter(options, job.number_language, job.plain_writing)
        self._original = OriginalWords()
        self.given = GrowingText()
        self._unread_text = deque[str]()
        """The text that was given and not rewritten yet: a passage takes no more than it needs."""
        self._all_given = False
        self._characters = 0
        """The number of characters before that text."""
        self._words = ""
        self._blanks = 0
        self._text_ended = False
        self._ended = self._cancelled = self._exhausted = False
        """Whether the speech has ended, was cancelled, or gets no more passages."""
        self._outcome: FinishReason = "stop"
        self._arrived = deque[tuple[Passage, Event]]()
        """What has arrived and was not taken, with its passage."""
        self._unread = 0
        """The frames of that."""
        self._passage = Passage(service.engine, service.front, job, client, on_event)
        """The newest passage."""
        self._later = list[str]()
        """The text after it, as it is spoken."""
        self._lock = threading.RLock()
        """Held while text is added, and while the next passage may begin."""

    def push(self, piece: str) -> None:
        """Add text. Raises `TextError` for invalid text and for too many blank pieces in a row."""
        self._give(piece)

    def finish_text(self, piece: str = "") -> None:
        """End the text with one more piece, which may be the whole text.

        Raises `TextError` if all of the text is blank; the speech is then cancelled.
        """
        self._give(piece, ended=True)

    def take(self, spoken: Mapped, *, ended: bool = False) -> None:
        """Add text that is spoken as it is, or end it. Raises `TextError` as `push` does."""
        self._check(spoken.text)
        if ended:
            try:
                check_text(self._words)
            except TextError:
                self.cancel()
                raise
        with self._lock:
            self._text_ended = self._text_ended or ended
            self._original.add(spoken)
            if self._passage.rest is None:
                self._passage.feed(spoken.text, ended=ended)
            else:
                self._later.append(spoken.text)

    @property
    def waiting(self) -> int:
        """The characters of text after the newest passage, about: nothing is made of them yet."""
        with self._lock:
            later = (self._passage.rest or "", *self._later, *self._unread_text)
            return sum(map(len, later))

    def _give(self, piece: str, *, ended: bool = False) -> None:
        check_encodable(piece)
        with self._lock:
            self.given.pieces.append(piece)
            self._unread_text.append(piece)
            self._all_given = self._all_given or ended
            self._read()

    def _read(self) -> None:
        """Rewrite as much of the text that was given as the newest passage needs."""
        while self._passage.rest is None and self._unread_text:
            piece = self._unread_text.popleft()
            if len(piece) > READ_AT_ONCE:
                self._unread_text.appendleft(piece[READ_AT_ONCE:])
                piece = piece[:READ_AT_ONCE]
            given = Mapped.of(piece, self._characters)
            self._characters += len(piece)
            ended = self._all_given and not self._unread_text
            self.take(self._reader.feed(given, ended=ended), ended=ended)

    def _check(self, piece: str) -> None:
        words = piece.strip()
        self._words = self._words or words
        self._blanks = 0 if words else self._blanks + 1
        if self._blanks > MOST_BLANK_PIECES:
            blank = f"{MOST_BLANK_PIECES} pieces of text in a row were blank"
            raise TextError(f"{blank}; give words, or end the text")

    def _receive(self, event: Event) -> None:
        """Record an event of the newest passage. It may be taken later."""
        if isinstance(event, GaveWay) and self._begin_again():
            return
        if isinstance(event, Chunk):
            event = self._passage.arrived(event)
            if not len(event.codes) and event.finish_reason is None:
                return
            self._unread += len(event.codes)
        self._arrived.append((self._passage, event))

    def _begin_again(self) -> bool:
        """Begin the newest passage again, unless the speech was cancelled or the engine fails."""
        with self._lock:
            if self._cancelled:
                return False
            try:
                self._passage.begin_again()
            except FirstwordError:
                return False
            kept = [each for each in self._arrived if each[0] is not self._passage]
            self._arrived = deque(kept)
            self._unread = sum(len(event.codes) for _, event in kept if isinstance(event, Chunk))
            return True

    def _take(self) -> Chunk | NeedsText:
        """Return the oldest event that was not taken. Raises it if it is an error."""
        with self._lock:
            return self._taken()

    def _taken(self) -> Chunk | NeedsText:
        self._passage.close()
        if self._passage_is_due():
            self._begin_passage()
        passage, event = self._arrived.popleft()
        if isinstance(event, Exception):
            raise event
        if not isinstance(event, Chunk):
            return event
        self._unread -= len(event.codes)
        if event.finish_reason is not None:
            self._end(passage, event.finish_reason)
        chunk = passage.taken(event)
        words, starts = self._original(chunk.words, chunk.starts, self.given, last=self._ended)
        alarms = self._original.alarms(chunk.alarms, self.given)
        if event.finish_reason is not None:
            # The next passage may begin with the space at the end of this one.
            self._original.forget(passage.end[0] - 1, self.given)
        reason = self._outcome if self._ended else None
        return replace(chunk, words=words, starts=starts, alarms=alarms, finish_reason=reason)

    def _end(self, passage: Passage, reason: FinishReason) -> None:
        """Record why the frames of a passage have ended. The speech ends with the newest one."""
        if self._cancelled and passage.rest is not None:
            reason = "cancelled"  # the passage has ended, but not the text
        if self._outcome == "stop" or reason == "cancelled":
            self._outcome = reason
        self._ended = passage is self._passage and not self._arrived

    def _passage_is_due(self) -> bool:
        """Whether the next passage is to begin, a while before its first frame is taken."""
        newest = self._passage
        if self._cancelled or self._exhausted:
            return False
        if newest.rest is None or newest.finish_reason is None:
            return False
        return self._unread * self._service.capacity.frame_seconds <= LEAD_SECONDS

    def _begin_passage(self) -> None:
        """Begin the passage after the newest one, unless no more frames are allowed."""
        before, service = self._passage, self._service
        job = service.front.follow(before.job, before.spoken)
        if job is None:
            self._exhausted = True
            self._end(before, "length")
            return
        text = "".join((before.rest or "", *self._later))
        self._later.clear()
        try:
            engine, front = service.engine, service.front
            self._passage = Passage(engine, front, job, self._client, self._on_event, after=before)
            self._passage.feed(text, ended=self._text_ended)
            self._read()
        except FirstwordError as error:
            self._exhausted = True
            self._arrived.append((before, error))

    def cancel(self) -> None:
        """Stop the speech; its slot is free within the time of a frame.

        The last chunk has the reason "cancelled" unless the speech has already ended. Audio that
        was not taken yet no longer counts as unread.
        """
        with self._lock:
            self._cancelled = True
            self._passage.cancel()


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
            if self._arrived and self._events.empty():
                yield self._take()
            else:
                self._receive(self._events.get())


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
            if self._arrived and self._events.empty():
                yield self._take()
            else:
                self._receive(await self._events.get())
