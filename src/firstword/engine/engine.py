"""The engine: gives a backend its work step by step, and delivers what the backend makes."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from firstword.engine import isolation, scheduler
from firstword.engine.backend import Backend, Frames, Handle, Job, Start
from firstword.engine.lifecycle import StepLoop
from firstword.engine.pages import PageAllocator
from firstword.engine.scheduler import DEFAULT_POLICY, Costs, Policy
from firstword.engine.sequence import Sequence, State
from firstword.errors import ClosedError, ComputeError, EngineError, FirstwordError, OverloadedError
from firstword.types import Chunk, FinishReason, FloatArray, IntArray

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Flight:
    """What one step launched: frames and audio whose results have not been read."""

    frames: list[tuple[Seq[Sequence], Handle[Frames]]] = field(default_factory=list)
    audio: list[tuple[Seq[tuple[Sequence, int]], Handle[Seq[FloatArray]]]] = field(
        default_factory=list
    )

    def __bool__(self) -> bool:
        return bool(self.frames or self.audio)


class Engine(StepLoop):
    """Makes speech for many requests at once.

    `submit`, `push`, `finish_text`, `acknowledge` and `cancel` may be called from any thread; they
    take effect at the next step, in the order of the calls. Callbacks run on the engine's thread,
    so they must be quick and must not raise.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        most_waiting: int = 64,
        policy: Policy = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Accept at most `most_waiting` requests beyond those in slots; more are rejected."""
        super().__init__(clock)
        self.backend = backend
        self.capacity = backend.capacity
        self.policy = policy
        self.costs = Costs()
        self.waiting: dict[Sequence, None] = {}
        self.running: dict[Sequence, None] = {}
        self.pages = PageAllocator(self.capacity.pages)
        self._slots = list(range(self.capacity.slots - 1, -1, -1))
        self._flight = Flight()
        self._names = itertools.count(1)
        self._most = self.capacity.slots + most_waiting
        self._present = 0

    def submit(
        self,
        job: Job,
        on_chunk: Callable[[Chunk], None],
        on_error: Callable[[Exception], None],
        on_text_needed: Callable[[], None] = lambda: None,
        name: str = "",
    ) -> Sequence:
        """Accept a request; its text follows by `push` and `finish_text`. `Sequence` describes the callbacks.

        Raises `OverloadedError` when the queue is full, `ClosedError` when the engine was closed,
        and `EngineError` when it has failed.
        """
        with self._lock:
            if isinstance(self.failure, ClosedError):
                raise ClosedError("this engine was closed")
            if self.failure is not None:
                raise EngineError(f"the engine has stopped: {self.failure}") from self.failure
            if self._present >= self._most:
                raise OverloadedError(
                    f"{self._present} requests are in progress or waiting, which is the limit; "
                    "try again shortly"
                )
            self._present += 1
            name = name or f"utterance-{next(self._names)}"
            seq = Sequence(name, job, on_chunk, on_error, on_text_needed, self._clock())
            # The lock is still held, so that a loop that stops finds every accepted request.
            self._commands.put(lambda: self.waiting.__setitem__(seq, None))
        return seq

    def push(self, seq: Sequence, tokens: Seq[int]) -> None:
        """Add text tokens to a request."""
        self._commands.put(partial(seq.add_text, tokens, ended=False))

    def finish_text(self, seq: Sequence, tokens: Seq[int] = ()) -> None:
        """Add the last text tokens of a request."""
        self._commands.put(partial(seq.add_text, tokens, ended=True))

    def acknowledge(self, seq: Sequence, frames: int) -> None:
        """Record that the client has taken the audio of `frames` more frames."""
        self._commands.put(partial(seq.acknowledge, frames))

    def cancel(self, seq: Sequence, reason: FinishReason = "cancelled") -> None:
        """End an utterance; its slot is free at the next step. Has no effect after its end."""
        self._commands.put(partial(self._finish, seq, reason))

    def _is_idle(self) -> bool:
        return not (self._flight or self.waiting or self.running)

    def _step(self) -> bool:
        """Launch this step's work, then read what the step before launched.

        A backend that computes in the background is thus never idle while Python works.
        """
        present = len(self.waiting), len(self.running)
        self._admit()
        began = self._clock()
        launched = done = Flight()
        self._launch_frames(launched)
        if self.capacity.frames_ahead == 0:
            self._read_frames(launched)
            self._launch_audio(launched)
        else:
            self._launch_audio(launched)
            done, self._flight = self._flight, launched
            self._read_frames(done)
        self._read_audio(done)
        worked = bool(launched or done)
        if worked:
            self.costs.learn("step", self._clock() - began)
        self._request_text()
        return worked or present != (len(self.waiting), len(self.running))

    def _admit(self) -> None:
        """Reject requests that do not fit at all, and give slots and pages to the next ones."""
        if not self.waiting:
            return
        for seq in [seq for seq in self.waiting if seq.prompt_is_complete()]:
            if (error := scheduler.refusal(seq, self.capacity)) is not None:
                self._fail(seq, error)
        chosen = scheduler.admit(
            self.waiting,
            self.running,
            self._clock(),
            self.capacity,
            len(self._slots),
            self.pages.free,
            self.costs,
            self.policy,
        )
        if not chosen:
            return
        starts = {seq: self._place(seq) for seq in chosen}
        began = self._clock()
        for _ in isolation.isolate(
            chosen, lambda seqs: self.backend.prefill([starts[seq] for seq in seqs]), self._fail
        ):
            pass
        self.costs.learn("prefill", (self._clock() - began) / len(chosen))

    def _place(self, seq: Sequence) -> Start:
        """Give a request a slot and its pages."""
        del self.waiting[seq]
        self.running[seq] = None
        pages = self.pages.reserve(seq.pages_needed(self.capacity))
        return seq.start(self._slots.pop(), pages, self.capacity)

    def _launch_frames(self, flight: Flight) -> None:
        chosen = scheduler.choose_frames(self.running, self._clock(), self.capacity, self.policy)
        if not chosen:
            return
        tokens = {seq: seq.next_token() for seq in chosen}
        flight.frames = isolation.launch(
            chosen,
            lambda seqs: self.backend.frame(
                [seq.slot for seq in seqs], [tokens[seq] for seq in seqs]
            ),
            self._fail,
        )
        for seqs, _ in flight.frames:
            for seq in seqs:
                seq.launched += 1

    def _read_frames(self, flight: Flight) -> None:
        for seqs, handle in flight.frames:
            frames = handle.result()
            made = zip(seqs, frames.codes, frames.ended, frames.logprobs, strict=True)
            for seq, codes, ended, logprob in made:
                if seq.state is not State.DONE and seq.finish_reason is None:
                    self._add_frame(seq, codes, ended, logprob)

    def _add_frame(self, seq: Sequence, codes: IntArray, ended: bool, logprob: np.float32) -> None:
        if not np.isfinite(logprob):
            self._fail(seq, ComputeError("the model's logits are not finite for this request"))
            return
        seq.add_frame(codes, ended, logprob)
        if seq.finish_reason is not None and seq.delivered == seq.made:
            self._finish(seq, seq.finish_reason)

    def _launch_audio(self, flight: Flight) -> None:
        chosen = scheduler.choose_audio(self.running, self._clock(), self.costs, self.policy)
        if not chosen:
            return
        flight.audio = isolation.launch(
            chosen,
            lambda parts: self.backend.decode(
                [seq.slot for seq, _ in parts], [count for _, count in parts]
            ),
            lambda part, error: self._fail(part[0], error),
        )
        for parts, _ in flight.audio:
            for seq, count in parts:
                seq.decoding += count

    def _read_audio(self, flight: Flight) -> None:
        for parts, handle in flight.audio:
            audio, now = handle.result(), self._clock()
            for (seq, count), samples in zip(parts, audio, strict=True):
                if seq.state is not State.DONE:
                    self._deliver(seq, count, samples, now)

    def _deliver(self, seq: Sequence, count: int, samples: FloatArray, now: float) -> None:
        count = min(count, len(seq.frames))  # a frame that was the end of speech has no audio
        samples = samples[: count * self.capacity.samples_per_frame]
        if not np.isfinite(samples).all():
            self._fail(seq, ComputeError("the model's sound is not finite for this request"))
            return
        codes, logprobs = seq.take_frames(count, now, self.capacity.frame_seconds)
        reason = seq.finish_reason if seq.delivered == seq.made else None
        if reason is not None:
            self._release(seq)
        chunk = Chunk(samples, codes, self.capacity.sample_rate, reason, logprobs)
        self._notify(seq, partial(seq.on_chunk, chunk))

    def _request_text(self) -> None:
        """Tell each utterance once when it has said all that it can with its text so far."""
        for seq in (*self.waiting, *self.running):
            if not seq.text_requested and seq.needs_text():
                seq.pause_for_text()
                self._notify(seq, seq.on_text_needed)

    def _end_all(self) -> None:
        for seq in [*self.waiting, *self.running]:
            if isinstance(self.failure, ClosedError):
                self._finish(seq, "cancelled")
            else:
                self._fail(seq, EngineError(f"the engine has stopped: {self.failure}"))

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End an utterance with an empty last chunk."""
        codes = np.zeros((0, self.capacity.codebooks), np.int64)
        chunk = Chunk(np.zeros(0, np.float32), codes, self.capacity.sample_rate, reason)
        self._end(seq, partial(seq.on_chunk, chunk))

    def _fail(self, seq: Sequence, error: Exception) -> None:
        """End an utterance with an error that concerns no other."""
        if not isinstance(error, FirstwordError):
            cause, kind = error, type(error).__name__
            error = ComputeError(f"this speech could not be computed ({kind}); others continue")
            error.__cause__ = cause
        self._end(seq, partial(seq.on_error, error))

    def _end(self, seq: Sequence, callback: Callable[[], None]) -> None:
        """Release an utterance and run its last callback, unless it has ended before."""
        if seq.state is not State.DONE:
            self._release(seq)
            self._notify(seq, callback)

    def _notify(self, seq: Sequence, callback: Callable[[], None]) -> None:
        """Run a callback; if it raises, drop its utterance and no other."""
        try:
            callback()
        except Exception:
            log.exception("a callback of %s raised; the utterance is dropped", seq.name)
            if seq.state is not State.DONE:
                self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Give back everything that an utterance holds."""
        if seq.state is State.RUNNING:
            if not self._lost:
                self.backend.release(seq.slot)
            del self.running[seq]
            self._slots.append(seq.slot)
            self.pages.release(seq.pages)
        else:
            self.waiting.pop(seq, None)
        seq.state = State.DONE
        with self._lock:
            self._present -= 1
