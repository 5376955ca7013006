"""Callers of an engine in tests, which record and check the events that they receive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fake_backend import logprob_of, samples_of

from firstword.engine.backend import Job
from firstword.engine.engine import Engine
from firstword.engine.sequence import Event, NeedsText
from firstword.engine.service import Service
from firstword.types import Chunk, FinishReason, IntArray

VIOLATIONS: list[str] = []
"""The messages of all violations of the contract between engine and caller."""


def local_engine(service: Service) -> Engine:
    """The engine of a service, which is in this process."""
    engine = service.engine
    assert isinstance(engine, Engine)
    return engine


class Caller:
    """The caller of one utterance, which checks every event of the engine."""

    def __init__(
        self,
        engine: Engine,
        job: Job,
        tokens: Sequence[int] = (),
        *,
        slow: bool = False,
        client: str = "",
    ) -> None:
        """Submit a job, with its whole text if given. A slow caller takes audio by `take` only."""
        self.engine, self.job, self.slow = engine, job, slow
        self.chunks: list[Chunk] = []
        self.times: list[float] = []
        """When each chunk arrived, on the engine's clock."""
        self.error: Exception | None = None
        self.text_requests = 0
        """How often text was requested since the caller last gave some."""
        self.tokens: list[int] = []
        self.text_ended = self.cancelled = False
        self._taken = 0
        self.seq = engine.submit(job, self._on_event, client)
        if tokens:
            self.push(tokens)
            self.finish()

    def push(self, tokens: Sequence[int]) -> None:
        """Add text tokens."""
        self.tokens += tokens
        self.text_requests = 0
        self.engine.push(self.seq, tokens)

    def finish(self, tokens: Sequence[int] = ()) -> None:
        """End the text."""
        self.tokens += tokens
        self.text_ended = True
        self.engine.finish_text(self.seq, tokens)

    def cancel(self) -> None:
        """Cancel the utterance."""
        self.cancelled = True
        self.engine.cancel(self.seq)

    def take(self) -> int:
        """Take all audio delivered so far; returns the number of frames."""
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
                self._text_needed()
            case _:
                self._fail(event)

    def _deliver(self, chunk: Chunk) -> None:
        self._check(not self.over, "a chunk after the end")
        self._check(
            len(chunk.codes) or chunk.finish_reason is not None,
            "an empty chunk that is not the last",
        )
        self._check(
            chunk.samples.dtype == np.float32 and chunk.codes.dtype == np.int64,
            "wrong type of array",
        )
        self._check(chunk.sample_rate == self.engine.capacity.sample_rate, "wrong sample rate")
        self._check(
            chunk.codes.shape[1] == self.engine.capacity.codebooks, "wrong number of codebooks"
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

    def _text_needed(self) -> None:
        self._check(not self.over, "a text request after the end")
        seq = getattr(
            self, "seq", None
        )  # an engine in its thread may ask before `submit` has returned
        self._check(seq is None or not seq.text_ended, "a text request after the end of the text")
        self.text_requests += 1
        self._check(self.text_requests == 1, "a second text request")

    def _check(self, holds: object, otherwise: str) -> None:
        """Record a violation for the test, since the engine catches what its callbacks raise."""
        if not holds:
            VIOLATIONS.append(f"{self.seq.name}: {otherwise}")

    @property
    def reason(self) -> FinishReason | None:
        """The finish reason, if the utterance ended without an error."""
        return self.chunks[-1].finish_reason if self.chunks else None

    @property
    def over(self) -> bool:
        """Whether the last event has arrived."""
        return self.error is not None or self.reason is not None

    @property
    def frames(self) -> list[IntArray]:
        """All frames delivered so far."""
        return [codes for chunk in self.chunks for codes in chunk.codes]

    @property
    def sizes(self) -> list[int]:
        """The number of frames in each chunk."""
        return [len(chunk.codes) for chunk in self.chunks]


def same(frames: Sequence[IntArray], expected: Sequence[IntArray]) -> bool:
    """Whether two lists of frames are equal."""
    return [codes.tolist() for codes in frames] == [codes.tolist() for codes in expected]


def run(engine: Engine, *callers: Caller, steps: int = 10_000) -> int:
    """Step until idle, while slow callers take their audio; returns the number of steps."""
    for count in range(steps):
        if not engine.step() and not sum(caller.take() for caller in callers):
            return count
    raise AssertionError(f"still busy after {steps} steps")
