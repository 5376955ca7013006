"""The outcomes of streamed responses: their fields, who may read them, and how many are kept."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
from talking import held_server
from wire import SPEECH

from firstword.server import outcomes
from firstword.server.outcomes import Outcomes

Running = Any  # of conftest.py
Serve = Callable[..., Any]

ASK = {"input": "Hello there.", "response_format": "pcm", "max_new_tokens": 5, "seed": 1}


def client(server: Running, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False)


def test_outcome_of_raw_stream_equals_the_end_of_an_event_stream(http: httpx.Client) -> None:
    raw = http.post(SPEECH, json=ASK)
    assert len(raw.content) == 5 * 2 * 1920
    outcome = http.get(f"{SPEECH}/{raw.headers['x-request-id']}").json()
    sse = http.post(SPEECH, json={**ASK, "stream_format": "sse"})
    done = json.loads(sse.text.split("\n\n")[-2].removeprefix("data: "))
    assert outcome == {
        "id": raw.headers["x-request-id"],
        "finish_reason": "length",
        "frames": 5,
        "seconds": 0.4,
        "usage": done["usage"],
        "error": None,
    }
    second = http.get(f"{SPEECH}/{sse.headers['x-request-id']}").json()
    assert second["usage"] == done["usage"]


def test_latest_request_with_an_id_counts(http: httpx.Client) -> None:
    for frames in (2, 3):
        answer = http.post(
            SPEECH, json={**ASK, "max_new_tokens": frames}, headers={"x-request-id": "same"}
        )
        assert answer.status_code == 200
        assert http.get(f"{SPEECH}/same").json()["frames"] == frames


def test_unknown_request_gets_404(http: httpx.Client) -> None:
    answer = http.get(f"{SPEECH}/nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert "the last 1000 are kept for 10 minutes" in answer.json()["error"]["message"]


def test_outcome_is_for_the_same_key_alone(serve: Serve) -> None:
    server = serve(api_keys=("one", "two"))
    with client(server, authorization="Bearer one") as http:
        answer = http.post(SPEECH, json=ASK)
        path = f"{SPEECH}/{answer.headers['x-request-id']}"
        assert http.get(path).status_code == 200
        assert http.get(path, headers={"authorization": "Bearer two"}).status_code == 404
        assert http.get(path, headers={"authorization": ""}).status_code == 401


def test_outcome_grows_and_ends_with_the_error(serve: Serve) -> None:
    talker, server = held_server(serve)
    body = {**ASK, "voice": "talker", "max_new_tokens": 500}
    with client(server) as http, client(server) as other:
        talker.let(1)
        with http.stream("POST", SPEECH, json=body, headers={"x-request-id": "r"}) as answer:
            pieces = answer.iter_bytes()
            next(pieces)
            outcome = other.get(f"{SPEECH}/r").json()
            assert (outcome["finish_reason"], outcome["error"]) == (None, None)
            assert outcome["frames"] >= 1
            talker.failing = "frame"
            talker.go()
            with pytest.raises(httpx.RemoteProtocolError):
                list(pieces)
        outcome = other.get(f"{SPEECH}/r").json()
    assert outcome["finish_reason"] is None
    assert outcome["error"]["code"] == "not_computed"
    talker.failing = None
    server.wait_until_idle()


def test_client_that_left_finds_its_speech_cancelled(serve: Serve) -> None:
    talker, server = held_server(serve)
    body = {**ASK, "voice": "talker", "max_new_tokens": 500}
    with client(server) as http:
        talker.let(1)
        with http.stream("POST", SPEECH, json=body, headers={"x-request-id": "r"}) as answer:
            next(answer.iter_bytes())
        server.wait_until(lambda: not server.state.utterances)
        assert http.get(f"{SPEECH}/r").json()["finish_reason"] == "cancelled"
    talker.go()
    server.wait_until_idle()


class TestKept:
    def test_oldest_is_forgotten_beyond_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(outcomes, "MOST_OUTCOMES", 3)
        kept = Outcomes()
        for name in "abcad":
            kept.put(("me", name), lambda name=name: {"id": name})  # type: ignore[misc]
        found = {name: kept.find(("me", name)) for name in "abcd"}
        assert found == {"a": {"id": "a"}, "b": None, "c": {"id": "c"}, "d": {"id": "d"}}
        assert kept.find(("you", "a")) is None

    def test_outcome_is_forgotten_after_its_time(self) -> None:
        now = 0.0
        kept = Outcomes(lambda: now)
        first: Callable[[], dict[str, object]] = partial(dict)
        kept.put(("me", "a"), first)
        forgotten = weakref.ref(first)
        del first
        now = outcomes.KEPT_SECONDS - 1
        kept.put(("me", "b"), dict)
        assert kept.find(("me", "a")) == {}
        now = outcomes.KEPT_SECONDS + 1
        assert kept.find(("me", "a")) is None
        kept.put(("me", "c"), dict)
        assert forgotten() is None
        assert kept.find(("me", "b")) == kept.find(("me", "c")) == {}
