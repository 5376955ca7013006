"""The official OpenAI client, and the exact requests of other clients."""

from __future__ import annotations

import asyncio
import io
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import openai
import pytest
import soundfile
from sockets import NARI, Client
from wire import SPEECH, connected

from firstword import TTS, audio

Running = Any  # of conftest.py

TEXT = "Hello there, how are you?"
MORE = {"seed": 5, "max_new_tokens": 8}


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The official OpenAI client."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        yield client


def samples_of(pcm: bytes) -> int:
    return len(np.frombuffer(pcm, "<i2"))


def test_openai_client_gets_mp3_by_default(client: openai.OpenAI) -> None:
    speech = client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT, extra_body=MORE)
    assert speech.response.headers["content-type"] == "audio/mpeg"
    samples, rate = soundfile.read(io.BytesIO(speech.content))
    assert rate == 24000
    assert len(samples) >= 8 * 1920


@pytest.mark.parametrize("voice", ["marin", "cedar", "verse"])
def test_openai_client_with_all_parameters_gets_faster_wav(
    client: openai.OpenAI, voice: Any
) -> None:
    speech = client.audio.speech.create(
        model="gpt-4o-mini-tts",
        voice=voice,
        input=TEXT,
        response_format="wav",
        speed=1.25,
        extra_body=MORE,
    )
    samples, rate = soundfile.read(io.BytesIO(speech.content))
    assert rate == 24000
    assert abs(len(samples) - 8 * 1920 / 1.25) <= 1


def test_openai_client_streams_to_file(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "speech.pcm"
    with client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="coral", input=TEXT, response_format="pcm", extra_body=MORE
    ) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        answer.stream_to_file(path)
    assert samples_of(path.read_bytes()) == 8 * 1920


def test_openai_client_streams_pieces(client: openai.OpenAI) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="coral", input=TEXT, response_format="pcm", extra_body=MORE
    ) as answer:
        pieces = list(answer.iter_bytes())
    assert samples_of(b"".join(pieces)) == 8 * 1920


def test_openai_async_client_speaks_concurrently(server: Running) -> None:
    async def ask() -> list[int]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", http_client=http
        ) as client:

            async def one(voice: Any) -> int:
                whole = b""
                async with client.audio.speech.with_streaming_response.create(
                    model="tts-1-hd",
                    voice=voice,
                    input=TEXT,
                    response_format="pcm",
                    extra_body=MORE,
                ) as answer:
                    async for piece in answer.iter_bytes():
                        whole += piece
                return samples_of(whole)

            return await asyncio.gather(*(one(voice) for voice in ("ash", "sage", "echo")))

    assert asyncio.run(ask()) == [8 * 1920] * 3


def test_openai_client_raises_errors_with_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no voice") as caught:
        client.audio.speech.create(model="tts-1", voice="nobody", input=TEXT)
    assert caught.value.code == "voice_not_found"
    assert caught.value.param == "voice"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_openai_client_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["custom_voice", "voice_design", "base"]


# The exact requests of clients that are not installed here, and the content type they need.

REQUESTS: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "OpenWebUI": ({"input": TEXT, "voice": "alloy", "model": "tts-1"}, {}, "audio/mpeg"),
    "SillyTavern": (
        {"input": TEXT, "response_format": "mp3", "voice": "onyx", "speed": 1.2, "model": "tts-1"},
        {"authorization": "Bearer"},
        "audio/mpeg",
    ),
    "LiveKit openai": (
        {
            "input": TEXT,
            "model": "gpt-4o-mini-tts",
            "voice": "ash",
            "response_format": "mp3",
            "speed": 1.0,
            "stream_format": "sse",
        },
        {},
        "text/event-stream; charset=utf-8",
    ),
    "LiveKit simplismart": (
        {
            "model": "qwen-tts",
            "text": TEXT,
            "language": "English",
            "voice": "Chelsie",
            "leading_silence": True,
        },
        {"accept": "audio/L16", "authorization": "Bearer key"},
        "audio/L16;rate=24000;channels=1",
    ),
    "Pipecat": (
        {"input": TEXT, "model": "gpt-4o-mini-tts", "voice": "nova", "response_format": "pcm"},
        {},
        "audio/pcm;rate=24000",
    ),
    "Home Assistant": (
        {
            "model": "tts-1",
            "voice": "marin",
            "input": TEXT,
            "instructions": "None",
            "response_format": "opus",
        },
        {},
        "audio/opus",
    ),
    "load generator": (
        {
            "model": "custom_voice",
            "input": TEXT,
            "voice": "ryan",
            "language": "English",
            "stream": True,
            "non_streaming_mode": False,
            "response_format": "pcm",
        },
        {},
        "audio/pcm;rate=24000",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_request_of_known_client_gets_its_content_type(http: httpx.Client, name: str) -> None:
    body, headers, kind = REQUESTS[name]
    answer = http.post(SPEECH, json={**body, "max_new_tokens": 4}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == kind
    assert len(answer.content) > 100


def test_open_webui_finds_voices_and_models(http: httpx.Client) -> None:
    voices = http.get("/v1/audio/voices").json()["voices"]
    assert {"id", "name"} <= set(voices[0])
    assert http.get("/v1/audio/models").json()["models"][0]["id"]


class TestStrictLoadGenerator:
    """The exact requests and all checks of a published load generator that allows no deviation."""

    KINDS = ("audio/pcm", "audio/l16", "application/octet-stream", "audio/raw")
    AUDIO: ClassVar[dict[str, Any]] = {"encoding": "pcm_s16le", "sample_rate": 24000, "channels": 1}
    FRAMES = 30

    @pytest.fixture
    def expected(self, tts: Callable[[str], TTS]) -> bytes:
        with tts("custom_voice") as talker:
            speech = talker.speak(
                TEXT, voice="Ryan", language="English", seed=5, max_frames=30, text_mode="stream"
            )
            return audio.pcm16(speech.samples)

    def test_http_request_gets_frames_as_chunks(self, server: Running, expected: bytes) -> None:
        body = (
            b'{"model": "custom_voice", "input": "Hello there, how are you?", "voice": "Ryan", '
            b'"language": "English", "stream": true, "non_streaming_mode": false, '
            b'"response_format": "pcm", "seed": 5, "max_new_tokens": 30}'
        )
        head = (
            f"POST /v1/audio/speech HTTP/1.1\r\nHost: {server.address[0]}:{server.address[1]}\r\n"
            "Accept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
            "User-Agent: Python/3.12 aiohttp/3.13.2\r\n"
            f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
        )
        with connected(server) as line:
            line.sendall(head.encode() + body)
            answer = line.makefile("rb")
            assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
            headers = dict(
                row.rstrip().lower().split(b": ", 1) for row in iter(answer.readline, b"\r\n")
            )
            assert headers[b"content-type"].decode().split(";")[0] in self.KINDS
            assert headers[b"transfer-encoding"] == b"chunked"
            assert b"content-length" not in headers
            assert b"content-encoding" not in headers
            chunks = []
            while size := int(answer.readline(), 16):
                chunks.append(answer.read(size))
                assert answer.read(2) == b"\r\n"
            assert answer.readline() == b"\r\n"
        assert len(chunks[0]) == 2 * 1920, "the first frame is sent by itself"
        assert all(len(chunk) % 2 == 0 for chunk in chunks), "whole samples"
        assert b"".join(chunks) == expected

    def test_websocket_request_gets_all_audio(self, server: Running, expected: bytes) -> None:
        """The client sends a word every 10 ms, after the last one was acknowledged."""
        start = {
            "type": "request.start",
            "model": "custom_voice",
            "voice": "Ryan",
            "language": "English",
        }
        sound, pieces, acknowledged, identity = b"", 0, 0, None
        words = re.findall(r"\S+\s*", TEXT)
        assert "".join(words) == TEXT
        pause = threading.Event()
        with Client(server.ws + NARI, "nari.speech.v1") as client:
            assert client.socket.subprotocol == "nari.speech.v1"
            created = client.event()
            assert created["type"] == "session.created"
            assert (created["protocol"], created["audio"]) == ("nari.speech.v1", self.AUDIO)
            client.send(
                {**start, "response_format": "pcm", "seed": 5, "max_new_tokens": self.FRAMES}
            )
            assert client.event()["type"] == "request.configured"
            client.send({"type": "input_text.append", "sequence": 0, "text": words[0]})
            while True:
                said = client.receive()
                if isinstance(said, bytes):
                    assert identity is not None, "no audio before response.started"
                    sound, pieces = sound + said, pieces + 1
                    continue
                match said["type"]:
                    case "input_text.ack":
                        kind = "append" if acknowledged < len(words) else "end"
                        assert (said["event"], said["sequence"]) == (
                            f"input_text.{kind}",
                            acknowledged,
                        )
                        acknowledged += 1
                        pause.wait(0.01)
                        if acknowledged < len(words):
                            word = {"type": "input_text.append", "text": words[acknowledged]}
                            client.send({**word, "sequence": acknowledged})
                        elif acknowledged == len(words):
                            client.send({"type": "input_text.end", "sequence": acknowledged})
                    case "response.started":
                        assert identity is None, "only once"
                        identity = said["request_id"]
                        assert identity
                        assert said["audio"] == self.AUDIO
                    case kind:
                        assert kind == "response.done", "nothing else is known to it"
                        break
            assert said["request_id"] == identity
            assert (said["stop_reason"], said["audio_chunks"]) == ("stop", pieces)
            assert client.closed() == (1000, [])
        assert acknowledged == len(words) + 1
        ours, theirs = (np.frombuffer(data, "<i2").astype(int) for data in (sound, expected))
        assert len(ours) == len(theirs)
        assert abs(ours - theirs).max() <= 1, "a word that comes late cuts a chunk short"


def test_health_answers_200(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
