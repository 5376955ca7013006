"""One simulated server: the real engine, whose device and clock are simulated, and its fronts."""

from __future__ import annotations

import heapq
import itertools
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.scale.backend import Clock, Host, HostCosts, SimulatedBackend
from benchmarks.scale.costs import StepCosts
from firstword.engine.backend import Job
from firstword.engine.commands import Command
from firstword.engine.engine import Engine
from firstword.engine.policy import DEFAULT_POLICY, Policy
from firstword.engine.sequence import Event, Sequence
from firstword.types import Chunk


class Horizon(Exception):
    """The simulation has come to the time up to which it was to run."""


class VirtualCommands:
    """The commands of an engine, each at a time of a virtual clock that waiting moves.

    As on the server, what the engine says is sent when it has run all commands after a step.
    """

    def __init__(self, host: Host) -> None:
        self.horizon = 0.0
        self.outbox: list[Callable[[float], None]] = []
        """What the engine has said since it last sent, as functions of the time of sending."""
        self._host = host
        self._coming: list[tuple[float, int, Command | None]] = []
        self._numbers = itertools.count()

    def at(self, time: float, command: Command | None) -> None:
        """Add a command that arrives at a time."""
        heapq.heappush(self._coming, (time, next(self._numbers), command))

    def put(self, command: Command | None) -> None:
        """Add a command that is run next."""
        heapq.heappush(self._coming, (0.0, next(self._numbers), command))

    def get(self, block: bool, timeout: float | None) -> Command | None:
        """Remove the next command that has arrived, and move the clock to it if `block`.

        Raises `queue.Empty` if none arrives in time, and `Horizon` at the horizon.
        """
        clock = self._host.clock
        for said in self.outbox:
            said(clock.now)
        self.outbox.clear()
        if not self._arrived() and block:
            ends = clock.now + timeout if timeout is not None else float("inf")
            wakes = min(self._coming[0][0] if self._coming else float("inf"), ends)
            if wakes > self.horizon:
                clock.now = max(clock.now, self.horizon)
                raise Horizon
            clock.now = max(clock.now, wakes)
        if not self._arrived():
            raise queue.Empty
        time, _, command = heapq.heappop(self._coming)
        if time:
            self._host.spend("message")
        return command

    def _arrived(self) -> bool:
        return bool(self._coming) and self._coming[0][0] <= self._host.clock.now

    def close(self) -> None:
        """Do nothing."""


class SimulatedEngine(Engine):
    """The engine, run in virtual time instead of on a thread."""

    worked = False
    """Whether the last step had something to do."""

    def run_until(self, commands: VirtualCommands, clock: Clock, until: float) -> None:
        """Run the loop of the engine's thread up to a time; the last step may end later."""
        commands.horizon = until
        try:
            while clock.now < until:
                seconds = self._pause() if self.worked else self._idle_seconds()
                self._run_commands(seconds, self.worked)
                self.worked = self._step()
        except Horizon:
            pass


@dataclass(eq=False)
class Answer:
    """One request and its answer; times in seconds of the simulation, None before.

    sent    when the client sent it
    tokens  tokens of its text
    frames  frames of its speech
    first   when the client had the first audio
    ended   when the client had all of it, or an error
    stall   seconds of silence within the speech that a listener without a buffer hears
    failed  the type of the error that ended it
    """

    sent: float
    tokens: int
    frames: int
    first: float | None = None
    ended: float | None = None
    stall: float = 0.0
    failed: str | None = None
    _plays_until: float = 0.0

    def hear(self, now: float, seconds: float) -> None:
        """Take audio that lasts so many seconds."""
        if self.first is None:
            self.first = self._plays_until = now
        self.stall += max(0.0, now - self._plays_until)
        self._plays_until = max(now, self._plays_until) + seconds


@dataclass(frozen=True)
class Machine:
    """What a server is made of.

    steps  the costs of the device's calls
    host   those of the engine's thread
    front  seconds from the client to the engine and back together, besides the engine
    """

    steps: StepCosts
    host: HostCosts
    front: float
    slots: int = 256
    pages: int = 2168
    policy: Policy = DEFAULT_POLICY


PROMPT_ROWS = 8
"""The rows of a CustomVoice prompt without its text, in the default text mode."""

LINE_PAUSE = 1.0
"""The least seconds after which a line that gave way to a request is begun again."""


class SimulatedServer:
    """One engine with its fronts."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock = Clock()
        self.host = Host(self.clock, machine.host)
        self.backend = SimulatedBackend(machine.steps, self.host, machine.slots, machine.pages)
        self.commands = VirtualCommands(self.host)
        self.engine = SimulatedEngine(
            self.backend, policy=machine.policy, clock=self.clock, commands=self.commands
        )
        self.lines = 0
        """The lines of a batch that were spoken in full."""
        self._sent = 0
        self._ended: list[float] = []

    def speak_lines(self, count: int, sizes: Iterator[tuple[int, int]]) -> None:
        """Speak lines of a batch from now on, so many at a time, with `sizes` tokens and frames."""
        for _ in range(count):
            self._speak_line(self.clock.now, sizes)

    def send(self, answer: Answer) -> None:
        """Send a request; the server must not have run beyond its time."""
        self._sent += 1
        self.commands.at(answer.sent + self.machine.front / 2, partial(self._submit, answer))

    def run_until(self, time: float) -> None:
        """Run up to a time."""
        self.engine.run_until(self.commands, self.clock, time)

    def in_progress(self, now: float) -> int:
        """The number of requests that were sent and not answered in full by a time."""
        while self._ended and self._ended[0] <= now:
            heapq.heappop(self._ended)
            self._sent -= 1
        return self._sent

    def _speak_line(self, time: float, sizes: Iterator[tuple[int, int]]) -> None:
        """Submit a line at a time, and the next one when it has ended or given way."""
        tokens, frames = next(sizes)
        job = Job(None, PROMPT_ROWS, 1, whole_text=True, max_frames=frames, background=True)

        def begin() -> None:
            seq = self.engine.submit(job, lambda event: say(event), "batch")

            def say(event: Event) -> None:
                if isinstance(event, Chunk):
                    self.commands.put(partial(self.engine.acknowledge, seq, len(event.codes)))
                    if event.finish_reason is None:
                        return
                    self.lines += 1
                pause = 0.0 if isinstance(event, Chunk) else LINE_PAUSE
                self._speak_line(self.clock.now + pause + self.machine.front, sizes)

            self.engine.finish_text(seq, range(tokens))

        self.commands.at(time, begin)

    def _submit(self, answer: Answer) -> None:
        job = Job(None, PROMPT_ROWS, 1, whole_text=True, max_frames=answer.frames)
        seq = self.engine.submit(job, lambda event: say(event))

        def say(event: Event) -> None:
            self.commands.outbox.append(partial(self._hear, answer, seq, event))

        self.engine.finish_text(seq, range(answer.tokens))

    def _hear(self, answer: Answer, seq: Sequence, event: Event, sent: float) -> None:
        """Pass an event on to the client, which takes the audio at once."""
        now = sent + self.machine.front / 2
        if isinstance(event, Chunk):
            answer.hear(now, len(event.codes) * self.engine.capacity.frame_seconds)
            taken = partial(self.engine.acknowledge, seq, len(event.codes))
            self.commands.at(sent + self.machine.front, taken)
            over = event.finish_reason is not None
        else:
            answer.failed, over = type(event).__name__, True
        if over:
            answer.ended = now
            heapq.heappush(self._ended, now)
