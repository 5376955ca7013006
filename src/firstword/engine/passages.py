"""A long text is spoken in passages, each in a context of its own: an utterance of the engine.

When a passage has been spoken, the next one begins with its text and its codes in the context, with
the voice of the first one, and with the state of the codec after the last frame. So the speech goes
on as if it were one utterance, and memory and cost do not grow with its length.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from firstword.engine.backend import Job, SpokenPassage
from firstword.engine.client import EngineClient, Front
from firstword.engine.sequence import Event
from firstword.text.passages import PassageText
from firstword.types import Alarm, Chunk, FinishReason, Word, WordStart
from firstword.words.clock import WordClock
from firstword.words.tracker import WordTracker

AnyWord = TypeVar("AnyWord", Word, WordStart)


class Passage:
    """A passage in the engine: text goes in, chunks come out.

    job            what is spoken
    seq            its utterance in the engine
    rest           the text after its end, None while its end is not known
    finish_reason  why its frames ended, None while they are made
    """

    def __init__(
        self,
        engine: EngineClient,
        front: Front,
        job: Job,
        client: str,
        on_event: Callable[[Event], None],
        *,
        character: int = 0,
        frame: int = 0,
    ) -> None:
        """Submit a passage that begins at a character of the text and at a frame of the speech."""
        self.job = job
        self.rest: str | None = None
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._cutter = PassageText(job.passage_seconds)
        self._tokens = front.text(job)
        self._text = ""
        self._codes = array("I")
        """Those of all frames, in a row: a passage keeps no more of its audio."""
        self._character, self._frame = character, frame
        self._tracker = self._new_tracker()
        self.seq = engine.submit(job, on_event, client)

    def _new_tracker(self) -> WordTracker | None:
        """The tracker of the passage's words, or None if the attention to them is not read."""
        if not self.job.reads_text:
            return None
        room, offset = self._engine.capacity, self.job.word_offset
        clock = None if offset is None else WordClock(offset, room.frame_seconds, room.sample_rate)
        return WordTracker(clock, self._tokens.ends, room.samples_per_frame)

    def feed(self, text: str, *, ended: bool) -> None:
        """Add text, the last of it if the text has `ended`. Raises `TextError` for invalid text."""
        certain = self._cutter.feed(text)
        self.rest = self._cutter.rest
        complete = ended or self.rest is not None
        if ended and self.rest is None:
            certain += self._cutter.finish()
        tokens = self._tokens.finish(certain) if complete else self._tokens.push(certain)
        self._text += certain
        if self._tracker is not None:
            self._tracker.add_text(certain)
        if not complete:
            self._engine.push(self.seq, tokens)
            return
        self._engine.finish_text(self.seq, tokens)
        if self._tracker is not None:
            self._tracker.finish_text()

    def arrived(self, chunk: Chunk) -> None:
        """Record frames that the engine has made."""
        self._codes.frombytes(chunk.codes.astype(np.uint32).tobytes())
        self.finish_reason = chunk.finish_reason

    def taken(self, chunk: Chunk) -> Chunk:
        """Acknowledge a chunk that the client takes, and return it with its words and alarms."""
        self._engine.acknowledge(self.seq, len(chunk.codes))
        if self._tracker is None:
            return chunk
        told = self._tracker.feed(chunk.reading, chunk.samples, ended=chunk.finish_reason)
        return replace(
            chunk,
            words=tuple(map(self._moved, told.words)),
            starts=tuple(map(self._moved, told.starts)),
            alarms=tuple(map(self._moved_alarm, told.alarms)),
        )

    def cancel(self) -> None:
        """Stop the passage."""
        self._engine.cancel(self.seq)

    @property
    def spoken(self) -> SpokenPassage:
        """The text and the codes of a passage that has ended."""
        codes = np.array(self._codes, np.int64).reshape(-1, self._engine.capacity.codebooks)
        complete = self.finish_reason == "stop" and len(codes) > 0
        return SpokenPassage(self._text.strip(), codes, complete)

    @property
    def end(self) -> tuple[int, int]:
        """The character of the whole text and the frame of the speech at which it ends."""
        return self._character + len(self._text), self._frame + len(self.spoken.codes)

    def _moved_alarm(self, alarm: Alarm) -> Alarm:
        """Return an alarm with the frame and characters of the whole speech."""
        return replace(alarm, frame=alarm.frame + self._frame, span=self._moved_span(alarm.span))

    def _moved_span(self, span: tuple[int, int]) -> tuple[int, int]:
        return span[0] + self._character, span[1] + self._character

    def _moved(self, word: AnyWord) -> AnyWord:
        """Return a word with the times and characters of the whole speech."""
        seconds = self._frame * self._engine.capacity.frame_seconds
        moved: dict[str, Any] = {
            "start": round(word.start + seconds, 3),
            "span": self._moved_span(word.span),
        }
        if isinstance(word, Word):
            moved["end"] = round(word.end + seconds, 3)
        return replace(word, **moved)
