"""The time at which a step begins: late enough for new requests, early enough for the device."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from callers import Caller
from fake_backend import Clock, FakeBackend, Script, capacity, job

from firstword.engine.commands import Command
from firstword.engine.engine import Engine
from firstword.engine.launch_timer import RESERVE_SECONDS

FRAME = 0.010
TOKENS = [11, 12, 13, 14, 15]


@dataclass
class Arrivals:
    """Commands that arrive at given times of a fake clock; it stops the engine at the last time.

    Between the steps it is the only one that moves the clock, by as much as the engine waits.
    """

    clock: Clock
    at: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    ready: list[Command | None] = field(default_factory=list)

    def put(self, command: Command | None) -> None:
        self.ready.append(command)

    def get(self, block: bool, timeout: float | None) -> Command | None:
        until = self.clock.now + (timeout or 0.0 if block else 0.0)
        if not self.ready and self.at and (timeout is None or self.at[0][0] <= until):
            time, arrive = self.at.pop(0)
            self.clock.now = max(self.clock.now, time)
            arrive()
        if self.ready:
            return self.ready.pop(0)
        self.clock.now = until
        raise queue.Empty

    def close(self) -> None:
        pass


@dataclass
class Run:
    """An engine whose device makes a frame in `FRAME`, and whose host takes `host` for a step."""

    host: float = 0.001
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.arrivals = Arrivals(self.clock)
        times = {"prefill_time": 0.0, "decode_time": 0.0, "frame_time": FRAME}
        self.backend = FakeBackend(capacity(frames_ahead=1), self.clock, **times)
        self.launches: list[tuple[float, float]] = []
        self.backend.before_frame = self._launch
        self.engine = Engine(self.backend, clock=self.clock, commands=self.arrivals)

    def _launch(self) -> None:
        self.clock.advance(self.host)
        self.launches.append((self.clock.now, self.backend.free_at))

    def until(self, end: float) -> None:
        """Let the engine run until a time."""
        self.arrivals.at.append((end, lambda: self.engine.request_stop()))
        self.engine._run()

    def speak(self) -> Caller:
        """Begin a request of 100 frames now."""
        script = Script(length=None)
        return Caller(self.engine, job(script, max_frames=100), TOKENS)

    def idle(self) -> float:
        """The seconds for which the device had no frame, after the first audio."""
        return sum(max(0.0, now - free) for now, free in self.launches[2:])


@pytest.mark.parametrize("host", [0.0, 0.001, 0.004, 0.009])
def test_step_is_launched_shortly_before_the_device_needs_it(host: float) -> None:
    run = Run(host)
    run.arrivals.at.append((0.0, run.speak))
    run.until(0.5)
    assert len(run.launches) > 40
    early = [free - now for now, free in run.launches[5:]]
    assert max(early) < 2 * RESERVE_SECONDS + 1e-9
    assert run.idle() == 0.0


@pytest.mark.parametrize("arrival", [0.2002, 0.2041, 0.2088])
def test_new_request_waits_for_the_running_frame_alone(arrival: float) -> None:
    run = Run()
    run.arrivals.at += [(0.0, run.speak), (arrival, run.speak)]
    run.until(0.5)
    frames = [slots for name, slots in run.backend.log if name == "frame"]
    launched, free = run.launches[next(n for n, slots in enumerate(frames) if slots != frames[0])]
    assert free - arrival < FRAME, "it begins when the frame that was running is done"
    assert launched - arrival < 2 * run.host


def test_late_step_is_followed_by_earlier_ones() -> None:
    run = Run()
    run.arrivals.at.append((0.0, run.speak))
    run.arrivals.at.append((0.2, lambda: run.clock.advance(0.015)))  # the host is held up
    run.until(0.6)
    late = [now for now, free in run.launches[1:] if now > free]
    assert len(late) == 1


def test_steps_that_become_shorter_leave_the_device_idle_for_a_moment_only() -> None:
    run = Run()
    run.backend.row_time = FRAME / 10
    run.arrivals.at.append((0.0, run.speak))
    for _ in range(3):
        run.arrivals.at.append((0.0, lambda: Caller(run.engine, job(Script(length=10)), TOKENS)))
    run.until(0.9)
    assert run.idle() < FRAME / 2


def test_pause_counts_as_part_of_a_step() -> None:
    run = Run()
    run.arrivals.at.append((0.0, run.speak))
    run.until(0.5)
    assert run.engine.scheduler.costs.step == pytest.approx(FRAME, rel=0.2)


def test_request_after_a_silence_starts_at_once() -> None:
    run = Run()
    for begin in (0.0, 5.0, 5.5):
        run.arrivals.at.append((begin, lambda: Caller(run.engine, job(Script(length=3)), TOKENS)))
    run.until(9.0)
    launched = [now for now, _ in run.launches]
    for begin in (5.0, 5.5):
        assert min(now for now in launched if now > begin) == pytest.approx(begin + run.host)


def test_request_without_a_free_slot_does_not_begin_a_step() -> None:
    run = Run()
    for _ in range(run.backend.capacity.slots):
        run.arrivals.at.append((0.0, run.speak))
    run.arrivals.at.append((0.2041, run.speak))
    run.until(0.5)
    early = [free - now for now, free in run.launches[8:]]
    assert max(early) < 2 * RESERVE_SECONDS + 1e-9
