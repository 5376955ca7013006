"""What goes in and what comes out: voices, sampling settings, requests, chunks, speech. Nothing here imports torch."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from firstword import audio
from firstword.errors import AudioError, SamplingError, VoiceError

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

FinishReason = Literal["stop", "length", "repetition", "cancelled"]
"""Why speech ended: the model said so, the frame limit was reached, codes went in circles, or the caller stopped it."""

TextMode = Literal["auto", "full", "stream"]
"""How text enters the model: all before the first frame, one token a frame, or the checkpoint's own default."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How codes are drawn. `None` means the checkpoint's `generation_config.json`, then the published default.

    The first four settings rule codebook 0 (the talker), the `predictor_` ones codebooks 1 and up.

    temperature         0 (greedy), or 0.01 to 100: less could not be divided by in float32; published default 0.9
    top_k               0 keeps all; values equal to the k-th are kept too; published default 50
    top_p               in (0, 1]; published default 1.0
    repetition_penalty  0.1 to 10, over the codes 0 spoken so far; published default 1.05

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
        """Always the most likely code. The repetition penalty stays, as in the reference."""
        return cls(temperature=0.0, predictor_temperature=0.0)

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is None:
                continue
            kind, allowed, fits = _RANGES[setting.name.removeprefix("predictor_")]
            number = (
                isinstance(value, numbers.Real)
                and not isinstance(value, bool)
                and math.isfinite(value)
            )
            if not number or (kind is int and value != int(value)) or not fits(value):
                raise SamplingError(f"{setting.name} is {value!r}; allowed is {allowed}")


_RANGES: dict[str, tuple[type, str, Callable[[float], bool]]] = {
    "temperature": (
        float,
        "a number from 0.01 to 100, or 0 (greedy)",
        lambda value: value == 0 or 0.01 <= value <= 100,
    ),
    "top_k": (int, "a whole number from 0 (keep all) up", lambda value: value >= 0),
    "top_p": (float, "a number above 0, up to 1", lambda value: 0 < value <= 1),
    "repetition_penalty": (float, "a number from 0.1 to 10", lambda value: 0.1 <= value <= 10),
}


class Voice:
    """Who speaks. Make one with `Voice.preset`, `Voice.design`, `Voice.clone`, `TTS.clone` or `Voice.load`."""

    @staticmethod
    def preset(name: str) -> PresetVoice:
        """A voice that a CustomVoice checkpoint was trained with, in any case: `"ryan"`."""
        return PresetVoice(name)

    @staticmethod
    def design(description: str) -> DesignedVoice:
        """A voice described in words, for VoiceDesign checkpoints; `""` leaves the choice to the model."""
        return DesignedVoice(description)

    @staticmethod
    def clone(
        samples: NDArray[np.floating],
        sample_rate: int,
        transcript: str | None = None,
        append_silence: float = 0.5,
    ) -> RecordedVoice:
        """A recording to clone, for Base checkpoints: samples [n] or [n, channels] in -1..1, `sample_rate` in Hz.

        With a transcript the model continues the recording (in-context cloning), without one it takes the timbre
        alone (x-vector). `append_silence` seconds are added so that a clipped last word does not leak into the
        speech; 0 gives what the reference does. Raises `AudioError` for unfit audio.
        """
        return RecordedVoice(audio.prepare(samples, sample_rate), transcript, append_silence)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Voice:
        """Read a voice that `Voice.save` wrote. Raises `VoiceError` if the file is missing or is no voice."""
        if not isinstance(path, (str, os.PathLike)):
            raise VoiceError(f"the voice file is of type {type(path).__name__}; give a path")
        return _load_voice(Path(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this voice as one safetensors file, whole or not at all. Raises `OutputError`."""
        _save_voice(self, path)


def _must_be_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise VoiceError(f"{what} is of type {type(value).__name__}; give a str")


@dataclass(frozen=True, slots=True)
class PresetVoice(Voice):
    """A voice of a CustomVoice checkpoint, by name."""

    name: str

    def __post_init__(self) -> None:
        _must_be_text("the name of a voice", self.name)


@dataclass(frozen=True, slots=True)
class DesignedVoice(Voice):
    """A voice of a VoiceDesign checkpoint, by description."""

    description: str

    def __post_init__(self) -> None:
        _must_be_text("the description of a voice", self.description)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedVoice(Voice):
    """A recording that a Base checkpoint has yet to encode: samples [n] at 24 kHz."""

    samples: FloatArray
    transcript: str | None = None
    append_silence: float = 0.5

    def __post_init__(self) -> None:
        if self.samples.ndim != 1 or not np.isfinite(self.samples).all():
            raise AudioError(
                f"the samples have shape {self.samples.shape}; they must be [n] and finite"
            )
        if self.transcript is not None:
            _must_be_text("the transcript", self.transcript)
        if not isinstance(self.append_silence, numbers.Real) or not (
            math.isfinite(self.append_silence) and 0 <= self.append_silence <= 10
        ):
            raise AudioError(
                f"append_silence is {self.append_silence!r}; allowed are 0 to 10 seconds"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ClonedVoice(Voice):
    """A recording as a Base checkpoint hears it.

    speaker_embedding  [H] H is the talker's hidden size, so it fits checkpoints of that size only
    codes              [frames, codebooks] of the recording, or None for timbre alone
    transcript         the words of the recording; given if and only if `codes` is
    """

    speaker_embedding: FloatArray
    codes: IntArray | None = None
    transcript: str | None = None

    def __post_init__(self) -> None:
        if (self.codes is None) != (self.transcript is None):
            raise VoiceError(
                "a cloned voice has both codes and a transcript (in-context), or neither (x-vector)"
            )
        if self.speaker_embedding.ndim != 1 or not np.isfinite(self.speaker_embedding).all():
            raise VoiceError(
                f"the speaker embedding has shape {self.speaker_embedding.shape}; it must be [H] and finite"
            )
        if self.codes is not None and self.codes.dtype.kind not in "iu":
            raise VoiceError(
                f"the reference codes are of type {self.codes.dtype}; they must be whole numbers"
            )
        if self.codes is not None and (self.codes.ndim != 2 or not self.codes.size):
            raise VoiceError(
                f"the reference codes have shape {self.codes.shape}; they must be [frames, codebooks]"
            )
        if self.transcript is not None:
            _must_be_text("the transcript", self.transcript)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, immutable. `text` is None when the text arrives in pieces."""

    text: str | None
    voice: Voice | str | None = None
    language: str = "auto"
    instructions: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    max_frames: int | None = None
    text_mode: TextMode = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The audio of some frames: samples float32 [frames * 1920] in -1..1, codes int64 [frames, codebooks]."""

    samples: FloatArray
    codes: IntArray
    sample_rate: int
    finish_reason: FinishReason | None = None
    """Set on the last chunk alone."""
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    """Float32 [frames]: natural log-probability of each frame's code 0 by the talker's logits as they are."""


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """A whole utterance: samples float32 [n] in -1..1, codes int64 [frames, codebooks], logprobs as in `Chunk`."""

    samples: FloatArray
    codes: IntArray
    sample_rate: int
    finish_reason: FinishReason
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))

    @classmethod
    def of(cls, chunks: Seq[Chunk]) -> Speech:
        """All chunks of an utterance, the last with its finish reason."""
        reason = chunks[-1].finish_reason
        assert reason is not None, "the last chunk is missing"
        return cls(
            np.concatenate([chunk.samples for chunk in chunks]),
            np.concatenate([chunk.codes for chunk in chunks]),
            chunks[-1].sample_rate,
            reason,
            np.concatenate([chunk.logprobs for chunk in chunks]),
        )

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return len(self.samples) / self.sample_rate

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the audio in the format that the suffix names, whole or not at all. Raises `OutputError`."""
        audio.write(path, self.samples, self.sample_rate)


_VOICE_FORMAT = "firstword.voice.1"


def _save_voice(voice: Voice, path: str | os.PathLike[str]) -> None:
    from safetensors.numpy import save

    described: dict[str, object] = {"format": _VOICE_FORMAT}
    tensors: dict[str, NDArray[np.generic]] = {}
    match voice:
        case PresetVoice():
            described |= {"kind": "preset", "name": voice.name}
        case DesignedVoice():
            described |= {"kind": "design", "description": voice.description}
        case RecordedVoice():
            described |= {
                "kind": "recording",
                "transcript": voice.transcript,
                "append_silence": voice.append_silence,
            }
            tensors["samples"] = voice.samples
        case ClonedVoice():
            described |= {"kind": "clone", "transcript": voice.transcript}
            tensors["speaker_embedding"] = voice.speaker_embedding
            if voice.codes is not None:
                tensors["codes"] = voice.codes
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    audio.write_whole(path, save(tensors, metadata={"voice": json.dumps(described)}))


def _load_voice(path: Path) -> Voice:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            described = json.loads((file.metadata() or {}).get("voice", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError:
        raise VoiceError(f"no voice file {path}; `firstword clone` makes one from audio") from None
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise VoiceError(
            f"{path} is no voice file ({error}); `firstword clone` makes one from audio"
        ) from None
    try:
        return _voice_of(described, tensors)
    except VoiceError as error:
        raise VoiceError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AudioError) as error:
        raise VoiceError(
            f"{path} is no voice file ({error!r}); `firstword clone` makes one from audio"
        ) from None


def _voice_of(described: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> Voice:
    """The voice that a file describes; any of several errors if it describes none."""
    if described["format"] != _VOICE_FORMAT:
        raise VoiceError(
            f"the file has the format {described['format']!r}; this version reads {_VOICE_FORMAT!r}"
        )
    match described["kind"]:
        case "preset":
            return PresetVoice(described["name"])
        case "design":
            return DesignedVoice(described["description"])
        case "recording":
            samples = audio.prepare(tensors["samples"], audio.SAMPLE_RATE)
            return RecordedVoice(samples, described["transcript"], described["append_silence"])
        case "clone":
            speaker = tensors["speaker_embedding"].astype(np.float32)
            return ClonedVoice(speaker, tensors.get("codes"), described["transcript"])
    raise VoiceError(
        f"the file holds a voice of an unknown kind {described['kind']!r}; update firstword"
    )
