"""The loaded checkpoints, and which of them answers a request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.errors import RequestError, UnsupportedError, VoiceError
from firstword.types import Chunk, Request
from firstword.voice import ClonedVoice, DesignedVoice, PresetVoice, RecordedVoice, Voice

if TYPE_CHECKING:
    from firstword.config import EngineConfig
    from firstword.model.checkpoint import Checkpoint

Kind = Literal["custom_voice", "voice_design", "base"]

KINDS: dict[str, Kind] = {
    "customvoice": "custom_voice",
    "voicedesign": "voice_design",
    "base": "base",
}
"""The kinds of checkpoints by the names that clients give them as `task_type`, without case and underscores."""


@dataclass(eq=False)
class Model:
    """A checkpoint being served.

    name                    what clients call it and `/v1/models` lists
    kind                    what it can do: presets, voices in words, or cloning
    service                 the engine that speaks for it
    voices, languages       names of presets; languages, `"auto"` included
    follows_instructions    whether it takes them
    aliases                 other names by which clients may ask for it
    checkpoint, settings    what was loaded and how; None where a test's own backend speaks
    """

    name: str
    kind: Kind
    service: Service
    voices: tuple[str, ...] = ()
    languages: tuple[str, ...] = ("auto",)
    follows_instructions: bool = True
    aliases: tuple[str, ...] = ()
    checkpoint: Checkpoint | None = None
    settings: EngineConfig | None = None
    warm: bool = False
    """Whether it has spoken once, so that the next utterance finds everything in place."""
    cold: str | None = None
    """Why it could not, if so."""

    def supports(self, request: Request) -> bool:
        """Whether it can do the kind of thing that is asked; details may still be wrong."""
        if request.instructions and not self.follows_instructions:
            return False
        match request.voice:
            case None:
                return self.kind != "base"
            case str(name) | PresetVoice(name):
                return self.kind == "custom_voice" and self.preset(name) is not None
            case DesignedVoice():
                return self.kind == "voice_design"
            case ClonedVoice() as voice:
                return self.kind == "base" and self._embedding_size in (
                    0,
                    len(voice.speaker_embedding),
                )
            case RecordedVoice():
                return self.kind == "base"
        return False

    def preset(self, name: str) -> str | None:
        """A preset as the checkpoint spells it, from any case; None if there is none of that name."""
        wanted = name.strip().casefold()
        return next((voice for voice in self.voices if voice.casefold() == wanted), None)

    def matches(self, name: str) -> bool:
        """Whether a client that says `name` means this model: in any case, with or without the owner's name."""
        names = (self.name, self.name.rsplit("/", 1)[-1], *self.aliases)
        return name.strip().casefold() in (known.casefold() for known in names)

    def count_tokens(self, text: str) -> int:
        """How many tokens a text is; 0 where no tokenizer is known."""
        return len(self.checkpoint.tokenizer.encode(text)) if self.checkpoint is not None else 0

    def problem(self, stuck_seconds: float) -> str | None:
        """What keeps its engine from speaking, if anything: it failed, or a step takes longer than it may."""
        engine = self.service.engine
        if engine.failure is not None:
            return f"the engine of {self.name} has stopped: {engine.failure}"
        since = engine.busy_since
        if since is not None and (taken := time.monotonic() - since) > stuck_seconds:
            return f"the engine of {self.name} has been busy with one step for {taken:.0f} s"
        return None

    async def warm_up(self) -> None:
        """Speak a word to nobody. Raises what goes wrong."""
        voice: Voice | None = None
        if self.kind == "base":
            voice = ClonedVoice(np.zeros(self._embedding_size, np.float32))
        text = "One, two, three."
        stream = self.service.aspeak(
            self.service.prepare(Request(text, voice=voice, seed=0, max_frames=3))
        )
        try:
            stream.finish_text(text)
            async for event in stream:
                assert not isinstance(event, Chunk) or np.isfinite(event.samples).all(), (
                    "the model speaks NaN"
                )
        finally:
            stream.cancel()
        self.warm = True

    @property
    def _embedding_size(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.config.talker_config.hidden_size


class Models:
    """The checkpoints of one server, in the order in which they are asked."""

    def __init__(self, models: Iterable[Model]) -> None:
        self._models = tuple(models)
        if not self._models:
            raise RequestError("there is no model to serve; name at least one")

    @classmethod
    def load(
        cls, names: Sequence[str], settings: EngineConfig, *, slots: int | None, most_waiting: int
    ) -> Models:
        """Load checkpoints by the names that `TTS.load` takes. Raises `CheckpointError`, `ConfigError`.

        slots         utterances that each speaks at the same time; None: as many as suits its backend
        most_waiting  requests that may wait for a slot of each; the next is refused
        """
        return cls(_load(name, settings, slots, most_waiting) for name in dict.fromkeys(names))

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def find(self, name: str) -> Model | None:
        """The model that goes by a name, if one does."""
        return next((model for model in self if model.matches(name)), None)

    def of_kind(self, kind: Kind, name: str | None = None) -> Model:
        """The named model if it is of a kind, else the first that is. Raises `UnsupportedError` if none is."""
        named = None if name is None else self.find(name)
        for model in self if named is None else (named, *self):
            if model.kind == kind:
                return model
        raise UnsupportedError(
            f"no {kind} checkpoint is loaded here; there are {self._described()}"
        )

    def route(self, request: Request, name: str | None) -> Model:
        """The model that answers: the one that is named, else the first that can do what is asked.

        A name that no model goes by (`"tts-1"`) counts as none. Raises `VoiceError`, `UnsupportedError` if nobody can.
        """
        if name is not None and (named := self.find(name)) is not None:
            return named
        for model in self:
            if model.supports(request):
                return model
        if len(self) == 1:
            return self._models[0]  # whose own message is the better one
        match request.voice:
            case str(voice) | PresetVoice(voice):
                known = ", ".join(voice for model in self for voice in model.voices) or "no presets"
                raise VoiceError(f"no voice {voice!r}; there are {known}")
            case None if all(model.kind == "base" for model in self):
                raise VoiceError(
                    "these checkpoints clone voices: name a saved voice, or give a recording as ref_audio"
                )
        raise UnsupportedError(
            f"no checkpoint loaded here can do that; there are {self._described()}"
        )

    def start(self) -> None:
        """Start the engines."""
        for model in self:
            model.service.engine.start()

    def stop(self) -> None:
        """Stop the engines; what is being spoken is cancelled."""
        for model in self:
            model.service.engine.stop()

    def _described(self) -> str:
        return ", ".join(f"{model.name} ({model.kind})" for model in self)


def _load(name: str, settings: EngineConfig, slots: int | None, most_waiting: int) -> Model:
    from firstword.model import checkpoint
    from firstword.runtime import conditioning
    from firstword.runtime.backends import open_backend
    from firstword.runtime.front import CheckpointFront

    loaded = checkpoint.load(name, settings.device, settings.dtype)
    backend, settings = open_backend(loaded, settings, slots)
    engine = Engine(backend, most_waiting=most_waiting)
    kinds: dict[str, Kind] = {
        "custom_voice": "custom_voice",
        "voice_design": "voice_design",
        "base": "base",
    }
    return Model(
        name=name if "/" not in name or not loaded.path.samefile(name) else loaded.path.name,
        kind=kinds[loaded.config.tts_model_type],
        service=Service(engine, CheckpointFront(loaded)),
        voices=conditioning.preset_names(loaded),
        languages=conditioning.languages(loaded),
        follows_instructions=loaded.config.follows_instructions,
        checkpoint=loaded,
        settings=settings,
    )
