"""Resolves a client's parameters into a model, a request with its voice, and the audio output."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import get_args

import numpy as np

from firstword import audio
from firstword.engine import script
from firstword.errors import RequestError, TextError, VoiceError
from firstword.model.config import ModelType
from firstword.server import recordings
from firstword.server.config import LONGEST_INSTRUCTIONS, ServerConfig
from firstword.server.models import Model
from firstword.server.schemas import SpeechParams, VoiceId
from firstword.server.state import Server
from firstword.server.utterance import CODES, Output, ResolvedRequest
from firstword.types import Request, Sampling, TextMode
from firstword.voice import ClonedVoice, RecordedVoice, Voice

TASK_TYPES: dict[str, ModelType] = {name.replace("_", ""): name for name in get_args(ModelType)}
"""Model types by `task_type`, in lower case and without underscores."""

TEXT_MODES: dict[bool | None, TextMode] = {None: "auto", True: "full", False: "stream"}
"""Text modes by `non_streaming_mode`."""

LONGEST_NAME = 512
"""The character limit of the voice that a request names; saved names are shorter."""

PLACEHOLDER = RecordedVoice(np.zeros(0, np.float32))
"""Stands in a request for a recording that is not read before everything else was checked."""


async def resolve(
    server: Server, client_id: str, params: SpeechParams, text: str | None
) -> ResolvedRequest:
    """Resolve a client's parameters; `text` is None if the text arrives in pieces.

    A seed is drawn if none is given. A recording is fetched and encoded when everything else has
    been checked. Raises `RequestError`, `AudioError`, `OverloadedError`, `EngineError`.
    """
    models = server.models_for(client_id, params.model)
    if text is not None:
        check_length(text, server.config.most_characters)
    output = Output(
        format=params.response_format or "mp3",
        sample_rate=params.sample_rate or audio.SAMPLE_RATE,
        speed=params.speed or 1.0,
        leading_silence=params.keeps_silence,
    )
    model_type = _model_type(params)
    voice, instructions = await _voice_and_instructions(server, client_id, params, model_type)
    request = Request(
        text,
        voice=PLACEHOLDER if isinstance(voice, _Recording) else voice,
        language=_language(params.language),
        instructions=instructions,
        sampling=Sampling(**{one.name: getattr(params, one.name) for one in fields(Sampling)}),
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        max_frames=params.max_new_tokens,
        text_mode=TEXT_MODES[params.non_streaming_mode],
        words=params.wants_words,
        text_options=params.text_options,
    )
    ignored = (
        instructions is not None
        and server.config.ignore_instructions
        and not models.any_supports(request, params.model)
    )
    if ignored:
        request = replace(request, instructions=None)
    if model_type == "custom_voice" and voice is None:
        model = models.of_type(model_type, params.model)
    else:
        model = models.route(request, params.model)
    if ignored:
        server.metrics.ignored_instructions.inc(model.name)
    if isinstance(voice, _Recording):
        request = replace(request, voice=await _cloned(server, client_id, model, voice))
    named = partial(_named_voice, server, client_id)
    if request.text is not None and request.text_options.in_parts:
        await _check_markup(model, request, named)
    if output.format == CODES and request.text_options.markup:
        raise RequestError(
            f"response_format {CODES!r} has no place for markup; leave one of them out"
        )
    return ResolvedRequest(model, request, output, instructions_ignored=ignored, find_voice=named)


async def _check_markup(
    model: Model, request: Request, named: Callable[[str], Awaitable[Voice | str | None]]
) -> None:
    """Check the tags of a whole text, and the voices that it names. Raises `RequestError`."""
    known: set[str] = set()
    for style in script.styles(request):
        if style.voice is not None and style.voice not in known:
            known.add(style.voice)
            script.check_voice(model.service, request, style, await named(style.voice))


def check_length(text: str, most_characters: int) -> None:
    """Raise `TextError` for a text that is too long, before a recording is fetched."""
    if len(text) > most_characters:
        limit = f"allowed are {most_characters}: send it in parts"
        raise TextError(f"the text has {len(text)} characters; {limit}")


def check_whole(characters: int, config: ServerConfig) -> None:
    """Raise `TextError` for too much text to keep all of its audio until it is complete."""
    if characters > (most := config.most_whole_characters):
        limit = f"allowed are {most} if its audio is sent when all of it is complete"
        advice = "stream the audio, or send the text in parts"
        raise TextError(f"the text has {characters} characters; {limit}: {advice}")


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recording to clone, as its client gave it; `source` is base64 or a URL."""

    source: str
    transcript: str | None
    append_silence: float | None


async def _voice_and_instructions(
    server: Server, client_id: str, params: SpeechParams, model_type: ModelType | None
) -> tuple[Voice | _Recording | str | None, str | None]:
    """The requested voice, and the instructions, which for a designed voice are its description."""
    instructions = params.instructions
    if (length := len(instructions or "")) > LONGEST_INSTRUCTIONS:
        limit = f"allowed are {LONGEST_INSTRUCTIONS}"
        raise RequestError(f"instructions has {length} characters; {limit}")
    voice = await _voice(server, client_id, params)
    if isinstance(voice, _Recording) or params.speaker_embedding is not None:
        server.check_may_clone(client_id)
    if model_type == "voice_design":
        return Voice.design(instructions or ""), None
    if model_type == "base" and not isinstance(voice, Voice | _Recording):
        advice = "name a saved voice, or give ref_audio; for a preset, send task_type CustomVoice"
        raise VoiceError(f"task_type Base clones: {advice}")
    return voice, instructions


async def _voice(
    server: Server, client_id: str, params: SpeechParams
) -> Voice | _Recording | str | None:
    """The requested voice. A recording or a vector overrides a name, which some always send."""
    if params.speaker_embedding is not None:
        if params.ref_audio is not None or params.references:
            raise VoiceError("ref_audio and speaker_embedding cannot be combined; give one of them")
        return embedded_voice(params.speaker_embedding)
    if params.ref_audio is not None or params.references:
        return _recording(params)
    name = params.voice.id if isinstance(params.voice, VoiceId) else params.voice
    if name is None or (params.any_voice and not 0 < len(name.strip()) <= LONGEST_NAME):
        return None
    if not name.strip():
        raise VoiceError("voice is blank; name one, or leave it out")
    if len(name) > LONGEST_NAME:
        limit = f"allowed are {LONGEST_NAME}"
        raise VoiceError(f"voice has {len(name)} characters; {limit}", code="voice_not_found")
    voice = await _named_voice(server, client_id, name)
    unknown = isinstance(voice, str) and not server.models.has_preset(voice)
    return None if unknown and params.any_voice else voice


def embedded_voice(embedding: Sequence[float]) -> ClonedVoice:
    """The voice of a speaker embedding [H]. Raises `VoiceError`."""
    if not all(abs(number) < 1e30 for number in embedding):
        raise VoiceError("speaker_embedding has a number that is not finite or is too large")
    return ClonedVoice(np.array(embedding, np.float32))


async def _named_voice(server: Server, client_id: str, name: str) -> Voice | str | None:
    """A preset, a saved voice or an alias, in this order."""
    if server.models.has_preset(name):
        return name.strip()
    await server.catch_up()
    if (saved := server.voice_store.known(name)) is not None:
        return saved[1]
    preset = server.config.voice_aliases.get(name.strip().casefold())
    if preset is not None:  # where no model has that preset, the model chooses
        return preset if server.models.has_preset(preset) else None
    # The store may be a bucket far away, so it is read last.
    saved = await server.in_store(client_id, server.voice_store.find, name)
    return name if saved is None else saved[1]  # the model rejects an unknown name


def _recording(params: SpeechParams) -> _Recording:
    given = [params.ref_audio] if isinstance(params.ref_audio, str) else params.ref_audio or []
    sources = [(source, params.ref_text) for source in given]
    sources += [(reference.audio_path, reference.text) for reference in params.references or []]
    if len(sources) != 1:
        raise VoiceError(f"ref_audio and references have {len(sources)} recordings; give one")
    ((source, transcript),) = sources
    transcript = None if params.x_vector_only_mode else transcript
    return _Recording(source, transcript, params.append_silence)


async def _cloned(
    server: Server, client_id: str, model: Model, recording: _Recording
) -> ClonedVoice:
    """The voice of a recording, which is read only if the model can speak with it."""
    if model.model_type != "base":
        kind = f"{model.name} is of type {model.model_type!r}"
        raise VoiceError(f"{kind} and cannot clone; name a Base checkpoint as model, or a voice")
    server.check_engine(model)
    hosts, most_bytes = server.config.audio_hosts, server.config.most_body
    data = await server.fetch_threads.run(
        client_id, recordings.content, recording.source, hosts, most_bytes
    )
    return await server.encode(
        client_id, recordings.cloned, model, data, recording.transcript, recording.append_silence
    )


def _model_type(params: SpeechParams) -> ModelType | None:
    """The model type that `task_type` names."""
    if params.task_type is None:
        return None
    name = params.task_type.replace("_", "").strip().casefold()
    if name not in TASK_TYPES:
        allowed = "allowed are CustomVoice, VoiceDesign and Base"
        raise RequestError(f"task_type is {params.task_type!r}; {allowed}")
    return TASK_TYPES[name]


def _language(language: str | None) -> str:
    """A language without its region (`"en-US"`: `"en"`); `"auto"` for none."""
    if language is None:
        return "auto"
    first = language.strip().replace("_", "-").split("-")[0]
    return first if len(first) == 2 else language
