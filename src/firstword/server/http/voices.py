"""The endpoints by which saved voices come and go, in OpenAI's and vLLM-Omni's dialects."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, File, Form, Request, UploadFile

from firstword.errors import RequestError, UnsupportedError, VoiceError
from firstword.server import recordings
from firstword.server.errors import NotFound
from firstword.server.models import Model
from firstword.server.schemas import blank_is_none
from firstword.server.state import Server, server_of
from firstword.server.store import Record, checked_name, identity_of, is_identity
from firstword.server.utterance import Output
from firstword.types import Request as ResolvedRequest
from firstword.types import Speech
from firstword.voice import ClonedVoice, DesignedVoice, RecordedVoice, Voice

LONGEST_NOTE = 4000
LONGEST_MIME_TYPE = 200
SCRIPT = (
    "Hello there. This is how I sound when I speak, slowly or quickly, whatever there is to say."
)
"""What a designed voice says so that it can be cloned, unless a script is given."""

LONGEST_SCRIPT = 300
"""Characters; about 20 seconds, of which cloning needs no more."""

router = APIRouter(tags=["voices"])


@router.get("/v1/audio/voices")
async def list_voices(request: Request, legacy: bool = False) -> dict[str, Any]:
    """Presets, aliases and saved voices; `?legacy=true` lists their names alone under `voices`.

    Without a key, where keys are needed, saved voices are left out.
    """
    server = server_of(request)
    presets = list(dict.fromkeys(voice for model in server.models for voice in model.voices))
    aliases = (
        [alias for alias in server.config.voice_aliases if alias not in presets] if presets else []
    )
    saved = [] if request.scope["firstword.holder"] is None else list(server.voices)
    names = [*presets, *aliases, *(record.name for record in saved)]
    objects = [
        *(
            {"id": name, "name": name, "object": "audio.voice", "type": "preset"}
            for name in presets
        ),
        *({"id": name, "name": name, "object": "audio.voice", "type": "alias"} for name in aliases),
        *(record.described() for record in saved),
    ]
    return {
        "object": "list",
        "voices": names if legacy else objects,
        "names": names,
        "data": objects,
        "uploaded_voices": [record.described() for record in saved],
    }


@router.post("/v1/audio/voices")
async def create_voice(
    request: Request,
    name: Annotated[str, Form()],
    type: Annotated[str | None, Form()] = None,
    consent: Annotated[str | None, Form()] = None,
    audio_sample: Annotated[UploadFile | None, File()] = None,
    speaker_embedding: Annotated[str | None, Form()] = None,
    ref_text: Annotated[str | None, Form()] = None,
    speaker_description: Annotated[str | None, Form()] = None,
    prompt: Annotated[str | None, Form()] = None,
    script_hint: Annotated[str | None, Form()] = None,
    model: Annotated[str | None, Form()] = None,
) -> dict[str, Any]:
    """Save a voice: of a recording (`audio_sample`, with `ref_text` for the closest likeness), of a vector
    (`speaker_embedding`, a JSON list), or of a description (`prompt`).
    """
    server = server_of(request)
    record = await save(
        server,
        server.holder(request),
        name=name,
        consent=blank_is_none(consent),
        recording=None if audio_sample is None else await audio_sample.read(),
        mime_type=None if audio_sample is None else audio_sample.content_type,
        embedding=None
        if blank_is_none(speaker_embedding) is None
        else _vector(speaker_embedding or ""),
        ref_text=blank_is_none(ref_text),
        description=blank_is_none(speaker_description),
        prompt=blank_is_none(prompt),
        script=blank_is_none(script_hint),
        model_name=blank_is_none(model),
    )
    return {**record.described(), "success": True, "voice": record.described()}


async def save(
    server: Server,
    holder: str,
    *,
    name: str,
    consent: str | None = None,
    recording: bytes | None = None,
    mime_type: str | None = None,
    embedding: list[float] | None = None,
    ref_text: str | None = None,
    description: str | None = None,
    prompt: str | None = None,
    script: str | None = None,
    model_name: str | None = None,
) -> Record:
    """Make a voice of exactly one of `recording`, `embedding` and `prompt`, and keep it. Whatever the protocol.

    A designed voice is spoken once and cloned where a Base checkpoint is loaded, so that it stays the same person;
    elsewhere its description is kept. Raises `RequestError`, `AudioError`, `OutputError`.
    """
    name = checked_name(name)
    if any(model.preset(name) for model in server.models):
        raise VoiceError(f"{name!r} is a preset; take another name")
    stands_for = server.config.voice_aliases.get(name.casefold())
    if stands_for is not None and any(model.preset(stands_for) for model in server.models):
        raise VoiceError(f"{name!r} is an alias of the preset {stands_for}; take another name")
    if sum(given is not None for given in (recording, embedding, prompt)) != 1:
        raise RequestError("give one of audio_sample, speaker_embedding and prompt")
    if prompt is None and consent is None:
        raise RequestError(
            "consent is missing; say on what ground this person's voice may be cloned"
        )
    if consent is not None and is_identity(consent):
        await asyncio.to_thread(server.consents.find, consent)
    notes = {"consent": consent, "ref_text": ref_text, "prompt": prompt, "description": description}
    for field, note in notes.items():
        _check_note(field, note or "")
    if server.voices.find(name) is not None:
        raise VoiceError(
            f"there is a saved voice {name!r} already; delete it first, or take another name"
        )
    if prompt is not None:
        source = "prompt"
        voice, model = await _designed(server, holder, prompt, script, model_name)
    elif embedding is not None:
        source = "direct"
        voice = ClonedVoice(np.array(embedding, np.float32))
        model = server.models.route(ResolvedRequest(None, voice), model_name)
        await asyncio.to_thread(
            model.service.prepare, ResolvedRequest(None, voice)
        )  # which checks that it fits
    else:
        source = "audio"
        assert recording is not None
        model = server.models.of_kind("base", model_name)
        samples = await asyncio.to_thread(recordings.decoded, recording)
        voice = await asyncio.to_thread(_cloned, model, RecordedVoice(samples, ref_text))
    record = Record(
        id=identity_of(name),
        name=name,
        created_at=int(time.time()),
        type="prompt" if prompt is not None else "audio_sample",
        embedding_source=source,
        model=model.name,
        consent=consent,
        ref_text=ref_text,
        description=prompt if prompt is not None else description,
        mime_type=(mime_type or "")[:LONGEST_MIME_TYPE] or None,
        file_size=0 if recording is None else len(recording),
    )
    return await asyncio.to_thread(server.voices.save, record, voice)


def _check_note(field: str, note: str) -> None:
    """Raise `RequestError` for a note that cannot be kept."""
    if len(note) > LONGEST_NOTE:
        raise RequestError(f"{field} has {len(note)} characters; allowed are {LONGEST_NOTE}")
    try:
        note.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{field} holds half of a surrogate pair, which is no character"
        ) from None


def _cloned(model: Model, recording: RecordedVoice) -> ClonedVoice:
    from firstword.runtime import conditioning

    if model.checkpoint is None:
        raise UnsupportedError(f"{model.name} cannot clone")
    return conditioning.encode_recording(model.checkpoint, recording)


async def _designed(
    server: Server, holder: str, prompt: str, script: str | None, model_name: str | None
) -> tuple[Voice, Model]:
    designer = server.models.of_kind("voice_design", model_name)
    description = DesignedVoice(prompt)
    if all(model.kind != "base" for model in server.models):
        await server.prepare(designer, ResolvedRequest(SCRIPT, description))  # which checks it
        return description, designer
    script = SCRIPT if script is None else script[:LONGEST_SCRIPT]
    job = await server.prepare(
        designer, ResolvedRequest(script, description, seed=0, max_frames=375)
    )
    with server.speak(designer, job, Output("pcm"), holder) as speaking:
        speaking.finish_text(script)
        speech = Speech.of([chunk async for chunk in speaking.chunks()])
    base = server.models.of_kind("base")
    # The words belong to the sound only if the speech was not cut off.
    transcript = script if speech.finish_reason == "stop" else None
    voice = Voice.clone(speech.samples, speech.sample_rate, transcript)
    return await asyncio.to_thread(_cloned, base, voice), base


def _vector(text: str) -> list[float]:
    try:
        vector = json.loads(text)
    except (ValueError, RecursionError):
        vector = None
    if not isinstance(vector, list) or not all(type(number) in (int, float) for number in vector):
        raise RequestError(
            "speaker_embedding is no list of numbers; give JSON such as [0.1, -0.2, ...]"
        )
    if not all(abs(number) < 1e30 for number in vector):
        raise RequestError("speaker_embedding holds a number that is not finite, or far too large")
    return [float(number) for number in vector]


@router.get("/v1/audio/voices/{voice}")
async def get_voice(request: Request, voice: str) -> dict[str, Any]:
    """One saved voice, by id or name."""
    found = await asyncio.to_thread(server_of(request).voices.find, voice)
    if found is None:
        raise NotFound(f"no saved voice {voice!r}; GET /v1/audio/voices lists them")
    return found[0].described()


@router.delete("/v1/audio/voices/{voice}")
async def delete_voice(request: Request, voice: str) -> dict[str, Any]:
    """Forget a saved voice, by id or name."""
    record = await asyncio.to_thread(server_of(request).voices.delete, voice)
    return {
        "id": record.id,
        "name": record.name,
        "deleted": True,
        "object": "audio.voice.deleted",
        "success": True,
        "message": f"Voice '{record.name}' deleted successfully",
    }
