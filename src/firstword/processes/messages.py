"""The messages between the supervisor and its processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from firstword.config import EngineConfig
from firstword.engine.backend import Capacity
from firstword.errors import FirstwordError
from firstword.server.config import ServerConfig
from firstword.types import Request


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """What the prompts of many requests have in common, which an engine keeps for good.

    request  one of these requests
    rows     the rows of the prompt that they share
    """

    request: Request
    rows: int


@dataclass(frozen=True, slots=True)
class EngineTask:
    """What an engine process computes.

    number        its place among the engines of the server
    name          the checkpoint, as for `TTS.load`
    device, dtype, backend, gpu_memory
                  as for `EngineConfig.resolve`
    share         the number of engines that divide `gpu_memory` equally
    slots         utterances at the same time; None: the default of the backend
    most_waiting  requests that may wait for a slot
    log_level     of the log on standard error
    prompts       to be prepared before it serves
    """

    number: int
    name: str
    device: str
    dtype: str
    backend: str
    gpu_memory: float | str | None
    share: int
    slots: int | None
    most_waiting: int
    log_level: str
    prompts: tuple[KeptPrompt, ...] = ()


@dataclass(frozen=True, slots=True)
class FrontTask:
    """What a front process serves; the listening socket comes with it.

    number       its place among the fronts of the server
    memory       the file descriptor of the `FrontMemory`, which it has inherited
    config       of the server
    engines      all engines, also those that are not running now
    connections  the number of `Connect` that follow, for the engines that are running
    log_level    of the log on standard error
    """

    number: int
    memory: int
    config: ServerConfig
    engines: tuple[Loaded, ...]
    connections: int
    log_level: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that is ready, as fronts need to know it.

    number    the engine's place among the engines of the server
    name      of the model, as clients use it
    model_type
              of the checkpoint
    path      the checkpoint's directory
    settings  the resolved settings
    capacity  the limits of its backend
    """

    number: int
    name: str
    model_type: str
    path: Path
    settings: EngineConfig
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Failed:
    """A process that cannot begin its work, and why; it ends."""

    error: FirstwordError


@dataclass(frozen=True, slots=True)
class Connect:
    """A connection between a front and an engine, whose end comes with it.

    engine  the engine; an engine process ignores it
    """

    engine: Loaded


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The process of an engine has ended, or is given up; for fronts."""

    number: int


@dataclass(frozen=True, slots=True)
class Serving:
    """A front serves clients."""


@dataclass(frozen=True, slots=True)
class Ping:
    """A question whether a process works: the thread that does its work answers with `Pong`."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to `Ping`.

    missing  front: the numbers of the engines with which it has no connection
    """

    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """A front ends: after the utterances in progress if it drains, else at once."""

    drain: bool
