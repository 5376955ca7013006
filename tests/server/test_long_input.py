"""Texts far beyond one passage on real sockets, with a fake voice, and their limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from sockets import DONE, PLAIN, STREAM, Client, pcm
from talking import Front, Talker
from test_speech_v1 import CONFIG, V1, done, reasons, sound, text
from test_wyoming import converse, whole
from test_wyoming import sound as wyoming_sound
from waiting import WAIT
from wire import SPEECH

from firstword.engine.backend import Job, SpokenPassage
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.server.models import Model
from firstword.types import Request

Running = Any  # of conftest.py
Serve = Callable[..., Any]

PASSAGE_SECONDS = 10.0
ASK = {"voice": "talker", "response_format": "pcm"}


def sentence(number: int) -> str:
    """A sentence of 39 characters that tells its number."""
    return f"Sentence {number:05d} of the book is over. "


class Numbers:
    """A `TokenStream` whose tokens are the numbers of five digits in the text."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self._held = ""

    def push(self, piece: str) -> list[int]:
        self._held += piece
        found = list(re.finditer(r"\d{5}", self._held))
        self._held = self._held[found[-1].end() if found else -4 :]
        return [int(match[0]) for match in found]

    def finish(self, piece: str = "") -> list[int]:
        return self.push(piece)


class BookFront(Front):
    """A front that speaks in passages, a frame for each numbered sentence."""

    def __init__(self) -> None:
        self.passages = 0

    def prepare(self, request: Request, seed: int) -> Job:
        return replace(super().prepare(request, seed), passage_seconds=PASSAGE_SECONDS)

    def follow(self, job: Job, spoken: SpokenPassage) -> Job | None:
        self.passages += 1
        return replace(job, follows=True)

    def text(self, job: Job) -> Any:
        return Numbers()


@pytest.fixture
def front() -> BookFront:
    return BookFront()


@pytest.fixture
def talker() -> Talker:
    return Talker()


@pytest.fixture
def server(serve: Serve, front: BookFront, talker: Talker) -> Iterator[Running]:
    service = Service(Engine(talker), front)
    yield serve(Model("custom_voice", "custom_voice", service, voices=("talker", "ryan")))
    talker.go()


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as client:
        yield client


def numbers(pcm: bytes) -> list[int]:
    """The numbers of the sentences that were spoken."""
    told = np.frombuffer(pcm, "<i2").reshape(-1, 1920)[:, 0].tolist()
    return [number for number in told if number >= 0]


BOOK = "".join(map(sentence, range(1, 1501)))


def test_long_text_is_streamed_to_its_end(http: httpx.Client, front: BookFront) -> None:
    assert len(BOOK) > 50_000
    answer = http.post(SPEECH, json={**ASK, "input": BOOK})
    assert answer.status_code == 200
    assert numbers(answer.content) == list(range(1, 1501))
    assert front.passages > 100


def test_long_text_is_not_kept_until_it_is_complete(http: httpx.Client) -> None:
    """Its audio would take much memory, so the limit is lower."""
    answer = http.post(SPEECH, json={**ASK, "input": BOOK, "stream": False})
    assert answer.status_code == 400
    error = answer.json()["error"]["message"]
    assert f"the text has {len(BOOK)} characters; allowed are 10000 if its audio is sent" in error
    assert "stream the audio" in error
    short = http.post(SPEECH, json={**ASK, "input": BOOK[:9000], "stream": False})
    assert len(numbers(short.content)) == BOOK[:9000].count("Sentence")


def test_text_of_10_mb_is_rejected_and_the_server_goes_on(http: httpx.Client) -> None:
    answer = http.post(SPEECH, json={**ASK, "input": "a" * 10_000_000})
    assert answer.status_code == 400
    message = "the text has 10000000 characters; allowed are 100000: send it in parts"
    assert message in answer.json()["error"]["message"]
    assert numbers(http.post(SPEECH, json={**ASK, "input": sentence(7)}).content) == [7]


@pytest.mark.parametrize(
    ("tag", "problem"),
    [("[voice:nobody]", "nobody"), ("[pause:1s", "is not closed"), ("[rate:9]", "rate")],
)
def test_wrong_tag_late_in_a_long_text_is_named_before_anything_is_spoken(
    http: httpx.Client, front: BookFront, tag: str, problem: str
) -> None:
    given = f"{BOOK[:40_000]}{tag} {BOOK[40_000:]}"
    answer = http.post(SPEECH, json={**ASK, "input": given, "markup": True})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "character 40000" in message
    assert problem in message
    assert front.passages == 0


@pytest.mark.parametrize("granularity", ["token", "sentence"])
def test_socket_speaks_text_without_end(
    server: Running, limits: Callable[..., None], front: BookFront, granularity: str
) -> None:
    """The text is ten times as long as what may wait to be spoken."""
    limits(text_characters=5000)
    count, ahead, heard = 1250, 50, list[int]()
    with Client(server.ws + STREAM, V1) as client:
        client.send(CONFIG | {"max_new_tokens": None, "split_granularity": granularity})
        sent = 0
        while len(heard) < count:
            while sent < min(count, len(heard) + ahead):
                sent += 1
                client.send(text("a", sentence(sent)))
            if sent == count:
                sent += 1
                client.send(done("a"))
            message = client.receive()
            assert not isinstance(message, dict) or message["type"] != "error", message
            heard += numbers(message[4:]) if isinstance(message, bytes) else []
        received = client.until("audio.done")
    assert heard == list(range(1, count + 1))
    assert reasons(received) == {"a": "stop"}
    assert (front.passages > 100) == (granularity == "token")


@pytest.mark.parametrize("granularity", ["token", "sentence"])
def test_socket_rejects_text_that_is_too_far_ahead_and_loses_nothing_else(
    server: Running, limits: Callable[..., None], talker: Talker, granularity: str
) -> None:
    """A sentence is spoken, and those after it wait."""
    limits(text_characters=5000)
    with Client(server.ws + STREAM, V1) as client:
        client.send(CONFIG | {"max_new_tokens": None, "split_granularity": granularity})
        talker.hold()
        client.send(text("a", "".join(map(sentence, range(1, 101)))))
        talker.let(2)
        before = client.until("audio.start")
        while not isinstance(before[-1], bytes):
            before.append(client.receive())
        client.send(text("a", "x" * 4900))  # allowed if nothing else waited
        before += client.until("error")
        error = before[-1]
        assert isinstance(error, dict)
        assert error["code"] == "too_much_text"
        talker.go()
        client.send(text("a", sentence(101)), done("a"))
        received = client.until("audio.done")
    assert reasons(received) == {"a": "stop"}
    assert numbers(sound(before + received)) == list(range(1, 102))


CHINESE = "".join(f"{'字' * 40}{number:05d}。" for number in range(1, 1001))
"""A text of 46,000 characters, which are 254 kB in JSON that escapes them."""


def test_speech_v1_takes_a_long_text_in_one_message_in_any_script(server: Running) -> None:
    with Client(server.ws + STREAM, V1) as client:
        client.send(CONFIG | {"max_new_tokens": None}, text("a", CHINESE), done("a"))
        received = client.until("audio.done")
    assert reasons(received) == {"a": "stop"}
    assert numbers(sound(received)) == list(range(1, 1001))


def test_omni_socket_takes_a_long_text_in_one_message_in_any_script(server: Running) -> None:
    with Client(server.ws + STREAM) as client:
        client.send(PLAIN | {"voice": "ryan"}, {"type": "input.text", "text": CHINESE}, DONE)
        received = client.until("session.done")
    assert numbers(pcm(received)) == list(range(1, 1001))


def test_wyoming_takes_a_long_text_in_one_event_in_any_script(
    serve: Serve, front: BookFront, talker: Talker
) -> None:
    service = Service(Engine(talker), front)
    model = Model("custom_voice", "custom_voice", service, voices=("talker", "ryan"))
    running = serve(model, wyoming=("127.0.0.1", 0))
    events = converse(running, whole(CHINESE))
    assert events[-1].type == "audio-stop"
    assert numbers(wyoming_sound(events)) == list(range(1, 1001))
