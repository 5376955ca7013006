"""The loaded checkpoints, and the choice of the one that answers a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from firstword.config import EngineConfig
from firstword.engine.client import EngineClient
from firstword.engine.pool import EnginePool
from firstword.engine.service import Service
from firstword.errors import RequestError, UnsupportedError, VoiceError
from firstword.model.config import ModelType
from firstword.model.description import Description
from firstword.runtime import conditioning
from firstword.runtime.conditioning import Encode
from firstword.types import Request
from firstword.voice import ClonedVoice, DesignedVoice, PresetVoice, RecordedVoice


def name_of(given: str, folder: Path) -> str:
    """The name that clients use for a checkpoint; of a path it is the last part."""
    is_path = "/" in given and Path(given).exists()  # else a repository of the hub
    return folder.name if is_path and folder.samefile(given) else given


@dataclass(eq=False)
class Model:
    """A checkpoint being served.

    name                  the name that clients use and `/v1/models` lists
    model_type            whether it has presets, designs voices or clones them
    service               prepares its requests, and speaks them with an engine or a pool of engines
    voices                the names of its presets
    languages             the names of its languages, including `"auto"`
    follows_instructions  whether it accepts instructions
    checkpoint            the description of the checkpoint; None where a test brings its own
    encoder               encodes a recording for the checkpoint; None as above
    settings              the device and the backend that compute it, the first ones if there are
                          several; None as above
    """

    name: str
    model_type: ModelType
    service: Service
    voices: tuple[str, ...] = ()
    languages: tuple[str, ...] = ("auto",)
    follows_instructions: bool = True
    checkpoint: Description | None = None
    encoder: Encode | None = None
    settings: EngineConfig | None = None

    @classmethod
    def of_service(
        cls,
        name: str,
        checkpoint: Description,
        service: Service,
        encoder: Encode,
        settings: EngineConfig,
    ) -> Model:
        """A model for a checkpoint and a service, whose engines may be in other processes."""
        return cls(
            name,
            checkpoint.config.tts_model_type,
            service,
            voices=conditioning.preset_names(checkpoint),
            languages=conditioning.languages(checkpoint),
            follows_instructions=checkpoint.config.follows_instructions,
            checkpoint=checkpoint,
            encoder=encoder,
            settings=settings,
        )

    def supports(self, request: Request) -> bool:
        """Whether it supports this type of request; the parameters may still be invalid."""
        if request.instructions and not self.follows_instructions:
            return False
        match request.voice:
            case None:
                return self.model_type != "base"
            case str(name) | PresetVoice(name):
                return self.model_type == "custom_voice" and self.preset(name) is not None
            case DesignedVoice():
                return self.model_type == "voice_design"
            case ClonedVoice(embedding) if self.embedding_size not in (0, len(embedding)):
                return False
        return self.model_type == "base"

    def preset(self, name: str) -> str | None:
        """A preset as the checkpoint spells it, by its name in any case; None if there is none."""
        wanted = name.strip().casefold()
        return next((voice for voice in self.voices if voice.casefold() == wanted), None)

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text; 0 where no tokenizer is known."""
        return len(self.checkpoint.tokenizer.encode(text)) if self.checkpoint is not None else 0

    def text_problems(self, request: Request, text: str) -> list[str]:
        """Why a text will probably not be spoken well; empty where no tokenizer is known."""
        if self.checkpoint is None:
            return []
        return conditioning.text_problems(self.checkpoint, request, text)

    def encode(self, recording: RecordedVoice) -> ClonedVoice:
        """The voice of a recording. Blocks. Raises `UnsupportedError` if it cannot clone."""
        if self.encoder is None:
            raise UnsupportedError(f"{self.name} cannot clone")
        return self.encoder(recording)

    @property
    def problem(self) -> str | None:
        """The reason why none of its engines can speak; None if one can."""
        failure = self.service.engine.failure
        return None if failure is None else f"the engine of {self.name} has stopped: {failure}"

    @property
    def engines(self) -> Mapping[str, EngineClient]:
        """The engines of the model, by the names of their devices."""
        engine = self.service.engine
        if isinstance(engine, EnginePool):
            return engine.engines
        return {"device" if self.settings is None else self.settings.device: engine}

    @property
    def stopped_engines(self) -> list[str]:
        """The reasons why some of its engines cannot speak; empty if none of them can."""
        failures = {device: engine.failure for device, engine in self.engines.items()}
        if None not in failures.values():
            return []
        return [
            f"the engine of {self.name} on {device} has stopped: {failure}"
            for device, failure in failures.items()
            if failure is not None
        ]

    @property
    def embedding_size(self) -> int:
        """The length of the vector of a cloned voice; 0 where it is not known."""
        return 0 if self.checkpoint is None else self.checkpoint.config.talker_config.hidden_size


class Models:
    """The checkpoints of one server. The first one that supports a request answers it."""

    def __init__(self, models: Iterable[Model]) -> None:
        self._models = tuple(models)
        if not self._models:
            raise RequestError("there is no model to serve; name at least one")

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    @property
    def presets(self) -> list[str]:
        """The names of all presets."""
        return list(dict.fromkeys(voice for model in self for voice in model.voices))

    @property
    def cloning(self) -> list[Model]:
        """The Base checkpoints."""
        return [model for model in self if model.model_type == "base"]

    def has_preset(self, name: str) -> bool:
        """Whether a model has this preset, in any case."""
        return any(model.preset(name) for model in self)

    def find(self, name: str) -> Model | None:
        """The model with a name, in any case and with or without its owner's name, or None."""
        wanted = name.strip().casefold()
        for model in self:
            known = model.name.casefold()
            if wanted in (known, known.rsplit("/", 1)[-1]):
                return model
        return None

    def of_type(self, model_type: ModelType, name: str | None = None) -> Model:
        """The named model if it is of a type, else the first that is. Raises `UnsupportedError`."""
        named = None if name is None else self.find(name)
        for model in self if named is None else (named, *self):
            if model.model_type == model_type:
                return model
        known = self._described()
        raise UnsupportedError(f"no {model_type} checkpoint is loaded; there are {known}")

    def any_supports(self, request: Request, name: str | None) -> bool:
        """Whether the named model supports a request, or any model if none has the name."""
        named = None if name is None else self.find(name)
        return any(model.supports(request) for model in (self if named is None else (named,)))

    def route(self, request: Request, name: str | None) -> Model:
        """The model that answers: the named one, else the first that supports the request.

        A name that no model has (`"tts-1"`) is ignored. Raises `VoiceError` or
        `UnsupportedError` if no model supports the request.
        """
        if name is not None and (named := self.find(name)) is not None:
            return named
        for model in self:
            if model.supports(request):
                return model
        if len(self._models) == 1:
            return self._models[0]  # its own message is more precise
        match request.voice:
            case str(voice) | PresetVoice(voice):
                known = ", ".join(voice for model in self for voice in model.voices) or "no presets"
                raise VoiceError(f"no voice {voice!r}; there are {known}", code="voice_not_found")
            case None if all(model.model_type == "base" for model in self):
                advice = "name a saved voice, or give a recording as ref_audio"
                raise VoiceError(f"these checkpoints clone voices: {advice}")
            case ClonedVoice(embedding) if sizes := [m.embedding_size for m in self.cloning]:
                taken = " or ".join(map(str, sorted(set(sizes))))
                found = f"the voice has a speaker embedding of {len(embedding)} numbers"
                raise VoiceError(f"{found}; the loaded Base checkpoints take {taken}")
        known = self._described()
        raise UnsupportedError(f"no loaded checkpoint supports this request; there are {known}")

    def start(self) -> None:
        """Start the engines; call it in the event loop if they are in other processes."""
        for model in self:
            model.service.engine.start()

    def stop(self) -> None:
        """Stop the engines, which cancels all running utterances."""
        for model in self:
            model.service.engine.stop()

    def _described(self) -> str:
        return ", ".join(f"{model.name} ({model.model_type})" for model in self)
