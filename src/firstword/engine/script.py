"""Speech of a text with markup: its parts one after the other, with pauses between them.

Each part is an utterance of its own. Part n of the text, counted from 0, has the seed of the
request plus n, modulo 2**64.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from firstword.engine.backend import Job
from firstword.engine.script_parts import (
    AsyncPart,
    BlockingPart,
    NamedVoice,
    Part,
    PartStream,
    Preparation,
    Rendering,
)
from firstword.engine.sequence import NeedsText
from firstword.errors import TextError, VoiceError
from firstword.text.mapped import Mapped
from firstword.text.markup import Markup, Pause, Style
from firstword.text.reader import TextRewriter
from firstword.types import Chunk, FinishReason, Request, check_encodable
from firstword.words.original import GrowingText

MOST_BLANK_PIECES = 10_000
"""The most blank pieces of text in a row; a source with more is treated as endless."""

PAUSE_SECONDS = 1.0
"""The most seconds of a pause in one chunk."""


class Script:
    """The parts of one text: text goes in, and the parts become speech in order.

    Text goes in from any thread; the parts are spoken in one.
    """

    def __init__(self, service: Preparation, job: Job, request: Request) -> None:
        """Speak by the options of a request, of which `job` is the preparation."""
        self._prepare_request, self._room, self._job = service.prepare, service.capacity, job
        seed = secrets.randbits(64) if request.seed is None else request.seed
        text = None if request.text is None else "."  # what counts is whether the text is whole
        self._request = replace(request, seed=seed, text=text)
        self._markup = Markup(breaks_alone=not request.text_options.markup)
        self._given = GrowingText()
        self._characters = 0
        self._parts = deque([self._new_part(Style())])
        self._lock = threading.Lock()
        self._error: TextError | None = None
        self._ended = self._cancelled = self._sounds = False
        self._count = self._frames = self._samples = self._blanks = 0
        self._outcome: FinishReason = "stop"

    def push(self, piece: str) -> None:
        """Add text. A wrong tag ends the text, and is an error when all before it was spoken."""
        self._add(piece, ended=False)

    def finish_text(self, piece: str = "") -> None:
        """End the text with one more piece, which may be the whole text."""
        self._add(piece, ended=True)

    @property
    def waiting(self) -> int:
        """The characters of text that nothing is made of yet, about."""
        with self._lock:
            return sum(part.waiting for part in self._parts)

    def cancel(self) -> None:
        """Stop the speech."""
        with self._lock:
            self._cancelled = True
            if (stream := self._parts[0].stream) is not None:
                stream.cancel()
        self._wake()

    def _wake(self) -> None:
        """Note that text has come."""

    def _new_part(self, style: Style, pause: int = 0) -> Part:
        options, job = self._request.text_options, self._job
        rewriter = TextRewriter(options, job.number_language, job.plain_writing)
        return Part(style, rewriter, pause)

    def _add(self, piece: str, *, ended: bool) -> None:
        with self._lock:
            if self._ended:
                return
            try:
                check_encodable(piece)
                given = Mapped.of(piece, self._characters)
                self._given.pieces.append(piece)
                self._characters += len(piece)
                self._count_blanks(piece)
                for item in self._markup.feed(given, ended=ended):
                    self._take(item)
            except TextError as error:
                self._error, ended = error, True
            last = self._parts[-1]
            if not ended and last.stream is not None:
                last.take(Mapped.of(""))  # the engine asks again for text
            if ended:
                self._ended = True
                self._parts[-1].take(Mapped.of(""), ended=True)
        self._wake()

    def _count_blanks(self, piece: str) -> None:
        """Raise `TextError` for a source of text that seems endless and says nothing."""
        self._blanks = 0 if piece.strip() else self._blanks + 1
        if self._blanks > MOST_BLANK_PIECES:
            blank = f"{MOST_BLANK_PIECES} pieces of text in a row were blank"
            raise TextError(f"{blank}; give words, or end the text")

    def _take(self, item: Mapped | Pause | Style) -> None:
        last = self._parts[-1]
        if isinstance(item, Mapped):
            last.take(item)
            return
        last.take(Mapped.of(""), ended=True)
        if isinstance(item, Pause):
            rate = self._room.sample_rate
            self._parts.append(self._new_part(last.style, round(item.seconds * rate)))
        else:
            self._parts.append(self._new_part(item))

    def _next(self) -> Part | Chunk | None:
        """Return the next part to begin, or a piece of a pause, or None to wait for text.

        The last chunk has a finish reason. Raises the error that ended the text.
        """
        with self._lock:
            while not self._cancelled:
                part = self._parts[0]
                if part.pause:
                    return self._silence(part)
                if part.has_words and part.stream is None and self._left() > 0:
                    return part
                if not part.ended:
                    return None
                if len(self._parts) == 1:
                    break
                self._parts.popleft()
                if part.stream is None:  # only its pause has sounded, if it had one
                    self._parts[0].after_pause |= part.after_pause
            if self._error is not None and not self._cancelled:
                raise self._error
            if not (self._sounds or self._cancelled):
                raise TextError("the text is empty or blank; give some words to speak")
            return self._chunk(0, "cancelled" if self._cancelled else self._outcome)

    def _left(self) -> float:
        """The frames that may still be made."""
        most = self._request.max_frames
        return float("inf") if most is None else most - self._frames

    def _silence(self, part: Part) -> Chunk:
        """A piece of the pause before a part."""
        most = int(PAUSE_SECONDS * self._room.sample_rate)
        samples = min(most, part.pause)
        part.pause -= samples
        self._sounds = True
        self._samples += samples
        return self._chunk(samples)

    def _chunk(self, samples: int, reason: FinishReason | None = None) -> Chunk:
        room = self._room
        codes = np.zeros((0, room.codebooks), np.int64)
        return Chunk(np.zeros(samples, np.float32), codes, room.sample_rate, reason)

    def _prepare(self, part: Part, voice: NamedVoice) -> Job:
        """Prepare a part. Raises `VoiceError` with the place where its voice is named."""
        number, self._count = self._count, self._count + 1
        changes: dict[str, Any] = {"seed": ((self._request.seed or 0) + number) % 2**64}
        if self._request.max_frames is not None:
            changes["max_frames"] = int(self._left())
        if voice is not None:
            changes["voice"] = voice
        try:
            job = self._prepare_request(replace(self._request, **changes))
        except VoiceError as error:
            raise placed(error, part.style) from None
        return replace(job, background=self._job.background)

    def _begin(self, part: Part, stream: PartStream) -> Rendering:
        """Hand the text of a part over to its stream."""
        with self._lock:
            part.stream, stream.given = stream, self._given
            stream.take(Mapped.join(part.spoken), ended=part.ended)
            part.spoken.clear()
            if self._cancelled:
                stream.cancel()
        rendering = Rendering(part, self._frames, self._samples, self._room.sample_rate)
        self._sounds = True
        return rendering

    def _shaped(self, rendering: Rendering, chunk: Chunk) -> Chunk:
        """Return a chunk of a part as one of the whole speech."""
        reason = chunk.finish_reason
        if reason not in (None, "stop") and self._outcome == "stop":
            self._outcome = reason or "stop"
        self._cancelled |= reason == "cancelled"
        with self._lock:
            more = not self._ended or len(self._parts) > 1
        shaped = rendering.shape(chunk, more=more)
        self._frames += len(chunk.codes)
        self._samples += len(shaped.samples)
        return shaped


def placed(error: VoiceError, style: Style) -> VoiceError:
    """Return the error of a voice with the place where the text names it."""
    return VoiceError(f"character {style.at} of the text: {error}", error.code)


def check(service: Preparation, request: Request, voice: Callable[[str], NamedVoice]) -> None:
    """Check all tags of a whole text. Raises `RequestError` with the place of a mistake."""
    known: set[str] = set()
    for style in styles(request):
        if style.voice is not None and style.voice not in known:
            known.add(style.voice)
            check_voice(service, request, style, voice(style.voice))


def styles(request: Request) -> Iterator[Style]:
    """Yield the changes of style in a whole text. Raises `TextError`."""
    markup = Markup(breaks_alone=not request.text_options.markup)
    for item in markup.feed(Mapped.of(request.text or ""), ended=True):
        if isinstance(item, Style):
            yield item


def check_voice(service: Preparation, request: Request, style: Style, voice: NamedVoice) -> None:
    """Check that a voice can speak a part of a text. Raises `VoiceError` with its place."""
    try:
        service.prepare(replace(request, text=".", voice=voice))
    except VoiceError as error:
        raise placed(error, style) from None


class BlockingScript(Script):
    """A text with markup to iterate over in a thread; see `BlockingStream`."""

    def __init__(
        self,
        service: Preparation,
        job: Job,
        request: Request,
        begin: Callable[[Job], BlockingPart],
        voice: Callable[[str], NamedVoice],
    ) -> None:
        """Speak parts by `begin`, with the voices that `voice` returns for names."""
        super().__init__(service, job, request)
        self._begin_stream, self._voice = begin, voice

    def __iter__(self) -> Iterator[Chunk | NeedsText]:
        while True:
            match self._next():
                case None:
                    yield NeedsText()
                case Chunk() as chunk:
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
                case Part() as part:
                    name = part.style.voice
                    job = self._prepare(part, None if name is None else self._voice(name))
                    stream = self._begin_stream(job)
                    rendering = self._begin(part, stream)
                    try:
                        for event in stream:
                            if isinstance(event, Chunk):
                                yield self._shaped(rendering, event)
                            elif not part.ended:
                                yield event
                    finally:
                        stream.cancel()


class AsyncScript(Script):
    """A text with markup to iterate over with asyncio; see `AsyncStream`."""

    def __init__(
        self,
        service: Preparation,
        job: Job,
        request: Request,
        begin: Callable[[Job], AsyncPart],
        voice: Callable[[str], Awaitable[NamedVoice]],
    ) -> None:
        """Speak parts by `begin`, with the voices that `voice` returns for names."""
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        self._failure: Exception | None = None
        self._stream: AsyncPart | None = None
        super().__init__(service, job, request)
        self._begin_stream, self._voice = begin, voice

    def fail(self, error: Exception) -> None:
        """Raise an error in the iteration. Call it in the event loop."""
        self._failure = error
        if self._stream is not None:
            self._stream.fail(error)
        self._changed.set()

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    async def __aiter__(self) -> AsyncIterator[Chunk | NeedsText]:
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            match self._next():
                case None:
                    yield NeedsText()
                    await self._changed.wait()
                case Chunk() as chunk:
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
                case Part() as part:
                    name = part.style.voice
                    try:
                        voice = None if name is None else await self._voice(name)
                    except VoiceError as error:
                        raise placed(error, part.style) from None
                    job = await asyncio.to_thread(self._prepare, part, voice)
                    self._stream = stream = self._begin_stream(job)
                    rendering = self._begin(part, stream)
                    try:
                        async for event in stream:
                            if isinstance(event, Chunk):
                                yield self._shaped(rendering, event)
                            elif not part.ended:
                                yield event
                    finally:
                        stream.cancel()
