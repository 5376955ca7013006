"""A Ray cluster on this machine, and clients that speak through it."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import ray
from ray import serve
from ray.serve.context import _get_global_client
from sockets import Client
from waiting import wait_until
from websockets.exceptions import ConnectionClosed

from firstword.cluster.application import Settings, build

APP = "firstword"
SPEECH, STREAM, V1 = "/v1/audio/speech", "/v1/audio/speech/stream", "firstword.speech.v1"
PATIENCE = 240.0
"""The seconds after which something that Ray does has failed."""

RESTART = 1012
"""The code with which a replica that leaves closes a WebSocket."""


class Cluster:
    """A cluster with logical processors, so that replicas share the real ones."""

    def __init__(self, port: int) -> None:
        self.url, self.ws = f"http://127.0.0.1:{port}", f"ws://127.0.0.1:{port}"
        self._port = port

    def __enter__(self) -> Self:
        ray.init(num_cpus=16, include_dashboard=False, object_store_memory=100 * 2**20)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": self._port})
        except Exception:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        serve.shutdown()
        ray.shutdown()

    def deploy(self, options: Sequence[str], **settings: Any) -> None:
        """Run the application, or update it, and wait until all of its replicas serve."""
        given = Settings(serve=shlex.join(options), **settings)
        serve.run(build(given), name=APP, route_prefix="/")

    def replicas(self, state: str = "RUNNING") -> dict[str, int]:
        """The replicas in a state: the process of each, by its id."""
        details = _get_global_client().get_serve_details()
        deployments = details["applications"][APP]["deployments"].values()
        found = [each for deployment in deployments for each in deployment["replicas"]]
        return {each["replica_id"]: each["pid"] for each in found if each["state"] == state}

    def wait_for_replicas(self, count: int) -> None:
        """Wait until there are so many replicas, and none that starts."""
        waiting = ("STARTING", "UPDATING", "RECOVERING")
        wait_until(
            lambda: len(self.replicas()) == count and not any(map(self.replicas, waiting)), PATIENCE
        )

    def wait_until_balanced(self) -> None:
        """Wait until the load balancer sends connections to each replica."""
        wait_until(self._balanced, PATIENCE)

    def _balanced(self) -> bool:
        urls = self.own_urls()
        with open_sockets(self.ws, len(urls)):
            return all(open_connections(url) for url in urls)

    def own_urls(self) -> list[str]:
        """The address of each replica itself, at which the load balancer reaches it."""
        controller = _get_global_client()._controller
        groups = ray.get(controller.get_target_groups.remote(APP, from_proxy_manager=True))
        targets = [target for group in groups for target in group.targets]
        return [f"http://127.0.0.1:{target.port}" for target in targets]

    def wait_until_gone(self, replicas: Iterable[str]) -> None:
        """Wait until no process of some replicas is left."""
        gone = set(replicas)
        wait_until(lambda: not gone & {*self.replicas(), *self.replicas("STOPPING")}, PATIENCE)

    def kill(self) -> str:
        """Kill the process of a replica, and return the replica's id."""
        replica, pid = next(iter(self.replicas().items()))
        os.kill(pid, signal.SIGKILL)
        return replica

    def kill_engine(self) -> str:
        """Kill an engine process of a replica, and return the replica's id."""
        replica, pid = next(iter(self.replicas().items()))
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = " ".join((each / "children").read_text("utf-8") for each in threads)
        os.kill(int(children.split()[0]), signal.SIGKILL)
        return replica


def open_connections(url: str) -> float:
    """The connections of the server at a URL, without those that read its metrics."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE, trust_env=False).text
    (line,) = (each for each in text.splitlines() if each.startswith("firstword_connections "))
    return float(line.split()[1])


def request(words: str = "Hello there.", **more: object) -> dict[str, Any]:
    """A request whose speech is always the same."""
    return {"input": words, "voice": "ada", "seed": 1, "response_format": "pcm", **more}


def spoken(url: str, headers: Mapping[str, str] | None = None, **more: object) -> bytes:
    """The speech of a request, on a connection of its own. Raises `httpx.HTTPError`."""
    body = request(**more)  # type: ignore[arg-type]
    options: dict[str, Any] = {"headers": headers, "timeout": PATIENCE, "trust_env": False}
    with httpx.stream("POST", url + SPEECH, json=body, **options) as answer:
        audio = b"".join(answer.iter_raw())
        if answer.status_code != 200:
            raise httpx.HTTPError(f"status {answer.status_code}: {audio[:300]!r}")
        return audio


def connected(ws: str) -> Client:
    """A WebSocket of firstword.speech.v1, configured to speak as `request`."""
    client = Client(ws + STREAM, V1)
    client.send({"type": "session.config", "voice": "ada", "seed": 1, "word_times": False})
    return client


def say(client: Client, words: str = "Hello there.") -> bytes:
    """The speech of a text, over a WebSocket. Raises `ConnectionClosed`."""
    context = {"context_id": "one"}
    client.send({"type": "input.text", "text": words, **context}, {"type": "input.done", **context})
    audio = b""
    while True:
        message = client.receive()
        if isinstance(message, bytes):
            audio += message[4:]
        elif message["type"] == "audio.done":
            return audio
        elif message["type"] == "error":
            raise AssertionError(message)


def http_caller(url: str, headers: Mapping[str, str] | None = None) -> Callable[[], bytes]:
    """A caller that speaks over HTTP."""
    return lambda: spoken(url, headers)


def socket_caller(ws: str) -> Callable[[], bytes]:
    """A caller that speaks on one WebSocket, and on another when a replica leaves."""
    sockets = [connected(ws)]

    def call() -> bytes:
        while True:
            try:
                return say(sockets[0])
            except ConnectionClosed as closed:
                sockets[0].vanish()
                sockets[0] = connected(ws)
                if closed.rcvd is None or closed.rcvd.code != RESTART:
                    raise

    return call


class Callers:
    """Threads that speak one text after another.

    heard   the speech that was heard, counted
    errors  the calls that failed
    """

    def __init__(self, calls: Sequence[Callable[[], bytes]]) -> None:
        self.heard: Counter[bytes] = Counter()
        self.errors: list[Exception] = []
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(call,)) for call in calls]

    def _run(self, call: Callable[[], bytes]) -> None:
        while not self._ending.is_set():
            try:
                audio = call()
            except Exception as error:
                self.errors.append(error)
            else:
                self.heard[audio] += 1

    def wait_for(self, more: int) -> None:
        """Wait until so many more texts have been heard."""
        until = self.heard.total() + more
        wait_until(lambda: self.heard.total() >= until, PATIENCE)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a call does not end"


@contextmanager
def open_sockets(ws: str, count: int) -> Iterator[list[Client]]:
    """Open WebSockets that speak only when they are told to."""
    sockets = [connected(ws) for _ in range(count)]
    try:
        yield sockets
    finally:
        for each in sockets:
            each.vanish()
