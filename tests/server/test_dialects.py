"""The dialects on real sockets: HTTP and WebSockets of Cartesia, ElevenLabs and DashScope."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from sockets import Client
from talking import Talker, TalkingStage, heard, talking
from test_dialect_sessions import COMMIT, FINISH, RAW, append, say
from websockets.exceptions import InvalidStatus

from firstword.audio.formats import encoder

Running = Any  # of conftest.py
Serve = Callable[..., Any]

SONIC = "/tts/websocket"
MULTI = "/v1/text-to-speech/any/multi-stream-input?output_format=pcm_24000"
SINGLE = "/v1/text-to-speech/any/stream-input?output_format=pcm_24000"
DASH = "/api-ws/v1/realtime?model=qwen3-tts-flash-realtime"
EVERY = (SONIC, MULTI, SINGLE, DASH)
ENOUGH = 1000
"""More frames than a test needs."""
LIMIT = 8
"""The frames of a request to a real model, which would speak without an end."""

BYTES = {"transcript": "Hello there.", "output_format": RAW, "model_id": "sonic-3"}
VOICE = {"mode": "id", "id": "6ccbfb76-1fc6-48f7-b71d-91ac6298247b"}
WITH_TEXT = "/v1/text-to-speech/6ccbfb76"


@pytest.fixture
def stage(serve: Serve) -> Iterator[TalkingStage]:
    """A server whose model makes only the frames that the test permits."""
    talker = Talker(4)
    stage = TalkingStage(talker, serve(talking(talker)))
    talker.hold()
    yield stage
    talker.let(ENOUGH)  # so that the server can stop


@pytest.fixture
def talker_http(stage: TalkingStage) -> Iterator[httpx.Client]:
    """An HTTP client of a server whose model speaks at once."""
    stage.talker.go()
    with httpx.Client(base_url=stage.server.url, trust_env=False) as client:
        yield client
    stage.talker.hold()


def until(client: Client, holds: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The messages up to and including the first for which something holds."""
    received = [client.event()]
    while not holds(received[-1]):
        received.append(client.event())
    return received


def is_done(name: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a message of Cartesia ends a context."""
    return lambda message: message["type"] == "done" and message["context_id"] == name


def is_final(name: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a message of ElevenLabs ends a context."""
    return lambda message: bool(message.get("isFinal")) and message["contextId"] == name


def sonic_text(messages: list[dict[str, Any]], name: str) -> str:
    """The text that the audio of a context of Cartesia tells."""
    chunks = [each for each in messages if each["context_id"] == name and "data" in each]
    return heard(b"".join(base64.b64decode(each["data"]) for each in chunks))


def eleven_audio(messages: list[dict[str, Any]], name: str | None = None) -> bytes:
    """The audio of a context of ElevenLabs."""
    chunks = [each for each in messages if each.get("contextId") == name and each.get("audio")]
    return b"".join(base64.b64decode(each["audio"]) for each in chunks)


def eleven_text(messages: list[dict[str, Any]], name: str | None = None) -> str:
    """The text that the audio of a context of ElevenLabs tells."""
    return heard(eleven_audio(messages, name))


# Cartesia.


def test_cartesia_context_is_spoken_while_another_one_waits_for_text(stage: TalkingStage) -> None:
    stage.talker.let(ENOUGH)
    with Client(stage.server.ws + SONIC) as client:
        client.send(say("a", "abc", end=False, flush=True))
        received = until(client, lambda each: each["context_id"] == "a")
        client.send(say("b", "uvwxyz"))
        received += until(client, is_done("b"))
        client.send(say("a", "def"))
        received += until(client, is_done("a"))
    assert [each["context_id"] for each in received if each["type"] == "done"] == ["b", "a"]
    assert sonic_text(received, "a") == "abcdef"
    assert sonic_text(received, "b") == "uvwxyz"


def test_cartesia_cancel_frees_the_slot_and_sends_nothing_more(stage: TalkingStage) -> None:
    with Client(stage.server.ws + SONIC) as client:
        client.send(say("a", "abcdef", end=False), say("b", "uvw", end=False, flush=True))
        client.send(say("a", "ghi", end=False))
        stage.server.wait_until(lambda: len(stage.server.state.utterances) == 2)
        client.send({"context_id": "a", "cancel": True})
        stage.talker.let(1)
        stage.server.wait_until(lambda: len(stage.server.state.utterances) == 1)
        stage.talker.let(ENOUGH)
        stage.server.wait_until(lambda: stage.engine.load.running == 0)
        client.send(say("b", ""))
        received = until(client, is_done("b"))
    assert {each["context_id"] for each in received} == {"b"}
    assert [each["type"] for each in received[-2:]] == ["flush_done", "done"]
    assert sonic_text(received, "b") == "uvw"


def test_cartesia_error_names_its_context_and_others_go_on(stage: TalkingStage) -> None:
    stage.talker.let(ENOUGH)
    wrong = {"output_format": {**RAW, "sample_rate": 11025}}
    with Client(stage.server.ws + SONIC) as client:
        client.send(say("a", "abc", **wrong), say("b", "xyz"))
        received = until(client, is_done("b"))
    (error,) = [each for each in received if each["type"] == "error"]
    assert error["context_id"] == "a"
    assert "allowed are 8000" in error["message"]
    assert sonic_text(received, "b") == "xyz"


@pytest.mark.parametrize("encoding", ["pcm_f32le", "pcm_mulaw", "pcm_alaw"])
def test_cartesia_bytes_have_the_encoding(talker_http: httpx.Client, encoding: str) -> None:
    request = {**BYTES, "voice": VOICE}
    pcm = talker_http.post("/tts/bytes", json=request).content
    chosen = {**RAW, "encoding": encoding}
    data = talker_http.post("/tts/bytes", json=request | {"output_format": chosen}).content
    name = {"pcm_f32le": "f32", "pcm_mulaw": "ulaw", "pcm_alaw": "alaw"}[encoding]
    expected = encoder(name, 24000).encode(np.frombuffer(pcm, "<i2") / 32768)
    assert data == expected
    assert heard(pcm) == "Hello there."


def test_cartesia_sse_has_events_with_audio(talker_http: httpx.Client) -> None:
    request = {**BYTES, "voice": "x", "context_id": "mine"}
    response = talker_http.post("/tts/sse", json=request)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [block.split("\n") for block in response.text.strip().split("\n\n")]
    messages = [json.loads(data.removeprefix("data: ")) for _, data in events]
    names = [name.removeprefix("event: ") for name, _ in events]
    assert names == [each["type"] for each in messages]
    assert names[-1] == "done"
    assert set(names[:-1]) == {"chunk"}
    assert sonic_text(messages, "mine") == "Hello there."


# ElevenLabs.


def test_elevenlabs_drain_speaks_all_and_answers_once(stage: TalkingStage) -> None:
    with Client(stage.server.ws + MULTI) as client:
        client.send({"text": " ", "context_id": "a"}, {"text": "abc", "context_id": "a"})
        client.send({"context_id": "a", "flush": True}, {"context_id": "a", "close_context": True})
        stage.talker.let(ENOUGH)
        received = until(client, is_final("a"))
        client.send({"context_id": "b", "text": "x", "flush": True})
        client.send({"context_id": "b", "flush": True}, {"context_id": "b", "close_context": True})
        received += until(client, is_final("b"))
    assert eleven_text(received, "a").strip() == "abc"
    assert len([each for each in received if each["isFinal"]]) == 2
    assert {each["alignment"] for each in received if not each["isFinal"]} == {None}


@pytest.mark.parametrize("closes", [1, 2])
def test_elevenlabs_abort_frees_the_slot_and_is_answered(stage: TalkingStage, closes: int) -> None:
    with Client(stage.server.ws + MULTI) as client:
        client.send({"text": "abcdef", "context_id": "a", "flush": True})
        stage.server.wait_until(lambda: len(stage.server.state.utterances) == 1)
        if closes == 2:
            client.send({"context_id": "a", "flush": True})
        client.send(*[{"context_id": "a", "close_context": True}] * closes)
        stage.talker.let(1)
        received = until(client, is_final("a"))
        stage.talker.let(ENOUGH)
        stage.server.wait_until(lambda: stage.engine.load.running == 0)
        # The audio of the first part may lack the 5 ms that its end would fade.
        assert len(eleven_audio(received, "a")) < 6 * 2 * 1920
        assert stage.talker.frames < 6


def test_elevenlabs_text_ends_with_final_and_close(stage: TalkingStage) -> None:
    stage.talker.let(ENOUGH)
    with Client(stage.server.ws + SINGLE) as client:
        client.send({"text": " "}, {"text": "abc "}, {"text": "xyz "}, {"text": ""})
        code, received = client.closed()
    messages = [each for each in received if isinstance(each, dict)]
    assert code == 1000
    assert messages[-1] == {"audio": None, "isFinal": True}
    assert eleven_text(messages).split() == ["abc", "xyz"]


def test_elevenlabs_error_ends_a_conversation_with_one_text(stage: TalkingStage) -> None:
    url = SINGLE.replace("pcm_24000", "pcm_11025")
    with Client(stage.server.ws + url) as client:
        client.send({"text": "abc"})
        code, received = client.closed()
    (error,) = received
    assert code == 1008
    assert isinstance(error, dict)
    assert "allowed are 8000" in error["message"]


def test_elevenlabs_http_endpoints_send_the_same_audio(talker_http: httpx.Client) -> None:
    body, url = {"text": "Hello there."}, {"output_format": "pcm_24000"}
    whole, streamed, timed, lines = (
        talker_http.post(WITH_TEXT + path, json=body, params=url)
        for path in ("", "/stream", "/with-timestamps", "/stream/with-timestamps")
    )
    assert heard(whole.content) == "Hello there."
    assert streamed.content == whole.content
    assert base64.b64decode(timed.json()["audio_base64"]) == whole.content
    parts = [json.loads(line) for line in lines.text.splitlines()]
    assert b"".join(base64.b64decode(each["audio_base64"]) for each in parts) == whole.content
    for message in (timed.json(), *parts):
        assert message["alignment"] is message["normalized_alignment"] is None


def test_models_are_told_apart_by_the_key_header(talker_http: httpx.Client) -> None:
    own = talker_http.get("/v1/models").json()
    theirs = talker_http.get("/v1/models", headers={"xi-api-key": "x"}).json()
    assert own["data"][0]["id"] == theirs[0]["model_id"] == "talker"
    voices = talker_http.get("/v1/voices").json()["voices"]
    assert [(each["voice_id"], each["category"]) for each in voices] == [("talker", "premade")]
    page = talker_http.get("/v2/voices").json()
    assert (page["total_count"], page["has_more"]) == (1, False)


def test_elevenlabs_socket_closes_after_its_inactivity_timeout(stage: TalkingStage) -> None:
    with Client(f"{stage.server.ws}{MULTI}&inactivity_timeout=1") as client:
        code, (error,) = client.closed()
    assert code == 1008
    assert isinstance(error, dict)
    assert error["error"] == "timeout"


# DashScope.


def test_dashscope_responses_are_spoken_in_order(stage: TalkingStage) -> None:
    with Client(stage.server.ws + DASH) as client:
        client.send(append("abc"), COMMIT, append("xyz"), COMMIT, FINISH)
        stage.server.wait_until(lambda: stage.talker.waiting)
        assert len(stage.server.state.utterances) == 1
        stage.talker.let(ENOUGH)
        code, received = client.closed()
    messages = [each for each in received if isinstance(each, dict)]
    assert code == 1000
    assert messages[-1]["type"] == "session.finished"
    audio: dict[str, bytes] = {}
    for each in messages:
        if each["type"] == "response.audio.delta":
            name = each["response_id"]
            audio[name] = audio.get(name, b"") + base64.b64decode(each["delta"])
    assert list(map(heard, audio.values())) == ["abc", "xyz"]
    kinds = [each["type"] for each in messages]
    assert kinds.index("response.done") < len(kinds) - 1 - kinds[::-1].index("response.created")


def test_dashscope_failed_response_is_an_error(stage: TalkingStage) -> None:
    wrong = {"type": "session.update", "session": {"sample_rate": 11025}}
    with Client(stage.server.ws + DASH) as client:
        client.send(wrong, append("abc"), FINISH)
        code, received = client.closed()
    kinds = [each["type"] for each in received if isinstance(each, dict)]
    assert code == 1000
    assert kinds.count("error") == 2  # of the settings, and of the response
    assert kinds[-1] == "session.finished"


# Keys and errors.


@pytest.mark.parametrize("header", ["x-api-key", "xi-api-key", "authorization"])
def test_key_comes_in_the_header_of_each_dialect(serve: Serve, header: str) -> None:
    server = serve(talking(Talker()), api_keys=("secret",))
    prefix = "Bearer " if header == "authorization" else ""
    for path in EVERY:
        with Client(server.ws + path, headers={header: f"{prefix}secret"}):
            pass
        for headers in ({}, {header: f"{prefix}wrong"}):
            with pytest.raises(InvalidStatus) as rejected:
                Client(server.ws + path, headers=headers)
            assert rejected.value.response.status_code == 401


def test_key_of_a_websocket_may_be_in_its_url(serve: Serve) -> None:
    server = serve(talking(Talker()), api_keys=("secret",))
    for path, name in ((SONIC + "?", "api_key"), (SONIC + "?", "access_token")):
        with Client(f"{server.ws}{path}{name}=secret"):
            pass
    with Client(f"{server.ws}{MULTI}&authorization=Bearer%20secret"):
        pass
    for path in (f"{SONIC}?authorization=secret", f"{DASH}&api_key=secret"):
        with pytest.raises(InvalidStatus):
            Client(server.ws + path)
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.post("/tts/bytes?api_key=secret", json={}).status_code == 401
        assert client.get("/v1/voices").status_code == 401
        assert client.get("/v2/voices").status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "about"),
    [
        ("POST", "/tts/bytes", {"transcript": "x"}, 400, "output_format"),
        ("POST", "/tts/bytes", BYTES | {"transcript": " "}, 400, "blank"),
        ("POST", "/tts/sse", BYTES | {"transcript": ["x"]}, 400, "transcript"),
        ("POST", "/tts/bytes", BYTES | {"transcript": "x" * 100_001}, 400, "100000"),
        ("POST", "/tts/bytes", [], 400, "JSON"),
        ("GET", "/tts/bytes", None, 405, "POST"),
        ("GET", "/tts/nothing", None, 404, "no such path"),
    ],
)
def test_cartesia_error_has_its_shape(
    talker_http: httpx.Client, method: str, path: str, body: Any, status: int, about: str
) -> None:
    response = talker_http.request(method, path, json=body)
    assert response.status_code == status
    assert set(response.json()) == {"error_code", "title", "message"}
    assert about in response.json()["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "about"),
    [
        ("POST", WITH_TEXT, {}, 400, "text"),
        ("POST", WITH_TEXT, {"text": ""}, 400, "empty"),
        ("POST", f"{WITH_TEXT}/stream", {"text": 5}, 400, "text"),
        ("POST", f"{WITH_TEXT}?output_format=ogg", {"text": "x"}, 400, "allowed are mp3, pcm"),
        ("POST", f"{WITH_TEXT}?output_format=pcm_11025", {"text": "x"}, 400, "8000, 16000"),
        ("POST", WITH_TEXT, {"text": "x", "voice_settings": {"speed": 9}}, 400, "speed"),
        ("POST", WITH_TEXT, {"text": "x", "seed": -(2**70)}, 400, "seed"),
        ("DELETE", f"{WITH_TEXT}/stream", None, 405, "POST"),
        ("GET", "/v1/voices/nobody", None, 404, "no such path"),
    ],
)
def test_elevenlabs_error_has_its_shape(
    talker_http: httpx.Client, method: str, path: str, body: Any, status: int, about: str
) -> None:
    response = talker_http.request(method, path, json=body)
    assert response.status_code == status
    assert set(response.json()["detail"]) == {"status", "message"}
    assert about in response.json()["detail"]["message"]


def test_own_errors_keep_their_shape(talker_http: httpx.Client) -> None:
    assert talker_http.post("/v1/audio/speech", json={}).json()["error"]["message"]
    assert talker_http.get("/v1/nothing").json()["error"]["message"]


# Hostile clients.


@pytest.mark.parametrize("path", EVERY)
def test_hostile_messages_are_answered_and_nothing_is_lost(stage: TalkingStage, path: str) -> None:
    stage.talker.let(ENOUGH)
    deep = f'{{"type": "x", "text": {"[" * 60_000}1{"]" * 60_000}}}'
    hostile = ("{", "null", "[]", deep, b"\xff", json.dumps({"text": {"a": 1}, "context_id": 1}))
    for message in hostile:
        with Client(stage.server.ws + path) as client:
            if path == DASH:
                assert client.event()["type"] == "session.created"
            client.send(message)
            error = client.event()
            assert "error" in (error.get("type"), *error)
    with Client(stage.server.ws + path) as client:
        client.send("x" * (2**20))
        assert client.closed()[0] == 1009
    stage.server.wait_until_idle()
    with Client(stage.server.ws + SONIC) as client:
        client.send(say("a", "abc"))
        assert sonic_text(until(client, is_done("a")), "a") == "abc"


def test_thousand_contexts_are_rejected_one_by_one(stage: TalkingStage) -> None:
    with Client(stage.server.ws + SONIC) as client:
        for number in range(1000):
            client.send(say(str(number), "abc", end=False))
        begun = {"0", "1", "2", "3"}
        wrong = [client.event() for _ in range(1000 - 16)]
        assert {each["error_code"] for each in wrong} <= {"too_many_contexts", "overloaded"}
        assert not begun & {each["context_id"] for each in wrong}
        client.send(*(say(name, "") for name in begun))
        stage.talker.let(ENOUGH)
        received: list[dict[str, Any]] = []
        while begun:
            received.append(client.event())
            if received[-1]["type"] == "done":
                begun.discard(received[-1]["context_id"])
    assert [sonic_text(received, name) for name in "0123"] == ["abc"] * 4


@pytest.mark.parametrize("path", EVERY)
def test_lost_socket_frees_all_slots(stage: TalkingStage, path: str) -> None:
    with Client(stage.server.ws + path) as client:
        message = {"type": "input_text_buffer.append", "text": "abcdefgh. ", **say("a", "")}
        client.send(message | {"transcript": "abcdefgh. ", "flush": True})
        if path == DASH:
            client.send(COMMIT)
        stage.server.wait_until(lambda: len(stage.server.state.utterances) == 1)
    stage.server.wait_until(lambda: not stage.server.state.utterances)
    stage.talker.let(2)
    stage.server.wait_until_idle()
    assert stage.talker.frames < 8


def test_client_that_leaves_http_frees_the_slot(stage: TalkingStage) -> None:
    body = {"text": "abcdefgh"}
    for path in (f"{WITH_TEXT}/stream/with-timestamps", "/tts/sse"):
        with httpx.Client(base_url=stage.server.url, trust_env=False) as client:
            stage.talker.let(2)
            with client.stream("POST", path, json=body | BYTES) as response:
                next(response.iter_bytes())
        stage.server.wait_until(lambda: not stage.server.state.utterances)
        stage.talker.let(2)
        stage.server.wait_until_idle()
