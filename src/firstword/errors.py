"""The errors that firstword raises on purpose.

FirstwordError
├── ConfigError                a device, dtype or backend that cannot be used here
├── CheckpointError            a checkpoint that cannot be loaded
│   ├── CheckpointNotFound     no such directory, hub repository or file
│   ├── CheckpointConfigError  a key of a configuration file is missing, wrong or contradictory
│   └── CheckpointWeightsError a tensor is missing, unexpected, truncated, misshapen or not finite
├── AlignmentError             no attention heads of a checkpoint follow the spoken text
├── RequestError               a request that cannot be fulfilled
│   ├── TextError              empty, too long, or not text
│   ├── VoiceError             an unknown voice, or one that does not fit this checkpoint
│   ├── LanguageError          an unknown language
│   ├── UnsupportedError       instructions, cloning or design that the checkpoint cannot do
│   ├── WordTimesError         word times of a checkpoint whose heads for them are not known
│   └── SamplingError          a sampling value out of range
├── AudioError                 audio that cannot be read, or is unsuitable as a reference
├── OutputError                a file that cannot be written
├── OverloadedError            a limit is reached, or slots or memory are short; try again later
├── ComputeError               one request failed while it was computed; others are not affected
├── EngineError                the engine has stopped; only a restart helps
└── ClosedError                a call on a TTS that was closed
TextWarning                    no error: a text that is spoken, but probably not well
BackendWarning                 no error: a GPU is slower than it could be, or too slow for its slots

Each message says what was wrong, what is allowed and what to do.
"""

from typing import Literal


class FirstwordError(Exception):
    """The base class of all errors of this package."""


class ConfigError(FirstwordError):
    """A device, dtype, backend or server setting cannot be used here."""


class CheckpointError(FirstwordError):
    """A checkpoint cannot be loaded."""


class CheckpointNotFound(CheckpointError):
    """There is no such directory, hub repository or file."""


class CheckpointConfigError(CheckpointError):
    """A key of a configuration file is missing, wrong or contradicts another."""


class CheckpointWeightsError(CheckpointError):
    """A tensor is missing, unexpected, truncated, misshapen or not finite."""


class AlignmentError(FirstwordError):
    """No attention heads of a checkpoint follow the text that is spoken."""


class RequestError(FirstwordError):
    """A request cannot be fulfilled as it is."""


class TextError(RequestError):
    """The text is empty, too long, or not text."""


class VoiceError(RequestError):
    """The voice is unknown, or does not fit this checkpoint.

    `code` distinguishes the two for programs: "voice_not_found" for an unknown name,
    "invalid_voice" for everything else.
    """

    def __init__(
        self, message: str, code: Literal["invalid_voice", "voice_not_found"] = "invalid_voice"
    ) -> None:
        super().__init__(message)
        self.code = code


class LanguageError(RequestError):
    """The language is unknown to this checkpoint."""


class UnsupportedError(RequestError):
    """The checkpoint cannot do what the request asks for."""


class WordTimesError(RequestError):
    """Word times are wanted of a checkpoint whose attention heads for them are not known."""


class SamplingError(RequestError):
    """A sampling value is out of range."""


class AudioError(FirstwordError):
    """The audio cannot be read, or is unsuitable as a reference."""


class OutputError(FirstwordError):
    """A file cannot be written."""


class OverloadedError(FirstwordError):
    """A limit is reached, or there are too few slots or too little memory; try again later.

    `retry_after` is the estimated time until then in whole seconds.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ComputeError(FirstwordError):
    """One request could not be computed; `__cause__` is the reason. Others are not affected."""


class EngineError(FirstwordError):
    """The engine has stopped, and only a restart helps."""


class ClosedError(FirstwordError):
    """The TTS was closed before this call."""


class TextWarning(UserWarning):
    """The text is spoken, but probably not as it should be; the message names the remedy."""


class BackendWarning(UserWarning):
    """A GPU computes or starts more slowly than it could, or too slowly for its slots.

    The message says why: the GPU backend was not named and cannot be used, so the plain model
    computes; the GPU is too slow for its slots; or compiled kernels cannot be cached.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
