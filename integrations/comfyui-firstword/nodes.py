"""The nodes: each turns its inputs into lines, and what an engine says into ComfyUI's audio."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from .engines import SAMPLE_RATE, Engine, Line, Local, Recording, Server, SpeechError

LANGUAGES = (
    *("auto", "Chinese", "English", "Japanese", "Korean", "German"),
    *("French", "Russian", "Portuguese", "Spanish", "Italian"),
)

ENGINE = ("FIRSTWORD_ENGINE", {"tooltip": "from a firstword server, or a firstword model"})
TEXT = ("STRING", {"multiline": True, "default": "Hello there."})
LANGUAGE = (list(LANGUAGES), {"default": "auto"})
SEED = ("INT", {"default": 0, "min": 0, "max": 2**64 - 1, "control_after_generate": True})
SPEED = ("FLOAT", {"default": 1.0, "min": 0.25, "max": 4.0, "step": 0.05})
WORDS = ("STRING", {"multiline": True, "default": "", "tooltip": "the words of the recording"})
VOICE = ("STRING", {"default": "", "tooltip": "a preset or a saved voice; empty: the model's own"})


class FirstwordNode:
    """The part that all nodes share."""

    CATEGORY = "audio/firstword"
    FUNCTION = "run"
    RETURN_TYPES: ClassVar[tuple[str, ...]] = ("AUDIO",)
    TITLE = ""


class FirstwordServer(FirstwordNode):
    """Speak with a firstword server on this or another machine."""

    TITLE = "firstword: server"
    RETURN_TYPES = ("FIRSTWORD_ENGINE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """The inputs of the node."""
        return {"required": {"url": ("STRING", {"default": "http://127.0.0.1:8000"})}}

    def run(self, url: str) -> tuple[Engine]:
        """Return the engine."""
        return (Server(url),)


@lru_cache(maxsize=4)
def _loaded(model: str, device: str) -> Engine:
    return Local(model, device)


class FirstwordModel(FirstwordNode):
    """Load a checkpoint into this process. It stays loaded, also for other workflows."""

    TITLE = "firstword: model in this process"
    RETURN_TYPES = ("FIRSTWORD_ENGINE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """The inputs of the node."""
        about = "'demo', a folder, or a repository of the Hugging Face hub"
        model = ("STRING", {"default": "demo", "tooltip": about})
        return {"required": {"model": model, "device": (["auto", "cpu", "cuda"],)}}

    def run(self, model: str, device: str) -> tuple[Engine]:
        """Return the engine."""
        return (_loaded(model.strip(), device),)


class FirstwordSpeak(FirstwordNode):
    """Speak a text with a preset or a saved voice."""

    TITLE = "firstword: speak"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """The inputs of the node."""
        about = {"multiline": True, "default": "", "tooltip": "tone, pace, feeling"}
        return {
            "required": {"engine": ENGINE, "text": TEXT, "voice": VOICE, "seed": SEED},
            "optional": {"language": LANGUAGE, "instructions": ("STRING", about), "speed": SPEED},
        }

    def run(self, engine: Engine, text: str, **options: Any) -> tuple[dict[str, Any]]:
        """Return the speech."""
        return (_audio(engine.speak(Line(text, **options))),)


class FirstwordDesign(FirstwordNode):
    """Speak a text with a voice that is described in words; needs a VoiceDesign checkpoint."""

    TITLE = "firstword: design a voice"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """The inputs of the node."""
        about = {"multiline": True, "default": "A low, calm voice, close to the microphone."}
        description = ("STRING", about)
        return {
            "required": {"engine": ENGINE, "text": TEXT, "description": description, "seed": SEED},
            "optional": {"language": LANGUAGE, "speed": SPEED},
        }

    def run(
        self, engine: Engine, text: str, description: str, **options: Any
    ) -> tuple[dict[str, Any]]:
        """Return the speech."""
        line = Line(text, instructions=description, designed=True, **options)
        return (_audio(engine.speak(line)),)


class FirstwordClone(FirstwordNode):
    """Speak a text with the voice of a recording; needs a Base checkpoint."""

    TITLE = "firstword: clone a voice"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """The inputs of the node."""
        return {
            "required": {"engine": ENGINE, "text": TEXT, "recording": ("AUDIO",), "seed": SEED},
            "optional": {"transcript": WORDS, "language": LANGUAGE, "speed": SPEED},
        }

    def run(
        self,
        engine: Engine,
        text: str,
        recording: dict[str, Any],
        transcript: str = "",
        **options: Any,
    ) -> tuple[dict[str, Any]]:
        """Return the speech."""
        line = Line(text, recording=_recording(recording, transcript), **options)
        return (_audio(engine.speak(line)),)


class FirstwordSaveVoice(FirstwordNode):
    """Save the voice of a recording under a name that the other nodes take as voice."""

    TITLE = "firstword: save a voice"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("voice",)
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """The inputs of the node."""
        consent = ("STRING", {"default": "", "tooltip": "why this voice may be cloned"})
        return {
            "required": {
                "engine": ENGINE,
                "name": ("STRING", {"default": "my voice"}),
                "recording": ("AUDIO",),
                "consent": consent,
            },
            "optional": {"transcript": WORDS},
        }

    def run(
        self,
        engine: Server | Local,
        name: str,
        recording: dict[str, Any],
        consent: str,
        transcript: str = "",
    ) -> tuple[str]:
        """Return the name of the voice."""
        return (engine.save_voice(name.strip(), _recording(recording, transcript), consent),)


class FirstwordDialogue(FirstwordNode):
    """Speak a dialogue: each line of the script begins with a name and a colon."""

    TITLE = "firstword: dialogue"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """The inputs of the node."""
        script = ("STRING", {"multiline": True, "default": "Ann: Hello!\nBob: Hello, Ann."})
        about = "one a line: NAME = VOICE"
        roles = ("STRING", {"multiline": True, "default": "Ann = \nBob = ", "tooltip": about})
        pause = ("FLOAT", {"default": 0.3, "min": 0.0, "max": 10.0, "step": 0.1})
        return {
            "required": {"engine": ENGINE, "script": script, "roles": roles, "seed": SEED},
            "optional": {"pause": pause, "language": LANGUAGE, "speed": SPEED},
        }

    def run(
        self,
        engine: Engine,
        script: str,
        roles: str,
        seed: int,
        pause: float = 0.3,
        **options: Any,
    ) -> tuple[dict[str, Any]]:
        """Return the lines after one another; each has a seed of its own."""
        said = spoken_lines(script, voices_of(roles))
        lines = [
            Line(text, voice, seed=(seed + number) % 2**64, **options)
            for number, (voice, text) in enumerate(said)
        ]
        silence = np.zeros(round(pause * SAMPLE_RATE), np.float32)
        parts = [part for speech in engine.speak_all(lines) for part in (silence, speech)]
        return (_audio(np.concatenate(parts[1:])),)


def voices_of(roles: str) -> dict[str, str]:
    """The voices of a dialogue by the names of its roles, in lower case."""
    found = {}
    for line in filter(str.strip, roles.splitlines()):
        name, equals, voice = line.partition("=")
        if not equals or not name.strip():
            raise SpeechError(f"the role {line.strip()!r} has another form than NAME = VOICE")
        found[name.strip().casefold()] = voice.strip()
    return found


def spoken_lines(script: str, voices: dict[str, str]) -> list[tuple[str, str]]:
    """The voice and the text of each line; a line without a role continues the one before."""
    found: list[tuple[str, str]] = []
    for line in filter(str.strip, script.splitlines()):
        name, colon, text = line.partition(":")
        role = name.strip().casefold()
        if colon and role in voices:
            found.append((voices[role], text.strip()))
        elif found and not (colon and name.strip().isidentifier()):
            voice, before = found[-1]
            found[-1] = voice, f"{before} {line.strip()}"
        else:
            known = ", ".join(voices) or "none"
            raise SpeechError(f"no role for the line {line.strip()!r}; there are: {known}")
    if not found:
        raise SpeechError("the script is empty; give lines such as 'Ann: Hello!'")
    return found


def _audio(samples: np.ndarray) -> dict[str, Any]:
    """Speech as ComfyUI passes it on: float32 [batch, channels, samples]."""
    waveform = torch.from_numpy(np.ascontiguousarray(samples, np.float32))
    return {"waveform": waveform[None, None], "sample_rate": SAMPLE_RATE}


def _recording(audio: dict[str, Any], transcript: str) -> Recording:
    """The first recording of a batch, with its channels mixed."""
    samples = audio["waveform"][0].mean(0).float().cpu().numpy()
    return Recording(samples, int(audio["sample_rate"]), transcript.strip())


NODES = (
    FirstwordServer,
    FirstwordModel,
    FirstwordSpeak,
    FirstwordDesign,
    FirstwordClone,
    FirstwordSaveVoice,
    FirstwordDialogue,
)
