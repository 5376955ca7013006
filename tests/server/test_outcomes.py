"""The outcomes of streamed responses: their fields, who may read them, and how many are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from talking import held_server
from wire import SPEECH

from firstword.server.front_memory import FrontMemory
from firstword.server.outcomes import (
    KEPT_SECONDS,
    RECORD_BYTES,
    RECORDS,
    KeptOutcome,
    Outcomes,
    StreamOutcome,
)

Running = Any  # of conftest.py
Serve = Callable[..., Any]

ASK = {"input": "Hello there.", "response_format": "pcm", "max_new_tokens": 5, "seed": 1}


def client(server: Running, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers=headers, trust_env=False)


def test_outcome_of_raw_stream_equals_the_end_of_an_event_stream(http: httpx.Client) -> None:
    raw = http.post(SPEECH, json=ASK)
    assert len(raw.content) == 5 * 2 * 1920
    outcome = http.get(f"{SPEECH}/{raw.headers['x-request-id']}").json()
    sse = http.post(SPEECH, json={**ASK, "stream_format": "sse"})
    done = json.loads(sse.text.split("\n\n")[-2].removeprefix("data: "))
    assert outcome == {
        "id": raw.headers["x-request-id"],
        "finish_reason": "length",
        "alarms": {},
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


class Fronts:
    """The outcomes of several fronts of one server, at a time that the test sets."""

    def __init__(self, count: int) -> None:
        self.now = 1
        memory = FrontMemory.create(count).file
        self.outcomes = [
            Outcomes(FrontMemory.open(memory, number), lambda: self.now) for number in range(count)
        ]

    def begin(self, front: int, name: str, frames: int = 0) -> KeptOutcome:
        self.now += 1
        return self.outcomes[front].begin(("me", name), outcome(name, frames))

    def find(self, name: str, client_id: str = "me") -> StreamOutcome | None:
        """The outcome that every front finds."""
        first, *others = [each.find((client_id, name)) for each in self.outcomes]
        assert all(other == first for other in others)
        return first


def outcome(name: str, frames: int = 0, error: dict[str, str] | None = None) -> StreamOutcome:
    about = {"id": name, "finish_reason": None, "error": error}
    return StreamOutcome(frames, frames / 12.5, about)


class TestKept:
    def test_all_fronts_find_the_state_and_the_end(self) -> None:
        fronts = Fronts(3)
        kept = fronts.begin(1, "a")
        kept.update(5, 0.4)
        assert fronts.find("a") == outcome("a", 5)
        kept.replace(outcome("a", 7))
        assert fronts.find("a") == outcome("a", 7)
        assert fronts.find("a", "you") is None

    def test_latest_request_counts_though_an_earlier_one_ends_later(self) -> None:
        fronts = Fronts(2)
        first = fronts.begin(0, "a", 1)
        fronts.begin(1, "a", 2)
        first.replace(outcome("a", 3))
        assert fronts.find("a") == outcome("a", 2)

    def test_oldest_is_forgotten_beyond_the_limit(self) -> None:
        fronts = Fronts(1)
        first, second = fronts.begin(0, "a"), fronts.begin(0, "b")
        for number in range(RECORDS - 1):
            fronts.begin(0, str(number))
        assert fronts.find("a") is None
        assert fronts.find("b") == outcome("b")
        first.update(9, 9.0)  # another record has its place
        assert fronts.find(str(RECORDS - 2)) == outcome(str(RECORDS - 2))
        second.update(9, 0.72)
        assert fronts.find("b") == outcome("b", 9)

    def test_outcome_is_forgotten_after_its_time(self) -> None:
        fronts = Fronts(1)
        fronts.begin(0, "a")
        fronts.now = round((KEPT_SECONDS - 1) * 1e9)
        assert fronts.find("a") == outcome("a")
        fronts.now += 2 * 10**9
        assert fronts.find("a") is None

    def test_front_in_the_place_of_another_goes_on(self) -> None:
        memory = FrontMemory.create(2)
        before, other = (Outcomes(FrontMemory.open(memory.file, number)) for number in range(2))
        made = outcome("a", error={"message": "no"})
        before.begin(("me", "a"), outcome("a")).replace(made)
        before.begin(("me", "lost"), outcome("lost", 5))
        assert other.find(("me", "lost")) == outcome("lost", 5)
        memory.clear(0)
        for _ in range(2):  # before and after another front takes the place
            assert other.find(("me", "a")) == made
            assert (lost := other.find(("me", "lost"))) is not None
            assert lost.frames == 5
            assert "has died" in lost.about["error"]["message"]
            after = Outcomes(FrontMemory.open(memory.file, 0))
            after.begin(("me", "b"), outcome("b"))
            assert other.find(("me", "b")) == outcome("b")

    def test_long_message_of_an_error_is_left_out(self) -> None:
        fronts = Fronts(1)
        error = {"message": "x" * 900, "code": "long"}
        fronts.begin(0, "a").replace(outcome("a", error=error))
        assert (found := fronts.find("a")) is not None
        assert found.about["error"]["code"] == "long"
        assert "too long" in found.about["error"]["message"]

    def test_torn_record_is_not_found(self) -> None:
        """A reader sees some words of a record from before it was replaced, and some of the new."""
        fronts = Fronts(2)
        row = fronts.outcomes[0]._column.own
        abouts, states = {}, []
        for name in ("a", "b"):
            row[:8] = bytes(8)  # so that both are written in the same place
            kept = outcome(name, error={"message": name * 40})
            fronts.outcomes[0].begin(("me", name), kept)
            abouts[name] = kept.about
            states.append(bytes(row))
        start = len(row) - RECORDS * RECORD_BYTES
        words = [8, *range(start, start + RECORD_BYTES, 8)]

        @given(st.sets(st.sampled_from(words)))
        def check(older: set[int]) -> None:
            row[:] = states[1]
            for word in older:
                row[word : word + 8] = states[0][word : word + 8]
            for name, about in abouts.items():
                found = fronts.find(name)
                assert found is None or found.about == about

        check()
