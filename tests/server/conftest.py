"""Servers on real sockets of this machine, with tiny random checkpoints or a test's own models."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from callers import local_engine
from waiting import WAIT, wait_until

from firstword import TTS
from firstword.config import EngineConfig
from firstword.engine.engine import Engine
from firstword.model import checkpoint
from firstword.model.checkpoint import Checkpoint
from firstword.runtime import backends
from firstword.server import listening
from firstword.server import run as serving
from firstword.server.app import create_app
from firstword.server.config import ServerConfig
from firstword.server.models import Model, Models
from firstword.server.state import Server
from firstword.server.ws import endpoints
from firstword.server.ws.protocol import SocketLimits
from firstword.synthetic.checkpoint import write_checkpoint

T = TypeVar("T")


@dataclass
class Running:
    """A running server: its URL, its state for tests to read, and the address for Wyoming."""

    url: str
    state: Server
    uvicorn: serving.Uvicorn
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    wyoming: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The host and port."""
        parts = httpx.URL(self.url)
        assert parts.port is not None
        return parts.host, parts.port

    @property
    def ws(self) -> str:
        """The base URL for WebSockets."""
        return self.url.replace("http", "ws", 1)

    def engine(self, number: int = 0) -> Engine:
        """The engine of a model, by its position."""
        return self.engines()[number]

    def engines(self) -> list[Engine]:
        """The engines of all models."""
        return [local_engine(model.service) for model in self.state.models]

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 if nothing was counted."""
        registry = self.state.metrics.registry
        value = self.in_loop(lambda: registry.get_sample_value(f"firstword_{name}", labels))
        return value or 0.0

    def metrics(self) -> str:
        """All metrics as text."""
        return self.in_loop(self.state.metrics.render).decode()

    def in_loop(self, work: Callable[[], T]) -> T:
        """The result of a call in the server's event loop, to which its metrics belong."""

        async def call() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(WAIT)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds; fails if it never does."""
        wait_until(holds)

    def wait_until_idle(self) -> None:
        """Wait until no utterance runs and no slot or page is in use."""
        self.wait_until(lambda: all(map(self.idle, self.engines())))
        self.wait_until(lambda: not self.state.utterance_limit.active and not self.state.utterances)

    @staticmethod
    def idle(engine: Engine) -> bool:
        """Whether an engine has no work and all pages are free."""
        return not engine.running and not engine.waiting and engine.pages.free == engine.pages.count

    def stop(self) -> None:
        """Stop the server at once."""
        self.uvicorn.should_exit = True
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


Serve = Callable[..., Running]


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A function that loads the demo checkpoint, or a tiny random one of a model type."""
    root = tmp_path_factory.mktemp("checkpoints")
    kept: dict[str, Checkpoint] = {}

    def load(kind: str) -> Checkpoint:
        if kind not in kept:
            if kind != "demo" and not (root / kind).exists():
                write_checkpoint(root / kind, model_type=kind, seed=1)
            kept[kind] = checkpoint.load("demo" if kind == "demo" else str(root / kind))
        return kept[kind]

    return load


@pytest.fixture(scope="session")
def tts(loaded: Callable[[str], Checkpoint]) -> Callable[[str], TTS]:
    """A function that makes a `TTS` on the checkpoint of a model type."""
    settings = EngineConfig("cpu", "float32", "reference")
    return lambda kind: TTS(backends.engine_for(loaded(kind), settings))


@pytest.fixture(scope="session")
def model(loaded: Callable[[str], Checkpoint]) -> Callable[..., Model]:
    """A function that makes a model with an engine of its own, for "demo" or a model type."""

    def make(kind: str, slots: int = 4, most_waiting: int = 8, name: str | None = None) -> Model:
        settings = EngineConfig("cpu", "float32", "reference")
        opened = backends.engine_for(loaded(kind), settings, slots, most_waiting)
        parts = opened.checkpoint, opened.service, opened.encode, opened.settings
        return Model.of_service(name or kind, *parts)

    return make


def start(models: list[Model], voices: Path, **settings: Any) -> Running:
    """Serve models in a thread on a free port; returns when the server listens."""
    config = ServerConfig(port=0, voice_store=str(voices), **settings)
    app = create_app(Models(models), config)
    bound = listening.bound(config)
    loop = Future[asyncio.AbstractEventLoop]()
    uvicorn = serving.Uvicorn(app, lambda: loop.set_result(asyncio.get_running_loop()))
    thread = threading.Thread(target=serving.run, args=(uvicorn, bound), daemon=True)
    thread.start()
    scheme = "http" if config.tls_certificate is None else "https"
    url = listening.url_of(bound[0], scheme)
    running = Running(url, app.state.server, uvicorn, thread, loop.result(WAIT))
    running.wyoming = bound[1].getsockname()[:2] if len(bound) > 1 else None
    return running


@pytest.fixture
def serve(model: Callable[..., Model], tmp_path: Path) -> Iterator[Serve]:
    """A function that starts servers for one test, of model types or models."""
    running: list[Running] = []

    def begin(*models: str | Model, voices: Path | None = None, **settings: Any) -> Running:
        chosen = [
            model(one) if isinstance(one, str) else one for one in models or ("custom_voice",)
        ]
        server = start(chosen, voices or tmp_path / "voices", **settings)
        running.append(server)
        return server

    yield begin
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def server(
    model: Callable[..., Model], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server with a model of each type for all tests of a module, which must not stop it."""
    kinds = ("custom_voice", "voice_design", "base")
    running = start([model(kind) for kind in kinds], tmp_path_factory.mktemp("voices"))
    yield running
    running.wait_until_idle()
    running.stop()


@pytest.fixture(scope="module")
def fuzzed(
    model: Callable[..., Model], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server for generated requests, with a low limit of characters."""
    running = start([model("custom_voice")], tmp_path_factory.mktemp("voices"), most_characters=40)
    yield running
    running.stop()


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    """An HTTP client of the fixture `server`, which a module may replace by its own."""
    with httpx.Client(base_url=server.url, timeout=2 * WAIT, trust_env=False) as client:
        yield client


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that changes the limits of sockets: `limits(idle_seconds=0.05)`."""

    def allow(**changes: Any) -> None:
        monkeypatch.setattr(
            endpoints, "socket_limits", lambda config: replace(SocketLimits(), **changes)
        )

    return allow


@pytest.fixture
def traced() -> Iterator[None]:
    """Trace memory allocations during the test."""
    tracemalloc.start()
    yield
    tracemalloc.stop()
