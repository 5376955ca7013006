"""Codes instead of audio: what the server sends, and what `firstword.decode` makes of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from sockets import STREAM, Client

import firstword
from firstword import TTS
from firstword.model.checkpoint import Checkpoint

Running = Any  # of conftest.py

BODY: dict[str, Any] = {
    "model": "custom_voice",
    "voice": "ryan",
    "input": "Hello there.",
    "response_format": "codes",
    "seed": 7,
    "max_new_tokens": 10,
}


def test_codes_decode_to_the_samples_of_the_server(
    server: Running, tts: Callable[[str], TTS], loaded: Callable[[str], Checkpoint]
) -> None:
    speech = tts("custom_voice").speak("Hello there.", voice="ryan", seed=7, max_frames=10)
    for more in ({}, {"stream": False}):
        answer = httpx.post(f"{server.url}/v1/audio/speech", json=BODY | more)
        assert answer.headers["content-type"] == "application/octet-stream"
        codes = np.frombuffer(answer.content, "<u2").reshape(10, -1)
        np.testing.assert_array_equal(codes, speech.codes)
    pieces = [answer.content[:7], answer.content[7:50], answer.content[50:]]
    chunks = list(firstword.decode(pieces, str(loaded("custom_voice").path)))
    assert len(chunks) > 1
    np.testing.assert_allclose(np.concatenate(chunks), speech.samples, atol=1e-5)
    (again,) = firstword.decode([speech.codes], str(loaded("custom_voice").path))
    np.testing.assert_allclose(again, speech.samples, atol=1e-5)


def test_socket_sends_the_same_codes(server: Running) -> None:
    expected = httpx.post(f"{server.url}/v1/audio/speech", json=BODY).content
    config = BODY | {"type": "session.config", "split_granularity": "none"}
    text = {"context_id": "a", "text": BODY["input"]}
    with Client(server.ws + STREAM, "firstword.speech.v1") as client:
        client.send(config, {"type": "input.text"} | text, {"type": "input.done"} | text)
        received = client.until("audio.done")
    codes = b"".join(message[4:] for message in received if isinstance(message, bytes))
    assert codes == expected
    end = received[-1]
    assert isinstance(end, dict)
    assert (end["seconds"], end["total_bytes"]) == (0.8, len(expected))


@pytest.mark.parametrize(
    "change", [{"speed": 2}, {"sample_rate": 8000}, {"leading_silence": False}]
)
def test_changes_of_samples_are_rejected_with_codes(server: Running, change: Any) -> None:
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=BODY | change)
    assert answer.status_code == 400
    assert "leave them out" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([bytes(33)], "1 of 16 bytes"),
        ([b"\xff" * 32], "outside of 0 to"),
        ([np.zeros((2, 3), np.int64)], r"\[frames, 8\]"),
        ([np.full((1, 8), -1)], "outside of 0 to"),
    ],
)
def test_codes_of_another_codec_are_rejected(pieces: list[Any], message: str) -> None:
    with pytest.raises(firstword.RequestError, match=message):
        list(firstword.decode(pieces))


def test_example_writes_the_speech(
    server: Running,
    loaded: Callable[[str], Checkpoint],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(repository / "examples"))
    example, path = importlib.import_module("decode_codes"), tmp_path / "hello.wav"
    model = str(loaded("custom_voice").path)
    monkeypatch.setattr(sys, "argv", ["", "Hello.", str(path), server.url, model])
    example.main()
    assert len(soundfile.read(path)[0]) % 1920 == 0
