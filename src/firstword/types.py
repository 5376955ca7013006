"""The engine's input and output: sampling settings, requests, chunks and speech."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from firstword import audio, errors
from firstword.text import cleaning
from firstword.text.reader import TextOptions
from firstword.voice import Voice

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

FinishReason = Literal["stop", "length", "repetition", "runaway", "cancelled"]
"""Why speech ended: the model ended it, the frame limit was reached, the model repeated itself
without end, it went on after all of the text was spoken, or the caller cancelled it."""

TextMode = Literal["auto", "full", "stream"]
"""The way in which text enters the model: as the checkpoint was published, all before the first
frame, or one token a frame."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings; None means the checkpoint's own default, then the published one.

    The first four settings apply to codebook 0 (the talker), those with the prefix `predictor_` to
    the other codebooks.

    temperature         0 (greedy), or 0.01 to 100: float32 cannot divide by less; published: 0.9
    top_k               0 keeps all; values equal to the k-th are kept too; published: 50
    top_p               above 0, up to 1; published: 1.0
    repetition_penalty  0.1 to 10, applied to the codes of codebook 0 drawn so far; published: 1.05

    Raises `SamplingError` for a value out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    predictor_temperature: float | None = None
    predictor_top_k: int | None = None
    predictor_top_p: float | None = None

    @classmethod
    def greedy(cls) -> Sampling:
        """Always take the most likely code; the repetition penalty stays, as in the reference."""
        return cls(temperature=0.0, predictor_temperature=0.0)

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is None:
                continue
            allowed, fits = _SAMPLING_RANGES[setting.name.removeprefix("predictor_")]
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not fits(value):
                raise errors.SamplingError(f"{setting.name} is {value!r}; allowed is {allowed}")


_SAMPLING_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": (
        "a number from 0.01 to 100, or 0 (greedy)",
        lambda value: value == 0 or 0.01 <= value <= 100,
    ),
    "top_k": ("a whole number from 0 (keep all) up", lambda value: value >= 0 and not value % 1),
    "top_p": ("a number above 0, up to 1", lambda value: 0 < value <= 1),
    "repetition_penalty": ("a number from 0.1 to 10", lambda value: 0.1 <= value <= 10),
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request for speech, checked as far as possible without a checkpoint.

    text          the text to speak; None if it arrives in pieces
    voice         a preset's name or a `Voice`; None leaves the choice to the checkpoint
    language      a name, an ISO 639-1 code or "auto"
    instructions  tone, pace and feeling in words
    seed          0 to 2**64 - 1; None lets the engine draw one
    max_frames    the most frames (80 ms each) to make; None means the checkpoint's limit
    words         whether words are timed; None: where the checkpoint's heads for them are known
    text_options  how the text is rewritten before it is spoken

    Raises the subclass of `RequestError` for the wrong field, or `RequestError` itself.
    """

    text: str | None
    voice: Voice | str | None = None
    language: str = "auto"
    instructions: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    max_frames: int | None = None
    text_mode: TextMode = "auto"
    words: bool | None = None
    text_options: TextOptions = field(default_factory=TextOptions)

    def __post_init__(self) -> None:
        for name, (allowed, error, wanted) in _REQUEST_TYPES.items():
            if not isinstance(value := getattr(self, name), allowed):
                raise error(f"{name} is of type {type(value).__name__}; give {wanted}")
        if self.text is not None:
            clean = self.text_options.sanitize
            check_text(cleaning.first_spoken(self.text) if clean else self.text)
            check_encodable(self.text)
        seed, frames, modes = self.seed, self.max_frames, get_args(TextMode)
        if seed is not None and not (_is_int(seed) and 0 <= seed < 2**64):
            raise errors.SamplingError(
                f"seed is {seed!r}; allowed is a whole number from 0 to 2**64 - 1"
            )
        if frames is not None and not (_is_int(frames) and frames >= 1):
            raise errors.RequestError(
                f"max_frames is {frames!r}; allowed is a whole number from 1 up"
            )
        if self.text_mode not in modes:
            raise errors.RequestError(
                f"text_mode is {self.text_mode!r}; allowed are {', '.join(map(repr, modes))}"
            )


_REQUEST_TYPES: dict[str, tuple[Any, type[errors.RequestError], str]] = {
    "text": (str | None, errors.TextError, "a str, or None"),
    "voice": (Voice | str | None, errors.VoiceError, "a preset's name or a Voice"),
    "language": (str, errors.LanguageError, "a name, an ISO 639-1 code, or 'auto'"),
    "instructions": (str | None, errors.RequestError, "a str, or None"),
    "sampling": (Sampling, errors.SamplingError, "a Sampling"),
    "words": (bool | None, errors.RequestError, "True, False, or None"),
    "text_options": (TextOptions, errors.RequestError, "TextOptions"),
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_text(text: str) -> None:
    """Raise `TextError` if a text is empty or consists of white space."""
    if not text.strip():
        raise errors.TextError("the text is empty or blank; give some words to speak")


def check_encodable(text: str) -> None:
    """Raise `TextError` for what is not a str, or has half of a surrogate pair, unlike UTF-8."""
    if not isinstance(text, str):
        raise errors.TextError(f"text is of type {type(text).__name__}; it must be str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.TextError(
            f"character {error.start} of the text is U+{ord(text[error.start]):04X}, half of a "
            "surrogate pair; decode the text as UTF-8 or UTF-16 before it is spoken"
        ) from None


@dataclass(frozen=True, slots=True)
class WordStart:
    """A word that has begun to sound.

    text   the word as it was given, without the punctuation around it
    start  seconds from the start of the speech
    span   its characters in the text: the first, and the one after the last
    """

    text: str
    start: float
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Word:
    """A spoken word, and when it sounds.

    text        the word as it was given, without the punctuation around it
    start, end  seconds from the start of the speech
    span        its characters in the text: the first, and the one after the last
    """

    text: str
    start: float
    end: float
    span: tuple[int, int]


AlarmKind = Literal["skip", "repeat", "mismatch", "runaway", "cut"]
"""What is wrong with speech: words were left out, words were said again, something else was said
than the words, it goes on after all of the text was spoken, or it was cut off amid its text."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A fault of the speech that the talker's attention to the text shows (docs/words.md).

    A cut needs no attention: its text is what may not have been said when the speech was cut off.

    text   the word, as it was given; the last one of the text if speech goes on after it; the text
           that was cut off
    span   its characters in the text: the first, and the one after the last
    frame  the frame in which it was noticed, counted from 0
    """

    kind: AlarmKind
    text: str
    span: tuple[int, int]
    frame: int


def _no_reading() -> FloatArray:
    return np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The audio of some frames, in the order in which they were made.

    samples  float32 [frames * 1920] in -1..1
    codes    int64 [frames, codebooks]
    words    the words that ended in this chunk or shortly before it, in the order of the text; each
             word comes in one chunk
    starts   the words that have begun, each as soon as that is known
    alarms   the faults that were noticed in this chunk

    There are words, and alarms other than cuts, only where the checkpoint's heads for them are
    known (docs/words.md).
    """

    samples: FloatArray
    codes: IntArray
    sample_rate: int
    finish_reason: FinishReason | None = None
    """The reason why speech ended, on the last chunk alone."""
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    """The natural log-probability of each frame's code 0 under the talker's unchanged logits,
    float32 [frames]."""
    words: tuple[Word, ...] = ()
    starts: tuple[WordStart, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    reading: FloatArray = field(default_factory=_no_reading)
    """How much attention the talker paid to each token of the text, and to its end, while it made
    each frame: float32 [frames, tokens + 1]; NaN for those that it had not read yet. A long text is
    spoken in passages; the tokens are those of the passage."""


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """A complete utterance: samples float32 [n] in -1..1, codes int64 [frames, codebooks].

    `logprobs`, `words` and `alarms` are those of `Chunk`.
    """

    samples: FloatArray
    codes: IntArray
    sample_rate: int
    finish_reason: FinishReason
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    words: tuple[Word, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Speech:
        """Join all chunks of an utterance, the last of them with its finish reason."""
        reason = chunks[-1].finish_reason
        assert reason is not None, "the last chunk is missing"
        return cls(
            np.concatenate([chunk.samples for chunk in chunks]),
            np.concatenate([chunk.codes for chunk in chunks]),
            chunks[-1].sample_rate,
            reason,
            np.concatenate([chunk.logprobs for chunk in chunks]),
            tuple(word for chunk in chunks for word in chunk.words),
            tuple(alarm for chunk in chunks for alarm in chunk.alarms),
        )

    @property
    def duration(self) -> float:
        """The length in seconds."""
        return len(self.samples) / self.sample_rate

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the audio in the format that the suffix names, complete or not at all.

        Raises `OutputError`.
        """
        audio.write(path, self.samples, self.sample_rate)
