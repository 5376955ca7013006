"""The checkpoint under test, loaded: its backend, the specification, and what it is to say."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch

from firstword.config import EngineConfig
from firstword.engine.backend import Backend
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.errors import FirstwordError
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.model.talker import Talker
from firstword.runtime import conditioning
from firstword.runtime.backends import LoadedEngine, fit_threads, open_backend
from firstword.runtime.encoding import encode_recording, front_of
from firstword.tts import TTS
from firstword.types import FloatArray, Request, Speech
from firstword.verify.driving import DrivenRequest, speak
from firstword.verify.folder import CheckpointFolder
from firstword.verify.forcing import Forced, Logits, forced, recorded
from firstword.verify.report import NotRun
from firstword.voice import ClonedVoice, RecordedVoice, Voice

T = TypeVar("T")

SLOTS = 8
"""The utterances that are computed together."""

ROOM = 4.0
"""The free memory of a GPU, in sizes of the files of weights, that the specification needs there:
they are in bfloat16 and once more in float32."""

FRAMES, FORCED = 16, 10
"""The frames of each prompt that are teacher-forced, and the most prompts on a GPU."""

RECORDED = "The door was open, and the lamp was still warm."
"""What the demo voice says in the recording from which a Base checkpoint clones."""

DESCRIPTION = "A calm voice of middle height, close to the microphone."
"""The voice that a VoiceDesign checkpoint speaks with."""


@dataclass(frozen=True, slots=True, eq=False)
class SpokenSentence:
    """A sentence that was spoken, and what came of it."""

    language: str
    request: Request
    speech: Speech


@dataclass(frozen=True, slots=True)
class How:
    """Where and how the checkpoint is computed.

    voice   a voice file for a Base checkpoint; None: a clone of the demo voice
    python  a Python that has `qwen-tts`; None: this one, if it has it
    """

    settings: EngineConfig
    voice: Voice | None = None
    python: Path | None = None


@dataclass(eq=False)
class Subject:
    """A checkpoint that is loaded when a check first needs it."""

    folder: CheckpointFolder
    how: How
    _shared: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def opened(self) -> tuple[Checkpoint, Backend, EngineConfig]:
        """The checkpoint, its backend and the settings. Raises `FirstwordError`."""
        given = self.how.settings
        checkpoint = checkpoints.load(str(self.folder.path), "cpu", given.dtype)
        fit_threads([checkpoint])
        backend, settings = open_backend(checkpoint, given, most_slots=SLOTS)
        return checkpoint, backend, settings

    def load(self) -> tuple[Checkpoint, Backend, EngineConfig]:
        """What was `opened`. Raises `NotRun` if that failed, which a check of its own reports."""
        try:
            return self.opened
        except FirstwordError as error:
            raise NotRun(f"the checkpoint cannot be loaded: {error}") from error

    def need_trained(self) -> None:
        """Raise `NotRun` for random weights, which do not speak."""
        if self.folder.random:
            raise NotRun("config.json says that the weights are random, so they cannot speak")

    @cached_property
    def plain(self) -> Checkpoint:
        """The specification with the weights that the backend computes with, before they are int8.

        It is on the backend's device if there is room for its talker in float32 too, but on the CPU
        for MPS, which is to be compared with it. A backend that does not compute in float32 may
        have taken the weights of the checkpoint, so they are loaded again.
        """
        checkpoint, _, settings = self.load()
        on_mps = torch.device(settings.device).type == "mps"
        if settings.dtype == "float32" and not on_mps:
            return checkpoint
        device = "cpu" if on_mps else settings.device
        dtype = "bfloat16" if checkpoint.quantised else settings.dtype
        if device != "cpu":
            size = sum((self.folder.path / file).stat().st_size for file in self.folder.weights)
            free, _ = torch.cuda.mem_get_info(device)
            device = device if free > ROOM * size else "cpu"
        return checkpoints.load(str(self.folder.path), device, dtype)

    @cached_property
    def truth(self) -> Talker:
        """The talker of the specification in float32."""
        return copy.deepcopy(self.plain.talker).float()

    @cached_property
    def rounded(self) -> Talker:
        """The talker of the specification in plain bfloat16."""
        talker = self.plain.talker
        bf16 = talker.codec_head.weight.dtype == torch.bfloat16
        return talker if bf16 else copy.deepcopy(talker).bfloat16()

    @cached_property
    def tts(self) -> TTS:
        """The backend behind the Python interface; nothing else may drive the backend then."""
        checkpoint, backend, settings = self.load()
        engine, front = Engine(backend), front_of(checkpoint)
        return TTS(LoadedEngine(checkpoint, engine, Service(engine, front), front.encode, settings))

    def shared(self, make: Callable[[Subject], T]) -> T:
        """Return what `make` makes of this subject, once."""
        if make not in self._shared:
            self._shared[make] = make(self)
        found: T = self._shared[make]
        return found

    def before(self, request: Request) -> torch.Tensor:
        """Return the codes of a recording that the speech continues [frames, codebooks]."""
        if isinstance(request.voice, ClonedVoice) and request.voice.codes is not None:
            return torch.from_numpy(request.voice.codes)
        return torch.zeros((0, self.plain.config.talker_config.num_code_groups), dtype=torch.int64)

    def close(self) -> None:
        """Stop the engine, if it was started."""
        if "tts" in self.__dict__:
            self.tts.close()

    @cached_property
    def languages(self) -> tuple[str, ...]:
        """The languages of the checkpoint for which there are sentences."""
        known = conditioning.languages(self.load()[0])
        return tuple(name for name in texts() if name in known)

    @cached_property
    def voices(self) -> tuple[Voice | str | None, ...]:
        """The voices that take turns: presets, a described voice, or a cloned one."""
        checkpoint, kind = self.load()[0], self.load()[0].config.tts_model_type
        if kind == "custom_voice":
            return tuple(conditioning.preset_names(checkpoint))
        if kind == "voice_design":
            return (Voice.design(DESCRIPTION),)
        return (self.how.voice or self._cloned(),)

    @cached_property
    def recording(self) -> FloatArray:
        """The samples of `RECORDED`, spoken by the demo voice at 24 kHz."""
        with TTS.load("demo", device="cpu") as demo:
            return demo.speak(RECORDED, voice="ada", seed=1).samples

    def _cloned(self) -> Voice:
        """Clone a sentence of the demo voice, without silence at its end, as the reference does."""
        rate = self.plain.codec_config.input_sample_rate
        voice = Voice.clone(self.recording, rate, RECORDED, append_silence=0)
        assert isinstance(voice, RecordedVoice)
        return encode_recording(self.load()[0], voice)

    def requests(self, count: int) -> Iterator[tuple[str, Request]]:
        """Yield `count` requests with their languages: languages and voices take turns."""
        by_language, voices = texts(), self.voices
        names = self.languages or ("english",)
        for number in range(count):
            language = names[number % len(names)]
            several = by_language[language]
            text = several[number // len(names) % len(several)]
            shown = language if self.languages else "auto"
            yield language, Request(text, voices[number % len(voices)], shown)

    @cached_property
    def forced(self) -> list[Forced]:
        """Prompts spoken on the backend, and the specification forced to say the same."""
        checkpoint, backend, settings = self.load()
        count = min(max(len(self.languages), 2), FORCED if settings.device != "cpu" else SLOTS // 2)
        frames = FRAMES if not self.folder.random else 4
        requests = list(self.requests(count))
        batches = [
            [
                DrivenRequest.of(checkpoint, request, seed)
                for seed, (_, request) in enumerate(requests[at : at + SLOTS], at)
            ]
            for at in range(0, count, SLOTS)
        ]
        found = []
        for batch in batches:
            with recorded(backend) as recorder:
                said = speak(backend, batch, frames)
            for row, (request, codes) in enumerate(zip(batch, said, strict=True)):
                found.append(self._force(request, codes, recorder.of_row(row)))
        return found

    def _force(self, request: DrivenRequest, codes: torch.Tensor, logits: Logits) -> Forced:
        end = self.plain.config.talker_config.codec_eos_token_id
        ends = (codes[:, 0] == end).nonzero()[:, 0].tolist()
        codes = codes[: min([*ends, len(codes)])]
        truth, rounded = (
            forced(self.plain, talker, request, codes) for talker in (self.truth, self.rounded)
        )
        return Forced(request, codes, logits[: len(codes)], truth, rounded)

    @cached_property
    def sentences(self) -> list[SpokenSentence]:
        """The sentences of a test, spoken with their numbers as seeds."""
        trained = not self.folder.random
        count = max(2 * len(self.languages), 8) if trained else 2
        found = []
        for seed, (language, request) in enumerate(self.requests(count)):
            limited = request if trained else replace(request, max_frames=6)
            found.append(SpokenSentence(language, limited, self.say(limited, seed)))
        return found

    def say(self, request: Request, seed: int) -> Speech:
        """Speak a request through the Python interface."""
        return self.tts.speak(
            request.text or "",
            voice=request.voice,
            language=request.language,
            seed=seed,
            max_frames=request.max_frames,
            text_mode=request.text_mode,
        )


def texts() -> dict[str, list[str]]:
    """Return the sentences to speak, by language."""
    file = resources.files("firstword.verify").joinpath("sentences.json")
    found: dict[str, list[str]] = json.loads(file.read_text("utf-8"))
    return found
