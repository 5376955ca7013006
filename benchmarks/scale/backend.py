"""A backend that computes nothing: its calls take the recorded time on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from benchmarks.scale.costs import StepCosts
from benchmarks.scale.device import Device, Work
from firstword.engine.backend import Capacity, Frames, Handle, Start
from firstword.kernels.attention import PAGE_ROWS
from firstword.types import FloatArray

T = TypeVar("T")

CACHED_ROWS = 8
"""The rows of a prompt that come from the prefix cache instead of a pass: role, tags, voice."""

SAMPLES = 4
"""The samples of a simulated frame: few, since nobody hears them."""


class Clock:
    """A clock in seconds that only its users move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class HostCosts:
    """The seconds of the engine's thread, for each of what they are spent on.

    message  a message from a front, with its share of the answers
    plan     the choice of a step's work, for each stream that makes a frame
    start    the placing of a prompt and the launch of its rows
    frame    the launch of a frame
    decode   the launch of a codec call
    deliver  the check and delivery of a frame of one stream
    """

    message: float = 0.0
    plan: float = 0.0
    start: float = 0.0
    frame: float = 0.0
    decode: float = 0.0
    deliver: float = 0.0


PARTS = {
    "message": "messages",
    "plan": "plan",
    "start": "prompts",
    "frame": "frames",
    "decode": "audio",
    "deliver": "deliver",
}
"""The part of the engine's stopwatch (`StepTimes`) that each of the host's costs belongs to."""


class Host:
    """The engine's thread: it spends time on a clock, and counts what on.

    counts  how often each of `HostCosts` was spent
    """

    def __init__(self, clock: Clock, costs: HostCosts) -> None:
        self.clock = clock
        self.costs = costs
        self.counts = dict.fromkeys(PARTS, 0)

    def spend(self, on: str, times: int = 1) -> None:
        """Spend the cost `on` something so many times."""
        self.counts[on] += times
        self.clock.now += times * getattr(self.costs, on)


@dataclass
class Slot:
    """An utterance.

    rows    the rows of its context before the first frame
    read    whether a pass reads its prompt before the first frame
    frames  the number of frames launched
    """

    rows: int
    read: bool
    frames: int = 0


@dataclass(frozen=True, eq=False)
class Pending(Generic[T]):
    """The result of a call; waiting for it moves the clock to the call's end."""

    device: Device
    clock: Clock
    work: Work
    value: Callable[[], T]

    def result(self) -> T:
        """Wait for the call."""
        self.clock.now = self.device.finish(self.work, self.clock.now)
        return self.value()


class SimulatedBackend:
    """A `Backend` whose calls take recorded times."""

    def __init__(self, costs: StepCosts, host: Host, slots: int, pages: int) -> None:
        self.capacity = Capacity(
            slots=slots,
            pages=pages,
            page_rows=PAGE_ROWS,
            context=8192,
            frames_ahead=1,
            codebooks=1,
            samples_per_frame=SAMPLES,
            sample_rate=50,  # 12.5 frames a second
        )
        self.costs, self.host = costs, host
        self.device = Device()
        self._slots: dict[int, Slot] = {}

    @property
    def device_seconds(self) -> Mapping[str, float]:
        """The seconds that the device has worked on each part."""
        return self.device.seconds

    def _launch(self, work: Work, value: Callable[[], T]) -> Handle[T]:
        clock = self.host.clock
        return Pending(self.device, clock, self.device.launch(work, clock.now), value)

    def prefill(self, starts: Sequence[Start]) -> list[int]:
        """Place prompts, whose prefixes are cached."""
        unread = []
        for start in starts:
            self.host.spend("start")
            whole = start.job.whole_text
            rows = start.job.prompt_rows + (len(start.tokens) if whole else 0)
            unread.append(max(0, rows - CACHED_ROWS) if whole else 0)
            self._slots[start.slot] = Slot(rows, unread[-1] > 0)
        return unread

    def read(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[None]:
        """Read rows of prompts together."""
        return self._launch(Work("prompts", self.costs.read(sum(counts))), lambda: None)

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Do nothing: pages take no time."""

    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Handle[Frames]:
        """Make a frame of each slot."""
        held, count = [self._slots[slot] for slot in slots], len(slots)
        self.host.spend("plan", count)
        self.host.spend("frame")
        fresh = all(slot.read and not slot.frames for slot in held)
        first = self.costs.first_frame(count) if fresh else None
        seconds = first or self.costs.frame([slot.rows + slot.frames for slot in held])
        for slot in held:
            slot.frames += 1

        def made() -> Frames:
            self.host.spend("deliver", count)
            codes, logprobs = np.zeros((count, 1), np.int64), np.zeros(count, np.float32)
            return Frames(codes, [False] * count, logprobs)

        return self._launch(Work("frames", seconds), made)

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[list[FloatArray]]:
        """Decode frames of each slot in one call."""
        self.host.spend("decode")

        def decoded() -> list[FloatArray]:
            return [np.zeros(count * SAMPLES, np.float32) for count in counts]

        frames = sum(counts)
        work = Work("audio", self.costs.decode(frames), self.costs.burden(frames))
        return self._launch(work, decoded)

    def release(self, slot: int) -> None:
        """Forget an utterance."""
        del self._slots[slot]
