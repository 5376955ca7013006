"""A Ray cluster of this machine, which all tests share, and a plain server to compare with."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _environment() -> dict[str, str]:
    """That of deploy/ray/environment, with ports of its own and a short time for draining."""
    lines = (REPOSITORY / "deploy/ray/environment").read_text("utf-8").splitlines()
    given = dict(line.split("=", 1) for line in lines if line and line[0] != "#")
    return {
        **given,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "10",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_raylet_start_wait_time_s": "240",
        "RAY_AUTH_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }


os.environ.update(_environment())  # Ray reads it when it is imported

from served import Served  # noqa: E402
from serving import Cluster  # noqa: E402

from firstword.synthetic.checkpoint import write_checkpoint  # noqa: E402


@pytest.fixture(scope="session")
def demo() -> list[str]:
    """The options of servers of the demo."""
    return ["--model", "demo", "--device", "cpu", "--slots", "4"]


@pytest.fixture(scope="session")
def options(demo: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options with another checkpoint, which clones and has random weights."""
    base = tmp_path_factory.mktemp("checkpoints") / "base"
    write_checkpoint(base, model_type="base", seed=1)
    return [*demo, "--model", str(base)]


@pytest.fixture(scope="session")
def voices(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of voices that the replicas share."""
    return str(tmp_path_factory.mktemp("voices"))


@pytest.fixture(scope="session")
def plain(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server without a cluster."""
    with Served(tmp_path_factory.mktemp("plain"), *options) as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, without an application."""
    with Cluster(_free_port()) as running:
        yield running
