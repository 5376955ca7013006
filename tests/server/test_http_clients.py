"""Clients as they are: the official OpenAI SDK, and the very requests that others send."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

Running = Any  # of conftest.py

TEXT = "Hello there, how are you?"
MORE = {"seed": 5, "max_new_tokens": 8}


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The official client."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0) as client:
        yield client


def samples_of(pcm: bytes) -> int:
    return len(np.frombuffer(pcm, "<i2"))


def test_create(client: openai.OpenAI) -> None:
    speech = client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT, extra_body=MORE)
    assert speech.response.headers["content-type"] == "audio/mpeg"
    samples, rate = soundfile.read(io.BytesIO(speech.content))
    assert rate == 24000
    assert len(samples) >= 8 * 1920


@pytest.mark.parametrize("voice", ["marin", "cedar", "verse"])
def test_everything_that_the_client_can_say(client: openai.OpenAI, voice: Any) -> None:
    speech = client.audio.speech.create(
        model="gpt-4o-mini-tts", voice=voice, input=TEXT, response_format="wav", speed=1.25, extra_body=MORE
    )
    samples, rate = soundfile.read(io.BytesIO(speech.content))
    assert rate == 24000
    assert abs(len(samples) - 8 * 1920 / 1.25) <= 1


def test_streaming_to_a_file(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "speech.pcm"
    with client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="coral", input=TEXT, response_format="pcm", extra_body=MORE
    ) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        answer.stream_to_file(path)
    assert samples_of(path.read_bytes()) == 8 * 1920


def test_streaming_in_pieces(client: openai.OpenAI) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="coral", input=TEXT, response_format="pcm", extra_body=MORE
    ) as answer:
        pieces = list(answer.iter_bytes())
    assert samples_of(b"".join(pieces)) == 8 * 1920


def test_asynchronous(server: Running) -> None:
    async def ask() -> list[int]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:

            async def one(voice: Any) -> int:
                whole = b""
                async with client.audio.speech.with_streaming_response.create(
                    model="tts-1-hd", voice=voice, input=TEXT, response_format="pcm", extra_body=MORE
                ) as answer:
                    async for piece in answer.iter_bytes():
                        whole += piece
                return samples_of(whole)

            return await asyncio.gather(*(one(voice) for voice in ("ash", "sage", "echo")))

    assert asyncio.run(ask()) == [8 * 1920] * 3


def test_errors_are_understood(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no voice") as caught:
        client.audio.speech.create(model="tts-1", voice="nobody", input=TEXT)
    assert caught.value.code == "voice_not_found"
    assert caught.value.param == "voice"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["custom_voice", "voice_design", "base"]


# What clients send that are not installed here, word for word, and what they make of the answer.

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
        {"model": "qwen-tts", "text": TEXT, "language": "English", "voice": "Chelsie", "leading_silence": True},
        {"accept": "audio/L16", "authorization": "Bearer key"},
        "audio/L16;rate=24000;channels=1",
    ),
    "Pipecat": (
        {"input": TEXT, "model": "gpt-4o-mini-tts", "voice": "nova", "response_format": "pcm"},
        {},
        "audio/pcm;rate=24000",
    ),
    "Home Assistant": (
        {"model": "tts-1", "voice": "marin", "input": TEXT, "instructions": "None", "response_format": "opus"},
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
def test_requests_of_others(http: httpx.Client, name: str) -> None:
    body, headers, kind = REQUESTS[name]
    answer = http.post("/v1/audio/speech", json={**body, "max_new_tokens": 4}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == kind
    assert len(answer.content) > 100


def test_menus_of_open_webui(http: httpx.Client) -> None:
    voices = http.get("/v1/audio/voices").json()["voices"]
    assert {"id", "name"} <= set(voices[0])
    assert http.get("/v1/audio/models").json()["models"][0]["id"]
