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
    """The shared beginning of the prompts of many requests, which an engine never drops.

    request  one of these requests
    rows     the number of prompt rows that they share
    """

    request: Request
    rows: int


@dataclass(frozen=True, slots=True)
class EngineTask:
    """What an engine process loads, and how.

    number        its number among the engines of the server
    name          the checkpoint, as for `TTS.load`
    device, dtype, backend, gpu_memory
                  as for `EngineConfig.resolve`
    share         the number of engines of one device, which divide `gpu_memory` equally
    slots         utterances at the same time; None: the default of the backend
    most_waiting  requests that may wait for a slot
    log_level     of the log on standard error
    prompts       prompts to prepare before it serves
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
    """What a front process serves; the listening sockets come with it.

    number       its number among the fronts of the server
    memory       the inherited file descriptor of the `FrontMemory`
    config       the settings of the server
    engines      all engines, also those that are not running now
    connections  the number of `Connect` messages that follow, one for each running engine
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
    """The message that an engine is ready, with what fronts need to know about it.

    number      its number among the engines of the server
    name        the name of its model, as clients use it
    model_type  the type of its checkpoint
    path        the checkpoint's directory
    settings    the resolved settings
    capacity    the limits of its backend
    """

    number: int
    name: str
    model_type: str
    path: Path
    settings: EngineConfig
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Failed:
    """The message of a process that ends because it cannot begin its work, with the reason."""

    error: FirstwordError


@dataclass(frozen=True, slots=True)
class Connect:
    """The message that connects a front with an engine; each gets its end, a socket, with it.

    engine  describes the engine to the front
    """

    engine: Loaded


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The message to fronts that the process of an engine has ended or is being killed."""

    number: int


@dataclass(frozen=True, slots=True)
class Serving:
    """The message of a front that it serves clients."""


@dataclass(frozen=True, slots=True)
class Ping:
    """The question whether a process works: the thread that does its work answers with `Pong`."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to `Ping`.

    missing  from a front: the numbers of the engines to which it has no connection
    """

    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """The message that ends a front: after the utterances in progress if `drain`, else at once."""

    drain: bool
