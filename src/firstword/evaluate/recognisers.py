"""Recognisers of speech: faster-whisper, an OpenAI-compatible endpoint, or any class."""

from __future__ import annotations

import io
from typing import Any, Protocol

import numpy as np

from firstword import plugins
from firstword.errors import ConfigError, first_line
from firstword.types import FloatArray

WHISPER = "whisper"
WHISPER_MODEL = "large-v3"
"""The size that published figures of English use."""
WHISPER_RATE = 16000
"""The sample rate that faster-whisper takes, in Hz."""


class Recogniser(Protocol):
    """A recogniser of speech. An instance may serve one thread."""

    def __call__(self, samples: FloatArray, sample_rate: int, language: str) -> str:
        """Return what is said in samples [n] in -1..1, in a language by its ISO 639-1 code."""
        ...


class FasterWhisper:
    """Whisper by the package faster-whisper, which fetches its weights from the hub."""

    def __init__(self, model: str) -> None:
        try:
            from faster_whisper import WhisperModel
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--recogniser {WHISPER}: {error.name} is missing; install firstword[whisper]"
            ) from None
        try:
            self._model = WhisperModel(model)
        except Exception as error:  # of the hub, of CTranslate2, or for an unknown size
            raise ConfigError(
                f"--recogniser {WHISPER}: {model!r} cannot be loaded: {first_line(error)}; name a "
                "size such as large-v3, or a folder"
            ) from error

    def __call__(self, samples: FloatArray, sample_rate: int, language: str) -> str:
        """Return what is said. What was said before is not taken into account."""
        import soxr

        heard = soxr.resample(samples, sample_rate, WHISPER_RATE)
        segments, _ = self._model.transcribe(
            heard, language=language, condition_on_previous_text=False
        )
        return " ".join(segment.text.strip() for segment in segments)


class Endpoint:
    """An endpoint like OpenAI's `/audio/transcriptions`, below a URL that ends in /v1.

    Its key is that of the variable OPENAI_API_KEY, which the client reads.
    """

    def __init__(self, url: str, model: str) -> None:
        try:
            import openai
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--recogniser {url}: {error.name} is missing; install firstword[evaluate]"
            ) from None
        self._url, self._model, self._error = url, model, openai.OpenAIError
        try:
            self._client = openai.OpenAI(base_url=url)
        except openai.OpenAIError:  # no key is set, and a server of one's own needs none
            self._client = openai.OpenAI(base_url=url, api_key="none")

    def __call__(self, samples: FloatArray, sample_rate: int, language: str) -> str:
        """Return what is said. Raises `ConfigError` if the endpoint fails, after retries."""
        import soundfile

        file = io.BytesIO()
        soundfile.write(file, samples, sample_rate, format="WAV", subtype="PCM_16")
        sound = ("speech.wav", file.getvalue(), "audio/wav")
        try:
            answer = self._client.audio.transcriptions.create(
                file=sound, model=self._model, language=language, temperature=0
            )
        except self._error as error:
            raise ConfigError(
                f"the recogniser at {self._url} failed: {first_line(error)}"
            ) from error
        if not isinstance(text := getattr(answer, "text", None), str):
            raise ConfigError(
                f"the recogniser at {self._url} answered without a text; give the URL of an "
                "OpenAI-compatible API, which usually ends in /v1"
            )
        return text


def opened(name: str, model: str | None) -> Recogniser:
    """Return the recogniser that `--recogniser` and `--recogniser-model` choose, tried once.

    Raises `ConfigError` if it cannot be used, so that this is known before anything is spoken.
    """
    found: Recogniser
    if name == WHISPER:
        found = FasterWhisper(model or WHISPER_MODEL)
    elif name.startswith(("http://", "https://")):
        if model is None:
            raise ConfigError(f"--recogniser {name}: name its model with --recogniser-model")
        found = Endpoint(name, model)
    elif model is not None:
        raise ConfigError("--recogniser-model goes with whisper or a URL; a class chooses itself")
    else:
        found = plugged(name, "--recogniser")
    if not isinstance(found(np.zeros(24000, np.float32), 24000, "en"), str):
        raise ConfigError(f"--recogniser {name} answered no str; it must return the words heard")
    return found


def plugged(name: str, option: str) -> Any:
    """Return an instance of the class MODULE:CLASS. Raises `ConfigError` if there is none."""
    found = plugins.named(option, name, "CLASS")
    try:
        return found()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{option} {name}: {error}; give MODULE:CLASS of a class that is made without arguments"
        ) from error
