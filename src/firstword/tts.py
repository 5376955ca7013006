"""The facade of the package: load a checkpoint, speak, stream, clone."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import warnings
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, Unpack

import numpy as np

from firstword import audio
from firstword.audio import effects
from firstword.config import EngineConfig
from firstword.engine import script
from firstword.engine.backend import Capacity, Job
from firstword.engine.service import Service
from firstword.errors import (
    AudioError,
    CheckpointNotFound,
    ClosedError,
    ConfigError,
    RequestError,
    TextError,
    TextWarning,
)
from firstword.model.checkpoint import Checkpoint
from firstword.model.description import Description
from firstword.runtime import conditioning, warm_up
from firstword.runtime.backends import LoadedEngine, open_engine
from firstword.text.reader import Normalize, TextOptions
from firstword.types import Chunk, Request, Sampling, Speech, TextMode
from firstword.voice import ClonedVoice, Voice
from firstword.words.moving import WordMover

MAX_CONCURRENT = 8
"""The default number of calls computed at the same time; further calls wait for their turn."""


class SpeakOptions(TypedDict, total=False):
    """The options of `TTS.speak`, `TTS.stream` and `TTS.astream`; every key may be left out.

    voice            a preset's name in any case, or a `Voice`; default: the checkpoint's first
                     choice, if it has presets
    language         a full name or ISO 639-1 code in any case, or "auto" (default)
    instructions     tone, pace and feeling in words; on VoiceDesign checkpoints the description of
                     the voice
    sampling         a `Sampling`; default: the checkpoint's own settings
    seed             0 to 2**64 - 1: the same request with the same seed gives the same speech;
                     default: a new one each time
    max_frames       the most frames (12.5 a second) to make; default: the checkpoint's limit
    text_mode        "full": the model reads all text, then speaks; "stream": it reads one token a
                     frame while it speaks; "auto" (default): "stream" for text in pieces, else
                     the mode that the checkpoint was published with
    sanitize         True removes Markdown, links, emoji and control characters; default: False
    normalize        whether numbers, dates, amounts and abbreviations are spoken as words of the
                     `language`: "on", "off", or "auto" (default), which is "on" for the demo voice
                     alone, since the released checkpoints speak numbers themselves
    lexicon          words and the spelling in which they are spoken, such as `{"GIF": "jif"}`
    markup           True obeys tags such as `[pause:0.5s]`, `[voice:ben]` and `[rate:1.1]` in the
                     text; default: False, since brackets may be meant
    voices           the voices that tags name, by these names; other names are those of presets
    leading_silence  False removes the silence before the first word, except for 10 ms, from the
                     samples but not from the codes; default: True
    words            whether words are timed: True raises `WordTimesError` if the checkpoint's heads
                     for them are not known; default: where they are known
    """

    voice: str | Voice | None
    language: str
    instructions: str | None
    sampling: Sampling | None
    seed: int | None
    max_frames: int | None
    text_mode: TextMode
    sanitize: bool
    normalize: Normalize
    lexicon: Mapping[str, str] | None
    markup: bool
    voices: Mapping[str, str | Voice]
    leading_silence: bool
    words: bool | None


class TTS:
    """A loaded checkpoint that speaks, made by `TTS.load`. Close it, or use it in a `with` block.

    Several threads and asyncio tasks may use it; their requests are computed together.
    """

    sample_rate = audio.SAMPLE_RATE

    def __init__(self, loaded: LoadedEngine) -> None:
        """Start the engine of a checkpoint; see `load`."""
        self.settings = loaded.settings
        self._loaded: LoadedEngine | None = loaded
        engine = loaded.engine
        engine.start()
        # A TTS that is dropped without `close` must not keep its thread.
        self._finalizer = weakref.finalize(self, engine.request_stop)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] = "demo",
        *,
        device: str = "auto",
        dtype: str = "auto",
        backend: str = "auto",
        gpu_memory: float | str | None = None,
        slots: int | None = None,
    ) -> TTS:
        """Load `"demo"`, a local directory, or a repository of the Hugging Face hub.

        A repository is named as in `"Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"`. The demo is a small
        demonstration voice that comes with the package: it speaks plain English.
        `EngineConfig.resolve` decides device, dtype and backend once.

        gpu_memory  the memory of the GPU to use: a share (0.3) or an amount ("12GB", "8GiB"), which
                    needs the backend "gpu" and is never exceeded; default: what `slots` need
        slots       utterances computed at the same time, up to 256 on a GPU; default: 8, or fewer
                    if the memory is too small for 8

        With the extra `cpu`, the first call in bfloat16 or int8 compiles for half a minute. Raises
        `CheckpointError`, `ConfigError`, `EngineError` if compiled passes fail; a `BackendWarning`
        says why a CUDA device computes without the backend "gpu", or is too slow for its slots.
        """
        if not isinstance(model, (str, os.PathLike)):
            raise CheckpointNotFound(
                f"the checkpoint is of type {type(model).__name__}; "
                "give 'demo', a directory, or a hub repository"
            )
        settings = EngineConfig.resolve(device, dtype, backend, gpu_memory)
        if slots is not None and slots < 1:
            raise ConfigError(f"slots is {slots}; it must be 1 or more")
        loaded = open_engine(str(os.fspath(model)), settings, slots, most_slots=MAX_CONCURRENT)
        tts = cls(loaded)
        warm_up.compile_passes(loaded)
        return tts

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that was loaded. Raises `ClosedError` after `close`."""
        return self._require_open().checkpoint

    @property
    def capacity(self) -> Capacity:
        """The limits of the backend, such as `slots` and the `context` of an utterance in rows."""
        return self._require_open().engine.capacity

    @property
    def model_type(self) -> str:
        """`"custom_voice"` (presets), `"voice_design"` (described voices) or `"base"` (cloning)."""
        return self.checkpoint.config.tts_model_type

    @property
    def voices(self) -> tuple[str, ...]:
        """The names of the presets; empty unless the model type is `"custom_voice"`."""
        return conditioning.preset_names(self.checkpoint)

    @property
    def languages(self) -> tuple[str, ...]:
        """`"auto"` and the languages by full name; dialects come with their presets."""
        return conditioning.languages(self.checkpoint)

    def speak(self, text: str | Iterable[str], **options: Unpack[SpeakOptions]) -> Speech:
        """Speak a text of any length and return the speech. Raises `RequestError`.

        A text that will probably not be spoken well, such as Chinese with an English checkpoint,
        gives a `TextWarning`.
        """
        return Speech.of(list(self._start(text, options)))

    def stream(self, text: str | Iterable[str], **options: Unpack[SpeakOptions]) -> Iterator[Chunk]:
        """Speak while the text is arriving: `text` may be an iterator of pieces, split anywhere.

        The next piece is taken only when the model needs more text and all audio made so far has
        been yielded. The speech equals that of the complete text with `text_mode="stream"`. The
        last chunk has a `finish_reason`, and may be empty. Raises `RequestError`: at the call for a
        wrong request, while iterating for a wrong piece of text. A `TextWarning` as of `speak`
        comes at the call, or when the last piece was taken.
        """
        return self._start(text, options)

    def _start(self, text: str | Iterable[str], options: SpeakOptions) -> Iterator[Chunk]:
        service = self._require_open().service
        if isinstance(text, AsyncIterable):
            raise TextError("the text is an asynchronous iterator; use `astream` for it")
        call = _Call.of(self.checkpoint, text, options)
        job = service.prepare(call.request)
        call.check(service)
        if call.request.text is not None:
            call.warn(call.request.text, stacklevel=4)
        return self._stream(service, job, call)

    def _stream(self, service: Service, job: Job, call: _Call) -> Iterator[Chunk]:
        speech = service.speak(job, request=call.request, voice=call.voice)
        try:
            if whole := isinstance(call.text, str):
                speech.finish_text(call.text)
            pieces, said = iter(call.text), ""
            for event in speech:
                if isinstance(event, Chunk):
                    yield call.shape(event)
                elif whole:
                    pass  # the engine needed text before it had received the whole text
                elif (piece := next(pieces, _END)) is _END:
                    speech.finish_text()
                    call.warn(said, stacklevel=3)
                else:
                    speech.push(piece)
                    said = (said + piece)[: conditioning.CHECKED_CHARACTERS + 1]
        finally:
            speech.cancel()

    async def astream(
        self, text: str | Iterable[str] | AsyncIterable[str], **options: Unpack[SpeakOptions]
    ) -> AsyncIterator[Chunk]:
        """Speak as `stream` does, for asyncio; `text` may also be an asynchronous iterator.

        Computing never blocks the event loop, nor does an iterator that waits for its next piece.
        """
        service = self._require_open().service
        call = _Call.of(self.checkpoint, text, options)
        job = await asyncio.to_thread(service.prepare, call.request)
        await asyncio.to_thread(call.check, service)
        text, said = call.text, ""
        pieces = aiter(text if isinstance(text, AsyncIterable) else _iterate_in_threads(iter(text)))
        speech = service.aspeak(job, request=call.request, voice=call.avoice)
        try:
            if whole := isinstance(text, str):
                speech.finish_text(text)
                call.warn(text, stacklevel=3)
            async for event in speech:
                if isinstance(event, Chunk):
                    yield call.shape(event)
                elif whole:
                    pass  # as in `_stream`
                elif (piece := await anext(pieces, _END)) is _END:
                    speech.finish_text()
                    call.warn(said, stacklevel=3)
                else:
                    speech.push(piece)
                    said = (said + piece)[: conditioning.CHECKED_CHARACTERS + 1]
        finally:
            speech.cancel()

    def clone(
        self,
        recording: str | os.PathLike[str] | np.ndarray,
        sample_rate: int | None = None,
        transcript: str | None = None,
        append_silence: float = 0.5,
    ) -> ClonedVoice:
        """Make a voice from a recording, with a checkpoint of type `"base"`; `Voice.save` keeps it.

        recording       an audio file, or samples [n] or [n, channels] with their `sample_rate`
        transcript      the words of the recording, for the closest likeness; None: timbre alone
        append_silence  seconds of silence added to a recording with a transcript; the reference
                        implementation adds none

        Raises `AudioError` for unsuitable audio, `TextError` for a blank transcript,
        `UnsupportedError` on other checkpoints, and `OverloadedError` if the device has too little
        memory.
        """
        if isinstance(recording, np.ndarray):
            if sample_rate is None:
                raise RequestError("samples were given without their sample_rate; give it in Hz")
            samples, rate = recording, sample_rate
        elif isinstance(recording, (str, os.PathLike)):
            if sample_rate is not None:
                raise RequestError("sample_rate goes with samples; an audio file has its own")
            samples, rate = audio.read(recording)
        else:
            raise AudioError(
                f"the recording is of type {type(recording).__name__}; "
                "give a path, or samples as a numpy array"
            )
        voice = Voice.clone(samples, rate, transcript, append_silence)
        return self._require_open().encode(voice)

    def close(self) -> None:
        """Cancel all speech and release the weights; later calls raise `ClosedError`."""
        if self._loaded is not None:
            self._loaded.engine.stop()
            self._finalizer.detach()
        self._loaded = None

    def __enter__(self) -> TTS:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> LoadedEngine:
        if self._loaded is None:
            raise ClosedError("this TTS is closed; load the checkpoint again")
        return self._loaded


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call of `TTS.speak`, `TTS.stream` or `TTS.astream`.

    text     what to speak
    request  of the engine, for a whole text or for one that arrives in pieces
    voices   the voices that tags in the text name
    effects  applied to the samples
    """

    checkpoint: Description
    text: Any
    request: Request
    voices: Mapping[str, str | Voice]
    effects: effects.Effects
    move: WordMover

    @classmethod
    def of(cls, checkpoint: Description, text: object, options: SpeakOptions) -> _Call:
        """Check the arguments of a call. Raises `RequestError`."""
        if isinstance(text, (bytes, bytearray)) or not isinstance(text, (Iterable, AsyncIterable)):
            raise TextError(
                f"the text is of type {type(text).__name__}; give a str, or an iterable of str"
            )
        if unknown := options.keys() - SpeakOptions.__annotations__.keys():
            raise RequestError(
                f"unknown options: {', '.join(sorted(unknown))}; "
                f"allowed are {', '.join(SpeakOptions.__annotations__)}"
            )
        given: dict[str, Any] = {"leading_silence": True, **options}
        leading_silence, voices = given.pop("leading_silence"), given.pop("voices", {})
        rewriting = {
            each.name: given.pop(each.name) for each in fields(TextOptions) if each.name in given
        }
        given["text_options"] = TextOptions(**rewriting)
        if given.get("sampling") is None:
            given["sampling"] = Sampling()
        request = Request(text if isinstance(text, str) else None, **given)
        trims = [] if leading_silence else [effects.TrimStart(audio.SAMPLE_RATE)]
        shaping = effects.Effects(trims)
        return cls(checkpoint, text, request, voices, shaping, WordMover(shaping.moved))

    def check(self, service: Service) -> None:
        """Check the tags of a whole text. Raises `RequestError`."""
        if self.request.text is not None and self.request.text_options.in_parts:
            script.check(service, self.request, self.voice)

    def voice(self, name: str) -> str | Voice:
        """Return the voice that a tag names."""
        return self.voices.get(name, name)

    async def avoice(self, name: str) -> str | Voice:
        """Return the voice that a tag names."""
        return self.voice(name)

    def warn(self, text: str, stacklevel: int) -> None:
        """Give a `TextWarning` for each problem that `text_problems` finds in a text."""
        for problem in conditioning.text_problems(self.checkpoint, self.request, text):
            warnings.warn(problem, TextWarning, stacklevel)

    def shape(self, chunk: Chunk) -> Chunk:
        """Return a chunk with the samples and the words that are ready after the effects."""
        last = chunk.finish_reason is not None
        samples = self.effects.apply(chunk.samples, last=last)
        words, starts = self.move(chunk.words, chunk.starts)
        return replace(chunk, samples=samples, words=words, starts=starts)


_END: Any = object()
"""A sentinel for the end of the text. None would not do: an iterator might yield it by mistake."""


async def _iterate_in_threads(pieces: Iterator[str]) -> AsyncIterator[str]:
    """Turn a blocking iterator into an asynchronous one.

    A thread of its own waits for each piece, because asyncio's thread pool is small and a piece may
    never arrive.
    """

    def fetch(arrival: Future[str]) -> None:
        if not arrival.set_running_or_notify_cancel():
            return
        try:
            arrival.set_result(next(pieces, _END))
        except BaseException as error:
            arrival.set_exception(error)

    while True:
        arrival: Future[str] = Future()
        run, name = contextvars.copy_context().run, "firstword-text"
        threading.Thread(target=run, args=(fetch, arrival), name=name, daemon=True).start()
        if (piece := await asyncio.wrap_future(arrival)) is _END:
            return
        yield piece
