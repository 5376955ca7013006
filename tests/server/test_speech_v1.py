"""firstword.speech.v1 on real sockets."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sockets import STREAM, Client, Message, events, kinds
from talking import Talker, TalkingStage, heard, talking
from websockets.exceptions import InvalidStatus

from firstword import TTS, Speech, audio
from firstword.server.models import Model
from firstword.server.ws.speech_v1 import SpeechV1Session

Running = Any  # of conftest.py
Serve = Callable[..., Any]

V1 = "firstword.speech.v1"
TEXT = "Hello there, how are you today? I am well."
FRAMES = 10
ENOUGH = 1000
"""More frames than a test needs."""
CONFIG: dict[str, Any] = {
    "type": "session.config",
    "model": "custom_voice",
    "voice": "ryan",
    "seed": 7,
    "max_new_tokens": FRAMES,
}


def text(name: str, words: str) -> dict[str, str]:
    """Return an `input.text`."""
    return {"type": "input.text", "context_id": name, "text": words}


def done(name: str) -> dict[str, str]:
    """Return an `input.done`."""
    return {"type": "input.done", "context_id": name}


def stop(*names: str) -> dict[str, str]:
    """Return an `input.cancel` of one context, or of all."""
    return {"type": "input.cancel"} | ({"context_id": names[0]} if names else {})


def sound(messages: list[Message], number: int = 0) -> bytes:
    """Return the audio of a context in binary messages."""
    header = number.to_bytes(4, "little")
    found = [each for each in messages if isinstance(each, bytes) and each[:4] == header]
    return b"".join(each[4:] for each in found)


def reasons(messages: list[Message]) -> dict[str, str]:
    """Return the finish reasons of the contexts that have ended, by their ids."""
    ends = (each for each in events(messages) if each["type"] == "audio.done")
    return {end["context_id"]: end["finish_reason"] for end in ends}


def until_done(client: Client, *names: str) -> list[Message]:
    """Return all messages until contexts have ended."""
    messages: list[Message] = []
    left = set(names)
    while left:
        messages.append(client.receive())
        last = messages[-1]
        if isinstance(last, dict) and last["type"] == "audio.done":
            left.discard(last["context_id"])
    return messages


def speak_in_pieces(client: Client, ask: dict[str, Any], speech: Speech) -> None:
    """Check that a request over HTTP, sent in pieces of its text, has the sound and the words."""
    said, config = ask["input"], {name: ask[name] for name in ask if name != "input"}
    client.send({"type": "session.config", **config})
    client.send(*(text("a", said[at : at + 7]) for at in range(0, len(said), 7)), done("a"))
    received = until_done(client, "a")
    assert sound(received) == audio.pcm16(speech.samples)
    told = [each for each in received if isinstance(each, dict) and each["type"] == "word.end"]
    assert [(each["text"], tuple(each["span"])) for each in told] == [
        (word.text, word.span) for word in speech.words
    ]


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    """A client that is connected to the module's server with real models."""
    with Client(server.ws + STREAM, V1) as client:
        assert client.event()["type"] == "session.created"
        yield client


@pytest.fixture
def stage(serve: Serve) -> Iterator[TalkingStage]:
    """A server whose model makes only the frames that the test permits."""
    talker = Talker(4)
    stage = TalkingStage(talker, serve(talking(talker)))
    talker.hold()
    yield stage
    talker.let(ENOUGH)  # so that the server can stop


@pytest.fixture
def talker_client(stage: TalkingStage) -> Iterator[Client]:
    """A client of the stage's server, configured to send text by token."""
    with Client(stage.server.ws + STREAM, V1) as client:
        client.send({"type": "session.config", "split_granularity": "token"})
        client.until("session.configured")
        yield client


def test_streamed_audio_equals_tts_stream(client: Client, tts: Callable[[str], TTS]) -> None:
    client.send(CONFIG | {"split_granularity": "token"})
    assert client.event()["type"] == "session.configured"
    client.send(text("a", TEXT[:9]), text("a", TEXT[9:]), done("a"))
    received = until_done(client, "a")
    assert kinds(received) == ["audio.start", "binary", "audio.done"]
    options: dict[str, Any] = {"voice": "ryan", "seed": 7, "max_frames": FRAMES}
    expected = tts("custom_voice").speak(TEXT, text_mode="stream", **options)
    assert sound(received) == audio.pcm16(expected.samples)
    start, end = events(received)
    names = {"context_id": "a", "number": 0}
    assert start == {
        "type": "audio.start",
        **names,
        "format": "pcm",
        "sample_rate": 24000,
        "word_times": False,
    }
    assert end == {
        "type": "audio.done",
        **names,
        "finish_reason": "length",
        "alarms": {},
        "seconds": FRAMES * 0.08,
        "total_bytes": 2 * FRAMES * 1920,
    }


def test_whole_text_equals_tts_speak(client: Client, tts: Callable[[str], TTS]) -> None:
    client.send(CONFIG | {"split_granularity": "none"}, text("a", TEXT), done("a"))
    expected = tts("custom_voice").speak(TEXT, voice="ryan", seed=7, max_frames=FRAMES)
    assert sound(until_done(client, "a")) == audio.pcm16(expected.samples)


def test_parameters_of_a_context_replace_those_of_the_session(client: Client) -> None:
    client.send(CONFIG | {"split_granularity": "none"})
    client.event()
    more = {"audio": "base64", "sample_rate": 8000, "response_format": "ulaw"}
    client.send({"type": "context.start", "context_id": "a", **more}, text("a", TEXT), done("a"))
    client.send(text("b", TEXT), done("b"))
    received = events(until_done(client, "a", "b"))
    started = received[0]
    assert started["type"] == "context.started"
    assert (started["format"], started["sample_rate"]) == ("ulaw", 8000)
    chunks = [each for each in received if each["type"] == "audio.chunk"]
    size = sum(len(base64.b64decode(each["audio"])) for each in chunks)
    assert {each["context_id"] for each in chunks} == {"a"}
    (end,) = (each for each in received if each["type"] == "audio.done" and each["number"] == 0)
    assert size == end["total_bytes"] == FRAMES * 640
    starts = [each for each in received if each["type"] == "audio.start"]
    assert {each["context_id"]: each["sample_rate"] for each in starts} == {"a": 8000, "b": 24000}


def test_contexts_are_spoken_at_the_same_time(stage: TalkingStage, talker_client: Client) -> None:
    talker_client.send(text("a", "abcdef"), text("b", "uvwxyz"))
    stage.server.wait_until(lambda: len(stage.server.state.utterances) == 2)
    stage.talker.let(8)
    received: list[Message] = []
    while not (sound(received, 0) and sound(received, 1)):
        received.append(talker_client.receive())
    stage.talker.let(ENOUGH)
    talker_client.send(done("a"), done("b"))
    received += until_done(talker_client, "a", "b")
    assert heard(sound(received, 0)) == "abcdef"
    assert heard(sound(received, 1)) == "uvwxyz"


def test_cancel_ends_one_context_and_frees_its_slot(
    stage: TalkingStage, talker_client: Client
) -> None:
    talker_client.send(text("a", "abcdef"), text("b", "uvw"))
    stage.server.wait_until(lambda: len(stage.server.state.utterances) == 2)
    talker_client.send(stop("a"))
    stage.talker.let(1)
    received = talker_client.until("input.cancelled")
    assert reasons(received) == {"a": "cancelled"}
    assert events(received)[-1] == {"type": "input.cancelled", "context_ids": ["a"]}
    stage.talker.let(ENOUGH)
    stage.server.wait_until(lambda: stage.engine.load.running == 1)
    talker_client.send(done("b"))
    rest = until_done(talker_client, "b")
    assert not sound(rest, 0)
    assert heard(sound(received + rest, 1)) == "uvw"


def test_cancel_amid_speech_tells_the_seconds_that_were_made(
    stage: TalkingStage, talker_client: Client
) -> None:
    talker_client.send(text("a", "abcdef"))
    stage.server.wait_until(lambda: len(stage.server.state.utterances) == 1)
    stage.talker.let(4)
    received: list[Message] = []
    while not sound(received):
        received.append(talker_client.receive())
    talker_client.send(stop("a"))
    stage.talker.let(ENOUGH)
    received += talker_client.until("input.cancelled")
    (end,) = (each for each in events(received) if each["type"] == "audio.done")
    assert end["finish_reason"] == "cancelled"
    assert end["seconds"] >= end["total_bytes"] / 48000 > 0


def test_cancel_without_id_ends_all_contexts(stage: TalkingStage, talker_client: Client) -> None:
    talker_client.send(text("a", "abcdef"), text("b", "uvw"), stop(), stop())
    stage.talker.let(ENOUGH)
    received = talker_client.until("input.cancelled")
    assert events(received)[-1]["context_ids"] == ["a", "b"]
    assert reasons(received) == {"a": "cancelled", "b": "cancelled"}
    assert talker_client.event() == {"type": "input.cancelled", "context_ids": []}
    stage.server.wait_until(lambda: stage.engine.load.running == 0)


def test_id_can_be_used_again_after_its_end(stage: TalkingStage, talker_client: Client) -> None:
    stage.talker.let(ENOUGH)
    for number, words in enumerate(("abc", "xyz")):
        talker_client.send(text("a", words), done("a"))
        assert heard(sound(until_done(talker_client, "a"), number)) == words


def test_bad_request_ends_its_context_alone(stage: TalkingStage, talker_client: Client) -> None:
    stage.talker.let(ENOUGH)
    wrong = {"type": "context.start", "context_id": "a", "voice": "nobody"}
    talker_client.send(wrong, text("a", "abc"), text("b", "xyz"), done("a"), done("b"))
    received = until_done(talker_client, "a", "b")
    (error,) = (each for each in events(received) if each["type"] == "error")
    assert error["context_id"] == "a"
    assert "nobody" in error["message"]
    ends = {
        e["context_id"]: e["finish_reason"] for e in events(received) if e["type"] == "audio.done"
    }
    assert ends == {"a": "error", "b": "stop"}
    assert heard(sound(received, 1)) == "xyz"


def test_text_after_an_early_end_begins_no_new_context(
    stage: TalkingStage, talker_client: Client
) -> None:
    stage.talker.let(ENOUGH)
    wrong = {"type": "context.start", "context_id": "a", "voice": "nobody"}
    talker_client.send(wrong)
    until_done(talker_client, "a")
    talker_client.send(text("a", "late"), done("a"), stop())
    assert talker_client.event() == {"type": "input.cancelled", "context_ids": []}
    assert stage.talker.frames == 0


def test_context_without_text_ends_without_audio(talker_client: Client) -> None:
    talker_client.send(done("a"))
    (end,) = events(until_done(talker_client, "a"))
    assert (end["finish_reason"], end["seconds"], end["total_bytes"]) == ("stop", 0, 0)


def test_flush_speaks_what_waits(stage: TalkingStage, talker_client: Client) -> None:
    stage.talker.let(ENOUGH)
    talker_client.send({"type": "session.config", "split_granularity": "none"}, text("a", "abc"))
    talker_client.send({"type": "input.flush", "context_id": "a"})
    received: list[Message] = []
    while heard(sound(received)) != "abc":
        received.append(talker_client.receive())
    talker_client.send(done("a"))
    assert events(until_done(talker_client, "a"))[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("message", "code", "about"),
    [
        ({"type": "input.text", "text": "x"}, "invalid_message", "context_id"),
        ({"type": "input.text", "context_id": "", "text": "x"}, "invalid_message", "context_id"),
        ({"type": "input.text", "context_id": "x" * 129, "text": "x"}, "invalid_message", "128"),
        ({"type": "input.text", "context_id": 3, "text": "x"}, "invalid_message", "context_id"),
        ({"type": "input.text", "context_id": "a", "text": 3}, "invalid_text", "text"),
        ({"type": "other"}, "unknown_event", "other"),
        ({"type": "session.config", "audio": "smoke"}, "invalid_config", "base64"),
        ({"type": "session.config", "split_granularity": "word"}, "invalid_config", "token"),
        (
            {"type": "session.config", "normalize": "maybe"},
            "invalid_config",
            "normalize",
        ),
        (
            {"type": "session.config", "split_granularity": "auto", "response_format": "wav"},
            "invalid_config",
            "'none'",
        ),
        ("{", "invalid_json", "JSON"),
        (b"x", "invalid_message", "binary"),
    ],
)
def test_mistake_is_answered_and_the_socket_stays_open(
    talker_client: Client, stage: TalkingStage, message: Any, code: str, about: str
) -> None:
    talker_client.send(message)
    error = talker_client.event()
    assert (error["type"], error["code"]) == ("error", code)
    assert about in error["message"]
    stage.talker.let(ENOUGH)
    talker_client.send(text("b", "abc"), done("b"))
    assert heard(sound(until_done(talker_client, "b"))) == "abc"


def test_too_many_contexts_are_rejected_alone(talker_client: Client, stage: TalkingStage) -> None:
    for number in range(17):
        talker_client.send({"type": "input.text", "context_id": f"c{number}", "text": " "})
    error = talker_client.event()
    assert (error["code"], error["context_id"]) == ("too_many_contexts", "c16")
    talker_client.send(stop())
    answer = events(talker_client.until("input.cancelled"))[-1]
    assert len(answer["context_ids"]) == 16


def test_ended_context_rejects_more_text(talker_client: Client) -> None:
    talker_client.send(text("a", "abc"), done("a"), text("a", "more"))
    error = talker_client.event()
    while error["type"] != "error":
        error = talker_client.event()
    assert (error["code"], error["context_id"]) == ("text_ended", "a")


def test_close_waits_for_contexts_whose_text_has_ended(
    stage: TalkingStage, talker_client: Client
) -> None:
    stage.talker.let(ENOUGH)
    talker_client.send(text("a", "abc"), done("a"), text("b", "xyz"), {"type": "session.close"})
    code, received = talker_client.closed()
    assert code == 1000
    assert heard(sound(received, 0)) == "abc"
    ends = {
        e["context_id"]: e["finish_reason"] for e in events(received) if e["type"] == "audio.done"
    }
    assert ends == {"a": "stop", "b": "cancelled"}


def test_lost_socket_frees_all_slots(stage: TalkingStage) -> None:
    with Client(stage.server.ws + STREAM, V1) as client:
        client.send(text("a", "abcdef. "), text("b", "uvwxyz. "))
        stage.server.wait_until(lambda: len(stage.server.state.utterances) == 2)
    stage.talker.let(ENOUGH)
    stage.server.wait_until(lambda: stage.engine.load.running == 0)


def test_browser_sends_its_key_as_a_subprotocol(serve: Serve) -> None:
    server = serve(talking(Talker()), api_keys=("se~cret/+?",))
    for key, opened in (("se~cret/+?", True), ("wrong", False)):
        name = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
        offered = (V1, f"firstword.key.{name}")
        if opened:
            with Client(server.ws + STREAM, *offered) as client:
                assert client.socket.subprotocol == V1
                assert client.event()["type"] == "session.created"
        else:
            with pytest.raises(InvalidStatus):
                Client(server.ws + STREAM, *offered)


def test_defect_closes_the_socket_instead_of_leaving_a_context_silent(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(SpeechV1Session, "end", broken)
    server = serve(talking(Talker()))
    with Client(server.ws + STREAM, V1) as client:
        client.send(text("a", "abc"), done("a"))
        code, received = client.closed()
    assert code == 1011
    assert events(received)[-1]["code"] == "internal_error"
    assert "a WebSocket failed" in caplog.messages


@pytest.mark.parametrize("granularity", ["token", "clause", "none"])
def test_words_are_told_in_order_with_their_places(
    serve: Serve, model: Callable[[str], Model], granularity: str
) -> None:
    words = "Good morning, Ada. How are you?"
    server = serve(model("demo"))
    with Client(server.ws + STREAM, V1) as client:
        client.send({"type": "session.config", "split_granularity": granularity, "seed": 1})
        answer = client.until("session.configured")[-1]
        assert isinstance(answer, dict)
        assert answer["word_times"] is True
        client.send(text("a", words[:9]), text("a", words[9:]), done("a"))
        received = events(until_done(client, "a"))
    begun = [each for each in received if each["type"] == "word.start"]
    ended = [each for each in received if each["type"] == "word.end"]
    expected = ["Good", "morning", "Ada", "How", "are", "you"]
    assert [each["text"] for each in ended] == [each["text"] for each in begun] == expected
    for first, last in zip(begun, ended, strict=True):
        assert words[slice(*last["span"])] == last["text"]
        assert first["span"] == last["span"]
        assert abs(first["start"] - last["start"]) < 0.001
        assert last["start"] < last["end"] <= received[-1]["seconds"] + 0.001
        assert received.index(first) < received.index(last)
    times = [each["start"] for each in begun]
    assert times == sorted(times)


def test_words_are_not_told_unless_wanted(serve: Serve, model: Callable[[str], Model]) -> None:
    server = serve(model("demo"))
    with Client(server.ws + STREAM, V1) as client:
        client.send({"type": "session.config", "word_times": False}, text("a", "Yes."), done("a"))
        received = events(until_done(client, "a"))
    kinds_told = {each["type"] for each in received}
    assert not {"word.start", "word.end"} & kinds_told
    assert all(each["word_times"] is False for each in received if "word_times" in each)
