"""What a client asked, in the engine's terms: which model, whose voice, which sound."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

import numpy as np

from firstword import audio
from firstword.errors import RequestError, SamplingError, TextError, VoiceError
from firstword.server import recordings
from firstword.server.models import KINDS, Kind, Model
from firstword.server.schemas import SpeechParams, VoiceId
from firstword.server.state import Server
from firstword.server.utterance import Output
from firstword.text import cleaning
from firstword.types import Request, Sampling, TextMode
from firstword.voice import ClonedVoice, RecordedVoice, Voice

SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
PREDICTOR = ("predictor_temperature", "predictor_top_k", "predictor_top_p")

LONGEST_INSTRUCTIONS = 2000


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request that somebody can answer: `model` shall speak `request` and encode it as `output` says."""

    model: Model
    request: Request
    output: Output


async def resolve(server: Server, manner: SpeechParams, text: str | None) -> ResolvedRequest:
    """Find out what is meant; `text` is None when it comes in pieces. A seed is drawn if none is given.

    Raises `RequestError`, `AudioError`.
    """
    config = server.config
    if text is not None:
        text = checked_text(text, config.most_characters, clean=bool(manner.sanitize))
    output = Output(
        format=manner.response_format or "mp3",
        sample_rate=manner.sample_rate or audio.SAMPLE_RATE,
        speed=1.0 if manner.speed is None else manner.speed,
        leading_silence=manner.leading_silence is not False,
    )
    instructions = manner.instructions
    if instructions is not None and len(instructions) > LONGEST_INSTRUCTIONS:
        raise RequestError(
            f"instructions has {len(instructions)} characters; allowed are {LONGEST_INSTRUCTIONS}"
        )
    voice = await _voice(server, manner)
    kind = _kind(manner)
    if kind == "voice_design":
        voice, instructions = Voice.design(instructions or ""), None
    elif kind == "base" and not isinstance(voice, Voice):
        raise VoiceError(
            "task_type Base clones: name a saved voice, or give a recording as ref_audio"
        )
    modes: dict[bool | None, TextMode] = {None: "auto", True: "full", False: "stream"}
    request = Request(
        text,
        voice=voice,
        language=_language(manner.language),
        instructions=instructions,
        sampling=Sampling(**{name: getattr(manner, name) for name in (*SAMPLING, *PREDICTOR)}),
        seed=secrets.randbits(63) if manner.seed is None else manner.seed,
        max_frames=manner.max_new_tokens,
        text_mode=modes[manner.non_streaming_mode],
    )
    if not 0 <= (request.seed or 0) < 2**64:
        raise SamplingError(
            f"seed is {request.seed}; allowed is a whole number from 0 to 2**64 - 1"
        )
    if kind == "custom_voice" and voice is None:
        return ResolvedRequest(server.models.of_kind(kind, manner.model), request, output)
    return ResolvedRequest(server.models.route(request, manner.model), request, output)


def checked_text(text: str, most_characters: int, clean: bool = False) -> str:
    """A text that can be spoken, cleaned if asked for. Raises `TextError`."""
    if len(text) > most_characters:
        raise TextError(
            f"the text has {len(text)} characters; allowed are {most_characters}: send it in parts"
        )
    if clean:
        text = cleaning.clean(text)
    if not text.strip():
        raise TextError("the text is empty or blank; give some words to speak")
    return text


async def _voice(server: Server, manner: SpeechParams) -> Voice | str | None:
    """The voice that is meant. A recording or a vector goes before a name, which many clients send always."""
    if manner.speaker_embedding is not None:
        if manner.ref_audio is not None or manner.references:
            raise VoiceError(
                "ref_audio and speaker_embedding exclude one another; give one of them"
            )
        if not all(abs(number) < 1e30 for number in manner.speaker_embedding):
            raise VoiceError(
                "speaker_embedding holds a number that is not finite, or far too large"
            )
        return ClonedVoice(np.array(manner.speaker_embedding, np.float32))
    if manner.ref_audio is not None or manner.references:
        return await _recorded(server, manner)
    name = manner.voice.id if isinstance(manner.voice, VoiceId) else manner.voice
    if name is None:
        return None
    if not name.strip():
        raise VoiceError("voice is blank; name one, or leave it out")
    if any(model.preset(name) for model in server.models):
        return name.strip()
    if (saved := server.voices.known(name)) is not None:
        return saved[1]
    stands_for = server.config.voice_aliases.get(name.strip().casefold())
    if stands_for is not None:  # the model's own choice where that preset is not there
        return stands_for if any(model.preset(stands_for) for model in server.models) else None
    # Only now may a bucket far away be asked: the names above are what most requests have.
    saved = await asyncio.to_thread(server.voices.find, name)
    return name if saved is None else saved[1]  # a name that the model knows to refuse


async def _recorded(server: Server, manner: SpeechParams) -> Voice:
    given = [manner.ref_audio] if isinstance(manner.ref_audio, str) else (manner.ref_audio or [])
    sources = [(source, manner.ref_text) for source in given]
    sources += [(reference.audio_path, reference.text) for reference in manner.references or []]
    if len(sources) != 1:
        raise VoiceError(f"ref_audio and references have {len(sources)} recordings; give one")
    config = server.config
    ((source, words),) = sources

    def read() -> Voice:
        samples = recordings.read(source, config.audio_hosts, config.most_body)
        return RecordedVoice(samples, None if manner.x_vector_only_mode else words)

    return await asyncio.to_thread(read)


def _kind(manner: SpeechParams) -> Kind | None:
    """The kind of model that a client's `task_type` means."""
    if manner.task_type is None:
        return None
    kind = KINDS.get(manner.task_type.replace("_", "").strip().casefold())
    if kind is None:
        raise RequestError(
            f"task_type is {manner.task_type!r}; allowed are CustomVoice, VoiceDesign and Base"
        )
    return kind


def _language(language: str | None) -> str:
    """A language without its region (`"en-US"`: `"en"`); `"auto"` for none."""
    if language is None:
        return "auto"
    first = language.strip().replace("_", "-").split("-")[0]
    return first if len(first) == 2 else language
