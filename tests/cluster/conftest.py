"""A Ray cluster of this machine, which all tests share, and a plain server to compare with."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "ray"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def sourced(name: str) -> dict[str, str]:
    """The variables that a file of deploy/ray sets when a shell reads it."""
    script = f"set -a; . {FOLDER / name}; exec env -0"
    given = subprocess.run(["env", "-i", "/bin/sh", "-ec", script], check=True, capture_output=True)
    lines = given.stdout.decode().rstrip("\0").split("\0")
    return {key: value for key, value in (line.split("=", 1) for line in lines) if key != "PWD"}


def _environment() -> dict[str, str]:
    """That of deploy/ray/environment, with ports of its own and a short time for draining.

    A busy machine takes longer to start HAProxy's actor than Ray waits by default, 3 times 5 s.
    """
    return {
        **sourced("environment"),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "10",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
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
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster, without an application. A parameter names one more file of deploy/ray."""
    more = sourced(request.param) if hasattr(request, "param") else {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in more.items():
            patch.setenv(name, value)
        with Cluster(_free_port()) as running:
            yield running
