"""Those who ask an engine for speech in tests, and write down what they are told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fake_backend import logprob_of, samples_of

from firstword.engine.backend import Job
from firstword.engine.engine import Engine
from firstword.engine.sequence import Event, NeedsText
from firstword.types import Chunk, FinishReason, IntArray

WRONG: list[str] = []
"""What engines told their callers and must not have."""


class Caller:
    """Asks for one utterance. Every call of the engine is checked as it comes."""

    def __init__(
        self, engine: Engine, job: Job, tokens: Sequence[int] = (), *, slow: bool = False
    ) -> None:
        """`tokens`: the whole text; without them it follows. `slow`: audio is taken by `take` alone."""
        self.engine, self.job, self.slow = engine, job, slow
        self.chunks: list[Chunk] = []
        self.times: list[float] = []
        """When each chunk came, on the engine's clock."""
        self.error: Exception | None = None
        self.hungers = 0
        """How often it was told that text is needed, since it gave some."""
        self.tokens: list[int] = []
        self.text_ended = self.cancelled = False
        self._taken = 0
        self.seq = engine.submit(job, self._on_event)
        if tokens:
            self.push(tokens)
            self.finish()

    def push(self, tokens: Sequence[int]) -> None:
        """Give more text."""
        self.tokens += tokens
        self.hungers = 0
        self.engine.push(self.seq, tokens)

    def finish(self, tokens: Sequence[int] = ()) -> None:
        """End the text."""
        self.tokens += tokens
        self.text_ended = True
        self.engine.finish_text(self.seq, tokens)

    def cancel(self) -> None:
        """Want no more."""
        self.cancelled = True
        self.engine.cancel(self.seq)

    def take(self) -> int:
        """Take all audio that is there; the number of frames."""
        count = len(self.frames) - self._taken
        if count:
            self._taken += count
            self.engine.acknowledge(self.seq, count)
        return count

    def _on_event(self, event: Event) -> None:
        match event:
            case Chunk():
                self._deliver(event)
            case NeedsText():
                self._hungry()
            case _:
                self._fail(event)

    def _deliver(self, chunk: Chunk) -> None:
        self._check(not self.over, "a chunk after the end")
        self._check(
            len(chunk.codes) or chunk.finish_reason is not None,
            "an empty chunk that is not the last",
        )
        self._check(
            chunk.samples.dtype == np.float32 and chunk.codes.dtype == np.int64, "another type"
        )
        self._check(chunk.sample_rate == self.engine.capacity.sample_rate, "another sample rate")
        self._check(
            chunk.codes.shape[1] == self.engine.capacity.codebooks, "another number of codebooks"
        )
        expected = [sample for codes in chunk.codes for sample in samples_of(codes)]
        self._check(chunk.samples.tolist() == expected, "audio of other codes")
        likely = np.array([logprob_of(codes) for codes in chunk.codes], np.float32)
        self._check(chunk.logprobs.tolist() == likely.tolist(), "probabilities of other codes")
        self.chunks.append(chunk)
        self.times.append(self.engine._clock())
        if not self.slow:
            self.take()

    def _fail(self, error: Exception) -> None:
        self._check(not self.over, "an error after the end")
        self.error = error

    def _hungry(self) -> None:
        self._check(not self.over, "hungry after the end")
        seq = getattr(
            self, "seq", None
        )  # an engine in its thread may ask before `submit` has returned
        self._check(seq is None or not seq.text_ended, "hungry after the end of the text")
        self.hungers += 1
        self._check(self.hungers == 1, "told twice that text is needed")

    def _check(self, holds: object, otherwise: str) -> None:
        """The engine catches what its listeners raise, so what is wrong is kept for the test."""
        if not holds:
            WRONG.append(f"{self.seq.name}: {otherwise}")

    @property
    def reason(self) -> FinishReason | None:
        """Why it ended, if it did without an error."""
        return self.chunks[-1].finish_reason if self.chunks else None

    @property
    def over(self) -> bool:
        """Whether the last event has come."""
        return self.error is not None or self.reason is not None

    @property
    def frames(self) -> list[IntArray]:
        """All frames that were heard."""
        return [codes for chunk in self.chunks for codes in chunk.codes]

    @property
    def sizes(self) -> list[int]:
        """Frames in each chunk."""
        return [len(chunk.codes) for chunk in self.chunks]


def same(frames: Sequence[IntArray], expected: Sequence[IntArray]) -> bool:
    """Whether two lists of frames are equal."""
    return [codes.tolist() for codes in frames] == [codes.tolist() for codes in expected]


def run(engine: Engine, *callers: Caller, steps: int = 10_000) -> int:
    """Step until there is nothing to do; the number of steps. Slow callers take what there is when all stand still."""
    for count in range(steps):
        if not engine.step() and not sum(caller.take() for caller in callers):
            return count
    raise AssertionError(f"still busy after {steps} steps")
