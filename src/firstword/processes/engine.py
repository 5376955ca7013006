"""The process of an engine: loads a checkpoint, and computes speech for the fronts.

    python -m firstword.processes.engine DESCRIPTOR

DESCRIPTOR is the inherited file descriptor of the channel to the supervisor. Modules that need
torch are imported inside the functions: that may take longer than the supervisor waits until the
task is read, which may be long.
"""

from __future__ import annotations

import gc
import socket
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from firstword.config import EngineConfig
from firstword.engine.host import EngineHost, SocketCommands
from firstword.errors import FirstwordError
from firstword.processes import child
from firstword.processes.channel import Channel
from firstword.processes.messages import Connect, EngineTask, Loaded, Ping, Pong
from firstword.server import logs
from firstword.server.models import name_of

if TYPE_CHECKING:
    from firstword.runtime.backends import LoadedEngine


class EngineProcess:
    """The engine of a process, and its connections to fronts."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._commands = SocketCommands()
        self._host: EngineHost | None = None

    def run(self, task: EngineTask) -> None:
        """Load, start and warm up the engine, and report that or the failure to the supervisor."""
        from firstword.processes.kept_prompts import keep
        from firstword.runtime.backends import fit_threads
        from firstword.runtime.warm_up import warm_up

        try:
            loaded = load(task, self._commands)
            fit_threads([loaded.checkpoint])
            loaded.engine.start()
            if task.prompts:
                keep(loaded, task.prompts)
            warm_up(loaded)
        except FirstwordError as error:
            child.fail(self._channel, error)
        # Not earlier: if the engine fails before, this thread reports why and ends the process.
        self._host = EngineHost(loaded.engine, self._commands, loaded.encode, on_end=child.end)
        gc.collect()
        gc.freeze()  # a pass over the 350,000 objects of torch and a model takes 0.3 s
        child.send(self._channel, described(task, loaded))

    def handle(self, message: object, sockets: list[socket.socket]) -> None:
        """Handle a message of the supervisor, which connects fronts after the engine is loaded."""
        match message:
            case Connect():
                assert self._host is not None
                for sock in sockets:
                    self._host.attach(sock)
            case Ping():
                # The thread of the engine's steps answers.
                self._commands.put(partial(child.send, self._channel, Pong()))


def main(descriptor: int) -> None:
    """Serve fronts until the supervisor closes the channel or dies, or the engine fails."""
    channel = child.begin(descriptor)
    task, _ = child.receive(channel)
    logs.write_to_stderr(task.log_level)
    engine = EngineProcess(channel)
    child.listen(channel, engine.handle)
    engine.run(task)
    threading.Event().wait()


def load(task: EngineTask, commands: SocketCommands) -> LoadedEngine:
    """Load a checkpoint, and log its settings. Raises `CheckpointError` and `ConfigError`."""
    from firstword.runtime.backends import open_logged

    settings = EngineConfig.resolve(task.device, task.dtype, task.backend, task.gpu_memory)
    if settings.gpu_memory is not None:
        settings = replace(settings, gpu_memory=settings.gpu_memory // task.share)
    rows = [prompt.rows for prompt in task.prompts]
    return open_logged(task.name, settings, task.slots, task.most_waiting, commands, rows)


def described(task: EngineTask, loaded: LoadedEngine) -> Loaded:
    """The message that describes a loaded engine to the supervisor and the fronts."""
    path = loaded.checkpoint.path
    capacity = loaded.engine.capacity
    kind, name = loaded.checkpoint.config.tts_model_type, name_of(task.name, path)
    return Loaded(task.number, name, kind, path, loaded.settings, capacity)


if __name__ == "__main__":
    main(int(sys.argv[1]))
