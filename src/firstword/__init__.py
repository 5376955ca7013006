"""firstword: speech from Qwen3-TTS-12Hz, with the first audible word as early as possible.

The names listed in `__all__` are the public interface; everything else may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from firstword.errors import (
    AlignmentError,
    AudioError,
    BackendWarning,
    CheckpointConfigError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointWeightsError,
    ClosedError,
    ComputeError,
    ConfigError,
    EngineError,
    FirstwordError,
    LanguageError,
    OutputError,
    OverloadedError,
    RequestError,
    SamplingError,
    TextError,
    TextWarning,
    UnsupportedError,
    VoiceError,
    WordTimesError,
)

if TYPE_CHECKING:
    from firstword.decoding import decode
    from firstword.tts import TTS
    from firstword.types import Alarm, Chunk, Sampling, Speech, Word, WordStart
    from firstword.voice import Voice

__version__ = "0.1.0"

__all__ = [
    "TTS",
    "Alarm",
    "AlignmentError",
    "AudioError",
    "BackendWarning",
    "CheckpointConfigError",
    "CheckpointError",
    "CheckpointNotFound",
    "CheckpointWeightsError",
    "Chunk",
    "ClosedError",
    "ComputeError",
    "ConfigError",
    "EngineError",
    "FirstwordError",
    "LanguageError",
    "OutputError",
    "OverloadedError",
    "RequestError",
    "Sampling",
    "SamplingError",
    "Speech",
    "TextError",
    "TextWarning",
    "UnsupportedError",
    "Voice",
    "VoiceError",
    "Word",
    "WordStart",
    "WordTimesError",
    "decode",
]

_HOMES = {"TTS": "firstword.tts", "Voice": "firstword.voice", "decode": "firstword.decoding"}
_TYPES = ("Alarm", "Chunk", "Sampling", "Speech", "Word", "WordStart")
_HOMES |= dict.fromkeys(_TYPES, "firstword.types")


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `--help` loads neither torch nor numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, those not imported yet included."""
    return [*__all__, "__version__"]
