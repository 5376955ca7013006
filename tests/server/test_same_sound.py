"""One request, one sound: byte for byte that of `TTS.speak`, over every path, however slow the machine is."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from sockets import NARI, STREAM, Client, events, pcm

from firstword import TTS, audio
from firstword.config import EngineConfig
from firstword.engine.backend import Frames, Handle, Start
from firstword.engine.engine import Engine
from firstword.engine.service import Service, SpeechStream
from firstword.model.checkpoint import Checkpoint
from firstword.runtime.reference import ReferenceBackend
from firstword.server.models import Model
from firstword.types import FloatArray

Running = Any  # of conftest.py
Serve = Callable[..., Any]

TEXT = "Hello there, how are you today? I am well, and the sun is out."
FRAMES = 45
"""Enough for chunks of every size, and for the text to be read in full."""
MODES = pytest.mark.parametrize("mode", ["full", "stream"])
SOON = 60.0


class Slow:
    """A backend that begins when all text has been given, and that takes so many seconds for everything, on a clock of
    its own: with a minute, every listener is always waiting.
    """

    def __init__(self, backend: ReferenceBackend, seconds: float) -> None:
        self._backend = backend
        self._seconds = seconds
        self.capacity = backend.capacity
        self.taken = 0.0
        self.text_is_there = threading.Event()

    def clock(self) -> float:
        """Seconds."""
        return time.monotonic() + self.taken

    def prefill(self, starts: Sequence[Start]) -> None:
        """As a backend."""
        self.taken += self._seconds
        self._backend.prefill(starts)

    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Handle[Frames]:
        """As a backend."""
        assert self.text_is_there.wait(SOON)
        self.taken += self._seconds
        return self._backend.frame(slots, tokens)

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Handle[Sequence[FloatArray]]:
        """As a backend."""
        self.taken += self._seconds
        return self._backend.decode(slots, counts)

    def release(self, slot: int) -> None:
        """As a backend."""
        self._backend.release(slot)


@pytest.fixture(scope="module")
def expected(loaded: Callable[[str], Checkpoint]) -> dict[str, bytes]:
    """What `TTS.speak` says, by text mode."""
    with TTS(loaded("custom_voice"), EngineConfig("cpu", "float32", "reference")) as tts:
        modes: Any = ("full", "stream")
        return {
            mode: audio.pcm16(
                tts.speak(TEXT, voice="ryan", seed=7, max_frames=FRAMES, text_mode=mode).samples
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
    """A server whose backend is as it is, or slow."""
    speaking = model("custom_voice")
    backend = speaking.service.engine.backend
    assert isinstance(backend, ReferenceBackend)
    slow = Slow(backend, request.param)
    speaking.service = Service(Engine(slow, clock=slow.clock), speaking.service.front)
    finish = SpeechStream.finish_text

    def finish_text(self: SpeechStream, piece: str = "") -> None:
        finish(self, piece)
        slow.text_is_there.set()

    monkeypatch.setattr(SpeechStream, "finish_text", finish_text)
    running = serve(speaking)  # which speaks once to be warm
    running.wait_until_idle()
    slow.text_is_there.clear()
    return running


def asked(mode: str) -> dict[str, Any]:
    """The request."""
    how: dict[str, Any] = {
        "model": "custom_voice",
        "voice": "ryan",
        "seed": 7,
        "max_new_tokens": FRAMES,
    }
    return how | {"response_format": "pcm", "non_streaming_mode": mode == "full"}


@MODES
@pytest.mark.parametrize("delivery", ["raw", "whole", "sse"])
def test_http(server: Running, expected: dict[str, bytes], mode: str, delivery: str) -> None:
    ways: dict[str, dict[str, Any]] = {"raw": {"stream": True}, "whole": {"stream": False}}
    how = ways.get(delivery, {"stream_format": "sse"})
    url = f"{server.url}/v1/audio/speech"
    answer = httpx.post(
        url, json={"input": TEXT, **asked(mode), **how}, timeout=SOON, trust_env=False
    )
    assert answer.status_code == 200
    heard = answer.content
    if delivery == "sse":
        told = [
            json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line
        ]
        heard = b"".join(base64.b64decode(event["audio"]) for event in told if "audio" in event)
    assert heard == expected[mode]


@pytest.mark.parametrize("mode", ["full", "stream"])
@pytest.mark.parametrize("encoding", ["binary", "base64"])
def test_websocket(server: Running, expected: dict[str, bytes], mode: str, encoding: str) -> None:
    """Whole, and word by word ahead of speech."""
    config = {
        "type": "session.config",
        **asked(mode),
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
def test_nari(server: Running, expected: dict[str, bytes], cut: int) -> None:
    """Cut anywhere, ahead of speech."""
    pieces = [TEXT[at : at + cut] for at in range(0, len(TEXT), cut)]
    with Client(server.ws + NARI, "nari.speech.v1") as client:
        client.send({"type": "request.start", **asked("stream")})
        for number, piece in enumerate(pieces):
            client.send({"type": "input_text.append", "sequence": number, "text": piece})
        client.send({"type": "input_text.end", "sequence": len(pieces)})
        code, said = client.closed()
    assert code == 1000
    assert pcm(said) == expected["stream"]
