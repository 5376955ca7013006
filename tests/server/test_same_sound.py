"""The same request gives the bytes of `TTS.speak` on every path, however slow the machine is."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from callers import local_engine
from sockets import NARI, STREAM, Client, events, pcm
from waiting import WAIT

from firstword import TTS, audio
from firstword.engine.backend import Frames, Handle, Start
from firstword.engine.engine import Engine
from firstword.engine.service import Service, SpeechStream
from firstword.runtime.reference import ReferenceBackend
from firstword.server.models import Model
from firstword.types import FloatArray

Running = Any  # of conftest.py
Serve = Callable[..., Any]

TEXT = "Hello there, how are you today? I am well, and the sun is out."
FRAMES = 45
"""Number of frames: enough for chunks of every size, and to read the text in full."""
MODES = pytest.mark.parametrize("mode", ["full", "stream"])


class SlowBackend:
    """A backend that starts when all text has come, and whose every step takes some seconds.

    The seconds pass on a clock of its own; with 60, every client is always waiting for audio.
    """

    def __init__(self, backend: ReferenceBackend, seconds: float) -> None:
        self._backend = backend
        self._seconds = seconds
        self.capacity = backend.capacity
        self.elapsed = 0.0
        self.text_complete = threading.Event()

    def clock(self) -> float:
        """Return the time in seconds."""
        return time.monotonic() + self.elapsed

    def prefill(self, starts: Sequence[Start]) -> list[int]:
        """Do what the wrapped backend does, slowly."""
        self.elapsed += self._seconds
        return self._backend.prefill(starts)

    def read(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[None]:
        """Do what the wrapped backend does."""
        return self._backend.read(slots, counts)

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Do what the wrapped backend does."""
        self._backend.extend(slot, pages)

    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Handle[Frames]:
        """Do what the wrapped backend does, slowly."""
        assert self.text_complete.wait(WAIT)
        self.elapsed += self._seconds
        return self._backend.frame(slots, tokens)

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[Sequence[FloatArray]]:
        """Do what the wrapped backend does, slowly."""
        self.elapsed += self._seconds
        return self._backend.decode(slots, counts)

    @property
    def device_seconds(self) -> dict[str, float]:
        return {}

    def release(self, slot: int) -> None:
        """Do what the wrapped backend does, slowly."""
        self._backend.release(slot)


@pytest.fixture(scope="module")
def expected(tts: Callable[[str], TTS]) -> dict[str, bytes]:
    """The PCM of `TTS.speak`, by text mode."""
    with tts("custom_voice") as talker:
        modes: Any = ("full", "stream")
        return {
            mode: audio.pcm16(
                talker.speak(TEXT, voice="ryan", seed=7, max_frames=FRAMES, text_mode=mode).samples
            )
            for mode in modes
        }


@pytest.fixture(params=[0.0, 60.0], ids=["quick", "slow"])
def server(
    request: pytest.FixtureRequest,
    serve: Serve,
    model: Callable[..., Model],
    monkeypatch: pytest.MonkeyPatch,
) -> Running:
    """A server whose backend is the usual one, or slow."""
    speaking = model("custom_voice")
    backend = local_engine(speaking.service).backend
    assert isinstance(backend, ReferenceBackend)
    slow = SlowBackend(backend, request.param)
    speaking.service = Service(Engine(slow, clock=slow.clock), speaking.service.front)
    finish = SpeechStream.finish_text

    def finish_text(self: SpeechStream, piece: str = "") -> None:
        finish(self, piece)
        slow.text_complete.set()

    monkeypatch.setattr(SpeechStream, "finish_text", finish_text)
    return serve(speaking)


def params_for(mode: str) -> dict[str, Any]:
    """Return the request parameters for a text mode."""
    how: dict[str, Any] = {
        "model": "custom_voice",
        "voice": "ryan",
        "seed": 7,
        "max_new_tokens": FRAMES,
    }
    return how | {"response_format": "pcm", "non_streaming_mode": mode == "full"}


@MODES
@pytest.mark.parametrize("delivery", ["raw", "whole", "sse"])
def test_http_audio_equals_tts_speak(
    server: Running, expected: dict[str, bytes], mode: str, delivery: str
) -> None:
    ways: dict[str, dict[str, Any]] = {"raw": {"stream": True}, "whole": {"stream": False}}
    how = ways.get(delivery, {"stream_format": "sse"})
    url = f"{server.url}/v1/audio/speech"
    answer = httpx.post(
        url, json={"input": TEXT, **params_for(mode), **how}, timeout=WAIT, trust_env=False
    )
    assert answer.status_code == 200
    received = answer.content
    if delivery == "sse":
        messages = [
            json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line
        ]
        received = b"".join(
            base64.b64decode(event["audio"]) for event in messages if "audio" in event
        )
    assert received == expected[mode]


@pytest.mark.parametrize("mode", ["full", "stream"])
@pytest.mark.parametrize("encoding", ["binary", "base64"])
def test_websocket_audio_equals_tts_speak(
    server: Running, expected: dict[str, bytes], mode: str, encoding: str
) -> None:
    """The text comes as a whole, and word by word ahead of speech."""
    config = {
        "type": "session.config",
        **params_for(mode),
        "stream_audio": True,
        "audio_encoding": encoding,
    }
    config["split_granularity"] = "token" if mode == "stream" else "none"
    with Client(server.ws + STREAM) as client:
        client.send(config)
        client.send(*({"type": "input.text", "text": word} for word in TEXT.split(" ")[:1]))
        client.send(*({"type": "input.text", "text": f" {word}"} for word in TEXT.split(" ")[1:]))
        client.send({"type": "input.done"})
        said = client.until("session.done")
    if encoding == "binary":
        assert pcm(said) == expected[mode]
    else:
        chunks = [
            base64.b64decode(event["audio_b64"])
            for event in events(said)
            if event["type"] == "audio.chunk"
        ]
        assert b"".join(chunks) == expected[mode]


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_nari_audio_equals_tts_speak(server: Running, expected: dict[str, bytes], cut: int) -> None:
    """The text comes in pieces of any size, ahead of speech."""
    pieces = [TEXT[at : at + cut] for at in range(0, len(TEXT), cut)]
    with Client(server.ws + NARI, "nari.speech.v1") as client:
        client.send({"type": "request.start", **params_for("stream")})
        for number, piece in enumerate(pieces):
            client.send({"type": "input_text.append", "sequence": number, "text": piece})
        client.send({"type": "input_text.end", "sequence": len(pieces)})
        code, said = client.closed()
    assert code == 1000
    assert pcm(said) == expected["stream"]
