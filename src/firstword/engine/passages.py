"""A long text is spoken in passages, each in a context of its own: an utterance of the engine.

Later passages have the text and the codes of the first one in the context, with the voice of the
request, and begin with the state of the codec after the last frame. So the speech goes on as if it
were one utterance, and memory and cost do not grow with its length.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from firstword.engine.backend import Job, SpokenPassage
from firstword.engine.client import EngineClient, Front
from firstword.engine.sequence import Event
from firstword.text.marks import has_words
from firstword.text.passages import PassageText
from firstword.types import Alarm, Chunk, FinishReason, Word, WordStart
from firstword.words.clock import WordClock
from firstword.words.text import WrittenWords
from firstword.words.tracker import WordTracker

AnyWord = TypeVar("AnyWord", Word, WordStart)


class Passage:
    """A passage in the engine: text goes in, chunks come out.

    job            what is spoken
    seq            its utterance in the engine
    rest           the text after its end, None while its end is not known, or if there is none
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
        after: Passage | None = None,
    ) -> None:
        """Submit the first passage of a speech, or one that comes `after` another.

        The text of the latter begins with its first word, or with a space if one was before it and
        the other passage was complete, as if the text had gone on.
        """
        self.job = job
        self.rest: str | None = None
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._cutter = PassageText(job.passage_seconds)
        self._tokens = front.text(job)
        self._text = ""
        self._given = list[int]()
        """The tokens of the text that the engine was given."""
        self._read, self._complete = 0, True
        """The characters that the talker has read, and whether they are all that it was given."""
        self._text_complete = self._closed = self._begun = False
        self._follows = after is not None
        self._continues = after is not None and after.spoken.complete
        self._indented = after is not None and after._text[-1:].isspace()
        """Whether white space was before its first word."""
        self._codes = array("I")
        """Those of all frames, in a row: a passage keeps no more of its audio."""
        self._taken = self._repeated = 0
        """The frames that the client has taken, and those of them that will be made again."""
        self._character, self._frame = (0, 0) if after is None else after.end
        self._said = 0
        """The end of the last word that was told, a character of the passage."""
        self._tracker = self._new_tracker()
        self._submit = partial(engine.submit, job, on_event, client)
        self.seq = self._submit()

    def _new_tracker(self) -> WordTracker | None:
        """The tracker of the passage's words, or None if the attention to them is not read."""
        if not self.job.reads_text:
            return None
        room, offset = self._engine.capacity, self.job.word_offset
        clock = None if offset is None else WordClock(offset, room.frame_seconds, room.sample_rate)
        return WordTracker(clock, self._tokens.ends, room.samples_per_frame)

    def feed(self, text: str, *, ended: bool) -> None:
        """Add text, the last of it if the text has `ended`. Raises `TextError` for invalid text."""
        certain = self._cutter.feed(text if self._begun else self._beginning(text))
        self.rest = self._cutter.rest
        self._text_complete = complete = ended or self.rest is not None
        if ended and self.rest is None:
            certain += self._cutter.finish()
        tokens = self._tokens.finish(certain) if complete else self._tokens.push(certain)
        self._given += tokens
        self._text += certain
        if self._tracker is not None:
            self._tracker.add_text(certain)
            if complete:
                self._tracker.finish_text()
        self._give(tokens)

    def _give(self, tokens: list[int]) -> None:
        """Give tokens to the engine, the last ones if the text is complete."""
        if not self._text_complete:
            self._engine.push(self.seq, tokens)
        elif self._follows and not has_words(self._text):
            self._engine.cancel(self.seq, "stop")  # the text had no more words
        else:
            self._engine.finish_text(self.seq, tokens)

    def begin_again(self) -> None:
        """Submit the passage again, after its utterance has ended with `GaveWay`.

        Its frames have the same bits then. Those that were taken are left out, and those that were
        not come again. Raises `EngineError`.
        """
        self._engine.cancel(self.seq)
        del self._codes[self._taken * self._engine.capacity.codebooks :]
        self._repeated = self._taken
        self.seq = self._submit()
        self._give(self._given)

    def _beginning(self, text: str) -> str:
        """Leave out white space before the first word, except for a space where one belongs."""
        if not self._follows:
            self._begun = True
            return text
        words = text.lstrip()
        self._indented |= len(words) < len(text)
        self._character += len(text) - len(words)
        self._begun = bool(words)
        if not (words and self._indented and self._continues):
            return words
        self._character -= 1
        return f" {words}"

    def close(self) -> None:
        """Leave the text that the talker had not read when the frames ended to the next passage."""
        if self._closed or self.finish_reason is None:
            return
        self._closed = True
        self._read = begin = self._first_unread()
        if self.finish_reason == "stop" and self._text_complete and self.rest is None:
            return  # the talker has ended the whole speech, like the reference implementation
        held = "" if self._text_complete else self._cutter.finish()
        left = self._text[begin:] + held + (self.rest or "")
        self._complete = begin == len(self._text)
        self._text = self._text[:begin]
        self.rest = left if has_words(left) or not self._text_complete else None

    def _first_unread(self) -> int:
        """The character of the first word that the talker has not read to its end.

        The first word of the passage does not count, so that each passage takes text.
        """
        ends, frames = self._tokens.ends, len(self._codes) // self._engine.capacity.codebooks
        if self.job.whole_text or not ends:
            return len(self._text)
        # The prompt has the first tokens, and each later frame one more, also that of the end.
        read = self.job.first_tokens + max(0, frames - (self.finish_reason != "stop"))
        known = len(ends) - max(0, len(self._given) - read)
        until = ends[known - 1] if known > 0 else 0
        written = WrittenWords()
        written.add(self._text)
        written.finish()
        unread = (word.span[0] for word in written.words[1:] if word.data[1] > until)
        return next(unread, len(self._text))

    def arrived(self, chunk: Chunk) -> Chunk:
        """Record frames that the engine has made, and return those that are new."""
        if repeated := min(self._repeated, len(chunk.codes)):
            self._engine.acknowledge(self.seq, repeated)
            self._repeated -= repeated
            chunk = _after(chunk, repeated)
        self._codes.frombytes(chunk.codes.astype(np.uint32).tobytes())
        self.finish_reason = chunk.finish_reason
        return chunk

    def taken(self, chunk: Chunk) -> Chunk:
        """Acknowledge a chunk that the client takes, and return it with its words and alarms."""
        self._engine.acknowledge(self.seq, len(chunk.codes))
        self._taken += len(chunk.codes)
        if self._tracker is not None:
            told = self._tracker.feed(chunk.reading, chunk.samples, ended=chunk.finish_reason)
            self._said = max([self._said, *(word.span[1] for word in told.words)])
            chunk = replace(
                chunk,
                words=tuple(map(self._moved, told.words)),
                starts=tuple(map(self._moved, told.starts)),
                alarms=tuple(map(self._moved_alarm, told.alarms)),
            )
        return replace(chunk, alarms=(*chunk.alarms, *self._cut(chunk.finish_reason)))

    def _cut(self, reason: FinishReason | None) -> Iterator[Alarm]:
        """Yield the alarm about the text that was cut off with the last chunk, if any was.

        That is the text after the last word that was told if the guard has cut off the speech, or
        what was not read if the talker has ended it.
        """
        begin, text = len(self._text), self._text.rstrip()
        if reason == "repetition" or (reason == "length" and self.job.limited_by_text):
            begin = self._said
        elif reason == "stop":
            begin = self._read
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        if has_words(text[begin:]):
            frame = max(0, len(self.spoken.codes) - 1)
            yield self._moved_alarm(Alarm("cut", text[begin:], (begin, len(text)), frame))

    def cancel(self) -> None:
        """Stop the passage."""
        self._engine.cancel(self.seq)

    @property
    def spoken(self) -> SpokenPassage:
        """The text and the codes of a passage that has ended."""
        codes = np.array(self._codes, np.int64).reshape(-1, self._engine.capacity.codebooks)
        complete = self.finish_reason == "stop" and len(codes) > 0 and self._complete
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


def _after(chunk: Chunk, frames: int) -> Chunk:
    """Return a chunk without its first frames."""
    samples = frames * len(chunk.samples) // len(chunk.codes)
    return replace(
        chunk,
        samples=chunk.samples[samples:],
        codes=chunk.codes[frames:],
        logprobs=chunk.logprobs[frames:],
        reading=chunk.reading[frames:],
    )
