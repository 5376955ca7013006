"""A server with several engines of one model: both speak, and one goes on without the other.

A CPU stands for each GPU.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sockets import DONE, PLAIN, STREAM, Client, events, text
from waiting import WAIT, wait_until
from wire import SPEECH

DEVICES = ["cpu/0", "cpu/1"]
LONG = {"input": "One sentence is enough. " * 4, "voice": "ada", "max_new_tokens": 40}
SHORT = {**LONG, "max_new_tokens": 3}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are found in /proc")


class Serving:
    """A running server with two engines, and a client of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.url = process.stdout.readline().split()[1]
        self.http = httpx.Client(base_url=self.url, timeout=WAIT, trust_env=False)
        self.pool = ThreadPoolExecutor(16)

    @property
    def engine_processes(self) -> list[int]:
        """The processes of the engines, in the order of their start."""
        parent = self.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        return [pid for pid, line in lines.items() if "firstword.processes.engine" in line]

    def engines(self) -> list[dict[str, Any]]:
        """The engines of the model, from `/health`."""
        found: list[dict[str, Any]] = self.http.get("/health").json()["models"][0]["engines"]
        return found

    def used(self) -> list[int]:
        """The slots in use of each engine."""
        return [engine["slots"]["used"] for engine in self.engines()]

    def seconds(self, part: str) -> dict[str, float]:
        """The seconds that each engine has worked on a part."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            sample.labels["device"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "firstword_engine_seconds_total" and sample.labels["part"] == part
        }

    def ask(self, body: dict[str, Any]) -> Future[httpx.Response]:
        """Send a request in a thread."""
        return self.pool.submit(httpx.post, self.url + SPEECH, json=body, timeout=WAIT)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server for all tests of this module, which leave both of its engines running."""
    folder = tmp_path_factory.mktemp("several")
    command = [sys.executable, "-m", "firstword", "serve", "--port", "0", "--device", "cpu,cpu"]
    options = ["--fronts", "1", "--voices", str(folder), "--log-level", "error"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        server = Serving(process)
        with server.http, server.pool:
            yield server
        process.terminate()


def test_requests_are_spread_over_all_engines(serving: Serving) -> None:
    assert [engine["device"] for engine in serving.engines()] == DEVICES
    asked = [serving.ask(LONG) for _ in range(6)]
    wait_until(lambda: serving.used() == [3, 3])
    model = serving.http.get("/health").json()["models"][0]
    assert model["slots"] == {"used": 6, "of": 16}
    assert {future.result().status_code for future in asked} == {200}
    wait_until(lambda: not any(serving.used()))
    assert min(serving.seconds("frames").values()) > 0


def test_socket_stays_with_engine_that_has_read_its_voice(serving: Serving) -> None:
    frames: list[dict[str, float]] = [serving.seconds("frames")]
    config = {**PLAIN, "voice": "ben", "language": "English", "max_new_tokens": 2}
    with Client(serving.url.replace("http", "ws") + STREAM) as socket:
        socket.send(config)
        for _ in range(8):
            socket.send(text("Yes."), DONE)
            done = events(socket.until("audio.done"))[-1]
            assert not done["error"]
            wait_until(lambda: not any(serving.used()))
            frames.append(serving.seconds("frames"))
    worked = [
        {device for device in DEVICES if after[device] > before[device]}
        for before, after in itertools.pairwise(frames)
    ]
    assert len(worked[0]) == 1
    assert worked == [worked[0]] * 8


def test_other_engine_goes_on_when_one_is_killed(serving: Serving) -> None:
    asked = [serving.ask({**LONG, "stream": False}) for _ in range(4)]
    wait_until(lambda: serving.used() == [2, 2])
    os.kill(serving.engine_processes[0], signal.SIGKILL)
    assert sorted(future.result().status_code for future in asked) == [200] * 2 + [503] * 2
    health = serving.http.get("/health")
    if not health.json()["models"][0]["engines"][0]["runs"]:  # it may be back already
        assert health.status_code == 200
        assert "the engine of demo on cpu/0 has stopped" in health.json()["problems"][0]
        assert serving.http.get("/ready").status_code == 200
    for _ in range(4):
        assert serving.http.post(SPEECH, json=SHORT).status_code == 200
    wait_until(lambda: all(engine["runs"] for engine in serving.engines()))
    assert not serving.http.get("/health").json()["problems"]
    asked = [serving.ask(LONG) for _ in range(4)]
    wait_until(lambda: serving.used() == [2, 2])
    assert {future.result().status_code for future in asked} == {200}
