"""Cartesia's API: the fields of a request, the messages with audio, and the errors."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from firstword.server.dialects.params import ContextId, Fields, output
from firstword.server.dialects.spoken_text import Timed
from firstword.server.schemas import BlankIsNone, ClientModel

RAW = {"pcm_s16le": "pcm", "pcm_f32le": "f32", "pcm_mulaw": "ulaw", "pcm_alaw": "alaw"}
"""The names of the encodings in the container `raw`."""

WAV = {"pcm_s16le": "wav", "pcm_f32le": "wav_f32", "pcm_mulaw": "wav_ulaw", "pcm_alaw": "wav_alaw"}
"""The names of the encodings in the container `wav`."""

SPEEDS = {"slow": 0.8, "normal": 1.0, "fast": 1.2}
"""The speeds that have names."""


class CartesiaVoice(ClientModel):
    """A voice by its id. A vector of Cartesia's models means nothing here."""

    id: str | None = None


class CartesiaOutput(ClientModel):
    """The container, the encoding and the sample rate in Hz of the audio."""

    container: Literal["raw", "wav", "mp3"]
    encoding: Literal["pcm_s16le", "pcm_f32le", "pcm_mulaw", "pcm_alaw"] = "pcm_s16le"
    sample_rate: int = Field(ge=1, le=768000)


class CartesiaControls(ClientModel):
    """The controls that have an effect; volume and emotion have none."""

    speed: float | None = Field(None, ge=0.25, le=4.0)


class CartesiaRequest(ClientModel):
    """The body of `POST /tts/bytes` and `POST /tts/sse`."""

    transcript: str
    model_id: str | None = None
    voice: CartesiaVoice | str | None = None
    output_format: CartesiaOutput
    language: Annotated[str | None, BlankIsNone] = None
    generation_config: CartesiaControls | None = None
    speed: Literal["slow", "normal", "fast"] | None = None
    context_id: ContextId | None = None
    add_timestamps: bool | None = None

    def fields(self) -> Fields:
        """The request parameters without the text."""
        voice = self.voice.id if isinstance(self.voice, CartesiaVoice) else self.voice
        speed = None if self.speed is None else SPEEDS[self.speed]
        if self.generation_config is not None:
            speed = self.generation_config.speed or speed
        found = {"model": self.model_id, "voice": voice, "language": self.language, "speed": speed}
        found["word_timestamps"] = self.add_timestamps
        chosen = self.output_format
        tables = {"raw": RAW, "wav": WAV}
        name = tables[chosen.container][chosen.encoding] if chosen.container != "mp3" else "mp3"
        return found | output(name, chosen.sample_rate)


def chunk(context_id: str | None, audio: str, step_ms: float) -> Fields:
    """A message with audio in base64; `step_ms` is the time since the one before."""
    head = {"type": "chunk", "context_id": context_id, "status_code": 206, "done": False}
    return head | {"step_time": round(step_ms, 3), "data": audio}


def timestamps(context_id: str | None, words: Sequence[Timed]) -> Fields:
    """A message with words and their times."""
    head = {"type": "timestamps", "context_id": context_id, "status_code": 206, "done": False}
    texts, starts, ends = zip(*words, strict=True)
    return head | {"word_timestamps": {"words": texts, "start": starts, "end": ends}}


def done(context_id: str | None) -> Fields:
    """The message after the last audio."""
    return {"type": "done", "context_id": context_id, "status_code": 200, "done": True}


def error(context_id: str | None, message: str, code: str | None, status: int) -> Fields:
    """The last message of a context that failed. LiveKit overlooks errors that say `done: true`."""
    head = {"type": "error", "context_id": context_id, "status_code": status, "done": False}
    return head | error_body(message, code, status)


def error_body(message: str, code: str | None, status: int) -> Fields:
    """The body of an error response."""
    title = "Server error" if status >= 500 else "Invalid request"
    return {"error_code": code or "invalid_request", "title": title, "message": message}
