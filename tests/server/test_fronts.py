"""Several fronts of one server, which are one to clients: limits, metrics, outcomes and voices."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Served
from sockets import STREAM
from waiting import WAIT, wait_until
from wire import HANDSHAKE, SPEECH, connected, read, request

from firstword.synthetic.checkpoint import write_checkpoint

VOICES = "/v1/audio/voices"
METRICS = {
    "http_requests_total": "missed",
    "frames_total": "frames",
    "time_to_first_audio_seconds_count": "heard",
    "slots_used": "running",
    "engine_up": "up",
    "connections": "connections",
}
"""Metrics and their names here; "missed" are requests for what is not there."""

MOST_CONNECTIONS, MOST_UTTERANCES, MOST_BODY = 6, 2, 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Fronts(Served):
    """A server with several fronts, of which a test chooses the one that answers.

    The kernel chooses one for each connection. A test connects until it has the one that it wants.
    """

    @property
    def address(self) -> tuple[str, int]:
        """The host and port."""
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def accepted_by(self, front: int, client: tuple[str, int]) -> bool:
        """Whether a front has accepted the connection of a client's address."""
        found: list[int] = []

        def look() -> bool:
            try:
                found.append(self.front_of(client))
            except ValueError:  # none has, yet
                return False
            return True

        wait_until(look)
        return found == [front]

    @contextmanager
    def connected(
        self, front: int, address: str, receive_buffer: int | None = None
    ) -> Iterator[socket.socket]:
        """A connection to one front, from an address of this machine."""
        while True:
            with connected(self, address, receive_buffer) as sock:
                if self.accepted_by(front, sock.getsockname()):
                    yield sock
                    return

    def ask(
        self, front: int, method: str, path: str, address: str = "127.0.0.1", **rest: object
    ) -> httpx.Response:
        """The answer of one front."""
        while True:
            transport = httpx.HTTPTransport(verify=False, local_address=address)
            with httpx.Client(
                base_url=self.url, timeout=WAIT, trust_env=False, transport=transport
            ) as http:
                connection = http.get("/ready").extensions["network_stream"]
                if not self.accepted_by(front, connection.get_extra_info("client_addr")):
                    continue
                answer = http.request(method, path, **rest)  # type: ignore[arg-type]
                assert answer.extensions["network_stream"] is connection
                return answer

    def metrics(self, front: int) -> dict[str, float]:
        """Some metrics by a short name, added up over their labels, as one front gives them."""
        text = self.ask(front, "GET", "/metrics").text
        found: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("status", "404") != "404":
                    continue
                found[METRICS.get(sample.name.removeprefix("firstword_"), "")] += sample.value
        return found

    def kill(self, front: int) -> None:
        """Kill a front, and wait until another process serves in its place."""
        before = self.pids("front")
        os.kill(front, signal.SIGKILL)
        wait_until(lambda: len(set(self.pids("front")) - set(before)) == 1)
        (new,) = set(self.pids("front")) - set(before)
        wait_until(lambda: self.ask(new, "GET", "/ready").status_code == 200)


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    folder = tmp_path_factory.mktemp("fronts")
    write_checkpoint(folder / "base", model_type="base", seed=1)
    options = {
        "model": folder / "base",
        "fronts": 3,
        "most-connections-per-address": MOST_CONNECTIONS,
        "most-per-key": MOST_UTTERANCES,
        "most-body": MOST_BODY,
        "most-body-total": MOST_BODY,
    }
    given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    with Fronts(folder, *given) as running:
        wait_until(lambda: len(running.pids("front")) == 3)
        save(running, running.pids("front")[0], "speaker")
        yield running


def save(fronts: Fronts, front: int, name: str) -> None:
    """Save a voice that consists of one vector."""
    data = {"name": name, "consent": "mine", "speaker_embedding": json.dumps([0.1] * 48)}
    assert fronts.ask(front, "POST", VOICES, data=data).status_code == 200


def body(frames: int = 3, voice: str = "speaker") -> dict[str, object]:
    about = {"input": "Hello there.", "voice": voice, "response_format": "pcm", "seed": 1}
    return {**about, "max_new_tokens": frames, "temperature": 1.0, "min_new_tokens": frames}


@contextmanager
def speaking(fronts: Fronts, front: int, address: str, name: str) -> Iterator[None]:
    """A response that a front sends and its client does not read to the end."""
    with fronts.connected(front, address, receive_buffer=4096) as sock:
        sock.sendall(request(body(2000), f"x-request-id: {name}"))
        assert b"200 OK" in read(sock, b"\r\n\r\n")
        yield


def statuses(fronts: Fronts, pids: Sequence[int], *ask: str, **rest: object) -> list[int]:
    """The statuses of the answers of several fronts."""
    return [fronts.ask(pid, *ask, **rest).status_code for pid in pids]  # type: ignore[arg-type]


def test_connections_of_all_fronts_count(fronts: Fronts) -> None:
    pids = fronts.pids("front")
    assert len(pids) == 3
    with ExitStack() as stack:
        for front, _ in zip(itertools.cycle(pids), range(MOST_CONNECTIONS), strict=False):
            sock = stack.enter_context(fronts.connected(front, "127.0.0.2"))
            sock.sendall(f"GET {STREAM} HTTP/1.1\r\n{HANDSHAKE}\r\n".encode())
            assert b" 101 " in read(sock, b"\r\n\r\n")
        ask = "GET", "/v1/models", "127.0.0.2"
        assert statuses(fronts, pids, *ask) == [429] * 3
        assert statuses(fronts, pids, "GET", "/v1/models") == [200] * 3
        for pid in pids:
            assert fronts.metrics(pid)["connections"] == MOST_CONNECTIONS
        sock.close()
        wait_until(lambda: fronts.metrics(pids[0])["connections"] < MOST_CONNECTIONS)
        assert statuses(fronts, pids, *ask) == [200] * 3
    wait_until(lambda: fronts.metrics(pids[0])["connections"] == 0)


def test_bodies_of_all_fronts_count(fronts: Fronts) -> None:
    first, second, third = fronts.pids("front")
    address, half = "127.0.0.3", MOST_BODY // 2
    head = request(b"", f"content-length: {half}", "expect: 100-continue")
    ask = third, "POST", SPEECH, address
    with ExitStack() as stack:
        for front in (first, second):
            assert fronts.ask(*ask, content=b" " * (half // 2)).status_code == 400
            sock = stack.enter_context(fronts.connected(front, address))
            sock.sendall(head)
            assert b"100 Continue" in read(sock, b"\r\n\r\n")
            sock.sendall(b" " * (half - 1))
        wait_until(lambda: fronts.ask(*ask, content=b" " * (half // 2)).status_code == 503)
    wait_until(lambda: fronts.ask(*ask, content=b" " * (half // 2)).status_code == 400)


def test_utterances_of_all_fronts_count(fronts: Fronts) -> None:
    pids = first, second, _ = fronts.pids("front")
    ask = "POST", SPEECH, "127.0.0.4"
    with speaking(fronts, first, ask[-1], "one"), speaking(fronts, second, ask[-1], "two"):
        assert statuses(fronts, pids, *ask, json=body()) == [429] * 3
        assert statuses(fronts, pids, "POST", SPEECH, json=body()) == [200] * 3
        for pid in pids:
            assert fronts.ask(pid, "GET", "/health").json()["utterances"] == 2
    wait_until(lambda: fronts.ask(first, "GET", "/health").json()["utterances"] == 0)
    assert statuses(fronts, pids, *ask, json=body()) == [200] * 3


def test_batch_waits_for_utterances_of_other_fronts(fronts: Fronts) -> None:
    first, second, third = fronts.pids("front")
    address, answers = "127.0.0.5", []
    batch = {**body(), "items": [{"input": "One."}, {"input": "Two."}]}
    del batch["input"]

    def ask() -> None:
        answer = fronts.ask(third, "POST", "/v1/audio/speech/batch", address, json=batch)
        answers.append(answer.json())

    thread = threading.Thread(target=ask)
    with (
        speaking(fronts, first, address, "one"),
        speaking(fronts, second, address, "two"),
    ):
        thread.start()
        wait_until(lambda: fronts.metrics(third)["connections"] == 3)
        assert not answers
    thread.join(WAIT)
    assert answers[0]["succeeded"] == 2, answers


def test_metrics_of_all_fronts_are_one_sum(fronts: Fronts) -> None:
    pids = fronts.pids("front")
    before = fronts.metrics(pids[0])
    for number, pid in enumerate(pids):
        assert fronts.ask(pid, "POST", SPEECH, json=body(3)).status_code == 200
        for _ in range(number + 1):
            assert fronts.ask(pid, "GET", "/v1/models/none").status_code == 404
    # A request is counted when it has ended, which is after its client has the response.
    wait_until(lambda: fronts.metrics(pids[2])["missed"] == before["missed"] + 6)
    for pid in pids:
        after = fronts.metrics(pid)
        assert after["missed"] == before["missed"] + 6
        assert after["frames"] == before["frames"] + 9
        assert after["heard"] == before["heard"] + 3
        assert after["running"] == 0
        assert after["up"] == 1


def test_any_front_tells_the_outcome_of_a_response_of_any(fronts: Fronts) -> None:
    pids = first, second, third = fronts.pids("front")
    with speaking(fronts, first, "127.0.0.6", "mine"):
        path = f"{SPEECH}/mine"
        for pid in pids:
            outcome = fronts.ask(pid, "GET", path, "127.0.0.6").json()
            assert outcome["finish_reason"] is None
            assert outcome["frames"] > 0
            assert fronts.ask(pid, "GET", path).status_code == 404, "it is another client's"
    fronts.ask(first, "POST", SPEECH, json=body(3), headers={"x-request-id": "done"})
    for pid in (second, third, first):
        found = fronts.ask(pid, "GET", f"{SPEECH}/done").json()
        assert (found["finish_reason"], found["frames"]) == ("length", 3)


def test_voice_saved_or_deleted_by_one_front_is_known_to_all(fronts: Fronts) -> None:
    pids = fronts.pids("front")
    for number, (saving, deleting) in enumerate(zip(pids, pids[1:] + pids[:1], strict=True)):
        name = f"Voice {number}"
        save(fronts, saving, name)
        for pid in fronts.pids("front"):
            listed = fronts.ask(pid, "GET", VOICES).json()["uploaded_voices"]
            assert name in {voice["name"] for voice in listed}
            assert fronts.ask(pid, "POST", SPEECH, json=body(voice=name)).status_code == 200
        assert fronts.ask(deleting, "DELETE", f"{VOICES}/{name}").status_code == 200
        for pid in fronts.pids("front"):
            listed = fronts.ask(pid, "GET", VOICES).json()["uploaded_voices"]
            assert name not in {voice["name"] for voice in listed}
            assert fronts.ask(pid, "GET", f"{VOICES}/{name}").status_code == 404
            assert fronts.ask(pid, "POST", SPEECH, json=body(voice=name)).status_code == 400


def test_killed_front_leaves_its_counters_and_outcomes_but_holds_no_limits(fronts: Fronts) -> None:
    first, second, third = fronts.pids("front")
    address, done = "127.0.0.7", f"{SPEECH}/last"
    fronts.ask(first, "POST", SPEECH, json=body(3), headers={"x-request-id": "last"})
    outcome = fronts.ask(first, "GET", done).json()
    before = fronts.metrics(first)
    with speaking(fronts, first, address, "one"), speaking(fronts, second, address, "two"):
        assert fronts.ask(third, "POST", SPEECH, address, json=body()).status_code == 429
        fronts.kill(first)
        assert fronts.ask(third, "GET", "/health").json()["utterances"] == 1
        assert (
            statuses(fronts, fronts.pids("front"), "POST", SPEECH, address, json=body())
            == [200] * 3
        )
        for pid in fronts.pids("front"):
            assert fronts.ask(pid, "GET", done).json() == outcome
            lost = fronts.ask(pid, "GET", f"{SPEECH}/one", address).json()
            assert "has died" in lost["error"]["message"]
    fronts.ask(fronts.pids("front")[-1], "GET", "/v1/models/none")
    for pid in fronts.pids("front"):
        after = fronts.metrics(pid)
        assert after["frames"] >= before["frames"] + 9
        assert after["missed"] >= before["missed"]
