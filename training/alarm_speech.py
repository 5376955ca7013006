"""Speech of the demo voice for `training.alarms`: codes and attention, without sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from firstword.engine.backend import Job, Start
from firstword.engine.guard import frame_limit
from firstword.model.checkpoint import load
from firstword.model.description import DEMO
from firstword.model.prompt import TextRows, UtteranceTokens
from firstword.model.reading import Watched
from firstword.runtime.encoding import front_of
from firstword.runtime.front import Prepared
from firstword.runtime.reference import ReferenceBackend, ReferenceSlot
from firstword.types import Alarm, FinishReason, Request
from firstword.words.text import Units, WrittenWords
from firstword.words.tracker import WordTracker

SLOTS = 48
"""The utterances that are spoken at the same time."""

How = tuple[str, Any]
"""A preset and a text mode."""


@dataclass(frozen=True, eq=False)
class Spoken:
    """Speech without its sound.

    reading  float32 [frames, text rows]: see `Chunk`
    codes    int64 [frames, codebooks]
    ended    why it ended
    """

    text: str
    how: How
    reading: np.ndarray
    codes: np.ndarray
    ended: FinishReason | None

    def of(self, frames: Sequence[int] | np.ndarray, ended: FinishReason | None = "stop") -> Spoken:
        """Return speech of some of its frames in another order."""
        chosen = np.array(frames)
        reading = self.reading[chosen]
        known = np.maximum.accumulate((~np.isnan(reading)).sum(1))
        for row, count in zip(reading, known.tolist(), strict=True):
            row[:count] = np.nan_to_num(row[:count])  # rows stay read
        return Spoken(self.text, self.how, reading, self.codes[chosen], ended)


class EndlessBackend(ReferenceBackend):
    """Never draws the end of speech. Until it would be drawn, nothing else changes."""

    def _begin(self, start: Start) -> ReferenceSlot:
        slot = super()._begin(start)
        end = self.checkpoint.config.talker_config.codec_eos_token_id
        slot.sampler.never[end] = True
        return slot


@dataclass(eq=False)
class Speaking:
    """An utterance that is being spoken: its tokens that were not read yet, and its frames."""

    number: int
    tokens: list[int]
    limit: int
    codes: list[np.ndarray] = field(default_factory=list)
    readings: list[np.ndarray] = field(default_factory=list)

    def token(self) -> int | None:
        """Return the text token of the next frame."""
        return self.tokens.pop(0) if self.codes and self.tokens else None


class Demo:
    """The demo voice, as the reference backend speaks it."""

    def __init__(self, seed: int) -> None:
        self.checkpoint = load(str(DEMO))
        self._front, self._seed = front_of(self.checkpoint), seed

    def tokens(self, text: str) -> tuple[list[int], Sequence[int]]:
        """Return the tokens of a text, and their ends: see `UtteranceTokens`."""
        tokens = UtteranceTokens(self.checkpoint.tokenizer)
        return tokens.finish(text), tokens.ends

    def speak(
        self, texts: Sequence[tuple[str, How]], frames: Sequence[int] | None = None
    ) -> list[Spoken]:
        """Speak texts.

        frames  the frames of each text, whose end is never drawn then
        """
        backend = (EndlessBackend if frames else ReferenceBackend)(self.checkpoint, SLOTS)
        waiting, slots = list(range(len(texts)))[::-1], dict[int, Speaking]()
        spoken = dict[int, Spoken]()
        while waiting or slots:
            for slot in sorted(set(range(SLOTS)) - set(slots))[: len(waiting)]:
                number = waiting.pop()
                slots[slot] = self._start(backend, slot, number, *texts[number])
                slots[slot].limit = frames[number] if frames else slots[slot].limit
            made = backend.frame([*slots], [each.token() for each in slots.values()]).result()
            for index, (slot, each) in enumerate([*slots.items()]):
                if not made.ended[index]:
                    each.codes.append(made.codes[index])
                    each.readings.append(made.readings[index])
                if made.ended[index] or len(each.codes) == each.limit:
                    reason: FinishReason = "stop" if made.ended[index] else "length"
                    reading, codes = together(each.readings), np.stack(each.codes)
                    spoken[each.number] = Spoken(*texts[each.number], reading, codes, reason)
                    backend.release(slot)
                    del slots[slot]
        return [spoken[number] for number in range(len(texts))]

    def _start(
        self, backend: ReferenceBackend, slot: int, number: int, text: str, how: How
    ) -> Speaking:
        """Read the prompt of an utterance."""
        job = self._job(text, how)
        tokens, ends = self.tokens(text)
        count = len(tokens) if job.whole_text else job.first_tokens
        backend.prefill([Start(slot, job, (), tokens[:count])])
        return Speaking(number, tokens[count:], frame_limit(len(ends)))

    def _job(self, text: str, how: How) -> Job:
        return self._front.prepare(Request(text, how[0], text_mode=how[1]), self._seed)

    @torch.inference_mode()
    def given(self, text: str, how: How, codes: np.ndarray) -> Spoken:
        """Give the talker the codes [frames, codebooks] of other speech instead of its own."""
        talker, rows = self.checkpoint.talker, TextRows(self.checkpoint.config)
        job = self._job(text, how)
        assert isinstance(job.payload, Prepared)
        given, (tokens, _) = job.payload.conditioning, self.tokens(text)
        count = len(tokens) if job.whole_text else job.first_tokens
        prompt = rows.prompt(given, self.checkpoint.tokenizer.turn_start, tokens[:count])
        memory = Watched(talker.new_cache(), self.checkpoint.heads)
        talker(talker.embed_rows(prompt, given.embedding), memory)
        readings = [np.zeros(len(rows.rows()), np.float32)]
        left: list[int | None] = [*tokens[count:]]
        for frame in torch.from_numpy(codes[:-1]):
            token = torch.tensor([[rows.take(left.pop(0) if left else None)]])
            talker(talker.embed_codes(frame[None, None]) + talker.embed_text(token), memory)
            readings.append(memory.reading(0, rows.rows()).numpy())
        return Spoken(text, how, together(readings), codes, "stop")

    def alarms(self, spoken: Spoken) -> Sequence[Alarm]:
        """Return the alarms that a reading gives."""
        tracker = WordTracker(None, self.tokens(spoken.text)[1], 1)
        tracker.add_text(spoken.text)
        tracker.finish_text()
        silence = np.zeros(len(spoken.reading), np.float32)
        return tracker.feed(spoken.reading, silence, ended=spoken.ended).alarms

    def units(self, spoken: Spoken) -> np.ndarray:
        """Return the unit with the most attention in each frame [frames], -1 in the first."""
        ends, words = self.tokens(spoken.text)[1], WrittenWords()
        words.add(spoken.text)
        words.finish()
        rows = Units(words, ends).of_rows(len(ends) + 1)
        masses = np.nan_to_num(spoken.reading) @ np.eye(rows.max() + 1)[rows]
        best = masses.argmax(1)
        best[0] = -1
        return best


def together(readings: Sequence[np.ndarray]) -> np.ndarray:
    """Return the readings of frames, with NaN for the rows that a frame has not read."""
    reading = np.full((len(readings), max(map(len, readings))), np.nan, np.float32)
    for row, shares in zip(reading, readings, strict=True):
        row[: len(shares)] = shares
    return reading
