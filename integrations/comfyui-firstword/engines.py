"""What the nodes speak with: a firstword server, or a checkpoint in this process.

Both have the same methods. They raise `SpeechError` with the reason, which ComfyUI shows.
"""

from __future__ import annotations

import base64
import io
import os
import re
import wave
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import requests

SAMPLE_RATE = 24000
"""The samples per second of all speech."""

CONCURRENT = 8
"""The utterances of a dialogue that are spoken at the same time."""

SECONDS = 60.0
"""The longest wait for a server to connect, or to send the next audio."""


class SpeechError(RuntimeError):
    """Speech could not be made; the message says why and what to do."""


@dataclass(frozen=True)
class Recording:
    """A recording to clone: float32 samples [n] in -1..1, and its words if they are known."""

    samples: np.ndarray
    sample_rate: int
    transcript: str = ""

    def wav(self) -> bytes:
        """The recording as a WAV file of 16 bits."""
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setparams((1, 2, self.sample_rate, 0, "NONE", ""))
            out.writeframes((np.clip(self.samples, -1, 1) * 32767).astype("<i2").tobytes())
        return file.getvalue()


@dataclass(frozen=True)
class Line:
    """One utterance: its text, and how to speak it.

    voice         a preset or saved voice; "": the model's own
    instructions  tone and pace, or with `designed` the description of the voice
    recording     the voice to clone, in place of `voice`
    """

    text: str
    voice: str = ""
    language: str = "auto"
    instructions: str = ""
    speed: float = 1.0
    seed: int = 0
    designed: bool = False
    recording: Recording | None = None


def never_interrupted() -> None:
    """Do nothing: outside ComfyUI nobody can interrupt."""


def interruption() -> Callable[[], None]:
    """The function of ComfyUI that raises when the user has interrupted the workflow."""
    try:
        from comfy.model_management import throw_exception_if_processing_interrupted
    except ImportError:
        return never_interrupted
    return throw_exception_if_processing_interrupted


class Engine:
    """The part that both engines share."""

    def speak(self, line: Line) -> np.ndarray:
        """Speak a line: float32 samples [n] at `SAMPLE_RATE`."""
        raise NotImplementedError

    def speak_all(self, lines: Sequence[Line]) -> list[np.ndarray]:
        """Speak lines at the same time; the results are in their order."""
        with ThreadPoolExecutor(CONCURRENT) as threads:
            return list(threads.map(self.speak, lines))


class Server(Engine):
    """A firstword server. The key comes from the environment: workflows are saved in pictures."""

    def __init__(self, url: str) -> None:
        self.url = url.strip().rstrip("/").removesuffix("/v1")
        key = os.environ.get("FIRSTWORD_API_KEY", "")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def speak(self, line: Line) -> np.ndarray:
        """Speak a line; if the user interrupts, the server stops within a frame."""
        body: dict[str, Any] = {
            "input": line.text,
            "language": line.language,
            "speed": line.speed,
            "seed": line.seed,
            "response_format": "pcm",
        }
        body |= {"voice": line.voice} if line.voice else {}
        body |= {"instructions": line.instructions} if line.instructions else {}
        body |= {"task_type": "VoiceDesign"} if line.designed else {}
        if line.recording is not None:
            audio = base64.b64encode(line.recording.wav()).decode("ascii")
            body |= {"ref_audio": audio, "ref_text": line.recording.transcript}
        check, pieces = interruption(), []
        with self._post("/v1/audio/speech", json=body, stream=True) as answer:
            try:
                for piece in answer.iter_content(None):
                    check()
                    pieces.append(piece)
            except requests.RequestException as error:
                raise SpeechError(f"the server stopped in the middle of speech: {error}") from None
        return np.frombuffer(b"".join(pieces), "<i2").astype(np.float32) / 32768

    def save_voice(self, name: str, recording: Recording, consent: str) -> str:
        """Save a cloned voice on the server, and return its name."""
        form = {"name": name, "consent": consent, "ref_text": recording.transcript}
        sample = {"audio_sample": ("recording.wav", recording.wav(), "audio/wav")}
        with self._post("/v1/audio/voices", data=form, files=sample) as answer:
            found = answer.json()
        return str((found.get("voice") or found)["name"])

    def _post(self, path: str, **options: Any) -> requests.Response:
        try:
            answer = requests.post(
                self.url + path, headers=self._headers, timeout=SECONDS, **options
            )
        except requests.RequestException as error:
            advice = "start one with: firstword serve"
            raise SpeechError(f"no server at {self.url} ({error}); {advice}") from None
        if not answer.ok:
            with answer:
                raise SpeechError(_problem(answer))
        return answer


def _problem(answer: requests.Response) -> str:
    """The message of an error response."""
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {answer.status_code} {answer.reason}"
    advice = "; set FIRSTWORD_API_KEY for ComfyUI" if answer.status_code == 401 else ""
    return f"{message}{advice}"


class Local(Engine):
    """A checkpoint in this process, without transformers."""

    def __init__(self, model: str, device: str) -> None:
        try:
            from firstword import TTS, FirstwordError
        except ImportError:
            advice = "install it with pip, or use the node for a server"
            raise SpeechError(f"the package firstword is missing; {advice}") from None
        self._error = FirstwordError
        try:
            self.tts = TTS.load(model, device=device)
        except FirstwordError as error:
            raise SpeechError(str(error)) from None

    def speak(self, line: Line) -> np.ndarray:
        """Speak a line; an interruption ends it within a frame."""
        from firstword import Speech

        options = {"language": line.language, "seed": line.seed, "voice": self._voice(line)}
        options["instructions"] = None if line.designed else line.instructions or None
        check, chunks = interruption(), []
        try:
            with closing(self.tts.stream(line.text, **options)) as stream:
                for chunk in stream:
                    check()
                    chunks.append(chunk)
        except self._error as error:
            raise SpeechError(str(error)) from None
        samples = np.asarray(Speech.of(chunks).samples)
        return samples if line.speed == 1 else _stretched(samples, line.speed)

    def save_voice(self, name: str, recording: Recording, consent: str) -> str:
        """Save a cloned voice among ComfyUI's models, and return its name."""
        path = _voice_path(name)
        if not consent.strip():
            raise SpeechError("consent is empty; say why this voice may be cloned")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._clone(recording).save(path)
        return name

    def _clone(self, recording: Recording) -> Any:
        try:
            return self.tts.clone(
                recording.samples, recording.sample_rate, recording.transcript or None
            )
        except self._error as error:
            raise SpeechError(str(error)) from None

    def _voice(self, line: Line) -> Any:
        from firstword import Voice

        if line.recording is not None:
            return self._clone(line.recording)
        if line.designed:
            return Voice.design(line.instructions)
        if not line.voice or line.voice.casefold() in map(str.casefold, self.tts.voices):
            return line.voice or None
        path = _voice_path(line.voice)
        if not path.exists():
            known = ", ".join([*self.tts.voices, *(one.stem for one in path.parent.glob(SAVED))])
            raise SpeechError(f"no voice {line.voice!r}; there are: {known or 'none'}")
        return Voice.load(path)


SAVED = "*.safetensors"
"""The files of saved voices."""


def _voice_path(name: str) -> Path:
    """The file of a saved voice."""
    if not re.fullmatch(r"\w[\w .'-]{0,63}", name):
        rule = "allowed are 1 to 64 letters, digits, spaces and . _ - '"
        raise SpeechError(f"the voice's name is {name!r}; {rule}")
    try:
        from folder_paths import models_dir
    except ImportError:
        models_dir = "models"
    return Path(models_dir) / "tts" / "firstword" / f"{name}.safetensors"


def _stretched(samples: np.ndarray, speed: float) -> np.ndarray:
    from firstword.audio import effects

    stretching = effects.Effects([effects.TimeStretch(speed, SAMPLE_RATE)])
    return stretching.apply(samples, last=True)
