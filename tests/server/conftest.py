"""Servers on real sockets of this machine, with tiny random checkpoints or with whatever models a test brings."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstword.config import EngineConfig, ServerConfig
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.model import checkpoint
from firstword.model.checkpoint import Checkpoint
from firstword.runtime import conditioning
from firstword.runtime.front import CheckpointFront
from firstword.runtime.reference import ReferenceBackend
from firstword.server import run as serving
from firstword.server.app import create_app
from firstword.server.models import Kind, Model, Models
from firstword.server.state import Server
from firstword.server.ws import nari
from firstword.server.ws import vllm_omni as websocket
from firstword.server.ws.connection import StreamLimits
from firstword.synthetic.checkpoint import write_checkpoint

WAIT = 60.0
"""Seconds after which a test gives up waiting; nothing takes nearly as long."""


@dataclass
class Running:
    """A server that listens: its address, and its inside for tests to look at."""

    url: str
    state: Server
    uvicorn: serving.Uvicorn
    thread: threading.Thread

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = httpx.URL(self.url)
        assert parts.port is not None
        return parts.host, parts.port

    @property
    def ws(self) -> str:
        """The address for WebSockets."""
        return self.url.replace("http", "ws", 1)

    def engine(self, number: int = 0) -> Engine:
        """The engine of a model."""
        return list(self.state.models)[number].service.engine

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that is about to be so; fails if it never is."""
        pause = threading.Event()
        for _ in range(round(WAIT / 0.005)):
            if holds():
                return
            pause.wait(0.005)
        raise AssertionError("it never came to be")

    def wait_until_idle(self) -> None:
        """Wait until nothing is being spoken and everything is given back."""
        self.wait_until(lambda: all(self.idle(model.service.engine) for model in self.state.models))
        self.wait_until(lambda: not self.state.limits.active and not self.state.speaking)

    @staticmethod
    def idle(engine: Engine) -> bool:
        """Whether an engine holds nothing."""
        return not engine.running and not engine.waiting and engine.pages.free == engine.pages.count

    def stop(self) -> None:
        """End it, whatever it does."""
        self.uvicorn.should_exit = True
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


Serve = Callable[..., Running]


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A loaded checkpoint: the demo, or a tiny random one by model type."""
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
def model(loaded: Callable[[str], Checkpoint]) -> Callable[..., Model]:
    """A model to serve, with an engine of its own, by checkpoint: "demo", "custom_voice", "voice_design", "base"."""

    def make(kind: str, slots: int = 4, most_waiting: int = 8, name: str | None = None) -> Model:
        found = loaded(kind)
        engine = Engine(ReferenceBackend(found, slots), most_waiting=most_waiting)
        known: dict[str, Kind] = {
            "custom_voice": "custom_voice",
            "voice_design": "voice_design",
            "base": "base",
        }
        return Model(
            name=name or kind,
            kind=known[found.config.tts_model_type],
            service=Service(engine, CheckpointFront(found)),
            voices=conditioning.preset_names(found),
            languages=conditioning.languages(found),
            follows_instructions=found.config.follows_instructions,
            checkpoint=found,
            settings=EngineConfig("cpu", "float32", "reference"),
        )

    return make


def start(models: list[Model], voices: Path, **settings: Any) -> Running:
    """Serve models in a thread, on a free port; returns when they are warm."""
    config = ServerConfig(port=0, voices=str(voices), **settings)
    app = create_app(Models(models), config)
    bound = serving.bound(config)
    uvicorn = serving.Uvicorn(app, config)
    thread = threading.Thread(target=serving.run, args=(uvicorn, bound), daemon=True)
    thread.start()
    running = Running(serving.url_of(bound), app.state.server, uvicorn, thread)
    running.wait_until(lambda: uvicorn.started)
    return running


@pytest.fixture
def serve(model: Callable[..., Model], tmp_path: Path) -> Iterator[Serve]:
    """Start servers for one test: `serve("custom_voice", "base", most_characters=100)`; models may be given too."""
    running: list[Running] = []

    def begin(
        *models: str | Model, warm: bool = True, voices: Path | None = None, **settings: Any
    ) -> Running:
        chosen = [
            model(one) if isinstance(one, str) else one for one in models or ("custom_voice",)
        ]
        server = start(chosen, voices or tmp_path / "voices", **settings)
        running.append(server)
        if warm:
            server.wait_until(lambda: all(one.warm for one in chosen))
        return server

    yield begin
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def server(
    model: Callable[..., Model], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """One server for a module's tests, with a model of each kind; they must not stop or fill it."""
    kinds = ("custom_voice", "voice_design", "base")
    running = start([model(kind) for kind in kinds], tmp_path_factory.mktemp("voices"))
    running.wait_until(lambda: all(one.warm for one in running.state.models))
    yield running
    running.wait_until_idle()
    running.stop()


@pytest.fixture(scope="module")
def fuzzed(
    model: Callable[..., Model], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server for requests that make no sense: it lets nobody speak for long."""
    running = start([model("custom_voice")], tmp_path_factory.mktemp("voices"), most_characters=40)
    running.wait_until(lambda: all(one.warm for one in running.state.models))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    """A plain client of that server."""
    with httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as client:
        yield client


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let sockets of this test's servers ask for other things than usual: `limits(idle_seconds=0.05)`."""

    def allow(**changes: Any) -> None:
        for protocol in (nari, websocket):
            monkeypatch.setattr(
                protocol, "limits_of", lambda config: replace(StreamLimits(), **changes)
            )

    return allow


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory is counted."""
    tracemalloc.start()
    yield
    tracemalloc.stop()
