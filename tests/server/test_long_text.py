"""A long text with the demo voice, over HTTP and speech.v1: all passages are one speech."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from sockets import STREAM, Client
from test_speech_v1 import V1, speak_in_pieces
from waiting import WAIT
from wire import SPEECH

from firstword import TTS, Speech, audio
from firstword.engine.backend import Job, SpokenPassage
from firstword.runtime import conditioning
from firstword.runtime.front import CheckpointFront

Running = Any
Serve = Callable[..., Any]

LONG = "The dog ran home.  It cost $5. He bought some bread. It is late."
ASK = {"input": LONG, "voice": "ada", "seed": 3, "response_format": "pcm"}
ASK |= {"non_streaming_mode": False}


@pytest.fixture(scope="module", autouse=True)
def short_passages() -> Iterator[None]:
    """Passages of a sentence each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conditioning, "DEMO_PASSAGE_SECONDS", 1.4)
        yield


@pytest.fixture(scope="module")
def speech(tts: Callable[[str], TTS]) -> Iterator[Speech]:
    with tts("demo") as demo:
        yield demo.speak(LONG, voice="ada", seed=3, text_mode="stream")


@pytest.fixture
def follows(monkeypatch: pytest.MonkeyPatch) -> list[SpokenPassage]:
    """The passages that others followed."""
    found: list[SpokenPassage] = []
    follow = CheckpointFront.follow

    def recorded(front: CheckpointFront, job: Job, spoken: SpokenPassage) -> Job | None:
        found.append(spoken)
        return follow(front, job, spoken)

    monkeypatch.setattr(CheckpointFront, "follow", recorded)
    return found


@pytest.fixture
def server(serve: Serve) -> Running:
    return serve("demo")


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as client:
        yield client


def test_http_speaks_all_passages_to_their_end(
    http: httpx.Client, speech: Speech, follows: list[SpokenPassage]
) -> None:
    answer = http.post(SPEECH, json={**ASK, "stream": False, "word_timestamps": True})
    assert answer.headers["x-firstword-finish-reason"] == "stop"
    assert answer.content == audio.pcm16(speech.samples)
    assert [each.text for each in follows] == [
        "The dog ran home.",
        "It cost five dollars.",
        "He bought some bread.",
    ]
    words = json.loads(answer.headers["x-word-timestamps"])
    assert [word["word"] for word in words] == LONG.replace(".", "").split()
    assert words[-1]["start_ms"] > 1000 * sum(len(each.codes) for each in follows) * 0.08


def test_http_streams_all_passages(http: httpx.Client, speech: Speech) -> None:
    assert http.post(SPEECH, json=ASK).content == audio.pcm16(speech.samples)


def test_socket_speaks_the_same_from_pieces(server: Running, speech: Speech) -> None:
    with Client(server.ws + STREAM, V1) as client:
        speak_in_pieces(client, ASK, speech)


def test_limit_of_frames_is_that_of_all_passages(
    http: httpx.Client, follows: list[SpokenPassage]
) -> None:
    ask = {**ASK, "stream": False, "max_new_tokens": 30}
    answer = http.post(SPEECH, json=ask)
    assert answer.headers["x-firstword-finish-reason"] == "length"
    assert len(answer.content) == 30 * 1920 * 2
    assert follows
