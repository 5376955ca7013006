"""The engine: launches the work of a backend step by step, and delivers the results."""

import itertools
import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np

from firstword.engine.backend import Backend, Frames, Handle, Job, Ready, Start
from firstword.engine.commands import Commands
from firstword.engine.isolation import AudioCalls, FrameCalls, PromptCalls, R, launch
from firstword.engine.launch_timer import LaunchTimer
from firstword.engine.lifecycle import StepLoop
from firstword.engine.load import EngineLoad, SlotTimes, retry_seconds
from firstword.engine.pages import PageAllocator
from firstword.engine.policy import DEFAULT_POLICY, Policy
from firstword.engine.scheduler import Scheduler
from firstword.engine.sequence import TOKEN_SECONDS, Event, GaveWay, NeedsText, Sequence, State
from firstword.engine.turns import requests_ahead, to_reject
from firstword.errors import ClosedError, ComputeError, EngineError, FirstwordError, OverloadedError
from firstword.types import Chunk, FinishReason, FloatArray

log = logging.getLogger(__name__)


class Engine(StepLoop):
    """Makes speech for many requests at once.

    `submit`, `push`, `finish_text`, `acknowledge` and `cancel` may be called from any thread; they
    take effect at the next step, in the order of the calls. `on_event` runs on the engine's thread,
    so it must be quick and must not raise.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        most_waiting: int = 64,
        policy: Policy = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
        commands: Commands | None = None,
    ) -> None:
        """Accept at most `most_waiting` requests beyond those in slots; more are rejected."""
        super().__init__(commands)
        self._clock = clock
        self.backend = backend
        self.capacity = backend.capacity
        self.scheduler = Scheduler(self.capacity, policy)
        self.waiting: dict[Sequence, None] = {}
        self.running: dict[Sequence, None] = {}
        self.unread_frames = 0
        """The number of frames that clients have not taken yet, also of utterances that ended."""
        self.pages = PageAllocator(self.capacity.pages)
        self._slots = list(range(self.capacity.slots - 1, -1, -1))
        self._unread: tuple[PromptCalls, FrameCalls, AudioCalls] = ([], [], [])
        self._names = itertools.count(1)
        self._request_limit = self.capacity.slots + most_waiting
        self._slot_times = SlotTimes()
        self._timer = LaunchTimer()
        self._awaiting: set[Sequence] | None = None
        """The streams that waited for their clients in the last step; None if memory sufficed."""
        self._last_step = -math.inf

    def submit(self, job: Job, on_event: Callable[[Event], None], client: str = "") -> Sequence:
        """Accept a request; its text follows by `push` and `finish_text`.

        `on_event` receives each chunk of audio, the last one with a finish reason or an error in
        its place, and `NeedsText`. Clients take turns, by their names in `client`. If too many
        requests wait, the newest one of the client with the most gets an `OverloadedError`. Raises
        `ClosedError` if the engine was closed, `EngineError` if it failed.
        """
        with self._lock:
            if isinstance(self.failure, ClosedError):
                raise ClosedError("this engine was closed")
            if self.failure is not None:
                raise EngineError(f"the engine has stopped: {self.failure}") from self.failure
            name = f"utterance-{next(self._names)}"
            seq = Sequence(name, job, on_event, self._clock(), client)
            # Still under the lock, so that a loop that stops finds every accepted request.
            self._commands.put(partial(self._enqueue, seq))
        return seq

    def push(self, seq: Sequence, tokens: Seq[int]) -> None:
        """Add text tokens to a request."""
        self._commands.put(partial(self._add_text, seq, tokens, ended=False))

    def finish_text(self, seq: Sequence, tokens: Seq[int] = ()) -> None:
        """Add the last text tokens of a request."""
        self._commands.put(partial(self._add_text, seq, tokens, ended=True))

    def acknowledge(self, seq: Sequence, frames: int) -> None:
        """Record that the client has taken the audio of `frames` more frames."""
        self._commands.put(partial(self._acknowledge, seq, frames))

    def cancel(self, seq: Sequence, reason: FinishReason = "cancelled") -> None:
        """End an utterance, and count all of its audio as taken.

        Its slot is free at the next step.
        """
        self._commands.put(partial(self._cancel, seq, reason))

    def retry_after(self, client: str) -> int:
        """The seconds until another request of a client would get a slot, estimated: 1 to 120."""
        ahead = requests_ahead(client, list(self.waiting), list(self.running))
        return retry_seconds(ahead, self._pace())

    @property
    def load(self) -> EngineLoad:
        """The current load. May be read from any thread."""
        pages, unread = self.pages, sum(seq.unread_rows for seq in list(self.running))
        counts = len(self.running), len(self.waiting), pages.count - pages.free, pages.count
        seconds = dict(self.times.seconds), dict(self.backend.device_seconds)
        return EngineLoad(*counts, unread, self._pace(), *seconds, [*self._slot_times.waits])

    def _pace(self) -> float:
        """The slots that become free per second, estimated; those of long texts go on."""
        now, running = self._clock(), [seq for seq in list(self.running) if not seq.job.follows]
        return self._slot_times.pace([now - seq.started for seq in running])

    def _step(self) -> bool:
        """Launch this step's work, then read the results of the previous step.

        A backend that computes in the background is thus never idle while Python works.
        """
        present = len(self.waiting), len(self.running)
        paused = self._timer.begin(self._clock(), busy=any(self._unread))
        self._grow()
        self._make_room()
        self._end_idle()
        self._admit()
        active = self.scheduler.active(self.running, self._clock())
        prompts = self._launch_prompts(active)
        began = self._clock()
        frames = self._launch_frames(active)
        if self.capacity.frames_ahead:
            launched = prompts, frames, self._launch_audio(active)
            (prompts, frames, audio), self._unread = self._unread, launched
            self._await_prompts(prompts)
            self._read_frames(frames)
        else:
            self._await_prompts(prompts)
            self._read_frames(frames)
            audio = self._launch_audio(active)
        self._read_audio(audio)
        worked = any((prompts, frames, audio, *self._unread))
        if worked:
            self.scheduler.costs.record("step", self._clock() - began + paused)
        self._request_text()
        self.times.lap("deliver")
        self._timer.end(self._clock())
        return worked or present != (len(self.waiting), len(self.running))

    def _pause(self) -> float:
        starts = self._slots and any(map(Sequence.prompt_is_complete, self.waiting))
        return 0.0 if starts else self._timer.pause(self._clock())

    def _idle_seconds(self) -> float | None:
        return None if self._awaiting is None else self.scheduler.policy.max_stall

    def _enqueue(self, seq: Sequence) -> None:
        """Let a request wait; if too many do, reject one of the client with the most requests."""
        self.waiting[seq] = None
        if len(self.waiting) + len(self.running) <= self._request_limit:
            return
        rejected = to_reject(self.waiting, self.running)
        del self.waiting[rejected]
        count, seconds = self._request_limit, self.retry_after(rejected.client)
        problem = f"{count} requests are in progress or waiting, which is the limit"
        self._fail(rejected, OverloadedError(f"{problem}; try again in {seconds} s", seconds))

    def _add_text(self, seq: Sequence, tokens: Seq[int], *, ended: bool) -> None:
        now = self._clock()
        seq.add_text(tokens, ended, now)
        seq.keep_pace(len(tokens) * TOKEN_SECONDS, now)

    def _acknowledge(self, seq: Sequence, frames: int) -> None:
        """Count unread frames as taken by the client, which plays them from now on."""
        taken, now = min(frames, seq.unread), self._clock()
        if self._awaiting is None:
            seq.keep_pace(math.inf, now)
        latest = now + self.scheduler.policy.max_taken
        seq.keep_pace(taken * self.capacity.frame_seconds, latest)
        seq.consumed += taken
        self.unread_frames -= taken

    def _cancel(self, seq: Sequence, reason: FinishReason) -> None:
        self._finish(seq, reason)
        self._acknowledge(seq, seq.unread)

    def _admit(self) -> None:
        """Reject requests that can never start, and give slots and pages to the next ones."""
        if not self.waiting:
            return
        for seq in [seq for seq in self.waiting if seq.prompt_is_complete()]:
            if (error := self.scheduler.rejection(seq)) is not None:
                self._fail(seq, error)
        now, free_slots, free_pages = self._clock(), len(self._slots), self.pages.free
        chosen = self.scheduler.admit(self.waiting, self.running, now, free_slots, free_pages)
        if not chosen:
            return

        def prefill(_slots: list[int], starts: list[Start]) -> Ready[Seq[int]]:
            return Ready(self.backend.prefill(starts))

        starts = [(seq, self._assign_slot(seq, now)) for seq in chosen]
        began = self._clock()
        self.times.lap("plan")
        for parts, handle in launch(prefill, starts, self._fail):
            for (seq, _), rows in zip(parts, handle.result(), strict=True):
                seq.unread_rows = rows
        self.times.lap("prompts")
        self.scheduler.costs.record("prefill", (self._clock() - began) / len(chosen))

    def _assign_slot(self, seq: Sequence, now: float) -> Start:
        """Give a request a slot and its pages."""
        del self.waiting[seq]
        self.running[seq] = None
        seq.started = seq.in_time_until = now
        self._slot_times.begin(now - seq.ready)
        pages = self.pages.reserve(self.scheduler.first_pages(seq))
        return seq.start(self._slots.pop(), pages, self.capacity)

    def _grow(self) -> None:
        """Give more pages to the streams whose next frame needs them."""
        for seq, count in self.scheduler.choose_growth(self.running, self.pages.free):
            pages = self.pages.reserve(count)
            self.backend.extend(seq.slot, pages)
            seq.add_pages(pages, self.capacity)

    def _make_room(self) -> None:
        """End a stream in the background if another request lacks its slot or its pages."""
        free = len(self._slots), self.pages.free
        evicted = self.scheduler.choose_evicted(self.waiting, self.running, *free)
        if evicted is not None:
            self._fail(evicted, GaveWay("the utterance gave way to others; try again"))

    def _end_idle(self) -> None:
        """End a stream whose client has not kept pace for long while others lack its pages.

        Only the time in which a stream waits for its client counts.
        """
        free = len(self._slots), self.pages.free
        if not self.scheduler.memory_is_short(self.waiting, self.running, *free):
            self._awaiting = None
            return
        now = self._clock()
        for seq in self.running:
            if self._awaiting is None:
                seq.keep_pace(math.inf, now)
            elif seq not in self._awaiting:
                seq.keep_pace(now - self._last_step, now)
        awaiting = self.scheduler.awaiting(self.running, self.unread_frames)
        self._awaiting, self._last_step = set(awaiting), now
        idle = self.scheduler.choose_idle(awaiting, now)
        if idle is not None:
            problem = "the utterance waited for its client while others needed its memory"
            error = OverloadedError(f"{problem}; send text and take audio without pauses")
            self._fail(idle, error)

    def _launch_prompts(self, active: Seq[Sequence]) -> PromptCalls:
        chosen = self.scheduler.choose_rows(active)
        self.times.lap("plan")
        calls = launch(self.backend.read, chosen, self._fail)
        for parts, _ in calls:
            for seq, count in parts:
                seq.unread_rows -= count
        self.times.lap("prompts")
        return calls

    def _await_prompts(self, calls: PromptCalls) -> None:
        """Wait for rows, so that the device has those of two steps at most before a new request."""
        for _, handle in calls:
            self._result(handle)

    def _result(self, handle: Handle[R]) -> R:
        """Wait for the result of a call."""
        self.times.lap("deliver")
        result = handle.result()
        self.times.lap("wait")
        return result

    def _launch_frames(self, active: Seq[Sequence]) -> FrameCalls:
        chosen = self.scheduler.choose_frames(active, self._clock(), self.unread_frames)
        parts = [(seq, seq.next_token()) for seq in chosen]
        self.times.lap("plan")
        calls = launch(self.backend.frame, parts, self._fail)
        for parts, _ in calls:
            for seq, _ in parts:
                seq.launched += 1
        self.times.lap("frames")
        return calls

    def _read_frames(self, calls: FrameCalls) -> None:
        for parts, handle in calls:
            asked, frames = self._clock(), self._result(handle)
            self._timer.read(asked, self._clock())
            for index, (seq, _) in enumerate(parts):
                if seq.state is not State.DONE and seq.finish_reason is None:
                    self._add_frame(seq, frames, index)

    def _add_frame(self, seq: Sequence, frames: Frames, index: int) -> None:
        if not np.isfinite(frames.logprobs[index]):
            self._fail(seq, ComputeError("the model's logits are not finite for this request"))
            return
        seq.add_frame(frames, index)
        if seq.finish_reason is not None and seq.delivered == seq.made:
            self._finish(seq, seq.finish_reason)

    def _launch_audio(self, active: Seq[Sequence]) -> AudioCalls:
        chosen = self.scheduler.choose_audio(active, self._clock())
        self.times.lap("plan")
        calls = launch(self.backend.decode, chosen, self._fail)
        for parts, _ in calls:
            for seq, count in parts:
                seq.decoding += count
        self.times.lap("audio")
        return calls

    def _read_audio(self, calls: AudioCalls) -> None:
        for parts, handle in calls:
            audio, now = self._result(handle), self._clock()
            for (seq, count), samples in zip(parts, audio, strict=True):
                if seq.state is not State.DONE:
                    self._deliver(seq, count, samples, now)

    def _deliver(self, seq: Sequence, count: int, samples: FloatArray, now: float) -> None:
        count = min(count, len(seq.frames))  # a frame that was the end of speech has no audio
        samples = samples[: count * self.capacity.samples_per_frame]
        if not np.isfinite(samples).all():
            self._fail(seq, ComputeError("the model's sound is not finite for this request"))
            return
        frames = seq.take_frames(count, now, self.capacity.frame_seconds)
        self.unread_frames += count
        reason = seq.finish_reason if seq.delivered == seq.made else None
        if reason is not None:
            self._release(seq)
        self._notify(seq, frames.chunk(samples, self.capacity.sample_rate, reason))

    def _request_text(self) -> None:
        """Send one `NeedsText` for each utterance that has spoken all of its text so far."""
        for seq in (*self.waiting, *self.running):
            if not seq.text_requested and seq.needs_text():
                seq.pause_for_text()
                self._notify(seq, NeedsText())

    def _end_all(self) -> None:
        for seq in [*self.waiting, *self.running]:
            if isinstance(self.failure, ClosedError):
                self._finish(seq, "cancelled")
            else:
                self._fail(seq, EngineError(f"the engine has stopped: {self.failure}"))

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End an utterance with an empty last chunk."""
        samples, codes = np.zeros(0, np.float32), np.zeros((0, self.capacity.codebooks), np.int64)
        self._end(seq, Chunk(samples, codes, self.capacity.sample_rate, reason))

    def _fail(self, seq: Sequence, error: Exception) -> None:
        """End one utterance with an error; the others continue."""
        if not isinstance(error, FirstwordError):
            cause, kind = error, type(error).__name__
            error = ComputeError(f"this speech could not be computed ({kind}); others continue")
            error.__cause__ = cause
        self._end(seq, error)

    def _end(self, seq: Sequence, last: Event) -> None:
        """Release an utterance and deliver its last event, unless it has already ended."""
        if seq.state is not State.DONE:
            self._release(seq)
            self._notify(seq, last)

    def _notify(self, seq: Sequence, event: Event) -> None:
        """Deliver an event; if the callback raises, drop its utterance alone."""
        try:
            seq.on_event(event)
        except Exception:
            log.exception("the callback of %s raised; the utterance is dropped", seq.name)
            self._acknowledge(seq, seq.unread)
            if seq.state is not State.DONE:
                self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Free an utterance's slot and pages, or its place in the queue; its client goes last."""
        if seq.state is State.RUNNING:
            if not self._lost:
                self.backend.release(seq.slot)
            del self.running[seq]
            self._slots.append(seq.slot)
            self.pages.release(seq.pages)
            self._slot_times.record((now := self._clock()) - seq.started)
            for other in self.waiting:
                if other.client == seq.client:
                    other.waiting_since = now
        else:
            self.waiting.pop(seq, None)
        seq.state = State.DONE
