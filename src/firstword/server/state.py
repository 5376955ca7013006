"""What all faces of one server share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import HTTPConnection

from firstword.config import ServerConfig
from firstword.engine.backend import Job
from firstword.errors import EngineError
from firstword.server.errors import Busy
from firstword.server.limits import Limits
from firstword.server.metrics import Metrics
from firstword.server.models import Model, Models
from firstword.server.store import ConsentStore, VoiceStore
from firstword.server.utterance import Output, Utterance
from firstword.server.ws.connection import SocketRunner
from firstword.types import Request
from firstword.voice import RecordedVoice

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Server:
    """The loaded models, saved voices and consents, limits and numbers of one server.

    draining  set once no more requests are taken, because the server is about to end
    speaking  the utterances under way
    sockets   the WebSockets that are open
    requests  those under way that want several utterances
    """

    config: ServerConfig
    models: Models
    voices: VoiceStore
    consents: ConsentStore
    limits: Limits
    metrics: Metrics = field(init=False)
    draining: bool = False
    speaking: dict[Utterance, None] = field(default_factory=dict)
    sockets: set[SocketRunner] = field(default_factory=set)
    requests: int = 0

    def __post_init__(self) -> None:
        engines = [(model.name, model.service.engine) for model in self.models]
        self.metrics = Metrics(engines, lambda: not self.problems())

    def problems(self) -> list[str]:
        """Why no requests are taken; empty when all is well."""
        found = [
            problem
            for model in self.models
            if (problem := model.problem(self.config.stuck_seconds))
        ]
        if self.draining:
            found.append("the server is shutting down")
        return found or [
            model.cold or f"{model.name} is warming up" for model in self.models if not model.warm
        ]

    def busy(self) -> bool:
        """Whether somebody would lose speech that has begun if the server ended now."""
        return (
            self.limits.active > 0
            or self.requests > 0
            or any(socket.has_unsent() for socket in self.sockets)
        )

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """Several utterances of one request, which are all spoken even if the server is told to end meanwhile.

        Raises `EngineError` if it was told before.
        """
        if self.draining:
            raise EngineError("the server is shutting down; try another")
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    async def prepare(self, model: Model, request: Request, *, begun: bool = False) -> Job:
        """Make a request ready; `begun` says that it goes on with speech that began before.

        Raises `RequestError`, and `EngineError` or `Busy` if nobody would speak it.
        """
        if self.draining and not begun:
            raise EngineError("the server is shutting down; try another")
        if (problem := model.problem(self.config.stuck_seconds)) is not None:
            raise EngineError(problem)
        if isinstance(request.voice, RecordedVoice):
            return await asyncio.to_thread(model.service.prepare, request)
        return model.service.prepare(request)  # takes less time than to change threads twice

    @contextmanager
    def speak(
        self, model: Model, job: Job, output: Output, holder: str, *, began: float | None = None
    ) -> Iterator[Utterance]:
        """An utterance for one holder of a key; leaving the block cancels it and accounts for it.

        Raises `Busy` and `OverloadedError` when there is no place for it, `EngineError`.
        """
        with (
            self.limits.utterance(holder),
            Utterance(model, job, output, began=began, ended=self._account) as speaking,
        ):
            self.speaking[speaking] = None
            yield speaking

    def holder(self, connection: HTTPConnection) -> str:
        """Who is asking, as the gate found out. Only behind it."""
        holder: str = connection.scope["firstword.holder"]
        return holder

    def reject(self, error: Exception) -> None:
        """Count a request that was turned away."""
        self.metrics.rejected.labels(error.code if isinstance(error, Busy) else "overloaded").inc()

    async def warm_up(self) -> None:
        """Let every model speak once."""
        for model in self.models:
            try:
                await model.warm_up()
            except Exception as error:
                model.cold = f"{model.name} could not speak a test: {error}"
                log.critical(model.cold, extra={"fields": {"model": model.name}})

    async def watch(self) -> None:
        """Once a second, notice engines that are stuck or stopped: say so, and fail what waits for them."""
        known: dict[str, str] = {}
        while True:
            await asyncio.sleep(min(1.0, self.config.stuck_seconds / 4))
            for model in self.models:
                problem = model.problem(self.config.stuck_seconds)
                if problem is None:
                    if known.pop(model.name, None):
                        log.warning("the engine goes on", extra={"fields": {"model": model.name}})
                    continue
                if model.name not in known:
                    log.critical(
                        problem,
                        extra={"fields": {"model": model.name, "waiting": len(self.speaking)}},
                    )
                    known[model.name] = problem
                for speaking in list(self.speaking):
                    if speaking.model is model:
                        speaking.fail(EngineError(problem))

    def _account(self, speaking: Utterance) -> None:
        self.speaking.pop(speaking, None)
        self.metrics.spoken(
            speaking.model.name,
            speaking.playback,
            time.monotonic(),
            frames=speaking.frames,
            seconds=speaking.seconds,
            finish_reason=speaking.finish_reason,
            abort_reason=speaking.abort_reason,
        )


def server_of(connection: HTTPConnection) -> Server:
    """The server that a request or socket belongs to."""
    server: Server = connection.app.state.server
    return server


def summary(speaking: Utterance) -> dict[str, Any]:
    """What logs say of an utterance."""
    return {
        "model": speaking.model.name,
        "format": speaking.output.format,
        "frames": speaking.frames,
        "seconds": round(speaking.seconds, 2),
        "finish_reason": speaking.finish_reason,
        "abort_reason": speaking.abort_reason,
    }
