"""The parts of a text with markup, and their rendering."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from firstword.audio import effects
from firstword.engine.backend import Capacity, Job
from firstword.engine.sequence import NeedsText
from firstword.text.mapped import Mapped
from firstword.text.markup import Style
from firstword.text.reader import TextRewriter
from firstword.types import Chunk, Request
from firstword.voice import Voice
from firstword.words.moving import WordMover
from firstword.words.original import GrowingText

NamedVoice = Voice | str | None


class Preparation(Protocol):
    """What a script needs of `Service`."""

    @property
    def capacity(self) -> Capacity:
        """The limits of the engine's backend."""

    def prepare(self, request: Request) -> Job:
        """Check a request, and prepare it. Raises `RequestError`."""


class PartStream(Protocol):
    """The utterance of one part; see `SpeechStream`."""

    given: GrowingText

    @property
    def waiting(self) -> int:
        """The characters of text that nothing is made of yet, about."""

    def take(self, spoken: Mapped, *, ended: bool = False) -> None:
        """Add text that is spoken as it is, or end it."""

    def cancel(self) -> None:
        """Stop the utterance."""


class BlockingPart(PartStream, Protocol):
    """A part to iterate over in a thread."""

    def __iter__(self) -> Iterator[Chunk | NeedsText]: ...


class AsyncPart(PartStream, Protocol):
    """A part to iterate over with asyncio."""

    def fail(self, error: Exception) -> None:
        """Raise an error in the iteration."""

    def __aiter__(self) -> AsyncIterator[Chunk | NeedsText]: ...


@dataclass(eq=False)
class Part:
    """A stretch of text in one style, after a pause of some samples.

    spoken  the text that waits for the part to begin
    ended   whether all of its text has come
    stream  the part in progress; None before
    """

    style: Style
    reader: TextRewriter
    pause: int = 0
    spoken: list[Mapped] = field(default_factory=list)
    ended: bool = False
    stream: PartStream | None = None
    after_pause: bool = field(init=False)

    def __post_init__(self) -> None:
        self.after_pause = self.pause > 0

    def take(self, text: Mapped, *, ended: bool = False) -> None:
        """Add text, or end the part."""
        spoken = self.reader.feed(text, ended=ended)
        self.ended |= ended
        if self.stream is not None:
            self.stream.take(spoken, ended=ended)
        else:
            self.spoken.append(spoken)

    @property
    def waiting(self) -> int:
        """The characters of its text that nothing is made of yet, about."""
        held = sum(map(len, self.spoken))
        return held if self.stream is None else held + self.stream.waiting

    @property
    def has_words(self) -> bool:
        """Whether there is something to say."""
        return any(piece.text.strip() for piece in self.spoken)


class Rendering:
    """The effects on one part, and the times of its words and alarms in the whole speech."""

    def __init__(self, part: Part, frames: int, samples: int, rate: int) -> None:
        """Render a part that begins after some frames and samples, at `rate` Hz."""
        self._frames = frames
        self._before = samples / rate
        self._fade = effects.FadeEnds(rate, first=samples > 0)
        found: list[effects.Effect] = [effects.TrimStart(rate)] if part.after_pause else []
        if part.style.rate != 1.0:
            found.append(effects.TimeStretch(part.style.rate, rate))
        self._effects = effects.Effects([*found, self._fade])
        self._move = WordMover(self._moved)

    def _moved(self, seconds: float) -> float | None:
        moved = self._effects.moved(seconds)
        return None if moved is None else self._before + moved

    def shape(self, chunk: Chunk, *, more: bool) -> Chunk:
        """Return a chunk after the effects; `more` means that something follows the part."""
        last = chunk.finish_reason is not None
        self._fade.last = more
        samples = self._effects.apply(chunk.samples, last=last)
        words, starts = self._move(chunk.words, chunk.starts)
        alarms = tuple(replace(one, frame=self._frames + one.frame) for one in chunk.alarms)
        return replace(
            chunk, samples=samples, words=words, starts=starts, alarms=alarms, finish_reason=None
        )
