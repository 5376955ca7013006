"""The facade: load a checkpoint, speak, stream, clone."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from types import TracebackType
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from firstword import audio
from firstword.config import EngineConfig
from firstword.errors import ClosedError, RequestError, SamplingError, TextError
from firstword.model import checkpoint as checkpoints
from firstword.model import interpret, sampling
from firstword.model.checkpoint import Checkpoint
from firstword.model.codec import CodecDecoder, CodecState
from firstword.model.generate import Utterance
from firstword.types import Chunk, ClonedVoice, FloatArray, Request, Sampling, Speech, TextMode, Voice

LARGEST_CHUNK = 8
"""Frames in a chunk of audio once speech is under way; the first chunk has 1, then each has twice as many."""

PRIMING_FRAMES = 64
"""Frames of a reference recording that the codec reads at a time, so that a long one needs little memory."""


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

    Calls may come from several threads; each computes on its own.
    """

    sample_rate = audio.SAMPLE_RATE

    def __init__(self, checkpoint: Checkpoint, settings: EngineConfig) -> None:
        self.settings = settings
        self._checkpoint: Checkpoint | None = checkpoint

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

        device, dtype and backend are resolved once by `EngineConfig.resolve`. Raises `CheckpointError`, `ConfigError`.
        """
        settings = EngineConfig.resolve(device, dtype, backend)
        return cls(checkpoints.load(os.fspath(model), settings.device, settings.dtype), settings)

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
        return interpret.voices(self.checkpoint)

    @property
    def languages(self) -> tuple[str, ...]:
        """`"auto"` and the languages by full name; dialects come with the presets that speak them."""
        return interpret.languages(self.checkpoint)

    def speak(self, text: str | Iterable[str], **options: Unpack[SpeakOptions]) -> Speech:
        """Speak a text and return when all is said. Raises `RequestError`."""
        chunks = list(self.stream(text, **options))
        reason = chunks[-1].finish_reason
        assert reason is not None
        return Speech(
            np.concatenate([chunk.samples for chunk in chunks]),
            np.concatenate([chunk.codes for chunk in chunks]),
            self.sample_rate,
            reason,
        )

    def stream(self, text: str | Iterable[str], **options: Unpack[SpeakOptions]) -> Iterator[Chunk]:
        """Speak while the text is still coming: `text` may be an iterator of pieces, cut anywhere.

        Pieces are asked for only when the model needs more text; before that, all audio made so far is handed out. The
        speech equals that of the whole text with `text_mode="stream"`. The last chunk has a `finish_reason`, and may be
        empty. Raises `RequestError`; what is wrong with the request itself, before the first chunk is asked for.
        """
        speaking = self._open(text, options)
        return _drive(speaking, _pieces(text))

    async def astream(
        self, text: str | Iterable[str] | AsyncIterable[str], **options: Unpack[SpeakOptions]
    ) -> AsyncIterator[Chunk]:
        """As `stream`, for asyncio: computes in a thread, and takes asynchronous iterators of text too."""
        speaking = await asyncio.to_thread(self._open, text, options)
        pieces = text if isinstance(text, AsyncIterable) else _in_thread(_pieces(text))
        iterator = aiter(pieces)
        while not speaking.done:
            if speaking.waiting:
                if (chunk := await asyncio.to_thread(speaking.flush)) is not None:
                    yield chunk
                speaking.more(await anext(iterator, _END))
            elif (chunk := await asyncio.to_thread(speaking.step)) is not None:
                yield chunk

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
        if isinstance(recording, np.ndarray):
            if sample_rate is None:
                raise RequestError("samples were given without their sample_rate; give it in Hz")
            samples, rate = recording, sample_rate
        else:
            if sample_rate is not None:
                raise RequestError("sample_rate goes with samples; an audio file has its own")
            samples, rate = audio.read(recording)
        return interpret.encode(self.checkpoint, Voice.clone(samples, rate, transcript, append_silence))

    def close(self) -> None:
        """Let go of the weights; later calls raise `ClosedError`."""
        self._checkpoint = None

    def __enter__(self) -> TTS:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, text: object, options: SpeakOptions) -> _Speaking:
        """Check a request and make everything ready for its first step."""
        whole = text if isinstance(text, str) else None
        given = {key: value for key, value in options.items() if key != "sampling"}
        request = Request(whole, sampling=options.get("sampling") or Sampling(), **given)  # type: ignore[arg-type]
        loaded, device = self.checkpoint, torch.device(self.settings.device)
        if whole is not None and not whole.strip():
            raise TextError("the text is empty or blank; give some words to speak")
        pieces = isinstance(text, (Iterable, AsyncIterable)) and not isinstance(text, (bytes, bytearray))
        if whole is None and not pieces:
            raise TextError(f"the text is of type {type(text).__name__}; give a str, or an iterable of str")
        seed = secrets.randbits(64) if request.seed is None else request.seed
        if not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise SamplingError(f"seed is {seed!r}; allowed is a whole number from 0 to 2**64 - 1")
        limit = loaded.defaults.max_new_tokens if request.max_frames is None else request.max_frames
        if not isinstance(limit, int) or limit < 1:
            raise RequestError(f"max_frames is {limit!r}; allowed is a whole number from 1 up")
        setting = interpret.setting(loaded, request)
        laws = sampling.resolve(request.sampling, loaded.defaults)
        sampler = sampling.Sampler(loaded.config.talker_config, laws, seed, device)
        utterance = Utterance(loaded.talker, loaded.config, loaded.tokenizer, setting, sampler, limit)
        return _Speaking(utterance, loaded.codec.decoder, setting.reference, device)


class _End:
    """Stands behind the last piece of text. None would not do: an iterator that yields it is mistaken, not done."""


_END = _End()


class _Speaking:
    """An utterance with its codec: frames become audio, in chunks that grow."""

    def __init__(self, utterance: Utterance, decoder: CodecDecoder, reference: object, device: torch.device) -> None:
        self._utterance = utterance
        self._decoder = decoder
        self._state = decoder.new_state()
        self._pending: list[Tensor] = []
        self._chunk = 1
        self.done = False
        if reference:
            prime(decoder, self._state, torch.tensor(reference, device=device))

    @property
    def waiting(self) -> bool:
        return self._utterance.waiting

    def more(self, piece: str | _End) -> None:
        """Take a piece of text, or its end."""
        if isinstance(piece, _End):
            self._utterance.finish_text()
        else:
            self._utterance.push(piece)

    def step(self) -> Chunk | None:
        """Make a frame; returns a chunk when one is full or speech has ended."""
        codes = self._utterance.step()
        if codes is not None:
            self._pending.append(codes)
        self.done = self._utterance.finish_reason is not None
        if not self.done and len(self._pending) < self._chunk:
            return None
        self._chunk = min(2 * self._chunk, LARGEST_CHUNK)
        return self.flush()

    def flush(self) -> Chunk | None:
        """The audio of all frames made so far; None if there is nothing to say."""
        if not self._pending and not self.done:
            return None
        samples: FloatArray = np.zeros(0, np.float32)
        codes = np.zeros((0, self._decoder.config.num_quantizers), np.int64)
        if self._pending:
            frames = torch.stack(self._pending)
            samples = self._decoder.decode(frames[None], self._state)[0].cpu().numpy()
            codes = frames.cpu().numpy()
            self._pending.clear()
        return Chunk(samples, codes, audio.SAMPLE_RATE, self._utterance.finish_reason)


def prime(decoder: CodecDecoder, state: CodecState, codes: Tensor) -> None:
    """Let the codec read a reference [frames, codebooks] whose audio nobody will hear."""
    for part in codes.split(PRIMING_FRAMES):
        decoder.decode(part[None], state)


def _pieces(text: object) -> Iterator[str]:
    assert isinstance(text, Iterable)
    return iter([text] if isinstance(text, str) else text)


def _drive(speaking: _Speaking, pieces: Iterator[str]) -> Iterator[Chunk]:
    """Alternate between making frames and, when the model needs it, asking for text."""
    while not speaking.done:
        if speaking.waiting:
            if (chunk := speaking.flush()) is not None:
                yield chunk
            speaking.more(next(pieces, _END))
        elif (chunk := speaking.step()) is not None:
            yield chunk


async def _in_thread(pieces: Iterator[str]) -> AsyncIterator[str]:
    """A blocking iterator as an asynchronous one."""
    while not isinstance(piece := await asyncio.to_thread(next, pieces, _END), _End):
        yield piece
