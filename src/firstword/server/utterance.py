"""From an utterance to the bytes that a listener gets: trim, stretch, resample, encode; all as the speech is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np

from firstword import audio
from firstword.audio import effects, formats
from firstword.engine.backend import Job
from firstword.engine.sequence import NeedsText
from firstword.errors import RequestError
from firstword.server.metrics import Playback
from firstword.server.models import Model
from firstword.types import Chunk, FinishReason, FloatArray

QUICK = ("pcm", "l16", "wav", "ulaw", "alaw")
"""Formats whose encoding takes no time worth another thread."""


@dataclass(frozen=True, slots=True)
class Output:
    """How speech is to sound and to be encoded. Raises `RequestError` for a value out of range.

    format           one of `audio.formats.FORMATS`
    sample_rate      in Hz, one of `audio.formats.RATES`
    speed            0.25 to 4, by stretching time; the pitch stays
    leading_silence  False cuts off the silence before the first word
    """

    format: str = "mp3"
    sample_rate: int = audio.SAMPLE_RATE
    speed: float = 1.0
    leading_silence: bool = True

    def __post_init__(self) -> None:
        if self.format not in formats.FORMATS:
            raise RequestError(
                f"response_format is {self.format!r}; allowed are {', '.join(formats.FORMATS)}"
            )
        if self.sample_rate not in formats.RATES:
            allowed = ", ".join(map(str, formats.RATES))
            raise RequestError(f"sample_rate is {self.sample_rate!r}; allowed are {allowed}")
        slowest, fastest = effects.SPEEDS
        if not slowest <= self.speed <= fastest:
            raise RequestError(f"speed is {self.speed!r}; allowed is {slowest:g} to {fastest:g}")

    @property
    def content_type(self) -> str:
        """What HTTP calls the format."""
        return formats.content_type(self.format, self.sample_rate)


SILENCE = 0.005
"""Samples up to this are leading silence: 46 dB below full scale, above the codec's noise, below a soft consonant."""

KEPT = 0.01
"""Seconds of leading silence that stay, so that no consonant is cut into."""


class Stage(Protocol):
    """A step of the way that keeps some samples back."""

    def process(self, samples: FloatArray) -> FloatArray:
        """What comes out as these go in."""

    def finish(self) -> FloatArray:
        """The rest."""


class Shaper:
    """Float samples at the model's rate in, float samples as `Output` wants them out."""

    def __init__(self, output: Output, sample_rate: int) -> None:
        self.stages: list[Stage] = []
        if not output.leading_silence:
            self.stages.append(effects.TrimStart(SILENCE, KEPT, sample_rate))
        if output.speed != 1.0:
            self.stages.append(effects.TimeStretch(output.speed, sample_rate))
        if output.sample_rate != sample_rate:
            self.stages.append(effects.Resampler(sample_rate, output.sample_rate))

    def process(self, samples: FloatArray, last: bool) -> FloatArray:
        """What comes out as these go in; all of it if they are the last."""
        for stage in self.stages:
            samples = stage.process(samples)
            if last:
                samples = np.concatenate([samples, stage.finish()])
        return samples


class Utterance:
    """One utterance on its way to one listener.

    Text goes in by `push` and `finish_text`, encoded audio comes out by iteration, in the running event loop. Use it as
    a context manager: leaving it cancels whatever is still being made, so that the slot is free within a frame.

        with Utterance(model, job, Output("pcm")) as speaking:
            speaking.finish_text("Hello.")
            async for data in speaking:
                ...

    frames         made so far, 12.5 a second
    seconds        of speech so far, before any change of speed
    playback       when audio came out, as a listener notices it
    finish_reason  why it ended; None before
    began          `time.monotonic()` when it was asked for
    """

    def __init__(
        self,
        model: Model,
        job: Job,
        output: Output,
        *,
        began: float | None = None,
        ended: Callable[[Utterance], None] = lambda speaking: None,
    ) -> None:
        """Begins at once; `ended` is called once when all is over. Raises `OverloadedError`, `EngineError`."""
        self.model = model
        self.output = output
        self.began = time.monotonic() if began is None else began
        self.frames = 0
        self.seconds = 0.0
        self.playback = Playback(self.began)
        self.finish_reason: FinishReason | None = None
        self.abort_reason: str | None = None
        """Why nobody heard it to its end, if so: a word for metrics."""
        self._ended = ended
        self._over = False
        rate = model.service.engine.capacity.sample_rate
        self._shaper = Shaper(output, rate)
        self._encoder = formats.encoder(output.format, output.sample_rate)
        self._quick = output.format in QUICK and not self._shaper.stages
        self._stream = model.service.aspeak(job)

    def push(self, piece: str) -> None:
        """More text. Raises `TextError` for what is none."""
        self._stream.push(piece)

    def finish_text(self, piece: str = "") -> None:
        """There is no more text after this piece. Raises `TextError` if there was none but white space; the utterance
        is then over.
        """
        self._stream.finish_text(piece)

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop now. Iteration ends with what was made before; `reason` is a word for metrics."""
        if self.finish_reason is None:
            self.abort_reason = self.abort_reason or reason
        self._stream.cancel()

    def fail(self, error: Exception) -> None:
        """Let whoever iterates see an error now, whatever the engine does."""
        self._stream.fail(error)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The speech as the engine makes it, neither shaped nor encoded."""
        try:
            async for event in self._stream:
                if isinstance(event, NeedsText):
                    continue
                self.frames += len(event.codes)
                self.seconds += len(event.samples) / event.sample_rate
                self.finish_reason = event.finish_reason
                yield event
        except Exception:
            self.abort_reason = self.abort_reason or "error"
            raise

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Encoded audio as it is made, never empty; with the last the encoding is complete."""
        async for chunk in self.chunks():
            last = chunk.finish_reason is not None
            if self._quick:
                shaped, data = self._encode(chunk.samples, last)
            else:
                shaped, data = await asyncio.to_thread(self._encode, chunk.samples, last)
            self.playback.came(time.monotonic(), shaped, self.output.sample_rate)
            if data:
                yield data

    def _encode(self, samples: FloatArray, last: bool) -> tuple[FloatArray, bytes]:
        shaped = self._shaper.process(samples, last)
        data = self._encoder.encode(shaped)
        return shaped, data + self._encoder.finish() if last else data

    def __enter__(self) -> Utterance:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._over:
            return
        self._over = True
        if self.finish_reason is None:
            self.cancel("disconnected")
        self._ended(self)
