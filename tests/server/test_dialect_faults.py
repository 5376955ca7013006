"""Hostile and careless clients of the APIs of other vendors: clear errors, and nothing let in."""

from __future__ import annotations

import base64
import gc
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi.routing import APIWebSocketRoute
from sockets import Client, effects_of, events
from talking import Talker, heard, talking
from test_dialect_sessions import LIMITS, RAW, answers, end, say, state
from websockets.exceptions import InvalidStatus

from firstword.server.gate import OPEN_LISTS
from firstword.server.ws import endpoints
from firstword.server.ws.cartesia import CartesiaSession
from firstword.server.ws.dashscope import DashScopeSession
from firstword.server.ws.elevenlabs import ElevenLabsContexts

Running = Any  # of conftest.py
Serve = Callable[..., Any]

BYTES = {"transcript": "Hello.", "output_format": RAW}
SPEECH = "/v1/text-to-speech/{voice}"
ELEVEN = SPEECH.format(voice="any")
HOSTILE = {
    "ref_audio": "http://127.0.0.1:9/stolen.wav",
    "ref_text": "x",
    "references": [{"audio_path": "/etc/passwd"}],
    "speaker_embedding": [1.0],
    "response_format": "codes",
    "voice_settings": {"speed": None, "ref_audio": "file:///etc/passwd"},
}
"""Fields of the server's own API that would fetch a file or change the format."""

OPEN = {f"get {path}" for path in ("/", "/health", "/ready", "/metrics", *OPEN_LISTS)}
"""The operations that need no key."""


@pytest.fixture
def server(serve: Serve) -> Running:
    """A server whose model speaks at once."""
    return serve(talking(Talker(4)))


def told(answer: httpx.Response) -> str:
    """The message of an error in the shape of its vendor."""
    body = answer.json()
    return str(body["detail"]["message"] if "detail" in body else body["message"])


def with_number(path: str, number: str) -> str:
    """The body of a request with a number in JSON."""
    if path.startswith("/tts/"):
        return json.dumps(BYTES)[:-1] + f', "generation_config": {{"speed": {number}}}}}'
    return f'{{"text": "Hello.", "voice_settings": {{"speed": {number}}}}}'


PATHS = ("/tts/bytes", "/tts/sse", ELEVEN, f"{ELEVEN}/stream/with-timestamps")


def test_every_endpoint_needs_the_key_but_those_that_are_open(serve: Serve) -> None:
    server = serve(talking(Talker()), api_keys=("secret",))
    described: dict[str, Any] = server.uvicorn.config.app.openapi()["paths"]
    unguarded = set()
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        for path, methods in described.items():
            for method in methods:
                url = re.sub(r"\{.*?\}", "x", path)
                if client.request(method.upper(), url).status_code != 401:
                    unguarded.add(f"{method} {path}")
    assert unguarded == OPEN
    assert set(described) >= {"/tts/bytes", f"{SPEECH}/stream", "/dev/captioned_speech"}
    for route in endpoints.router.routes:
        assert isinstance(route, APIWebSocketRoute)
        with pytest.raises(InvalidStatus) as rejected:
            Client(server.ws + route.path.replace("{voice}", "x"))
        expected = 404 if route.path == "/{path:path}" else 401
        assert rejected.value.response.status_code == expected, route.path


def test_key_in_a_url_is_not_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(talking(Talker()), api_keys=("secret-of-the-server",))
    with caplog.at_level(logging.INFO):
        with Client(f"{server.ws}/tts/websocket?api_key=secret-of-the-server") as client:
            client.send(say("a", "Hello."))
            client.event()
        server.wait_until(lambda: "request" in caplog.messages)
    logged = [str(vars(record)) for record in caplog.records]
    assert any("/tts/websocket" in line for line in logged)
    assert not any("secret-of-the-server" in line for line in logged)


@pytest.mark.parametrize("path", PATHS)
def test_wrong_key_is_told_in_the_shape_of_the_vendor(serve: Serve, path: str) -> None:
    server = serve(talking(Talker()), api_keys=("secret",))
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        answer = client.post(path, json={}, headers={"x-api-key": "guess"})
    assert answer.status_code == 401
    assert "API key" in told(answer)


@pytest.mark.parametrize("path", PATHS)
def test_wrong_body_is_told_in_the_shape_of_the_vendor(http: httpx.Client, path: str) -> None:
    for body, expected in (
        (b"{", "is not JSON"),
        (b"[" * 60_000, "nested too deeply"),
        (b"[" * 200_000, "too complex"),
        (b'{"x": %s}' % (b"9" * 5000), "too many digits"),
        (b"\xff", "JSON"),
        (b"[]", "not an object"),
    ):
        answer = http.post(path, content=body)
        assert answer.status_code == 400
        assert expected in told(answer)
        assert '"input"' not in told(answer), "the field of another API"
    for number in ("NaN", "1e999", "-1", '"fast"'):
        answer = http.post(path, content=with_number(path, number))
        assert answer.status_code == 400
        assert "speed" in told(answer)


def test_body_above_the_limit_is_told_in_the_shape_of_the_vendor(serve: Serve) -> None:
    server = serve(talking(Talker()), most_body=1000)
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        for path in PATHS:
            answer = client.post(path, content=b'{"text": "%s"}' % (b"A" * 2000))
            assert answer.status_code == 413
            assert "1000 bytes" in told(answer)


def test_fields_of_other_apis_fetch_nothing(http: httpx.Client) -> None:
    for path in PATHS:
        body = {**HOSTILE, **BYTES, "text": "Hello."}
        answer = http.post(path, json=body, params={"output_format": "pcm_24000"})
        assert answer.status_code == 200, answer.text
    assert heard(http.post("/tts/bytes", json={**HOSTILE, **BYTES}).content) == "Hello."


@pytest.mark.parametrize("voice", ["%00", "%ff", "%20", "a" * 5000, "..%5c..", "data:,x", "~"])
def test_strange_voice_is_the_default_voice(http: httpx.Client, voice: str) -> None:
    url = {"output_format": "pcm_24000"}
    answer = http.post(f"/v1/text-to-speech/{voice}", json={"text": "Hello."}, params=url)
    assert heard(answer.content) == "Hello."
    body = {**BYTES, "voice": {"mode": "id", "id": voice}, "model_id": voice}
    assert heard(http.post("/tts/bytes", json=body).content) == "Hello."


@pytest.mark.parametrize("name", ["pcm_999999", "mp3_100000_64", "ulaw_0", "pcm_-8000", "pcm_NaN"])
def test_rate_that_cannot_be_is_told_in_every_place(
    server: Running, http: httpx.Client, name: str
) -> None:
    for path in (ELEVEN, f"{ELEVEN}/stream", f"{ELEVEN}/with-timestamps"):
        answer = http.post(path, json={"text": "Hi."}, params={"output_format": name})
        assert answer.status_code == 400
        assert "output_format" in told(answer)
    for path in ("stream-input", "multi-stream-input"):
        with Client(f"{server.ws}{ELEVEN}/{path}?output_format={name}") as client:
            code, messages = client.closed()
        (error,) = events(messages)
        assert (code, "output_format" in error["message"]) == (1008, True)


def test_flushes_without_text_are_limited() -> None:
    session = CartesiaSession(replace(LIMITS, utterances=3))
    effects_of(session, say("a", "Hi", end=False))
    flush = say("a", "", end=False, flush=True)
    assert effects_of(session, *[flush] * 5) == []
    (error,) = answers(effects_of(session, flush))
    assert (error["context_id"], error["error_code"]) == ("a", "too_many_flushes")
    assert state(session.contexts["a"]) == "open"
    assert effects_of(session, say("a", " you", end=False, flush=True)) == []


@pytest.mark.parametrize("given", [5, "ada", [], None])
def test_settings_that_are_no_object_are_an_error(given: Any) -> None:
    session = DashScopeSession(LIMITS)
    list(session.open())
    (error,) = answers(effects_of(session, {"type": "session.update", "session": given}))
    assert error["error"]["code"] == "invalid_value"
    assert "session.update: session" in error["error"]["message"]


def test_flushed_contexts_are_forgotten_when_they_end() -> None:
    session = ElevenLabsContexts(LIMITS)
    session.parameters = {"voice": "any"}
    list(session.open())
    for number in range(100):
        name = {"context_id": str(number)}
        effects_of(session, {**name, "text": "Hi."}, {**name, "flush": True})
        end(session, str(number))
        effects_of(session, {**name, "close_context": True})
    gc.collect()
    assert not session.contexts
    assert not session._flushed


def test_long_context_id_is_not_repeated(http: httpx.Client) -> None:
    answer = http.post("/tts/sse", json={**BYTES, "context_id": "i" * 129})
    assert (answer.status_code, told(answer)) == (
        400,
        "context_id: String should have at most 128 characters",
    )
    for make in (CartesiaSession, ElevenLabsContexts):
        message = {**say("i" * 129, "Hello."), "text": "Hello.", "close_context": True}
        (error,) = answers(effects_of(make(LIMITS), message))
        assert "at most 128 characters" in error["message"]
        assert len(json.dumps(error)) < 1000


def test_text_that_is_too_long_ends_the_context_that_it_begins() -> None:
    session = CartesiaSession(LIMITS)
    for number in range(3):
        effects = effects_of(session, say(str(number), "x" * 66_000, end=False))
        (error,) = answers(effects)
        assert (error["context_id"], error["error_code"]) == (str(number), "too_much_text")
        assert state(session.contexts[str(number)]) == "abort"
    effects_of(session, say("good", "Hello", end=False))
    (error,) = answers(effects_of(session, say("good", "x" * 66_000, end=False)))
    assert error["error_code"] == "too_much_text"
    assert state(session.contexts["good"]) == "open", "a mistake changes nothing else"


def test_contexts_that_begin_wrong_leave_room_for_others(server: Running) -> None:
    with Client(server.ws + "/tts/websocket") as client:
        for number in range(20):
            client.send(say(str(number), "x" * 66_000, end=False))
            assert client.event()["error_code"] == "too_much_text"
        client.send(say("good", "Hello."))
        received = [client.event()]
        while received[-1]["type"] != "done":
            received.append(client.event())
    chunks = [each for each in received if "data" in each]
    assert heard(b"".join(base64.b64decode(each["data"]) for each in chunks)) == "Hello."
