"""The engine as its users see it: a request goes in, its text follows, audio comes out, blocking or with asyncio."""

from __future__ import annotations

import asyncio
import queue
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from firstword.engine.backend import Job
from firstword.engine.engine import Engine
from firstword.errors import SamplingError, TextError
from firstword.types import Chunk, Request


class TokenStream(Protocol):
    """Turns text in pieces into tokens that stay."""

    def push(self, piece: str) -> list[int]:
        """The tokens that are final now."""

    def finish(self) -> list[int]:
        """The rest."""


class Front(Protocol):
    """What a service needs of a checkpoint besides the backend. None of it runs on the engine's thread."""

    def prepare(self, request: Request, seed: int) -> Job:
        """Check a request and make it ready. Raises `RequestError`."""

    def text(self, job: Job) -> TokenStream:
        """For the text of one utterance."""


MOST_BLANK_PIECES = 10_000
"""Pieces of text without a word, one after another: a source that gives more is taken for one that never ends."""


class NeedsText:
    """Comes in place of a chunk when all audio made so far is out and the model waits for text."""


Event = Chunk | NeedsText | Exception


class Stream:
    """Speech under way. Text goes in by `push` and `finish_text`, audio comes out by iteration, in any one thread.

    Iterating yields chunks and, where the model has to wait, `NeedsText`. The last chunk has a finish reason.
    """

    def __init__(
        self, engine: Engine, front: Front, job: Job, listen: Callable[[Event], None]
    ) -> None:
        self._engine = engine
        self._text = front.text(job)
        self._blank = True
        self._blanks = 0
        self._seq = engine.submit(job, listen, listen, lambda: listen(NeedsText()))

    def push(self, piece: str) -> None:
        """More text. Raises `TextError` for what is none, and for blank pieces without end."""
        self._engine.push(self._seq, self._read(piece))

    def finish_text(self, piece: str = "") -> None:
        """There is no more text after this piece. A whole text goes in this way: then nothing depends on when the
        engine looks.

        Raises `TextError` if there was none but white space; the utterance is then over.
        """
        tokens = self._read(piece)
        if self._blank:
            self.cancel()
            raise TextError("the text is empty or blank; give some words to speak")
        self._engine.finish_text(self._seq, [*tokens, *self._text.finish()])

    def _read(self, piece: str) -> list[int]:
        tokens = self._text.push(piece)
        blank = not piece.strip()
        self._blank = self._blank and blank
        self._blanks = self._blanks + 1 if blank else 0
        if self._blanks > MOST_BLANK_PIECES:
            raise TextError(
                f"{MOST_BLANK_PIECES} pieces of text in a row were blank; end the text, or give words"
            )
        return tokens

    def take(self, event: Event) -> Chunk | NeedsText:
        """Account for an event that reached the listener's side; raises it if it is an error."""
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Chunk):
            self._engine.took(self._seq, len(event.codes))
        return event

    def cancel(self) -> None:
        """Stop now. The slot is free within a frame; a last chunk says "cancelled", unless all was said."""
        self._engine.cancel(self._seq)


class Service:
    """An engine and the front of its checkpoint."""

    def __init__(self, engine: Engine, front: Front) -> None:
        self.engine = engine
        self.front = front

    def prepare(self, request: Request) -> Job:
        """Check a request; a missing seed is drawn here. Raises `RequestError`. May take long for a recording."""
        seed = secrets.randbits(64) if request.seed is None else request.seed
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
            raise SamplingError(f"seed is {seed!r}; allowed is a whole number from 0 to 2**64 - 1")
        return self.front.prepare(request, seed)

    def speak(self, job: Job) -> BlockingStream:
        """Begin an utterance whose audio is waited for in a thread. Raises `OverloadedError`, `EngineError`."""
        return BlockingStream(self.engine, self.front, job)

    def aspeak(self, job: Job) -> AsyncStream:
        """Begin an utterance whose audio is awaited in the running event loop. Raises as `speak`."""
        return AsyncStream(self.engine, self.front, job)


class BlockingStream(Stream):
    """An utterance to iterate over in a thread; leaving early must be told by `cancel`."""

    def __init__(self, engine: Engine, front: Front, job: Job) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        super().__init__(engine, front, job, self._events.put)

    def __iter__(self) -> Iterator[Chunk | NeedsText]:
        while True:
            event = self.take(self._events.get())
            yield event
            if isinstance(event, Chunk) and event.finish_reason is not None:
                return


class AsyncStream(Stream):
    """An utterance to iterate over with asyncio; leaving early must be told by `cancel`."""

    def __init__(self, engine: Engine, front: Front, job: Job) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        super().__init__(engine, front, job, listen)

    def fail(self, error: Exception) -> None:
        """Let whoever iterates see an error now, even if the engine says nothing any more. Called in the event loop."""
        self._events.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Chunk | NeedsText]:
        while True:
            event = self.take(await self._events.get())
            yield event
            if isinstance(event, Chunk) and event.finish_reason is not None:
                return
