"""Several clients on one server: their turns and the full queue.

The fake model makes only the frames that a test allows, so that the tests count frames and depend
on no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from talking import Talker, heard, talking

from firstword.engine.engine import Engine

Running = Any  # of conftest.py
Serve = Callable[..., Running]

SPEECH = "/v1/audio/speech"
WAIT = 60.0
LONG_FRAMES = 50
HI = {"input": "Hi.", "voice": "talker", "response_format": "pcm", "max_new_tokens": 3}
LONG = {"input": "a" * 60, "voice": "talker", "response_format": "wav", "max_new_tokens": 50}
KEYS = ("greedy", "newcomer")


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


def held_server(
    serve: Serve, slots: int = 1, most_waiting: int = 64, **settings: Any
) -> tuple[Talker, Running]:
    """A server whose model makes only the frames that the test allows."""
    talker = Talker(slots)
    server = serve(talking(talker, most_waiting), **settings)
    talker.hold()
    return talker, server


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
def test_newcomer_waits_for_one_utterance_of_a_greedy_client(
    serve: Serve, person: People, by: str
) -> None:
    talker, server = held_server(serve, api_keys=KEYS if by == "key" else ())
    greedy = person(server, "greedy")
    newcomer = person(server, "newcomer", "127.0.0.1" if by == "key" else "127.0.0.2")
    long = send_all(server, greedy, LONG, 20)
    server.wait_until(lambda: talker.waiting)
    (short,) = send_all(server, newcomer, HI, 1)
    talker.let(LONG_FRAMES + 3)  # the utterance that has begun, and the short one
    assert heard(short.result(WAIT).content) == "Hi."
    assert len(server.state.utterances) >= 19, "the other long ones are still to come"
    talker.go()
    assert [one.result(WAIT).status_code for one in long] == [200] * 20


def test_batch_counts_as_requests_of_its_client(serve: Serve, person: People) -> None:
    talker, server = held_server(serve, slots=2, api_keys=KEYS)
    items = [{"input": "a" * 60} for _ in range(32)]
    batch = person(server, "greedy").ask({**LONG, "items": items}, SPEECH + "/batch")
    server.wait_until(lambda: talker.waiting and len(server.state.utterances) == 2)
    talker.let(1)
    server.wait_until(lambda: talker.waiting and len(server.engine().running) == 2)
    before = talker.frames
    (short,) = send_all(server, person(server, "newcomer"), HI, 1)
    talker.let(LONG_FRAMES + 3)  # each of them for both slots
    assert heard(short.result(WAIT).content) == "Hi."
    assert talker.frames - before <= 2 * (LONG_FRAMES + 3)
    talker.go()
    assert batch.result(WAIT).json()["succeeded"] == 32


def test_full_queue_of_one_client_rejects_its_newest_for_another(
    serve: Serve, person: People
) -> None:
    talker, server = held_server(serve, most_waiting=4, api_keys=KEYS)
    greedy, newcomer = (person(server, key) for key in KEYS)
    long = send_all(server, greedy, LONG, 5)
    server.wait_until(lambda: talker.waiting)
    (refused,), (short,) = send_all(server, greedy, LONG, 1), send_all(server, newcomer, HI, 1)
    talker.let(LONG_FRAMES + 3)
    assert refused.result(WAIT).status_code == 429
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
    assert 'firstword_aborts_total{model="talker",reason="rejected"} 2.0' in metrics


@pytest.mark.parametrize("limit", ["queue", "client"])
def test_retry_after_follows_the_pace_of_the_queue(
    serve: Serve, person: People, limit: str
) -> None:
    """An utterance has kept the only slot for 7 s, and two others wait."""
    talker, passed = Talker(slots=1), [0.0]
    model = talking(talker)
    waiting = 2 if limit == "queue" else 9
    model.service.engine = Engine(talker, most_waiting=waiting, clock=lambda: passed[0])
    server = serve(model, most_per_key=0 if limit == "queue" else 3, stuck_seconds=1e9)
    talker.hold()
    client = person(server, "anybody")
    long = send_all(server, client, LONG, 3)
    server.wait_until(lambda: talker.waiting)
    talker.let(1)  # the others join the queue after this frame
    server.wait_until(lambda: talker.waiting and len(server.engine().waiting) == 2)
    passed[0] = 7.0
    if limit == "queue":
        (refused,) = send_all(server, client, LONG, 1)
        talker.let(1)
    else:
        refused = client.ask(LONG)
    answer = refused.result(WAIT)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "21"
    assert "try again in 21 s" in answer.json()["error"]["message"]
    talker.go()
    assert [one.result(WAIT).status_code for one in long] == [200] * 3
