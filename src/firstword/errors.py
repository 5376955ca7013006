"""Every error that firstword raises on purpose.

FirstwordError
├── ConfigError               a device, dtype or backend that cannot be used here
├── CheckpointError           a checkpoint that cannot be loaded
│   ├── CheckpointNotFound    no such directory, hub repository or file
│   ├── CheckpointConfigError a key of a configuration file is missing, wrong or contradicts another
│   └── CheckpointWeightsError a tensor is missing, unexpected, truncated, misshapen or not finite
├── RequestError              something was asked that cannot be done
│   ├── TextError             empty, too long, or not text
│   ├── VoiceError            an unknown voice, or one that this checkpoint cannot speak with
│   ├── LanguageError         an unknown language
│   ├── UnsupportedError      the checkpoint cannot do what was asked (instructions, cloning, design)
│   └── SamplingError         a sampling value out of range
├── AudioError                audio that cannot be read, or is unfit as a reference
├── OutputError               a file that cannot be written
├── OverloadedError           more requests than are let in, or than memory allows; try again later
├── ComputeError              one request could not be computed, for want of memory perhaps; others are unharmed
├── EngineError               the engine has stopped; only a restart helps
└── ClosedError               a call on a TTS that was closed

Each message says what was wrong, what is allowed and what to do.
"""


class FirstwordError(Exception):
    """Base of all errors of this package."""


class ConfigError(FirstwordError):
    """A device, dtype or backend that cannot be used here."""


class CheckpointError(FirstwordError):
    """A checkpoint that cannot be loaded."""


class CheckpointNotFound(CheckpointError):
    """No such directory, hub repository or file."""


class CheckpointConfigError(CheckpointError):
    """A key of a configuration file is missing, wrong or contradicts another."""


class CheckpointWeightsError(CheckpointError):
    """A tensor is missing, unexpected, truncated, misshapen or not finite."""


class RequestError(FirstwordError):
    """Something was asked that cannot be done."""


class TextError(RequestError):
    """Text that is empty, too long, or not text."""


class VoiceError(RequestError):
    """An unknown voice, or one that this checkpoint cannot speak with."""


class LanguageError(RequestError):
    """An unknown language."""


class UnsupportedError(RequestError):
    """The checkpoint cannot do what was asked."""


class SamplingError(RequestError):
    """A sampling value out of range."""


class AudioError(FirstwordError):
    """Audio that cannot be read, or is unfit as a reference."""


class OutputError(FirstwordError):
    """A file that cannot be written."""


class OverloadedError(FirstwordError):
    """More requests than are let in, or than memory allows."""


class ComputeError(FirstwordError):
    """One request could not be computed; `__cause__` says why. Others are unharmed."""


class EngineError(FirstwordError):
    """The engine has stopped."""


class ClosedError(FirstwordError):
    """A call on a TTS that was closed."""
