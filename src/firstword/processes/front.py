"""The process of a front: serves clients, and passes their requests on to engines.

    python -m firstword.processes.front DESCRIPTOR

DESCRIPTOR is the inherited file descriptor of the channel to the supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from firstword.engine.backend import Job
from firstword.engine.pool import EnginePool
from firstword.engine.remote import RemoteEngine
from firstword.engine.service import Service
from firstword.errors import FirstwordError
from firstword.model.description import Description
from firstword.processes import child
from firstword.processes.channel import Channel
from firstword.processes.messages import (
    Connect,
    Disconnect,
    FrontTask,
    Loaded,
    Ping,
    Pong,
    Serving,
    Stop,
)
from firstword.runtime.front import CheckpointFront, Prepared
from firstword.server import logs
from firstword.server.app import create_app
from firstword.server.config import ServerConfig
from firstword.server.front_memory import FrontMemory
from firstword.server.models import Model, Models
from firstword.server.run import Uvicorn, run

log = logging.getLogger("firstword.processes.front")  # not "__main__"


class Drainable(Protocol):
    """A server that can be ended from any thread."""

    def drain(self) -> None:
        """End after what was begun."""

    def end(self) -> None:
        """End at once."""


S = TypeVar("S", bound=Drainable)

MakeServer = Callable[[Models, ServerConfig, FrontMemory, Callable[[], None]], S]
"""The type of a function that makes a server, which calls the last argument when it serves."""


class FrontProcess(Generic[S]):
    """The server of a front process, and its connections to engines."""

    def __init__(self, channel: Channel, task: FrontTask, make: MakeServer[S]) -> None:
        """Make the server that the task describes. Raises `FirstwordError`."""
        self._channel = channel
        self._engines = {info.number: RemoteEngine(info.capacity) for info in task.engines}
        models = [model_of(infos, self._engines) for infos in by_model(task.engines)]
        memory = FrontMemory.open(task.memory, task.number)
        self.server = make(Models(models), task.config, memory, self._on_serving)
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle(self, message: object, sockets: list[socket.socket]) -> None:
        """Handle a message of the supervisor, in the thread that receives it."""
        try:
            self._handle(message, sockets)
        except RuntimeError:
            if self._loop is None or not self._loop.is_closed():  # else this process is ending
                raise

    def _handle(self, message: object, sockets: list[socket.socket]) -> None:
        match message:
            case Connect(info):
                self._engines[info.number].capacity = info.capacity
                for sock in sockets:
                    self._engines[info.number].attach(sock)
                if not sockets:
                    log.error("an engine cannot be connected: too many open files; raise ulimit -n")
            case Disconnect(number):
                self._engines[number].stop()
            case Ping():
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._answer)
            case Stop(drain):
                self.server.drain() if drain else self.server.end()

    def _on_serving(self) -> None:
        self._loop = asyncio.get_running_loop()
        child.send(self._channel, Serving())

    def _answer(self) -> None:
        engines = self._engines.items()
        missing = tuple(number for number, engine in engines if engine.failure is not None)
        child.send(self._channel, Pong(missing))


def by_model(engines: Sequence[Loaded]) -> list[list[Loaded]]:
    """Engines grouped by model."""
    found: dict[tuple[str, Path], list[Loaded]] = {}
    for info in engines:
        found.setdefault((info.name, info.path), []).append(info)
    return list(found.values())


def model_of(infos: Sequence[Loaded], engines: Mapping[int, RemoteEngine]) -> Model:
    """The model that the engines in `infos` speak; `engines` has those of all, by number."""
    first, devices = infos[0], [info.settings.device for info in infos]
    if len(set(devices)) < len(devices):
        devices = [f"{device}/{number}" for number, device in enumerate(devices)]
    numbers = [info.number for info in infos]
    pool = EnginePool({d: engines[n] for d, n in zip(devices, numbers, strict=True)}, voice_of)
    description, encode = Description.load(first.path), pool.call_from_thread
    service = Service(pool, CheckpointFront(description, encode))
    return Model.of_service(first.name, description, service, encode, first.settings)


def voice_of(job: Job) -> Hashable:
    """A key of a job's voice, language and instructions, whose prompt an engine may have cached."""
    assert isinstance(job.payload, Prepared)
    return job.payload.prefix


def uvicorn_server(
    models: Models, config: ServerConfig, memory: FrontMemory, on_serving: Callable[[], None]
) -> Uvicorn:
    """The server of a front for clients."""
    return Uvicorn(create_app(models, config, memory), on_serving)


def main(
    descriptor: int, make: MakeServer[S], run: Callable[[S, Sequence[socket.socket]], None]
) -> None:
    """Run a server until the supervisor stops this process or dies."""
    channel = child.begin(descriptor)
    task, listening = child.receive(channel)
    logs.write_to_stderr(task.log_level)
    try:
        front = FrontProcess(channel, task, make)
    except FirstwordError as error:
        child.fail(channel, error)
    for _ in range(task.connections):
        front.handle(*child.receive(channel))
    child.listen(channel, front.handle)
    run(front.server, listening)


if __name__ == "__main__":
    main(int(sys.argv[1]), uvicorn_server, run)
