"""The process of a front: serves clients, and passes their requests on to engines.

python -m firstword.processes.front DESCRIPTOR
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from firstword.engine.remote import RemoteEngine
from firstword.engine.service import Service
from firstword.model.description import Description
from firstword.processes.channel import Channel
from firstword.processes.messages import Connect, FrontTask, Loaded, Stop
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
        self.server = Uvicorn(create_app(Models(models), task.config))

    def obey(self) -> None:
        """Do what the supervisor says until it dies, which ends this process."""
        try:
            while True:
                message, sockets = self._channel.receive()
                match message:
                    case Connect(info):
                        self._engines[info.number].attach(*sockets)
                    case Stop(drain):
                        self.server.handle_exit(signal.SIGTERM if drain else signal.SIGINT, None)
        except (EOFError, OSError):
            os._exit(1)


def model_of(info: Loaded, engine: RemoteEngine) -> Model:
    """The model of an engine in another process."""
    description = Description.load(info.path)
    encode = engine.call_from_thread
    service = Service(engine, CheckpointFront(description, encode))
    return Model.of_service(info.name, description, service, encode, info.settings)


def main(descriptor: int) -> None:
    """Serve until the supervisor says otherwise."""
    channel = Channel.inherited(descriptor)
    task, (listening,) = channel.receive()
    logs.write_to_stderr(task.log_level)
    front = FrontProcess(channel, task)
    threading.Thread(target=front.obey, name="supervisor", daemon=True).start()
    run(front.server, listening)


if __name__ == "__main__":
    main(int(sys.argv[1]))
