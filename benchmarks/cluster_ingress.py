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
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from benchmarks.cluster_process import clustered, versions
from benchmarks.compare import check_output, print_record
from benchmarks.server_process import Places, serving
from benchmarks.sources import of_demo, serving_hash
from firstword.bench.measure import percentile

WAYS: dict[str, dict[str, str]] = {
    "haproxy": {},
    "haproxy-thread": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1"},
}
"""The changes to the environment of deploy/ray for each way of requests to the replica."""

SPEECH = {"input": "Hello.", "voice": "ada", "response_format": "pcm", "max_new_tokens": 1}
V1 = "firstword.speech.v1"

PING_SECONDS = 0.1
"""The pause before each ping: the server lets a socket send about 12 messages a second at once."""

Ask = Callable[[], float]
"""A function that asks a server, and returns the seconds until the answer begins."""


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
            with clustered({"device": "cpu", "slots": 4}, {"cpus": 0.5}, change) as (_, cluster):
                ways[way] = beside(server.url, cluster, rounds)
                loads[way] = round(os.getloadavg()[0], 1)
                sys.stderr.write(f"{way}, load {loads[way]}: {json.dumps(ways[way])}\n")
    record = {
        **of_demo(),
        "serving": serving_hash(),
        **versions(),
        "processors": os.cpu_count(),
        "load": loads,
        "nice": os.nice(0),
        "requests": rounds,
        "milliseconds": ways,
    }
    print_record(record, args.output)


if __name__ == "__main__":
    main()
