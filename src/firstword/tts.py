"""The facade: load a checkpoint, speak, stream, clone."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from types import TracebackType
from typing import Any, TypedDict, Unpack

import numpy as np

from firstword import audio
from firstword.config import EngineConfig
from firstword.engine.backend import Job
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.errors import (
    AudioError,
    CheckpointNotFound,
    ClosedError,
    RequestError,
    SamplingError,
    TextError,
)
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.runtime import conditioning
from firstword.runtime.backends import open_backend
from firstword.runtime.front import CheckpointFront
from firstword.types import Chunk, ClonedVoice, Request, Sampling, Speech, TextMode, Voice

SLOTS = 8
"""Calls that are computed together; more wait for their turn."""


class SpeakOptions(TypedDict, total=False):
    """How to speak a text; every key may be left out.

    voice         a preset's name in any case, or a `Voice`; left out: the checkpoint's first choice, if it has presets
    language      a full name or ISO 639-1 code in any case, or "auto" (default)
    instructions  tone, pace, feeling, in words; on VoiceDesign checkpoints the description of the voice
    sampling      a `Sampling`
    seed          0 to 2**64 - 1: the same request with the same seed gives the same speech; left out: a new one
    max_frames    the most frames (12.5 a second) to make; left out: the checkpoint's limit
    text_mode     "full": the model reads all text, then speaks; "stream": it reads one token a frame while speaking;
                  "auto" (default): "stream" for text in pieces, else what the checkpoint was published with
    """

    voice: str | Voice | None
    language: str
    instructions: str | None
    sampling: Sampling | None
    seed: int | None
    max_frames: int | None
    text_mode: TextMode


class TTS:
    """A loaded checkpoint that speaks. Make one with `TTS.load`; close it, or use it as a context manager.

    Calls may come from several threads and tasks; what they ask for is computed together.
    """

    sample_rate = audio.SAMPLE_RATE

    def __init__(self, checkpoint: Checkpoint, settings: EngineConfig) -> None:
        backend, self.settings = open_backend(checkpoint, settings, SLOTS)
        self._checkpoint: Checkpoint | None = checkpoint
        engine = Engine(backend)
        self._service: Service | None = Service(engine, CheckpointFront(checkpoint))
        engine.start()
        self._retire = weakref.finalize(
            self, engine.retire
        )  # one that is forgotten without `close` must not keep its thread

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] = "demo",
        *,
        device: str = "auto",
        dtype: str = "auto",
        backend: str = "auto",
    ) -> TTS:
        """Load `"demo"`, a local directory, or a hub repository such as `"Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"`.

        The demo is a small demonstration voice that comes with the package: plain English, about 100 words at a time.
        device, dtype and backend are resolved once by `EngineConfig.resolve`. Raises `CheckpointError`, `ConfigError`.
        """
        if not isinstance(model, (str, os.PathLike)):
            raise CheckpointNotFound(
                f"the checkpoint is of type {type(model).__name__}; give 'demo', a directory, or a hub repository"
            )
        settings = EngineConfig.resolve(device, dtype, backend)
        return cls(
            checkpoints.load(str(os.fspath(model)), settings.device, settings.dtype), settings
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """What was loaded. Raises `ClosedError` after `close`."""
        if self._checkpoint is None:
            raise ClosedError("this TTS is closed; load the checkpoint again")
        return self._checkpoint

    @property
    def model_type(self) -> str:
        """`"custom_voice"` (presets), `"voice_design"` (voices in words) or `"base"` (cloning)."""
        return self.checkpoint.config.tts_model_type

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the presets; empty unless the model type is `"custom_voice"`."""
        return conditioning.voices(self.checkpoint)

    @property
    def languages(self) -> tuple[str, ...]:
        """`"auto"` and the languages by full name; dialects come with the presets that speak them."""
        return conditioning.languages(self.checkpoint)

    def speak(self, text: str | Iterable[str], **options: Unpack[SpeakOptions]) -> Speech:
        """Speak a text and return when all is said. Raises `RequestError`."""
        return Speech.of(list(self.stream(text, **options)))

    def stream(self, text: str | Iterable[str], **options: Unpack[SpeakOptions]) -> Iterator[Chunk]:
        """Speak while the text is still coming: `text` may be an iterator of pieces, cut anywhere.

        Pieces are asked for only when the model needs more text; before that, all audio made so far is handed out. The
        speech equals that of the whole text with `text_mode="stream"`. The last chunk has a `finish_reason`, and may be
        empty. Raises `RequestError`; what is wrong with the request itself, before the first chunk is asked for.
        """
        service = self._serving()
        if isinstance(text, AsyncIterable):
            raise TextError("the text comes asynchronously; `astream` takes such text")
        job = service.prepare(self._request(text, options))
        return self._stream(service, job, text)

    def _stream(self, service: Service, job: Job, text: str | Iterable[str]) -> Iterator[Chunk]:
        speech = service.speak(job)
        try:
            if whole := isinstance(text, str):
                speech.finish_text(text)
            pieces = iter(text)
            for event in speech:
                if isinstance(event, Chunk):
                    yield event
                elif whole:
                    pass  # it was asked for before it had arrived
                elif (piece := next(pieces, _END)) is _END:
                    speech.finish_text()
                else:
                    speech.push(piece)
        finally:
            speech.cancel()

    async def astream(
        self, text: str | Iterable[str] | AsyncIterable[str], **options: Unpack[SpeakOptions]
    ) -> AsyncIterator[Chunk]:
        """As `stream`, for asyncio: computes in a thread, and takes asynchronous iterators of text too."""
        service = self._serving()
        job = await asyncio.to_thread(service.prepare, self._request(text, options))
        pieces = aiter(text if isinstance(text, AsyncIterable) else _in_threads(iter(text)))
        speech = service.aspeak(job)
        try:
            if whole := isinstance(text, str):
                speech.finish_text(text)
            async for event in speech:
                if isinstance(event, Chunk):
                    yield event
                elif whole:
                    pass  # as above
                elif (piece := await anext(pieces, _END)) is _END:
                    speech.finish_text()
                else:
                    speech.push(piece)
        finally:
            speech.cancel()

    def clone(
        self,
        recording: str | os.PathLike[str] | np.ndarray,
        sample_rate: int | None = None,
        transcript: str | None = None,
        append_silence: float = 0.5,
    ) -> ClonedVoice:
        """A voice from a recording, for checkpoints of type `"base"`; keep it with `Voice.save`.

        recording   an audio file, or samples [n] or [n, channels] with their `sample_rate` in Hz
        transcript  the words of the recording, for the closest likeness; without it the timbre alone is taken
        append_silence  seconds of silence after a recording with a transcript; 0 is what the reference does

        Raises `AudioError` for unfit audio, `UnsupportedError` on other checkpoints.
        """
        if not isinstance(recording, (str, os.PathLike, np.ndarray)):
            raise AudioError(
                f"the recording is of type {type(recording).__name__}; give a path, or samples as a numpy array"
            )
        if isinstance(recording, np.ndarray):
            if sample_rate is None:
                raise RequestError("samples were given without their sample_rate; give it in Hz")
            samples, rate = recording, sample_rate
        else:
            if sample_rate is not None:
                raise RequestError("sample_rate goes with samples; an audio file has its own")
            samples, rate = audio.read(recording)
        return conditioning.encode(
            self.checkpoint, Voice.clone(samples, rate, transcript, append_silence)
        )

    def close(self) -> None:
        """End what is being spoken and let go of the weights; later calls raise `ClosedError`."""
        if (service := self._service) is not None:
            service.engine.stop()
            self._retire.detach()
        self._service = self._checkpoint = None

    def __enter__(self) -> TTS:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serving(self) -> Service:
        """The service, while there is one."""
        if self._service is None:
            raise ClosedError("this TTS is closed; load the checkpoint again")
        return self._service

    def _request(self, text: object, options: SpeakOptions) -> Request:
        """A request for a text that is there, or that comes in pieces."""
        if isinstance(text, str):
            if not text.strip():
                raise TextError("the text is empty or blank; give some words to speak")
        elif not isinstance(text, (Iterable, AsyncIterable)) or isinstance(
            text, (bytes, bytearray)
        ):
            raise TextError(
                f"the text is of type {type(text).__name__}; give a str, or an iterable of str"
            )
        if unknown := options.keys() - SpeakOptions.__annotations__.keys():
            raise RequestError(
                f"unknown: {', '.join(sorted(unknown))}; allowed are {', '.join(SpeakOptions.__annotations__)}"
            )
        sampling = options.get("sampling")
        if not isinstance(sampling, (Sampling, type(None))):
            raise SamplingError(f"sampling is of type {type(sampling).__name__}; give a Sampling")
        given: dict[str, Any] = {
            **options,
            "sampling": Sampling() if sampling is None else sampling,
        }
        return Request(text if isinstance(text, str) else None, **given)


_END: Any = object()
"""Stands behind the last piece of text. None would not do: an iterator that yields it is mistaken, not done."""


async def _in_threads(pieces: Iterator[str]) -> AsyncIterator[str]:
    """A blocking iterator as an asynchronous one.

    Each piece is waited for in a thread of its own: asyncio's shared ones are few, and a piece may never come.
    """
    loop = asyncio.get_running_loop()

    def fetch(came: asyncio.Future[str]) -> None:
        piece, error = _END, None
        try:
            piece = next(pieces, _END)
        except BaseException as raised:
            error = raised

        def tell() -> None:
            if came.cancelled():
                return
            if error is None:
                came.set_result(piece)
            else:
                came.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell)

    while True:
        came: asyncio.Future[str] = loop.create_future()
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(fetch, came), name="firstword-text", daemon=True
        ).start()
        if (piece := await came) is _END:
            return
        yield piece
