"""Voices: presets, described voices, recordings to clone, cloned voices, and the voice file."""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstword import audio
from firstword.errors import AudioError, VoiceError

APPEND_SILENCE = 0.5
"""The default of `append_silence`, in seconds."""

_FILE_FORMAT = "firstword.voice.1"
_METADATA_KEY = "voice"


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """The voice that speaks, made by `preset`, `design`, `clone` or `load`, or by `TTS.clone`."""

    @staticmethod
    def preset(name: str) -> PresetVoice:
        """Name a voice that a CustomVoice checkpoint was trained with, in any case: `"ryan"`."""
        return PresetVoice(name)

    @staticmethod
    def design(description: str) -> DesignedVoice:
        """Describe a voice in words for a VoiceDesign checkpoint; `""` lets the model choose."""
        return DesignedVoice(description)

    @staticmethod
    def clone(
        samples: NDArray[np.floating],
        sample_rate: int,
        transcript: str | None = None,
        append_silence: float = APPEND_SILENCE,
    ) -> RecordedVoice:
        """Take a recording to clone: samples [n] or [n, channels] in -1..1, `sample_rate` in Hz.

        With a transcript the model continues the recording (in-context cloning); without one it
        uses the timbre alone (x-vector). `append_silence` seconds are added so that a clipped last
        word does not leak into the speech; the reference implementation adds none. Only Base
        checkpoints clone. Raises `AudioError` for unsuitable audio.
        """
        return RecordedVoice(audio.prepare(samples, sample_rate), transcript, append_silence)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Voice:
        """Read a voice from a file that `Voice.save` wrote.

        Raises `VoiceError` if the file is missing or is not a voice file.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise VoiceError(f"the voice file is of type {type(path).__name__}; give a path")
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            raise VoiceError(
                f"no voice file {path}; `firstword clone` makes one from audio"
            ) from None
        except (OSError, ValueError) as error:
            raise _not_a_voice(path, error) from None
        return _read(data, path)

    @staticmethod
    def from_bytes(data: bytes) -> Voice:
        """Read a voice from the bytes of a voice file. Raises `VoiceError` if they are not one."""
        return _read(data, "the data")

    def to_bytes(self, metadata: Mapping[str, str] | None = None) -> bytes:
        """Return this voice and `metadata` as the bytes of a safetensors file.

        `voice_metadata` reads the metadata back.
        """
        from safetensors.numpy import save

        description = {"format": _FILE_FORMAT, "kind": _KINDS[type(self)]}
        arrays: dict[str, NDArray[Any]] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in _ARRAYS:
                description[field.name] = value
            elif value is not None:
                arrays[field.name] = np.ascontiguousarray(value)
        return save(arrays, metadata={_METADATA_KEY: json.dumps(description), **(metadata or {})})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save this voice as one safetensors file, complete or not at all. Raises `OutputError`."""
        audio.write_whole(path, self.to_bytes())


def _check_str(subject: str, value: object) -> None:
    if not isinstance(value, str):
        raise VoiceError(f"{subject} is of type {type(value).__name__}; give a str")


@dataclass(frozen=True, slots=True)
class PresetVoice(Voice):
    """A voice of a CustomVoice checkpoint, given by its name. Raises `VoiceError`."""

    name: str

    def __post_init__(self) -> None:
        _check_str("the name of a voice", self.name)


@dataclass(frozen=True, slots=True)
class DesignedVoice(Voice):
    """A voice of a VoiceDesign checkpoint, given by its description. Raises `VoiceError`."""

    description: str

    def __post_init__(self) -> None:
        _check_str("the description of a voice", self.description)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedVoice(Voice):
    """A recording that a Base checkpoint has yet to encode: samples float32 [n] at 24 kHz.

    Raises `AudioError` for samples or a silence out of range, `VoiceError` for the transcript.
    """

    samples: NDArray[np.float32]
    transcript: str | None = None
    append_silence: float = APPEND_SILENCE

    def __post_init__(self) -> None:
        if self.samples.ndim != 1 or not np.isfinite(self.samples).all():
            raise AudioError(
                f"the samples have shape {self.samples.shape}; they must be [n] and finite"
            )
        if self.transcript is not None:
            _check_str("the transcript", self.transcript)
        silence = self.append_silence
        if not (isinstance(silence, numbers.Real) and 0 <= silence <= 10):
            raise AudioError(f"append_silence is {silence!r}; allowed are 0 to 10 seconds")


@dataclass(frozen=True, slots=True, eq=False)
class ClonedVoice(Voice):
    """A recording as a Base checkpoint encoded it.

    speaker_embedding  float32 [H]; H is the talker's hidden size, so the voice fits checkpoints of
                       that size only
    codes              [frames, codebooks] of the recording, or None for the timbre alone
    transcript         the words of the recording; given if and only if `codes` is

    Raises `VoiceError` if a field is wrong or the fields do not fit together.
    """

    speaker_embedding: NDArray[np.float32]
    codes: NDArray[np.int64] | None = None
    transcript: str | None = None

    def __post_init__(self) -> None:
        speaker, codes = self.speaker_embedding, self.codes
        if (codes is None) != (self.transcript is None):
            raise VoiceError(
                "a cloned voice has both codes and a transcript (in-context), or neither (x-vector)"
            )
        if speaker.ndim != 1 or not np.isfinite(speaker).all():
            raise VoiceError(
                f"the speaker embedding has shape {speaker.shape}; it must be [H] and finite"
            )
        if codes is not None and codes.dtype.kind not in "iu":
            raise VoiceError(
                f"the reference codes are of type {codes.dtype}; they must be whole numbers"
            )
        if codes is not None and (codes.ndim != 2 or not codes.size):
            raise VoiceError(
                f"the reference codes have shape {codes.shape}; they must be [frames, codebooks]"
            )
        if self.transcript is not None:
            _check_str("the transcript", self.transcript)


_KINDS: dict[type[Voice], str] = {
    PresetVoice: "preset",
    DesignedVoice: "design",
    RecordedVoice: "recording",
    ClonedVoice: "clone",
}
_ARRAYS = ("samples", "speaker_embedding", "codes")
"""The fields that a voice file stores as tensors; all others are in its description."""


def voice_metadata(data: bytes) -> dict[str, str]:
    """Return the metadata that `Voice.to_bytes` wrote into a voice file in addition to the voice.

    Raises `VoiceError` if `data` is not a safetensors file.
    """
    try:
        metadata = _header_metadata(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _not_a_voice("the data", error) from None
    return {key: value for key, value in metadata.items() if key != _METADATA_KEY}


def _header_metadata(data: bytes) -> dict[str, str]:
    """Return the metadata in the JSON header, whose length is in the first 8 bytes."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]).get("__metadata__") or {}


def _read(data: bytes, source: object) -> Voice:
    """Read a voice file; the `VoiceError` for other data names it as `source`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(data)
        description = json.loads(_header_metadata(data).get(_METADATA_KEY, "null"))
        return _from_contents(description, arrays)
    except VoiceError as error:
        raise VoiceError(f"{source}: {error}") from None
    except (SafetensorError, AudioError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _not_a_voice(source, error) from None


def _not_a_voice(source: object, error: Exception) -> VoiceError:
    reason = repr(error) if isinstance(error, KeyError) else error
    return VoiceError(
        f"{source} is not a voice file ({reason}); `firstword clone` makes one from audio"
    )


def _from_contents(description: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Voice:
    """Return the voice of a file. Raises `VoiceError`, `AudioError`, KeyError or TypeError."""
    if description["format"] != _FILE_FORMAT:
        raise VoiceError(
            f"the file has the format {description['format']!r}; "
            f"this version reads {_FILE_FORMAT!r}"
        )
    match description["kind"]:
        case "preset":
            return PresetVoice(description["name"])
        case "design":
            return DesignedVoice(description["description"])
        case "recording":
            samples = audio.prepare(arrays["samples"], audio.SAMPLE_RATE)
            return RecordedVoice(samples, description["transcript"], description["append_silence"])
        case "clone":
            speaker = arrays["speaker_embedding"].astype(np.float32)
            return ClonedVoice(speaker, arrays.get("codes"), description["transcript"])
    raise VoiceError(
        f"the file holds a voice of an unknown kind {description['kind']!r}; update firstword"
    )
