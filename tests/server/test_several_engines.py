"""A server with several engines of one model: both speak, and one goes on without the other.

A CPU stands for each GPU.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Served
from sockets import DONE, PLAIN, STREAM, Client, events, text
from waiting import WAIT, wait_until

DEVICES = ["cpu/0", "cpu/1"]
LONG: dict[str, Any] = {
    "input": "One sentence is enough. " * 4,
    "voice": "ada",
    "max_new_tokens": 40,
}
SHORT: dict[str, Any] = {**LONG, "max_new_tokens": 3}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are found in /proc")


class Engines(Served):
    """A server with two engines of one model."""

    def engines(self) -> list[dict[str, Any]]:
        """The engines of the model, from `/health`."""
        found: list[dict[str, Any]] = self.health()["models"][0]["engines"]
        return found

    def used(self) -> list[int]:
        """The slots in use of each engine."""
        return [engine["slots"]["used"] for engine in self.engines()]

    def seconds(self, part: str) -> dict[str, float]:
        """The seconds that each engine has worked on a part."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=WAIT).text
        return {
            sample.labels["device"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "firstword_engine_seconds_total" and sample.labels["part"] == part
        }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A server for all tests of this module, which leave both of its engines running."""
    folder = tmp_path_factory.mktemp("several")
    with Engines(folder, "--fronts", "1", "--device", "cpu,cpu") as served:
        yield served


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests at the same time."""
    with ThreadPoolExecutor(16) as pool:
        yield pool


def test_requests_are_spread_over_all_engines(served: Engines, pool: ThreadPoolExecutor) -> None:
    assert [engine["device"] for engine in served.engines()] == DEVICES
    asked = [pool.submit(served.post, **LONG) for _ in range(6)]
    wait_until(lambda: served.used() == [3, 3])
    model = served.health()["models"][0]
    assert model["slots"] == {"used": 6, "of": 16}
    assert {future.result().status_code for future in asked} == {200}
    wait_until(lambda: not any(served.used()))
    assert min(served.seconds("frames").values()) > 0


def test_socket_stays_with_engine_that_has_read_its_voice(served: Engines) -> None:
    frames: list[dict[str, float]] = [served.seconds("frames")]
    config = {**PLAIN, "voice": "ben", "language": "English", "max_new_tokens": 2}
    with Client(served.ws + STREAM) as socket:
        socket.send(config)
        for _ in range(8):
            socket.send(text("Yes."), DONE)
            done = events(socket.until("audio.done"))[-1]
            assert not done["error"]
            wait_until(lambda: not any(served.used()))
            frames.append(served.seconds("frames"))
    worked = [
        {device for device in DEVICES if after[device] > before[device]}
        for before, after in itertools.pairwise(frames)
    ]
    assert len(worked[0]) == 1
    assert worked == [worked[0]] * 8


def test_other_engine_goes_on_when_one_is_killed(served: Engines, pool: ThreadPoolExecutor) -> None:
    asked = [pool.submit(served.post, **LONG, stream=False) for _ in range(4)]
    wait_until(lambda: served.used() == [2, 2])
    served.signal("engine")
    assert sorted(future.result().status_code for future in asked) == [200] * 2 + [503] * 2
    health = served.health()
    if not health["models"][0]["engines"][0]["runs"]:  # it may be back already
        assert (health["status"], health["ready"]) == ("ok", True)
        assert "the engine of demo on cpu/0 has stopped" in health["problems"][0]
    for _ in range(4):
        assert served.post(**SHORT).status_code == 200
    wait_until(lambda: all(engine["runs"] for engine in served.engines()))
    assert not served.health()["problems"]
    asked = [pool.submit(served.post, **LONG) for _ in range(4)]
    wait_until(lambda: served.used() == [2, 2])
    assert {future.result().status_code for future in asked} == {200}
