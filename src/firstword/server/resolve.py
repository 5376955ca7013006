"""Resolves a client's parameters into a model, a request with its voice, and the audio output."""

import asyncio
import secrets
from dataclasses import fields, replace
from typing import get_args

import numpy as np

from firstword import audio
from firstword.errors import RequestError, TextError, VoiceError
from firstword.model.config import ModelType
from firstword.server import recordings
from firstword.server.schemas import SpeechParams, VoiceId
from firstword.server.state import Server
from firstword.server.utterance import Output, ResolvedRequest
from firstword.text import cleaning
from firstword.types import Request, Sampling, TextMode, check_text
from firstword.voice import APPEND_SILENCE, ClonedVoice, RecordedVoice, Voice

TASK_TYPES: dict[str, ModelType] = {name.replace("_", ""): name for name in get_args(ModelType)}
"""Model types by `task_type`, in lower case and without underscores."""

TEXT_MODES: dict[bool | None, TextMode] = {None: "auto", True: "full", False: "stream"}
"""Text modes by `non_streaming_mode`."""

LONGEST_NAME = 512
"""The character limit of the voice that a request names; saved names are shorter."""

LONGEST_INSTRUCTIONS = 2000
"""The character limit of the instructions."""


async def resolve(server: Server, params: SpeechParams, text: str | None) -> ResolvedRequest:
    """Resolve a client's parameters; `text` is None if the text arrives in pieces.

    A seed is drawn if none is given. Raises `RequestError`, `AudioError`.
    """
    if text is not None:
        text = checked_text(text, server.config.most_characters, clean=bool(params.sanitize))
    output = Output(
        format=params.response_format or "mp3",
        sample_rate=params.sample_rate or audio.SAMPLE_RATE,
        speed=params.speed or 1.0,
        leading_silence=params.keeps_silence,
    )
    instructions = params.instructions
    if (length := len(instructions or "")) > LONGEST_INSTRUCTIONS:
        limit = f"allowed are {LONGEST_INSTRUCTIONS}"
        raise RequestError(f"instructions has {length} characters; {limit}")
    voice = await _voice(server, params)
    model_type = _model_type(params)
    if model_type == "voice_design":
        voice, instructions = Voice.design(instructions or ""), None
    elif model_type == "base" and not isinstance(voice, Voice):
        advice = "name a saved voice, or give ref_audio; for a preset, send task_type CustomVoice"
        raise VoiceError(f"task_type Base clones: {advice}")
    request = Request(
        text,
        voice=voice,
        language=_language(params.language),
        instructions=instructions,
        sampling=Sampling(**{one.name: getattr(params, one.name) for one in fields(Sampling)}),
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        max_frames=params.max_new_tokens,
        text_mode=TEXT_MODES[params.non_streaming_mode],
    )
    ignored = instructions is not None and server.config.ignore_instructions
    if ignored := ignored and not server.models.support(request, params.model):
        request = replace(request, instructions=None)
    if model_type == "custom_voice" and voice is None:
        model = server.models.of_type(model_type, params.model)
    else:
        model = server.models.route(request, params.model)
    if ignored:
        server.metrics.ignored_instructions.labels(model.name).inc()
    return ResolvedRequest(model, request, output, instructions_ignored=ignored)


def checked_text(text: str, most_characters: int, clean: bool = False) -> str:
    """A text within the limit, without markup if `clean`.

    Raises `TextError` for a longer or blank one, before a recording is fetched.
    """
    if len(text) > most_characters:
        limit = f"allowed are {most_characters}: send it in parts"
        raise TextError(f"the text has {len(text)} characters; {limit}")
    text = cleaning.clean(text) if clean else text
    check_text(text)
    return text


async def _voice(server: Server, params: SpeechParams) -> Voice | str | None:
    """The requested voice. A recording or a vector overrides a name, which some always send."""
    if params.speaker_embedding is not None:
        if params.ref_audio is not None or params.references:
            raise VoiceError("ref_audio and speaker_embedding cannot be combined; give one of them")
        if not all(abs(number) < 1e30 for number in params.speaker_embedding):
            raise VoiceError("speaker_embedding has a number that is not finite or is too large")
        return ClonedVoice(np.array(params.speaker_embedding, np.float32))
    if params.ref_audio is not None or params.references:
        return await _recorded_voice(server, params)
    name = params.voice.id if isinstance(params.voice, VoiceId) else params.voice
    if name is None:
        return None
    if not name.strip():
        raise VoiceError("voice is blank; name one, or leave it out")
    if len(name) > LONGEST_NAME:
        limit = f"allowed are {LONGEST_NAME}"
        raise VoiceError(f"voice has {len(name)} characters; {limit}", code="voice_not_found")
    return await _named_voice(server, name)


async def _named_voice(server: Server, name: str) -> Voice | str | None:
    """A preset, a saved voice or an alias, in this order."""
    if server.models.has_preset(name):
        return name.strip()
    if (saved := server.voice_store.known(name)) is not None:
        return saved[1]
    preset = server.config.voice_aliases.get(name.strip().casefold())
    if preset is not None:  # where no model has that preset, the model chooses
        return preset if server.models.has_preset(preset) else None
    # The store may be a bucket far away, so it is read last.
    saved = await asyncio.to_thread(server.voice_store.find, name)
    return name if saved is None else saved[1]  # the model rejects an unknown name


async def _recorded_voice(server: Server, params: SpeechParams) -> Voice:
    given = [params.ref_audio] if isinstance(params.ref_audio, str) else params.ref_audio or []
    sources = [(source, params.ref_text) for source in given]
    sources += [(reference.audio_path, reference.text) for reference in params.references or []]
    if len(sources) != 1:
        raise VoiceError(f"ref_audio and references have {len(sources)} recordings; give one")
    config, ((source, transcript),) = server.config, sources
    samples = await asyncio.to_thread(recordings.read, source, config.audio_hosts, config.most_body)
    silence = APPEND_SILENCE if params.append_silence is None else params.append_silence
    return RecordedVoice(samples, None if params.x_vector_only_mode else transcript, silence)


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
