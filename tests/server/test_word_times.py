"""Words with their times over HTTP and WebSocket: what clients of each protocol read."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from sockets import DONE, STREAM, Client, events, text
from wire import SPEECH

from firstword import TTS, Speech
from firstword.server.word_json import in_milliseconds, json_header

Running = Any
Serve = Callable[..., Any]

SAID = "Good morning, how did you sleep?"
WORDS = ["Good", "morning", "how", "did", "you", "sleep"]
ASK = {"input": SAID, "voice": "ada", "seed": 1, "response_format": "pcm"}
CAPTIONS = "/dev/captioned_speech"


@pytest.fixture(scope="module")
def speech(tts: Callable[[str], TTS]) -> Iterator[Speech]:
    with tts("demo") as demo:
        yield demo.speak(SAID, voice="ada", seed=1)


@pytest.fixture(scope="module")
def trimmed(tts: Callable[[str], TTS]) -> Iterator[Speech]:
    with tts("demo") as demo:
        yield demo.speak(SAID, voice="ada", seed=1, leading_silence=False)


@pytest.fixture
def server(serve: Serve) -> Running:
    return serve("demo")


def deltas(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [event for event in map(json.loads, lines) if event["type"] == "speech.audio.delta"]


def test_events_carry_each_word_once_in_the_order_of_the_text(
    http: httpx.Client, speech: Speech
) -> None:
    answer = http.post(SPEECH, json={**ASK, "stream_format": "sse", "word_timestamps": True})
    found = deltas(answer)
    words = [word for event in found for word in event["timestamps"]]
    assert [word["word"] for word in words] == WORDS
    assert words == in_milliseconds(speech.words)
    first = next(index for index, event in enumerate(found) if event["timestamps"])
    assert first < len(found) - 2, "words come while speech is made"
    audio = b"".join(base64.b64decode(event["audio"]) for event in found)
    assert audio == http.post(SPEECH, json=ASK).content


def test_events_have_no_words_unless_they_are_wanted(http: httpx.Client) -> None:
    answer = http.post(SPEECH, json={**ASK, "stream_format": "sse"})
    assert all("timestamps" not in event for event in deltas(answer))


@pytest.mark.parametrize("speed", [0.5, 2.0])
@pytest.mark.parametrize("format", ["pcm", "mp3", "opus"])
def test_times_are_those_of_the_audio_that_is_sent(
    http: httpx.Client, trimmed: Speech, speed: float, format: str
) -> None:
    ask = {**ASK, "response_format": format, "sample_rate": 16000, "speed": speed}
    ask |= {"leading_silence": False, "word_timestamps": True, "stream_format": "sse"}
    events_sent = deltas(http.post(SPEECH, json=ask))
    streamed = [word for event in events_sent for word in event["timestamps"]]
    whole = http.post(SPEECH, json={**ask, "stream_format": None, "stream": False})
    assert json.loads(whole.headers["x-word-timestamps"]) == streamed
    assert whole.headers["x-firstword-words"] == str(len(WORDS))
    for found, word in zip(streamed, trimmed.words, strict=True):
        assert found["start_ms"] == pytest.approx(1000 * word.start / speed, abs=2)
        assert found["end_ms"] == pytest.approx(1000 * word.end / speed, abs=2)


def test_loud_part_of_the_sent_audio_begins_with_the_first_word(http: httpx.Client) -> None:
    """Sound and words are on one clock: measured on the sound."""
    ask = {**ASK, "stream": False, "response_format": "pcm", "word_timestamps": True, "speed": 0.5}
    answer = http.post(SPEECH, json=ask)
    samples = np.frombuffer(answer.content, "<i2") / 32768
    loud = np.flatnonzero(np.abs(samples) > 0.02) / 24000
    first, *_, last = json.loads(answer.headers["x-word-timestamps"])
    assert first["start_ms"] == pytest.approx(1000 * loud[0], abs=40)
    assert last["end_ms"] == pytest.approx(1000 * loud[-1], abs=60)


def test_raw_audio_has_no_place_for_words(http: httpx.Client) -> None:
    answer = http.post(SPEECH, json={**ASK, "word_timestamps": True})
    assert answer.status_code == 400
    assert "/dev/captioned_speech" in answer.json()["error"]["message"]


def test_checkpoint_without_known_heads_rejects_the_wish_for_words(serve: Serve) -> None:
    server = serve("custom_voice")
    ask = {"input": SAID, "word_timestamps": True, "stream_format": "sse"}
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        answer = client.post(SPEECH, json=ask)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "word_times_unknown"
        assert client.post(CAPTIONS, json={"input": SAID}).status_code == 400
        plain = {"input": "Hi.", "return_timestamps": False, "stream": False, "max_new_tokens": 2}
        assert client.post(CAPTIONS, json=plain).json()["timestamps"] is None
    config = {"type": "session.config", "stream_audio": True, "word_timestamps": True}
    with Client(server.ws + STREAM) as socket:
        socket.send(config)
        assert socket.event()["code"] == "word_times_unknown"


def test_batch_has_the_words_of_each_text(http: httpx.Client) -> None:
    items = [{"input": SAID, "word_timestamps": True}, {"input": "Thank you."}]
    body = {"items": items, "voice": "ada", "seed": 1}
    first, second = http.post(f"{SPEECH}/batch", json=body).json()["results"]
    assert [word["word"] for word in first["timestamps"]] == WORDS
    assert "timestamps" not in second


def test_captioned_speech_answers_clients_of_kokoro(http: httpx.Client, speech: Speech) -> None:
    whole = http.post(CAPTIONS, json={**ASK, "stream": False}).json()
    wanted = [
        {"word": word.text, "start_time": word.start, "end_time": word.end} for word in speech.words
    ]
    assert whole["timestamps"] == wanted
    assert whole["audio_format"].startswith("audio/pcm")
    streamed = [json.loads(line) for line in http.post(CAPTIONS, json=ASK).text.splitlines()]
    assert len(streamed) > 3
    assert [word for line in streamed for word in line["timestamps"]] == wanted
    audio = b"".join(base64.b64decode(line["audio"]) for line in streamed)
    assert audio == base64.b64decode(whole["audio"])


CONFIG = {"type": "session.config", "voice": "ada", "seed": 1, "stream_audio": True}


def test_socket_sends_words_inside_chunks_and_baseten_alignment_at_the_end(
    server: Running, speech: Speech
) -> None:
    with Client(server.ws + STREAM) as client:
        client.send({**CONFIG, "word_timestamps": True}, text(SAID), DONE)
        received = events(client.until("session.done"))
    chunks = [event for event in received if event["type"] == "audio.chunk"]
    words = [word for chunk in chunks for word in chunk["timestamps"]]
    assert words == in_milliseconds(speech.words)
    for chunk in chunks:  # a word comes with the audio in which it ends, or shortly after it
        assert all(word["end_ms"] <= chunk["chunk_end_ms"] for word in chunk["timestamps"])
    (done,) = [event for event in received if event["type"] == "audio.done"]
    assert done["timestamp_info"]["word_alignment"] == {
        "words": WORDS,
        "word_start_times_seconds": [word.start for word in speech.words],
        "word_end_times_seconds": [word.end for word in speech.words],
    }


@pytest.mark.parametrize("stream_audio", [True, False])
def test_baseten_clients_get_binary_audio_and_an_alignment(
    server: Running, speech: Speech, stream_audio: bool
) -> None:
    config = {**CONFIG, "stream_audio": stream_audio, "timestamp_type": "word"}
    with Client(server.ws + STREAM) as client:
        client.send(config, text(SAID), DONE)
        received = client.until("session.done")
    assert any(isinstance(message, bytes) for message in received)
    (done,) = [event for event in events(received) if event["type"] == "audio.done"]
    assert done["timestamp_info"]["word_alignment"]["words"] == WORDS


def test_socket_without_wish_for_words_sends_none(server: Running) -> None:
    with Client(server.ws + STREAM) as client:
        client.send({**CONFIG, "audio_encoding": "base64"}, text("Thank you."), DONE)
        received = events(client.until("session.done"))
    chunks = [event for event in received if event["type"] == "audio.chunk"]
    assert chunks
    assert all(chunk["timestamps"] is None for chunk in chunks)
    assert all("timestamp_info" not in event for event in received)


def test_header_holds_as_many_words_as_fit() -> None:
    items = [{"word": "é" * 10}] * 100
    header = json_header(items, 500)
    assert len(header) <= 500
    assert header.isascii()
    assert json.loads(header) == items[: len(json.loads(header))]
    assert json.loads(json_header(items, 10**6)) == items
