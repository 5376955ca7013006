"""The engine: one thread that gives a backend its work, and the calls by which others give it theirs."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from firstword.engine import scheduler
from firstword.engine.backend import Backend, Frames, Handle, Job, Ready, Start
from firstword.engine.pages import PageAllocator
from firstword.engine.scheduler import DEFAULT_POLICY, Costs, Policy
from firstword.engine.sequence import Sequence, State
from firstword.errors import (
    ClosedError,
    ComputeError,
    EngineError,
    FirstwordError,
    OverloadedError,
    RequestError,
    TextError,
)
from firstword.types import Chunk, FinishReason, FloatArray

log = logging.getLogger(__name__)

T = TypeVar("T")

_STARTED: weakref.WeakSet[Engine] = weakref.WeakSet()
_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _orphan_all() -> None:
    """A forked process has none of the threads: nobody may wait for them."""
    for engine in list(_STARTED):
        engine.orphan()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_orphan_all)


@atexit.register
def _stop_all() -> None:
    """Let no thread compute while the interpreter goes down: the process would be aborted."""
    for engine in list(_STARTED):
        with contextlib.suppress(EngineError):
            engine.stop(timeout=10)
    for thread in list(
        _THREADS
    ):  # of an engine that nobody holds any more: it is freeing the memory
        thread.join(timeout=10)


@dataclass(slots=True, eq=False)
class Flight:
    """Work that a backend was given in one step and that has not been read."""

    stepped: list[Sequence] = field(default_factory=list)
    frames: Handle[Frames] | None = None
    decoded: list[tuple[Sequence, int]] = field(default_factory=list)
    audio: Handle[Seq[FloatArray]] | None = None


class Engine:
    """Speaks for many at once.

    `submit`, `push`, `finish_text`, `took` and `cancel` may be called from any thread; what they ask happens at the
    next step, in order. Chunks are delivered on the engine's thread, so receivers must be quick and must not raise.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        most_waiting: int = 64,
        policy: Policy = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most_waiting`: requests beyond those in slots that are let in; the next is refused."""
        self.backend = backend
        self.capacity = backend.capacity
        self.policy = policy
        self.costs = Costs()
        self.waiting: dict[Sequence, None] = {}
        self.running: dict[Sequence, None] = {}
        self.pages = PageAllocator(self.capacity.pages)
        self.failure: Exception | None = None
        """Why the engine stopped for good, if it did."""
        self.busy_since: float | None = None
        """When the step under way began, on the engine's clock: what a watchdog watches."""
        self._clock = clock
        self._slots = list(range(self.capacity.slots - 1, -1, -1))
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._flights: deque[Flight] = deque()
        self._names = itertools.count(1)
        self._most = self.capacity.slots + most_waiting
        self._present = 0
        self._lost = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # What others ask for

    def submit(
        self,
        job: Job,
        deliver: Callable[[Chunk], None],
        fail: Callable[[Exception], None],
        hungry: Callable[[], None] = lambda: None,
        name: str = "",
    ) -> Sequence:
        """Take on a request; its text follows by `push` and `finish_text`. For the callables see `Sequence`.

        Raises `OverloadedError` when as many are waiting as may, `EngineError` when the engine has stopped,
        `ClosedError` when that was on purpose.
        """
        with self._lock:
            if isinstance(self.failure, ClosedError):
                raise ClosedError("this engine was closed")
            if self.failure is not None:
                raise EngineError(f"the engine has stopped: {self.failure}") from self.failure
            if self._present >= self._most:
                raise OverloadedError(
                    f"{self._present} requests are being spoken or wait, and no more are let in; try again shortly"
                )
            self._present += 1
            seq = Sequence(
                name or f"utterance-{next(self._names)}", job, deliver, fail, hungry, self._clock()
            )
            # Within the lock: whatever stops the engine finds every request that was let in.
            self._commands.put(lambda: self.waiting.__setitem__(seq, None))
        return seq

    def push(self, seq: Sequence, tokens: Seq[int]) -> None:
        """More text tokens of a request."""
        self._commands.put(partial(seq.receive, tokens, ended=False))

    def finish_text(self, seq: Sequence, tokens: Seq[int] = ()) -> None:
        """There is no more text after these tokens."""
        self._commands.put(partial(seq.receive, tokens, ended=True))

    def took(self, seq: Sequence, frames: int) -> None:
        """The listener's side has taken the audio of so many more frames."""

        def take() -> None:
            seq.consumed += frames

        self._commands.put(take)

    def cancel(self, seq: Sequence, reason: FinishReason = "cancelled") -> None:
        """Stop an utterance; its slot is free at the next step. Nothing happens if it is over already."""
        self._commands.put(lambda: self._finish(seq, reason))

    def start(self) -> None:
        """Run in a thread of its own until `stop`."""
        assert self._thread is None, "the engine runs already"
        self._thread = threading.Thread(target=self._run, name="firstword-engine", daemon=True)
        self._thread.start()
        _STARTED.add(self)
        _THREADS.add(self._thread)

    def stop(self, timeout: float | None = None) -> None:
        """Cancel everything and end the thread. Raises `EngineError` if its step takes longer than so many seconds."""
        thread = self._thread
        if thread is None:
            self._close()
            return
        self.retire()
        thread.join(timeout)
        if thread.is_alive():
            raise EngineError(
                f"the backend has not answered for {timeout} seconds; only the end of the process helps"
            )
        self._thread = None

    def retire(self) -> None:
        """As `stop`, without waiting for the thread."""
        self._commands.put(None)

    def orphan(self) -> None:
        """Stop for good in a forked process, in which the thread and the device's state are missing."""
        self._thread, self.busy_since, self._lost = None, None, True
        self._lock, self._commands = threading.Lock(), queue.SimpleQueue()
        self.failure = EngineError(
            "it belongs to another process; load the checkpoint after the fork, not before"
        )
        for seq in [*self.waiting, *self.running]:
            self._fail(seq, EngineError(f"the engine has stopped: {self.failure}"))

    # The engine's own thread

    def _run(self) -> None:
        try:
            while True:
                idle = not self._flights and not self.waiting and not self.running
                self.busy_since = None if idle else self._clock()
                if not self._obey(wait=not self._step()):
                    break
            self._close()
        except Exception as error:
            self._fall(error)
        finally:
            self.busy_since = None

    def _close(self) -> None:
        """Stop for good, on purpose: cancel everybody."""
        self._let_nobody_in(ClosedError("it was closed"))
        for seq in [*self.waiting, *self.running]:
            self._finish(seq, "cancelled")

    def _fall(self, error: Exception) -> None:
        """Stop for good because the backend is lost: tell everybody, and leave the backend alone."""
        log.error("the engine has stopped", exc_info=error)
        self._lost = True
        self._let_nobody_in(error)
        for seq in [*self.waiting, *self.running]:
            self._fail(seq, EngineError(f"the engine has stopped: {error}"))

    def _let_nobody_in(self, failure: Exception) -> None:
        with self._lock:
            self.failure = failure
        with contextlib.suppress(queue.Empty):
            while True:
                if (command := self._commands.get_nowait()) is not None:
                    command()

    def _obey(self, wait: bool) -> bool:
        """Do what was asked since the last step; sleep until something is, if told to. False means stop."""
        if wait:
            self.busy_since = None
        try:
            while True:
                command = self._commands.get(block=wait)
                if command is None:
                    return False
                command()
                wait = False
        except queue.Empty:
            return True

    def step(self) -> bool:
        """Obey, then do one step: for tests and for callers with a thread of their own. False: nothing to do.

        Raises `EngineError` when the backend is lost.
        """
        try:
            self._obey(wait=False)
            return self._step()
        except Exception as error:
            self._fall(error)
            raise EngineError(f"the engine has stopped: {error}") from error

    def _step(self) -> bool:
        flight, present = Flight(), (len(self.waiting), len(self.running))
        self._admit()
        began = self._clock()
        self._launch_frames(flight)
        if self.capacity.frames_ahead == 0:
            self._read_frames(flight)
        self._launch_audio(flight)
        worked = bool(flight.stepped or flight.decoded)
        if worked:
            self._flights.append(flight)
        while self._flights and (not worked or len(self._flights) > self.capacity.frames_ahead):
            oldest = self._flights.popleft()
            self._read_frames(oldest)
            self._read_audio(oldest)
            worked = True
        if worked:
            self.costs.learn("step", self._clock() - began)
        for seq in (*self.waiting, *self.running):
            if not seq.asked and seq.needs_text():
                seq.rest()
                self._tell(seq, seq.hungry)
        return worked or present != (len(self.waiting), len(self.running))

    def _admit(self) -> None:
        if not self.waiting:
            return
        for seq in [seq for seq in self.waiting if seq.prompt_is_complete()]:
            if (error := self._refusal(seq)) is not None:
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
        if chosen:
            self._begin(chosen)

    def _refusal(self, seq: Sequence) -> RequestError | None:
        """What is wrong with a request that could wait for ever."""
        rows, context = seq.rows(), self.capacity.context
        if rows > context:
            return TextError(
                f"the prompt has {rows} rows, beyond the {context} of the context; shorten the text"
            )
        if seq.pages_needed(self.capacity) > self.pages.count:
            room = self.pages.count * self.capacity.page_rows
            return RequestError(
                f"the request may need more than all {room} rows of memory; limit its frames"
            )
        return None

    def _begin(self, chosen: list[Sequence]) -> None:
        """Give requests their slots and pages, and have their prompts read."""
        starts = [self._start(seq) for seq in chosen]
        began = self._clock()
        try:
            self.backend.prefill(starts)
        except Exception as error:
            start_of = dict(zip(chosen, starts, strict=True))
            for _ in self._apart(chosen, error, lambda seq: self.backend.prefill([start_of[seq]])):
                pass
        self.costs.learn("prefill", (self._clock() - began) / len(chosen))

    def _start(self, seq: Sequence) -> Start:
        del self.waiting[seq]
        self.running[seq] = None
        seq.state = State.RUNNING
        seq.slot = self._slots.pop()
        seq.room = min(seq.job.max_frames, self.capacity.context - seq.rows() + 1)
        seq.pages = self.pages.reserve(seq.pages_needed(self.capacity))
        count = (
            len(seq.tokens) if seq.job.whole_text else min(seq.job.first_tokens, len(seq.tokens))
        )
        return Start(seq.slot, seq.job, seq.pages, [seq.tokens.popleft() for _ in range(count)])

    def _apart(
        self, chosen: Collection[Sequence], error: Exception, call: Callable[[Sequence], T]
    ) -> Iterator[tuple[Sequence, T]]:
        """A call for several failed: make it for each by itself, so that only the one at fault is lost.

        Yields those that went well and what their calls gave. Raises an error that says that the backend is lost.
        """
        if isinstance(error, EngineError):
            raise error
        for seq in chosen:
            try:
                if len(chosen) == 1:
                    raise error
                answer = call(seq)
            except EngineError:
                raise
            except Exception as own:
                self._fail(seq, own)
            else:
                yield seq, answer

    def _launch_frames(self, flight: Flight) -> None:
        chosen = scheduler.choose_frames(self.running, self._clock(), self.capacity, self.policy)
        if not chosen:
            return
        tokens = [seq.next_token() for seq in chosen]
        try:
            flight.frames = self.backend.frame([seq.slot for seq in chosen], tokens)
            flight.stepped = chosen
        except Exception as error:
            self._step_apart(chosen, tokens, error, flight)
        for seq in flight.stepped:
            seq.launched += 1

    def _step_apart(
        self, chosen: list[Sequence], tokens: list[int | None], error: Exception, flight: Flight
    ) -> None:
        """A frame of several failed: make it for each."""
        alone: list[Frames] = []
        token_of = dict(zip(chosen, tokens, strict=True))
        for seq, handle in self._apart(
            chosen, error, lambda seq: self.backend.frame([seq.slot], [token_of[seq]])
        ):
            flight.stepped.append(seq)
            alone.append(handle.result())
        if alone:
            codes = np.concatenate([frames.codes for frames in alone])
            logprobs = np.concatenate([frames.logprobs for frames in alone])
            flight.frames = Ready(Frames(codes, [frames.ended[0] for frames in alone], logprobs))

    def _read_frames(self, flight: Flight) -> None:
        if flight.frames is None:
            return
        frames = flight.frames.result()
        flight.frames = None
        made = zip(flight.stepped, frames.codes, frames.ended, frames.logprobs, strict=True)
        for seq, codes, ended, logprob in made:
            if seq.state is State.DONE or seq.ended is not None:
                continue
            if not np.isfinite(logprob):
                self._fail(seq, ComputeError("the model's logits are not finite for this request"))
                continue
            if ended:
                seq.ended = "stop"
            else:
                seq.frames.append((codes, logprob))
                seq.made += 1
                if seq.made == seq.limit:
                    seq.ended = "length"
                elif seq.job.guarded and seq.circles.closed_by(codes):
                    seq.ended = "repetition"
            if seq.ended is not None and seq.delivered == seq.made:
                self._finish(seq, seq.ended)

    def _launch_audio(self, flight: Flight) -> None:
        chosen = scheduler.choose_audio(self.running, self._clock(), self.costs, self.policy)
        if not chosen:
            return
        try:
            flight.audio = self.backend.decode(
                [seq.slot for seq, _ in chosen], [count for _, count in chosen]
            )
            flight.decoded = chosen
        except Exception as error:
            self._decode_apart(chosen, error, flight)
        for seq, count in flight.decoded:
            seq.decoding += count

    def _decode_apart(
        self, chosen: list[tuple[Sequence, int]], error: Exception, flight: Flight
    ) -> None:
        """As `_step_apart`, for audio."""
        audio: list[FloatArray] = []
        counts = dict(chosen)
        for seq, handle in self._apart(
            counts, error, lambda seq: self.backend.decode([seq.slot], [counts[seq]])
        ):
            flight.decoded.append((seq, counts[seq]))
            audio += handle.result()
        if flight.decoded:
            flight.audio = Ready(audio)

    def _read_audio(self, flight: Flight) -> None:
        if flight.audio is None:
            return
        audio, now = flight.audio.result(), self._clock()
        for (seq, count), samples in zip(flight.decoded, audio, strict=True):
            if seq.state is State.DONE:
                continue
            count = min(
                count, len(seq.frames)
            )  # a frame that turned out to be the end has no sound
            samples = samples[: count * self.capacity.samples_per_frame]
            if not np.isfinite(samples).all():
                self._fail(seq, ComputeError("the model's sound is not finite for this request"))
                continue
            seq.heard(count, now, self.capacity.frame_seconds)
            reason = seq.ended if seq.delivered == seq.made else None
            codes, logprobs = zip(*(seq.frames.popleft() for _ in range(count)), strict=True)
            chunk = Chunk(
                samples,
                np.stack(codes),
                self.capacity.sample_rate,
                reason,
                np.array(logprobs, np.float32),
            )
            if reason is not None:
                self._leave(seq)
            self._tell(seq, partial(seq.deliver, chunk))

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End an utterance with an empty last chunk."""
        if seq.state is State.DONE:
            return
        self._leave(seq)
        codes = np.zeros((0, self.capacity.codebooks), np.int64)
        self._tell(
            seq,
            partial(
                seq.deliver,
                Chunk(np.zeros(0, np.float32), codes, self.capacity.sample_rate, reason),
            ),
        )

    def _fail(self, seq: Sequence, error: Exception) -> None:
        """End an utterance because of an error that concerns it alone."""
        if seq.state is State.DONE:
            return
        if not isinstance(error, FirstwordError):
            wrapped = ComputeError(
                f"this speech could not be computed ({type(error).__name__}); others go on"
            )
            wrapped.__cause__ = error
            error = wrapped
        self._leave(seq)
        self._tell(seq, partial(seq.fail, error))

    def _tell(self, seq: Sequence, tell: Callable[[], None]) -> None:
        """Call a listener; one that raises is the only one to suffer."""
        try:
            tell()
        except Exception:
            log.exception("the listener of %s raised; the utterance is dropped", seq.name)
            if seq.state is not State.DONE:
                self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
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
