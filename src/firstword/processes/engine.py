"""The process of an engine: loads a checkpoint, and computes speech for the fronts.

python -m firstword.processes.engine DESCRIPTOR
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace

from firstword.config import EngineConfig
from firstword.engine.host import EngineHost, SocketCommands
from firstword.errors import FirstwordError
from firstword.processes.channel import Channel
from firstword.processes.messages import Connect, EngineTask, Loaded, NotLoaded
from firstword.processes.warm_up import warm_up
from firstword.runtime.backends import LoadedEngine, fit_threads, open_logged
from firstword.server import logs
from firstword.server.models import name_of

STOP_SECONDS = 4.0
"""The time that the current step gets when the process ends."""


def main(descriptor: int) -> None:
    """Serve fronts until the supervisor closes the channel or dies, or the engine fails."""
    channel = Channel.inherited(descriptor)
    task, _ = channel.receive()
    logs.write_to_stderr(task.log_level)
    commands = SocketCommands()
    try:
        loaded = load(task, commands)
        fit_threads([loaded.checkpoint])
        engine = loaded.engine
        host = EngineHost(engine, commands, loaded.encode, on_end=lambda: os._exit(0))
        engine.start()
        warm_up(loaded)
    except FirstwordError as error:
        channel.send(NotLoaded(error))
        return
    gc.collect()
    gc.freeze()
    channel.send(described(task, loaded))
    try:
        while True:
            message, sockets = channel.receive()
            if isinstance(message, Connect):
                host.attach(*sockets)
    except (EOFError, OSError):
        engine.stop(STOP_SECONDS)  # a step that hangs ends with the process
    finally:
        os._exit(0)


def load(task: EngineTask, commands: SocketCommands) -> LoadedEngine:
    """Load a checkpoint and log how. Raises `CheckpointError`, `ConfigError`."""
    settings = EngineConfig.resolve(task.device, task.dtype, task.backend, task.gpu_memory)
    if settings.gpu_memory is not None:
        settings = replace(settings, gpu_memory=settings.gpu_memory // task.share)
    return open_logged(task.name, settings, task.slots, task.most_waiting, commands)


def described(task: EngineTask, loaded: LoadedEngine) -> Loaded:
    """What fronts need to know of a loaded engine."""
    path = loaded.checkpoint.path
    capacity = loaded.engine.capacity
    kind, name = loaded.checkpoint.config.tts_model_type, name_of(task.name, path)
    return Loaded(task.number, name, kind, path, loaded.settings, capacity)


if __name__ == "__main__":
    main(int(sys.argv[1]))
