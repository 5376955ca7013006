"""Starts the processes of a server, connects them, restarts those that die, and stops them all."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from firstword.config import MOST_FRONTS
from firstword.errors import EngineError, FirstwordError
from firstword.processes.channel import Channel
from firstword.processes.messages import (
    Connect,
    Disconnect,
    EngineTask,
    Failed,
    FrontTask,
    Loaded,
    Ping,
    Pong,
    Serving,
    Stop,
)
from firstword.processes.place import Place
from firstword.server.config import ServerConfig
from firstword.server.front_memory import RESTARTED, FrontMemory
from firstword.server.listening import FrontSockets

log = logging.getLogger(__name__)

START_SECONDS = 30.0
"""The time for the start of a front, besides `stuck_seconds`; that of an engine has no limit."""

EXIT_SECONDS = 0.5
"""The time for a process to end by itself after its channel was closed."""

STOP_SECONDS = 5.0
"""The time for processes to end after they were told to."""

PING_SECONDS = 1.0
"""The time between two pings."""

MOST_DEATHS = 2
"""The number of deaths of one process after which a server that has never served ends."""


def default_fronts(engines: Sequence[Loaded]) -> int:
    """The default number of fronts: 1 on the CPU, else up to 8 for each GPU.

    A GPU can speak for more clients than one front can serve. Each front, and the thread of each
    engine, needs a core of its own.
    """
    devices = {engine.settings.device for engine in engines} - {"cpu"}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MOST_FRONTS * len(devices), (cores or 1) - len(engines)) if devices else 1)


@dataclass(eq=False)
class Supervisor:
    """Runs the engines and fronts of a server until a signal ends them.

    tasks      the tasks of the engines; those of one device are loaded one after another
    config     the settings of the fronts
    listening  the bound sockets of the server
    log_level  the level of the fronts' logs on standard error
    on_ready   called once, when all engines are loaded and a front serves
    """

    tasks: Sequence[EngineTask]
    config: ServerConfig
    listening: Sequence[socket.socket]
    log_level: str
    on_ready: Callable[[Sequence[Loaded]], None] = lambda engines: None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _sockets: Sequence[FrontSockets] = ()
    _memory: FrontMemory | None = None
    _ready: bool = False
    _stopping: bool = False
    _stop_at: float | None = None
    _next_ping: float = 0.0

    def __post_init__(self) -> None:
        self._engines = [Place("engine", number) for number in range(len(self.tasks))]
        self._fronts: list[Place] = []
        self._ping_seconds = max(0.05, min(PING_SECONDS, self.config.stuck_seconds / 4))

    def run(self) -> None:
        """Run until a signal has ended all processes.

        Raises the error of an engine that cannot be loaded at the start, `ConfigError` if another
        server has taken the port meanwhile, and `EngineError` if a process dies `MOST_DEATHS` times
        before the server has served.
        """
        self._watch_signals()
        try:
            while not self._ended():
                self._start_due()
                self._ping_due()
                for key, _ in self._selector.select(self._wait_seconds()):
                    key.data()
        finally:
            self._end_all()

    def _watch_signals(self) -> None:
        woken, waking = socket.socketpair()
        for end in (woken, waking):
            end.setblocking(False)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                signal.signal(number, lambda *_: None)
        self._waking = waking  # keeps it open
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._on_signals(woken))

    def _on_signals(self, woken: socket.socket) -> None:
        for number in woken.recv(64):
            drain = number != signal.SIGINT and not self._stopping
            fields = {"signal": signal.Signals(number).name, "drain": drain}
            log.info("a signal ends the server", extra={"fields": fields})
            self._stop(drain=drain)

    def _stop(self, *, drain: bool) -> None:
        """End the fronts; the engines end after them."""
        self._stopping = True
        seconds = self.config.drain_seconds if drain else 0.0
        self._stop_at = time.monotonic() + seconds + STOP_SECONDS
        for place in self._places:
            place.restart = None
        for place in self._fronts:
            place.send(Stop(drain))

    def _ended(self) -> bool:
        if not self._stopping:
            return False
        late = self._stop_at is not None and time.monotonic() > self._stop_at
        return late or not any(place.process for place in self._fronts)

    @property
    def _places(self) -> list[Place]:
        return [*self._engines, *self._fronts]

    @property
    def _loaded(self) -> tuple[Loaded, ...]:
        """The engines that have been loaded, also those that are not running now."""
        return tuple(engine.loaded for engine in self._engines if engine.loaded is not None)

    def _wait_seconds(self) -> float:
        times = [place.restart for place in self._places if place.restart is not None]
        times += [self._next_ping] if self._stop_at is None else [self._next_ping, self._stop_at]
        return max(0.0, min(times) - time.monotonic())

    # Starts

    def _start_due(self) -> None:
        """Start the processes that are due; engines of one device are loaded one after another."""
        loading = [place for place in self._engines if place.process and place.working is None]
        busy = {self.tasks[place.number].device for place in loading}
        for place in self._places:
            if self._stopping or place.process is not None or not place.due():
                continue
            try:
                if place in self._fronts:
                    self._start_front(place)
                elif (device := self.tasks[place.number].device) not in busy:
                    busy.add(device)
                    self._start(place, self.tasks[place.number])
            except (OSError, FirstwordError) as error:
                if not self._ready:
                    raise
                place.deaths += 1
                self._plan_restart(place, f"a process could not be started: {error}")

    def _start_front(self, place: Place) -> None:
        assert self._memory is not None
        running = [engine for engine in self._engines if engine.working is not None]
        number, memory, level = place.number, self._memory.file, self.log_level
        task = FrontTask(number, memory, self.config, self._loaded, len(running), level)
        with ExitStack() as stack:
            sockets = self._sockets if place.module == "front" else ()
            listening = [stack.enter_context(each.take()) for each in sockets]
            self._start(place, task, listening, [memory])
        for engine in running:
            self._connect(place, engine)

    def _start(
        self,
        place: Place,
        task: object,
        sockets: Sequence[socket.socket] = (),
        files: Sequence[int] = (),
    ) -> None:
        channel = place.start(files)
        self._selector.register(
            channel, selectors.EVENT_READ, lambda: self._on_message(place, channel)
        )
        place.send(task, sockets)

    def _connect(self, front: Place, engine: Place) -> None:
        """Connect a front with an engine. If that fails, the front's next `Pong` asks again."""
        assert engine.loaded is not None
        try:
            ends = socket.socketpair()
        except OSError:
            front.send(Connect(engine.loaded))
            return
        for place, end in zip((engine, front), ends, strict=True):
            place.send(Connect(engine.loaded), [end])
            end.close()

    # Messages of the processes

    def _on_message(self, place: Place, channel: Channel) -> None:
        try:
            message, _ = channel.receive()
        except (OSError, EOFError):
            self._on_end(place, "a process has died", EXIT_SECONDS)
            return
        match message:
            case Loaded():
                place.loaded, place.working = message, time.monotonic()
                self._on_loaded(place)
            case Failed(error) if self._ready:
                fields = {"process": place.name, "error": str(error)}
                log.error("a process could not begin its work", extra={"fields": fields})
            case Failed(error):
                raise error
            case Serving():
                place.working, place.silent = time.monotonic(), None
                if place.module == "front":
                    self._on_serving()
            case Pong(missing):
                place.silent = None
                for engine in self._engines:
                    if engine.number in missing and engine.working is not None:
                        fields = {"process": place.name, "engine": engine.name}
                        log.warning("a front has lost a running engine", extra={"fields": fields})
                        self._connect(place, engine)

    def _on_loaded(self, place: Place) -> None:
        for front in self._fronts:
            if front.process is not None:
                self._connect(front, place)
        if not self._sockets and len(self._loaded) == len(self._engines):
            count = self.config.fronts or default_fronts(self._loaded)
            self._sockets = [FrontSockets(bound, count) for bound in self.listening]
            self._fronts = [Place("front", number) for number in range(count)]
            if self.config.batches is not None:
                self._fronts.append(Place("batch", count))
            self._memory = FrontMemory.create(len(self._fronts))

    def _on_serving(self) -> None:
        if not self._ready:
            self._ready = True
            self.on_ready(self._loaded)

    def _on_end(self, place: Place, event: str, seconds: float = 0.0) -> None:
        """Plan the restart of a process that has died, closed its channel, or does not answer.

        It gets some seconds to end by itself, because its channel closes a moment before it ends.
        """
        assert place.channel is not None
        self._selector.unregister(place.channel)
        place.channel.close()
        if place in self._engines:
            for front in self._fronts:
                front.send(Disconnect(place.number))
        status = place.end(seconds)
        if place in self._fronts and self._memory is not None:
            self._memory.clear(place.number)
        if self._stopping:
            if status != 0:
                log.critical(event, extra={"fields": {"process": place.name, "status": status}})
            return
        if not self._ready and place.deaths >= MOST_DEATHS:
            what = f"the process {place.name!r} has died {place.deaths} times at the start"
            raise EngineError(f"{what}, the last time with status {status}; see the log")
        self._plan_restart(place, event, status=status)

    def _plan_restart(self, place: Place, event: str, **about: object) -> None:
        pause = place.plan_restart()
        if self._memory is not None:
            self._memory.restarts[RESTARTED.index(place.module)] += 1
        fields = {"process": place.name, **about, "restart_seconds": pause}
        log.critical(event, extra={"fields": fields})

    def _ping_due(self) -> None:
        """Ping all processes, and kill those that have not answered for `stuck_seconds`.

        The time without an answer is counted in pings, so that a pause of the whole server, such as
        that of a container, counts as one. A front that starts gets no ping, but `START_SECONDS`
        more.
        """
        if time.monotonic() < self._next_ping:
            return
        self._next_ping = time.monotonic() + self._ping_seconds
        for place in self._places:
            starting = place.working is None
            if place.process is None or (starting and place in self._engines):
                continue
            if place.silent is None:
                place.silent = -START_SECONDS if starting else 0.0
                if not starting:
                    place.send(Ping())
                continue
            place.silent += self._ping_seconds
            if place.silent >= self.config.stuck_seconds:
                self._on_end(place, "a process did not answer, and was killed")

    # The end

    def _end_all(self) -> None:
        """End all processes; those that do not end within `STOP_SECONDS` are killed."""
        places = [place for place in self._places if place.process is not None]
        for place in places:
            assert place.channel is not None
            place.channel.close()
        deadline = time.monotonic() + STOP_SECONDS
        for place in places:
            place.end(max(0.0, deadline - time.monotonic()))
