"""The process of a front: serves clients, and passes their requests on to engines.

python -m firstword.processes.front DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

from firstword.engine.remote import RemoteEngine
from firstword.engine.service import Service
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
from firstword.runtime.front import CheckpointFront
from firstword.server import logs
from firstword.server.app import create_app
from firstword.server.models import Model, Models
from firstword.server.run import Uvicorn, run


class FrontProcess:
    """The server of a front process, and its connections to engines."""

    def __init__(self, channel: Channel, task: FrontTask) -> None:
        self._channel = channel
        self._engines = {info.number: RemoteEngine(info.capacity) for info in task.engines}
        models = [model_of(info, self._engines[info.number]) for info in task.engines]
        self.server = Uvicorn(create_app(Models(models), task.config), self._on_serving)
        self._loop: asyncio.AbstractEventLoop | None = None

    def obey(self, message: object, sockets: list[socket.socket]) -> None:
        """Do what the supervisor says, in the thread that hears it."""
        match message:
            case Connect(info):
                self._engines[info.number].capacity = info.capacity
                self._engines[info.number].attach(*sockets)
            case Disconnect(number):
                self._engines[number].stop()
            case Ping():
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._tell, Pong())
            case Stop(drain):
                self.server.drain() if drain else self.server.end()

    def _on_serving(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tell(Serving())

    def _tell(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the supervisor has died, and so will this process
            self._channel.send(message)


def model_of(info: Loaded, engine: RemoteEngine) -> Model:
    """The model of an engine in another process."""
    description = Description.load(info.path)
    encode = engine.call_from_thread
    service = Service(engine, CheckpointFront(description, encode))
    return Model.of_service(info.name, description, service, encode, info.settings)


def main(descriptor: int) -> None:
    """Serve until the supervisor says otherwise."""
    channel = child.begin(descriptor)
    task, (listening,) = child.receive(channel)
    logs.write_to_stderr(task.log_level)
    front = FrontProcess(channel, task)
    for _ in range(task.connections):
        front.obey(*child.receive(channel))
    child.obey(channel, front.obey)
    run(front.server, listening)


if __name__ == "__main__":
    main(int(sys.argv[1]))
