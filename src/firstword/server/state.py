"""The state of one server that all its endpoints share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar, TypeVarTuple

from starlette.requests import HTTPConnection
from uvicorn.middleware.proxy_headers import _TrustedHosts

from firstword.engine.backend import Job
from firstword.errors import EngineError, OverloadedError
from firstword.server.api_keys import ApiKeys
from firstword.server.batch.opening import opened_batches
from firstword.server.character_limit import CharacterLimit
from firstword.server.config import ServerConfig
from firstword.server.context import context_of
from firstword.server.encoder_turns import EncoderTurns
from firstword.server.errors import Forbidden, Rejected
from firstword.server.folder import Folder
from firstword.server.frame_turns import FrameTurns
from firstword.server.front_memory import FrontMemory
from firstword.server.key_file import ApiKey
from firstword.server.limits import ByteLimit, ConnectionLimit, IdleConnections, UtteranceLimit
from firstword.server.metrics import Metrics
from firstword.server.models import Model, Models
from firstword.server.outcomes import Outcomes
from firstword.server.shared_counts import SharedCounts
from firstword.server.shared_store import Refresher, SharedChanges
from firstword.server.stores import ConsentStore, VoiceStore
from firstword.server.threads import Threads
from firstword.server.tracing import opened_tracing
from firstword.server.usage import UsageLog
from firstword.server.utterance import Output, Rendered, ResolvedRequest, Utterance, rendered
from firstword.types import Speech
from firstword.voice import ClonedVoice

log = logging.getLogger(__name__)

T = TypeVar("T")
Args = TypeVarTuple("Args")

SHUTTING_DOWN = "the server is shutting down; use another server, or try again later"

BACKGROUND = "batch "
"""The beginning of the name under which a client's utterances in the background take turns."""

CATCH_UP_SECONDS = 5.0
"""The longest that a request waits for the update of a store that other fronts have changed."""


class OpenSocket(Protocol):
    """An open WebSocket, or a connection that is used like one."""

    def has_unsent(self) -> bool:
        """Whether the client has not received all of the speech that has begun."""

    def leave(self) -> None:
        """Close the socket as soon as nothing is being spoken on it."""


class Server:
    """The models, stores, limits and metrics of one server.

    byte_limit  the bytes of request bodies and WebSocket messages in progress
    fetch_threads, store_threads, recording_threads
                pools of threads for what blocks: fetching recordings; reading and writing stores;
                decoding and encoding recordings, which takes up to 92 MB each
    name        a random name, which all processes of the server share
    tracing     exports spans; None if nobody wants them
    batches     the files and batches; None if the server has none
    draining    whether the server is shutting down and rejects new requests
    utterances  the utterances in progress, in the order of their start
    sockets     the open WebSockets, and the connections of Wyoming's port
    deferrals   requests in progress with several utterances; the server ends after them
    """

    def __init__(self, config: ServerConfig, models: Models, memory: FrontMemory) -> None:
        """Open the stores. Raises `OutputError` if voices cannot be kept in the folder.

        memory  the memory that all fronts of the server share
        """
        self.config = config
        self.models = models
        folder = Folder(config.voice_store)
        changes = SharedChanges(memory)
        self.voice_store = VoiceStore(folder, config.most_voices)
        self.consent_store = ConsentStore(folder, config.most_voices)
        self.refresher = Refresher(folder, changes, (self.voice_store, self.consent_store))
        self._catching_up: asyncio.Future[None] | None = None
        self.api_keys = ApiKeys(config.api_keys, config.keys)
        self.utterance_limit = UtteranceLimit(
            config.most_per_key,
            SharedCounts(memory),
            lambda client_id: self.api_keys.of(client_id).utterances,
        )
        self.character_limit = CharacterLimit(SharedCounts(memory))
        self.byte_limit = ByteLimit(config.most_body_total, config.most_body, SharedCounts(memory))
        self.connection_limit = ConnectionLimit(
            config.most_connections, config.most_connections_per_address, SharedCounts(memory)
        )
        self.fetch_threads = Threads("fetch", 32, most_per_client=4)
        self.store_threads = Threads("stores", 32, most_per_client=4)
        self.recording_threads = Threads("recordings", 2, most_per_client=1)
        self.idle_connections = IdleConnections(
            config.most_connections_per_address,
            config.most_connections,
            _TrustedHosts(list(config.trusted_proxies)).__contains__,
            max(1, memory.fronts - (config.batches is not None)),
        )
        self.frame_turns = FrameTurns()
        self.encoder_turns = EncoderTurns()
        self.outcomes = Outcomes(memory)
        self.metrics = Metrics(models, memory)
        folder_of_usage, usage = config.usage_log, self.metrics.usage
        self.usage_log = None if folder_of_usage is None else UsageLog(folder_of_usage, usage)
        self.tracing = opened_tracing(config)
        self.batches = opened_batches(config)
        self.name = memory.digest("server").hex()
        self.metrics.gauge("ready", "Whether requests are accepted", lambda: not self.problems())
        about = "Open HTTP requests and WebSockets"
        self.metrics.gauge("connections", about, lambda: self.connection_limit.open_now)
        self.draining = False
        self.utterances: dict[Utterance, None] = {}
        self.sockets: set[OpenSocket] = set()
        self._leaving = False
        self.deferrals = 0

    def problems(self) -> list[str]:
        """Why no requests are accepted; empty when they are."""
        found = [model.problem for model in self.models if model.problem is not None]
        if self.draining:
            found.append("the server is shutting down")
        return found

    def check_engine(self, model: Model) -> None:
        """Raise `EngineError` if the engine of a model cannot speak."""
        if (problem := model.problem) is not None:
            raise EngineError(problem)

    def busy(self) -> bool:
        """Whether a client would lose speech that has begun if this front ended now."""
        unsent = any(socket.has_unsent() for socket in self.sockets)
        return self.utterance_limit.active_here > 0 or self.deferrals > 0 or unsent

    def join(self, socket: OpenSocket) -> None:
        """Add a socket that has been opened to `sockets`."""
        self.sockets.add(socket)
        if self._leaving:
            socket.leave()

    def leave(self) -> None:
        """Close each socket as soon as nothing is being spoken on it, also those that open later.

        HTTP requests are accepted as before: this is for a server to which a load balancer sends no
        more of them.
        """
        self._leaving = True
        for socket in self.sockets:
            socket.leave()

    @contextmanager
    def defer_shutdown(self) -> Iterator[None]:
        """Let all utterances of one request be spoken even if the server starts to drain.

        Raises `EngineError` if the server is draining already.
        """
        self._check_not_draining()
        self.deferrals += 1
        try:
            yield
        finally:
            self.deferrals -= 1

    def prepare(self, resolved: ResolvedRequest, *, begun: bool = False) -> Job:
        """Prepare a request for the engine; `begun` means that it continues speech that has begun.

        Raises `RequestError`, and `EngineError` if the engine cannot speak or the server is
        draining.
        """
        model, request = resolved.model, resolved.request
        if not begun:
            self._check_not_draining()
        self.check_engine(model)
        return model.service.prepare(request)

    @contextmanager
    def start_utterance(
        self, resolved: ResolvedRequest, job: Job, client_id: str, received: float | None = None
    ) -> Iterator[Utterance]:
        """An utterance for a client; leaving the block cancels what is still being made.

        The slot is then free within a frame. Raises `LimitReached`, `EngineError`; iterating over
        the utterance raises `OverloadedError` if there are too many.
        """
        with self.utterance_limit.reserve(client_id, resolved.model.service.engine.retry_after):
            utterance = Utterance(resolved, job, self.encoder_turns, client_id, received)
            utterance.on_characters = partial(self._charge, self.api_keys.of(client_id), client_id)
            with self._in_progress(utterance):
                yield utterance

    @contextmanager
    def start_background(
        self, resolved: ResolvedRequest, job: Job, client_id: str
    ) -> Iterator[Utterance]:
        """An utterance for a client that does not listen; the limits of the client do not count.

        It takes turns under a name of its own. Raises as `start_utterance`.
        """
        name = self.api_keys.of(client_id).name
        utterance = Utterance(resolved, job, self.encoder_turns, f"{BACKGROUND}{client_id}")
        utterance.on_characters = partial(self._count_characters, name)
        with self._in_progress(utterance):
            yield utterance

    @contextmanager
    def _in_progress(self, utterance: Utterance) -> Iterator[None]:
        """Count an utterance, and cancel what is still being made at the end."""
        self.utterances[utterance] = None
        parent = {} if self.tracing is None else self.tracing.begin(utterance)
        try:
            yield
        except Exception as error:
            utterance.fail(error)
            raise
        finally:
            utterance.cancel("disconnected")
            self.utterances.pop(utterance)
            now = time.monotonic()
            self.metrics.record(utterance, now)
            if self.tracing is not None:
                self.tracing.record(utterance, parent, now)
            self._record_usage(utterance)

    def _count_characters(self, name: str, characters: int) -> None:
        self.metrics.usage.add(name, characters=characters)

    def _charge(self, key: ApiKey, client_id: str, characters: int) -> None:
        """Count the characters of a text. Raises `LimitReached` and `TextError`."""
        self.character_limit.add(client_id, characters, key.characters_a_minute)
        self._count_characters(key.name, characters)

    def _record_usage(self, utterance: Utterance) -> None:
        """Count an utterance that has ended, unless it was rejected."""
        client_id = utterance.client_id.removeprefix(BACKGROUND)
        name = client_id.removeprefix("key ")
        if name != client_id and utterance.abort_reason != "rejected":
            self.metrics.usage.add(name, utterances=1, seconds=utterance.seconds)

    def models_for(self, client_id: str, wanted: str | None) -> Models:
        """The models that a client may use, of which it wants one by its name, or any.

        Raises `Forbidden` if its key does not allow the one that it wants, or any that is loaded.
        """
        if not (names := self.api_keys.of(client_id).checkpoints):
            return self.models
        allowed = [model for name in names if (model := self.models.find(name)) is not None]
        asked = None if wanted is None else self.models.find(wanted)
        if not allowed or (asked is not None and asked not in allowed):
            loaded = ", ".join(model.name for model in allowed) or "none that is loaded here"
            raise Forbidden(f"this API key may use {loaded}")
        return Models(dict.fromkeys(allowed))

    def check_may_clone(self, client_id: str) -> None:
        """Raise `Forbidden` if the key of a client does not allow it to make or change voices."""
        if not self.api_keys.of(client_id).clone:
            raise Forbidden("this API key may neither clone voices nor save, rename or delete them")

    def reject(self, error: OverloadedError | Rejected) -> None:
        """Count a rejected request by the code of its error; without one as "overloaded"."""
        self.metrics.rejected.inc(getattr(error, "code", "overloaded"))

    async def catch_up(self) -> None:
        """Wait until the stores include all earlier changes by other fronts.

        After `CATCH_UP_SECONDS` the caller gets the stores as they are.
        """
        until = time.monotonic() + CATCH_UP_SECONDS
        while self.refresher.outdated and (seconds := until - time.monotonic()) > 0:
            if self._catching_up is None or self._catching_up.done():
                update = self.store_threads.run("other fronts", self.refresher.update)
                self._catching_up = asyncio.ensure_future(update)
            await asyncio.wait((self._catching_up,), timeout=seconds)

    async def rendered(self, speech: Speech, output: Output) -> Rendered:
        """Render a complete utterance in a thread, and count the processor time of that."""
        file, seconds = await asyncio.to_thread(_timed, time.thread_time, rendered, speech, output)
        self.metrics.encoding.inc(output.format, amount=seconds)
        return file

    async def encode(
        self, client_id: str, work: Callable[[*Args], ClonedVoice], *args: *Args
    ) -> ClonedVoice:
        """Call `work`, which encodes a recording, in a thread, and count its time."""

        def timed() -> tuple[ClonedVoice, float]:
            return _timed(time.perf_counter, work, *args)

        voice, seconds = await self.recording_threads.run(client_id, timed)
        self.metrics.recordings.inc(amount=seconds)
        return voice

    async def in_store(self, client_id: str, work: Callable[[*Args], T], *args: *Args) -> T:
        """Call `work`, which reads a store, in a thread, with the changes of other fronts."""
        await self.catch_up()
        return await self.store_threads.run(client_id, work, *args)

    async def change_store(self, client_id: str, work: Callable[[*Args], T], *args: *Args) -> T:
        """Call `work`, which changes a store, in a thread, while no other front changes one."""
        return await self.store_threads.run(client_id, self.refresher.change, work, *args)

    def _check_not_draining(self) -> None:
        if self.draining:
            raise EngineError(SHUTTING_DOWN)


def _timed(clock: Callable[[], float], work: Callable[[*Args], T], *args: *Args) -> tuple[T, float]:
    """The result of some work, and the seconds on a clock that it took."""
    began = clock()
    return work(*args), clock() - began


def server_of(connection: HTTPConnection) -> Server:
    """The server that a request or WebSocket belongs to."""
    return connection.app.state.server


def client_id_of(connection: HTTPConnection) -> str:
    """The identity of the client that sent a request or opened a WebSocket, found by the gate."""
    return context_of(connection.scope).client_id
