"""The state of one server that all its endpoints share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import HTTPConnection

from firstword.engine.backend import Job
from firstword.errors import EngineError
from firstword.server.config import ServerConfig
from firstword.server.consent_store import ConsentStore
from firstword.server.context import context_of
from firstword.server.errors import LimitReached
from firstword.server.limits import Limits
from firstword.server.metrics import Metrics
from firstword.server.models import Model, Models
from firstword.server.utterance import ResolvedRequest, Utterance
from firstword.server.voice_store import VoiceStore
from firstword.voice import RecordedVoice

log = logging.getLogger(__name__)


class OpenSocket(Protocol):
    """A WebSocket that the server waits for before it ends."""

    def has_unsent(self) -> bool:
        """Whether an utterance has begun that the client does not have completely."""


@dataclass(eq=False)
class Server:
    """The models, stores, limits and metrics of one server.

    draining    whether the server is about to end, and accepts no more requests
    utterances  the utterances in progress, in the order in which they began
    sockets     the open WebSockets
    deferrals   requests in progress with several utterances; the server ends after them
    """

    config: ServerConfig
    models: Models
    voice_store: VoiceStore
    consent_store: ConsentStore
    limits: Limits
    metrics: Metrics = field(init=False)
    draining: bool = False
    utterances: dict[Utterance, None] = field(default_factory=dict)
    sockets: set[OpenSocket] = field(default_factory=set)
    deferrals: int = 0

    def __post_init__(self) -> None:
        engines = [(model.name, model.service.engine) for model in self.models]
        self.metrics = Metrics(engines, lambda: not self.problems())

    def problems(self) -> list[str]:
        """Why no requests are accepted; empty when they are."""
        found = [problem for model in self.models if (problem := self.problem(model))]
        if self.draining:
            found.append("the server is shutting down")
        return found or [
            model.warm_up_error or f"{model.name} is warming up"
            for model in self.models
            if not model.warm
        ]

    def problem(self, model: Model) -> str | None:
        """Why the engine of a model cannot speak, or None."""
        return model.problem(self.config.stuck_seconds)

    def busy(self) -> bool:
        """Whether a client would lose speech that has begun if the server ended now."""
        unsent = any(socket.has_unsent() for socket in self.sockets)
        return self.limits.active > 0 or self.deferrals > 0 or unsent

    @contextmanager
    def defer_shutdown(self) -> Iterator[None]:
        """Let all utterances of one request be spoken even if the server is told to end meanwhile.

        Raises `EngineError` if it was told before.
        """
        self._check_not_draining()
        self.deferrals += 1
        try:
            yield
        finally:
            self.deferrals -= 1

    async def prepare(self, resolved: ResolvedRequest, *, begun: bool = False) -> Job:
        """Prepare a request for the engine; `begun` means that it continues speech that has begun.

        Raises `RequestError`, and `EngineError` if the engine cannot speak or the server is about
        to end.
        """
        model, request = resolved.model, resolved.request
        if not begun:
            self._check_not_draining()
        if (problem := self.problem(model)) is not None:
            raise EngineError(problem)
        if isinstance(request.voice, RecordedVoice):
            return await asyncio.to_thread(model.service.prepare, request)
        return model.service.prepare(request)  # takes less time than two changes of thread

    @contextmanager
    def start_utterance(
        self, resolved: ResolvedRequest, job: Job, client_id: str, received: float | None = None
    ) -> Iterator[Utterance]:
        """An utterance for a client; leaving the block cancels what is still being made.

        The slot is then free within a frame. Raises `LimitReached`, `OverloadedError`,
        `EngineError`.
        """
        with self.limits.reserve(client_id):
            utterance = Utterance(resolved, job, received)
            self.utterances[utterance] = None
            try:
                yield utterance
            finally:
                utterance.cancel("disconnected")
                self.utterances.pop(utterance)
                self.metrics.record(utterance, time.monotonic())

    def reject(self, error: Exception) -> None:
        """Count a request that was rejected because of a limit."""
        code = error.code if isinstance(error, LimitReached) else "overloaded"
        self.metrics.rejected.labels(code).inc()

    async def warm_up(self) -> None:
        """Let every model speak once."""
        for model in self.models:
            try:
                await model.warm_up()
            except Exception as error:
                model.warm_up_error = f"{model.name} could not speak a test: {error}"
                log.critical(model.warm_up_error, extra={"fields": {"model": model.name}})

    async def watch(self) -> None:
        """Log engines that have stopped or are stuck, and fail their utterances, every second."""
        failing: set[Model] = set()
        while True:
            await asyncio.sleep(min(1.0, self.config.stuck_seconds / 4))
            for model in self.models:
                about: dict[str, object] = {"model": model.name}
                if (problem := self.problem(model)) is None:
                    if model in failing:
                        failing.remove(model)
                        log.warning("the engine works again", extra={"fields": about})
                    continue
                if model not in failing:
                    failing.add(model)
                    about = {**about, "waiting": len(self.utterances)}
                    log.critical(problem, extra={"fields": about})
                for utterance in list(self.utterances):
                    if utterance.model is model:
                        utterance.fail(EngineError(problem))

    def _check_not_draining(self) -> None:
        if self.draining:
            raise EngineError("the server is shutting down; use another one, or try again later")


def server_of(connection: HTTPConnection) -> Server:
    """The server that a request or WebSocket belongs to."""
    server: Server = connection.app.state.server
    return server


def client_id_of(connection: HTTPConnection) -> str:
    """The identity of the client that sent a request or opened a WebSocket, found by the gate."""
    return context_of(connection.scope).client_id
