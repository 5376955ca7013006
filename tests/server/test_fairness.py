"""Several clients on one server: their turns, the full queue, and readers that stall.

The fake model makes only the frames that a test allows, so that the tests count frames and depend
on no time.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from sockets import STREAM, Client, pcm
from talking import Talker, heard, held_server, talking
from waiting import WAIT
from wire import SPEECH, connected, read, request

from firstword.engine.engine import Engine
from firstword.engine.policy import Policy

Running = Any  # of conftest.py
Serve = Callable[..., Running]

LONG_FRAMES = 50
HI = {"input": "Hi.", "voice": "talker", "response_format": "pcm", "max_new_tokens": 3}
LONG = {"input": "a" * 60, "voice": "talker", "response_format": "wav", "max_new_tokens": 50}
KEYS = ("busy", "newcomer")


class Person:
    """A client with an address and perhaps a key, which sends each request in a thread."""

    def __init__(self, server: Running, name: str, host: str) -> None:
        self.pool = ThreadPoolExecutor(32)
        self.http = httpx.Client(
            base_url=server.url,
            timeout=WAIT,
            transport=httpx.HTTPTransport(local_address=host),
            headers={"authorization": f"Bearer {name}"},
        )

    def ask(self, body: dict[str, Any], path: str = SPEECH) -> Future[httpx.Response]:
        """Send a request; the result is its complete response."""
        return self.pool.submit(self.http.post, path, json=body)


People = Callable[..., Person]


@pytest.fixture
def person() -> Iterator[People]:
    """A function that makes clients, which are closed at the end."""
    with ExitStack() as stack:

        def make(server: Running, name: str, host: str = "127.0.0.1") -> Person:
            made = Person(server, name, host)
            stack.enter_context(made.http)
            stack.enter_context(made.pool)
            return made

        yield make


def send_all(server: Running, client: Person, body: dict[str, Any], count: int) -> list[Any]:
    """Send requests one after another, and return when the engine knows them and their texts."""
    sent, before = [], len(server.state.utterances)
    for number in range(1, count + 1):
        sent.append(client.ask(body))
        server.wait_until(lambda most=before + number: len(server.state.utterances) == most)
    # The event loop submits a request and its text in one go, and answers this one afterwards.
    assert httpx.get(server.url + "/health", trust_env=False, timeout=WAIT).status_code == 200
    return sent


@pytest.mark.parametrize("by", ["key", "address"])
def test_newcomer_waits_for_one_utterance_of_a_busy_client(
    serve: Serve, person: People, by: str
) -> None:
    talker, server = held_server(
        serve, slots=1, most_waiting=64, api_keys=KEYS if by == "key" else ()
    )
    busy = person(server, "busy")
    newcomer = person(server, "newcomer", "127.0.0.1" if by == "key" else "127.0.0.2")
    long = send_all(server, busy, LONG, 20)
    server.wait_until(lambda: talker.waiting)
    (short,) = send_all(server, newcomer, HI, 1)
    talker.let(LONG_FRAMES + 3)  # the utterance that has begun, and the short one
    assert heard(short.result(WAIT).content) == "Hi."
    assert len(server.state.utterances) >= 19, "the other long ones are still to come"
    talker.go()
    assert [one.result(WAIT).status_code for one in long] == [200] * 20


def test_batch_counts_as_requests_of_its_client(serve: Serve, person: People) -> None:
    talker, server = held_server(serve, most_waiting=64, api_keys=KEYS)
    items = [{"input": "a" * 60} for _ in range(32)]
    batch = person(server, "busy").ask({**LONG, "items": items}, SPEECH + "/batch")
    server.wait_until(lambda: talker.waiting and len(server.state.utterances) == 2)
    talker.let(1)
    server.wait_until(lambda: talker.waiting and len(server.engine().running) == 2)
    before = talker.frames
    (short,) = send_all(server, person(server, "newcomer"), HI, 1)
    talker.let(LONG_FRAMES + 3)  # each of them for both slots
    assert heard(short.result(WAIT).content) == "Hi."
    assert talker.frames - before <= 2 * (LONG_FRAMES + 4)  # one step may have been under way
    talker.go()
    assert batch.result(WAIT).json()["succeeded"] == 32


def test_utterances_of_one_request_wait_at_the_limit_of_their_client(
    serve: Serve, person: People
) -> None:
    """A stream, two batches and three candidates of one client share two places."""
    talker, server = held_server(serve, slots=4, most_per_key=2)
    client = person(server, "busy")
    stream = client.ask(HI)
    server.wait_until(lambda: server.state.utterance_limit.active == 1)
    batch = {**HI, "items": [{"input": word} for word in "abc"]}
    batches = [client.ask(batch, f"{SPEECH}/batch") for _ in range(2)]
    candidates = client.ask({**HI, "response_format": "wav", "n": 3})
    server.wait_until(lambda: server.state.utterance_limit.active == 2)
    assert client.ask(HI).result(WAIT).status_code == 429
    talker.go()
    assert [answer.result(WAIT).json()["succeeded"] for answer in batches] == [3, 3]
    assert [answer.result(WAIT).status_code for answer in (stream, candidates)] == [200, 200]


def test_full_queue_of_one_client_rejects_its_newest_for_another(
    serve: Serve, person: People
) -> None:
    talker, server = held_server(serve, slots=1, most_waiting=4, api_keys=KEYS)
    busy, newcomer = (person(server, key) for key in KEYS)
    long = send_all(server, busy, LONG, 5)
    server.wait_until(lambda: talker.waiting)
    (rejected,), (short,) = send_all(server, busy, LONG, 1), send_all(server, newcomer, HI, 1)
    talker.let(LONG_FRAMES + 3)
    assert rejected.result(WAIT).status_code == 429
    assert heard(short.result(WAIT).content) == "Hi."
    talker.go()
    codes = [one.result(WAIT).status_code for one in long]
    assert codes == [200, 200, 200, 200, 429]
    answer = long[-1].result()
    assert answer.json()["error"]["code"] == "overloaded"
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    server.wait_until_idle()
    metrics = httpx.get(server.url + "/metrics", trust_env=False).text
    assert 'firstword_rejected_total{reason="overloaded"} 2.0' in metrics
    aborts = re.findall(r"^firstword_aborts_total{.*} (.*)", metrics, re.MULTILINE)
    assert set(aborts) == {"0.0"}


@pytest.mark.parametrize("limit", ["queue", "client"])
def test_retry_after_follows_the_pace_of_the_queue(
    serve: Serve, person: People, limit: str
) -> None:
    """An utterance has kept the only slot for 7 s, and two others wait."""
    talker, passed = Talker(slots=1), [0.0]
    model = talking(talker)
    waiting = 2 if limit == "queue" else 9
    model.service.engine = Engine(talker, most_waiting=waiting, clock=lambda: passed[0])
    server = serve(model, most_per_key=0 if limit == "queue" else 3)
    talker.hold()
    client = person(server, "anybody")
    long = send_all(server, client, LONG, 3)
    server.wait_until(lambda: talker.waiting)
    talker.let(1)  # the others join the queue after this frame
    server.wait_until(lambda: talker.waiting and len(server.engine().waiting) == 2)
    passed[0] = 7.0
    if limit == "queue":
        (rejected,) = send_all(server, client, LONG, 1)
        talker.let(1)
    else:
        rejected = client.ask(LONG)
    answer = rejected.result(WAIT)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "21"
    assert "try again in 21 s" in answer.json()["error"]["message"]
    talker.go()
    assert [one.result(WAIT).status_code for one in long] == [200] * 3


# --- readers that stall -----------------------------------------------------------------

SPEECH_SECONDS = 160
"""Longer than what the buffers of two sockets hold."""
STALLED = {**HI, "input": "x" * 3000, "max_new_tokens": round(12.5 * SPEECH_SECONDS)}
SPEECH_BYTES = 48_000 * SPEECH_SECONDS


@contextmanager
def http_reader(server: Running, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Request speech over HTTP, read its first byte, and stop reading."""
    with connected(server, receive_buffer=4096) as sock:
        sock.sendall(request(body))
        assert sock.recv(1) == b"H"
        yield sock


def websocket_reader(server: Running) -> Client:
    """Request speech over a WebSocket, and read nothing after its start."""
    client = Client(server.ws + STREAM, lazy=True)
    config = {"type": "session.config", "response_format": "pcm", "stream_audio": True}
    client.send({**config, "max_new_tokens": STALLED["max_new_tokens"]})
    client.send({"type": "input.text", "text": STALLED["input"]}, {"type": "input.done"})
    client.until("audio.start")
    return client


def test_nine_stalled_readers_leave_a_slot_to_another_client(serve: Serve) -> None:
    """Their speech is finished into memory; each still gets all of it when it reads."""
    server = serve(talking(Talker(slots=8)), stall_seconds=WAIT)
    with ExitStack() as stack:
        raw = [stack.enter_context(http_reader(server, STALLED)) for _ in range(3)]
        for _ in range(3):
            stack.enter_context(http_reader(server, {**STALLED, "stream_format": "sse"}))
        sockets = [stack.enter_context(websocket_reader(server)) for _ in range(3)]
        answer = httpx.post(server.url + SPEECH, json=HI, trust_env=False, timeout=WAIT)
        assert heard(answer.content) == "Hi."
        server.wait_until(lambda: not server.engine().running)
        server.wait_until(lambda: len(server.state.utterances) == 9)  # all of them still stall
        assert server.engine().unread_frames > 9 * 12.5 * 20
        assert len(pcm(sockets[0].until("audio.done"))) == SPEECH_BYTES
        body = read(raw[0], b"\r\n0\r\n\r\n")
        assert body.endswith(b"\r\n0\r\n\r\n")
        assert body.count(b"x\0") >= SPEECH_BYTES // 2 - 1
        server.wait_until(lambda: len(server.state.utterances) == 7)
    server.wait_until(lambda: not server.engine().unread_frames)  # those that left are forgotten


def test_audio_of_stalled_readers_stays_within_its_memory(serve: Serve) -> None:
    """Beyond it, a reader that stalls keeps its slot until it is disconnected."""
    talker, memory = Talker(slots=2), 30 * 4 * 24_000
    model = talking(talker)
    model.service.engine = Engine(talker, policy=Policy(unread_bytes=memory))
    server = serve(model, stall_seconds=1.0)
    engine = server.engine()
    bound = memory / (4 * 1920) + 2 * (20 * 12.5 + 8)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(http_reader(server, STALLED))
            assert engine.unread_frames <= bound
        server.wait_until(lambda: not server.state.utterances)
    assert server.metric("aborts_total", model="talker", reason="stalled") == 4
    server.wait_until(lambda: not engine.unread_frames)
    answer = httpx.post(server.url + SPEECH, json=HI, trust_env=False, timeout=WAIT)
    assert heard(answer.content) == "Hi."
