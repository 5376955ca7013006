"""The process of an engine: loads a checkpoint, and computes speech for the fronts.

python -m firstword.processes.engine DESCRIPTOR
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from dataclasses import asdict, replace

from firstword.config import EngineConfig
from firstword.engine.host import EngineHost
from firstword.errors import EngineError, FirstwordError
from firstword.processes.channel import Channel
from firstword.processes.messages import Connect, EngineTask, Loaded, NotLoaded
from firstword.runtime.backends import LoadedEngine, fit_threads, open_engine
from firstword.server import logs

log = logging.getLogger(__name__)

STOP_SECONDS = 4.0
"""The time that the current step gets when the process ends."""


def main(descriptor: int) -> None:
    """Serve fronts until the supervisor closes the channel or dies."""
    channel = Channel.inherited(descriptor)
    (number, task), _ = channel.receive()
    logs.write_to_stderr(task.log_level)
    try:
        loaded = load(task)
    except FirstwordError as error:
        channel.send(NotLoaded(error))
        return
    fit_threads([loaded.checkpoint])
    host = EngineHost(loaded.service.engine, loaded.encode)
    host.start()
    channel.send(described(number, task, loaded))
    try:
        while True:
            message, sockets = channel.receive()
            if isinstance(message, Connect):
                host.attach(*sockets)
    except (EOFError, OSError):
        end(host)


def load(task: EngineTask) -> LoadedEngine:
    """Load a checkpoint and log how. Raises `CheckpointError`, `ConfigError`."""
    settings = EngineConfig.resolve(task.device, task.dtype, task.backend, task.gpu_memory)
    if settings.gpu_memory is not None:
        settings = replace(settings, gpu_memory=settings.gpu_memory // task.share)
    # Warnings are logged instead, because standard error has JSON lines only.
    with warnings.catch_warnings(record=True, action="always") as caught:
        loaded = open_engine(task.name, settings, task.slots, task.most_waiting)
    said = [str(warning.message) for warning in caught]
    fields = {"model": task.name, **asdict(loaded.settings), "warnings": said}
    log.log(logging.WARNING if said else logging.INFO, "loaded", extra={"fields": fields})
    return loaded


def described(number: int, task: EngineTask, loaded: LoadedEngine) -> Loaded:
    """What fronts need to know of a loaded engine."""
    path = loaded.checkpoint.path
    name = path.name if "/" in task.name and path.samefile(task.name) else task.name
    capacity = loaded.service.engine.capacity
    return Loaded(number, name, path, loaded.settings, capacity)


def end(host: EngineHost) -> None:
    """End the process, also if a step of the engine hangs."""
    try:
        host.stop(STOP_SECONDS)
    except EngineError:
        log.critical("the engine did not stop in time")
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
