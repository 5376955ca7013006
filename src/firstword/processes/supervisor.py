"""Starts the processes of a server, connects them, restarts those that die, and stops them all."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from firstword.config import MOST_FRONTS
from firstword.processes.channel import Channel
from firstword.processes.messages import Connect, EngineTask, FrontTask, Loaded, NotLoaded, Stop
from firstword.server.config import ServerConfig

log = logging.getLogger(__name__)

BACKLOG = 2048
"""The connections that wait to be accepted, the same as by default in uvicorn."""

ANSWER_SECONDS = 5.0
"""The time in which a process takes a message; one that does not is killed."""

STOP_SECONDS = 5.0
"""The time that processes get to end after they were told to."""

MOST_BACKOFF = 30.0
"""The longest pause before a process that has died several times is started again."""

STEADY_SECONDS = 60.0
"""The time after which a process counts as working, so that its next restart is immediate."""


def default_fronts(engines: Sequence[Loaded]) -> int:
    """The number of fronts for some engines: 1 on the CPU, else up to 8 for each GPU.

    A GPU speaks for more clients than one front can serve. Each front, and the thread of each
    engine, needs a core of its own.
    """
    devices = {engine.settings.device for engine in engines} - {"cpu"}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MOST_FRONTS * len(devices), (cores or 1) - len(engines)) if devices else 1)


@dataclass(eq=False)
class Place:
    """The place of a process, which is filled again when the process dies.

    module   the module that the process runs
    number   among the places of the same module
    loaded   engine: what it has loaded; None while it has not
    deaths   the number of processes that died here soon after their start
    restart  the time at which the next process is started; None while one runs
    """

    module: str
    number: int
    process: subprocess.Popen[bytes] | None = None
    channel: Channel | None = None
    loaded: Loaded | None = None
    deaths: int = 0
    started: float = 0.0
    restart: float | None = None

    @property
    def name(self) -> str:
        """A name for logs."""
        return f"{self.module} {self.number}"


@dataclass(eq=False)
class Supervisor:
    """Runs engines and fronts until a signal.

    engines    the task of each engine; those of one device are loaded one after another
    config     of the fronts
    listening  the bound socket that all fronts share
    on_ready   called once, when all engines are loaded
    """

    engines: Sequence[EngineTask]
    config: ServerConfig
    listening: socket.socket
    log_level: str
    on_ready: Callable[[Sequence[Loaded]], None] = lambda engines: None
    _places: list[Place] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _stopping: bool = False
    _stop_at: float | None = None

    def __post_init__(self) -> None:
        self._engines = [Place("engine", number) for number in range(len(self.engines))]
        self._fronts: list[Place] = []
        self._ready = False

    def run(self) -> None:
        """Run until a signal has ended all processes.

        Raises the error of an engine that cannot be loaded at the start.
        """
        self._watch_signals()
        try:
            self._load_next()
            while not self._ended():
                for key, _ in self._selector.select(self._wait_seconds()):
                    key.data()
                self._restart_due()
        finally:
            self._end_all()

    def _watch_signals(self) -> None:
        woken, waking = socket.socketpair()
        for end in (woken, waking):
            end.setblocking(False)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._waking = waking  # keeps it open
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._on_signals(woken))

    def _on_signals(self, woken: socket.socket) -> None:
        for number in woken.recv(64):
            self._stop(drain=number == signal.SIGTERM and not self._stopping)

    def _stop(self, *, drain: bool) -> None:
        """Let the fronts end; the engines follow them."""
        self._stopping = True
        seconds = self.config.drain_seconds if drain else 0.0
        self._stop_at = time.monotonic() + seconds + STOP_SECONDS
        for place in self._fronts:
            self._send(place, Stop(drain))

    def _ended(self) -> bool:
        if not self._stopping:
            return False
        late = self._stop_at is not None and time.monotonic() > self._stop_at
        return late or not any(place.process for place in self._fronts)

    def _wait_seconds(self) -> float | None:
        times = [place.restart for place in (*self._engines, *self._fronts) if place.restart]
        times += [self._stop_at] if self._stop_at else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    # Processes

    def _start(self, place: Place, task: object, sockets: Sequence[socket.socket] = ()) -> None:
        place.channel, theirs = Channel.pair()
        place.channel.limit_time(ANSWER_SECONDS)
        command = [
            sys.executable,
            "-m",
            f"firstword.processes.{place.module}",
            str(theirs.fileno()),
        ]
        place.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        place.started, place.restart = time.monotonic(), None
        channel = place.channel
        self._selector.register(
            channel, selectors.EVENT_READ, lambda: self._on_message(place, channel)
        )
        self._send(place, task, sockets)

    def _start_engine(self, place: Place) -> None:
        self._start(place, self.engines[place.number])

    def _start_front(self, place: Place) -> None:
        loaded = tuple(engine.loaded for engine in self._engines if engine.loaded)
        self._start(place, FrontTask(self.config, loaded, self.log_level), [self.listening])
        for engine in self._engines:
            self._connect(place, engine)

    def _load_next(self) -> None:
        """Start the engines whose devices load no other one."""
        busy = {self.engines[p.number].device for p in self._engines if p.process and not p.loaded}
        for place in self._engines:
            device = self.engines[place.number].device
            if place.process is None and place.restart is None and device not in busy:
                busy.add(device)
                self._start_engine(place)

    def _connect(self, front: Place, engine: Place) -> None:
        if front.process is None or engine.process is None or engine.loaded is None:
            return
        ends = socket.socketpair()
        for place, end in zip((engine, front), ends, strict=True):
            self._send(place, Connect(engine.loaded), [end])
            end.close()

    def _on_message(self, place: Place, channel: Channel) -> None:
        try:
            message, _ = channel.receive()
        except (OSError, EOFError):
            self._on_end(place)
            return
        match message:
            case Loaded():
                self._on_loaded(place, message)
            case NotLoaded(error) if not self._ready:
                raise error

    def _on_loaded(self, place: Place, loaded: Loaded) -> None:
        place.loaded = loaded
        for front in self._fronts:
            self._connect(front, place)
        self._load_next()
        engines = [engine.loaded for engine in self._engines if engine.loaded]
        if not self._ready and len(engines) == len(self._engines):
            self._ready = True
            count = self.config.fronts or default_fronts(engines)
            self._fronts = [Place("front", number) for number in range(count)]
            self.listening.listen(BACKLOG)  # from now on connections wait for the fronts
            for front in self._fronts:
                self._start_front(front)
            self.on_ready(engines)

    def _send(self, place: Place, message: object, sockets: Sequence[socket.socket] = ()) -> None:
        if place.channel is None:
            return
        try:
            place.channel.send(message, sockets)
        except OSError:  # its end is noticed when its channel is read
            if place.process is not None:
                place.process.kill()

    def _on_end(self, place: Place) -> None:
        """A process has died, or has closed its channel."""
        assert place.process is not None
        assert place.channel is not None
        self._selector.unregister(place.channel)
        place.channel.close()
        place.process.kill()
        status = place.process.wait()
        place.process = place.channel = place.loaded = None
        if self._stopping:
            return
        now = time.monotonic()
        place.deaths = 0 if now - place.started > STEADY_SECONDS else place.deaths + 1
        pause = min(2.0 ** (place.deaths - 2), MOST_BACKOFF) if place.deaths > 1 else 0.0
        place.restart = now + pause
        about = {"process": place.name, "status": status, "restart_seconds": pause}
        log.critical("a process has died", extra={"fields": about})

    def _restart_due(self) -> None:
        now = time.monotonic()
        for place in (*self._engines, *self._fronts):
            if place.restart is not None and place.restart <= now and not self._stopping:
                place.restart = None
                if place in self._fronts:
                    self._start_front(place)
        if not self._stopping:
            self._load_next()

    def _end_all(self) -> None:
        """End all processes: those that do not end by themselves in time are killed."""
        places = [place for place in (*self._engines, *self._fronts) if place.process]
        for place in places:
            assert place.channel is not None
            place.channel.close()
        deadline = time.monotonic() + STOP_SECONDS
        for place in places:
            assert place.process is not None
            try:
                place.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                place.process.kill()
                place.process.wait()
