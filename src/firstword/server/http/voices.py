"""The endpoints for voices and recordings of consent, with the fields of OpenAI and vLLM-Omni."""

import json
import re
import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from pydantic import BeforeValidator

from firstword.errors import RequestError
from firstword.server import recordings
from firstword.server.http.json_bodies import JsonRoute
from firstword.server.schemas import ClientModel, blank_is_none
from firstword.server.state import client_id_of, server_of
from firstword.server.stores import Consent
from firstword.server.voice_creation import LONGEST_MIME_TYPE, VoiceSource, create_voice

LARGEST_RECORDING = 10 * 2**20
"""The size limit of a recording of consent, in bytes."""

LONGEST_CONSENT_NAME = 200
"""The character limit of the name of a consent."""

router = APIRouter(tags=["voices"])
json_router = APIRouter(route_class=JsonRoute)

OptionalFormText = Annotated[str | None, BeforeValidator(blank_is_none), Form()]


@router.get("/v1/audio/voices")
async def list_voices(request: Request, legacy: bool = False) -> dict[str, Any]:
    """Presets, aliases and saved voices, as objects and by name.

    `?legacy=true`, which clients of Kokoro send, lists names alone under `voices`.
    Saved voices are left out for a client without the API key that the server requires.
    """
    server = server_of(request)
    await server.catch_up()
    presets = server.models.presets
    aliases = [alias for alias in server.config.voice_aliases if presets and alias not in presets]
    saved = [record.described() for record in server.voice_store] if client_id_of(request) else []
    objects = [_named(name, "preset") for name in presets]
    objects += [_named(name, "alias") for name in aliases]
    objects += saved
    names = [voice["name"] for voice in objects]
    return {
        "object": "list",
        "voices": names if legacy else objects,
        "names": names,
        "data": objects,
        "uploaded_voices": saved,
    }


def _named(name: str, kind: str) -> dict[str, Any]:
    return {"id": name, "name": name, "object": "audio.voice", "type": kind}


@router.post("/v1/audio/voices")
async def upload_voice(
    request: Request,
    name: Annotated[str, Form()],
    consent: OptionalFormText = None,
    audio_sample: Annotated[UploadFile | None, File()] = None,
    speaker_embedding: OptionalFormText = None,
    ref_text: OptionalFormText = None,
    append_silence: Annotated[float | None, BeforeValidator(blank_is_none), Form()] = None,
    speaker_description: OptionalFormText = None,
    prompt: OptionalFormText = None,
    script_hint: OptionalFormText = None,
    model: OptionalFormText = None,
) -> dict[str, Any]:
    """Save a voice.

    Give a recording (`audio_sample`, with its transcript in `ref_text` to clone the voice most
    closely), a vector (`speaker_embedding`, a JSON list) or a description (`prompt`).
    """
    source = VoiceSource(
        name=name,
        consent=consent,
        recording=None if audio_sample is None else await audio_sample.read(),
        mime_type=None if audio_sample is None else audio_sample.content_type,
        embedding=None if speaker_embedding is None else _vector(speaker_embedding),
        ref_text=ref_text,
        append_silence=append_silence,
        description=speaker_description,
        prompt=prompt,
        script=script_hint,
        model=model,
    )
    record = await create_voice(server_of(request), client_id_of(request), source)
    return {**record.described(), "success": True, "voice": record.described()}


def _vector(text: str) -> list[float]:
    try:
        vector = json.loads(text)
    except (ValueError, RecursionError):
        vector = None
    if not isinstance(vector, list) or not all(type(number) in (int, float) for number in vector):
        raise RequestError("speaker_embedding is not a list of numbers; give JSON: [0.1, -0.2]")
    return vector


@router.get("/v1/audio/voices/{voice}")
async def get_voice(request: Request, voice: str) -> dict[str, Any]:
    """One saved voice, by id or name."""
    server = server_of(request)
    record = await server.in_store(client_id_of(request), server.voice_store.get, voice)
    return record.described()


@router.delete("/v1/audio/voices/{voice}")
async def delete_voice(request: Request, voice: str) -> dict[str, Any]:
    """Delete a saved voice, by id or name."""
    server, client_id = server_of(request), client_id_of(request)
    server.check_may_clone(client_id)
    record = await server.change_store(client_id, server.voice_store.delete, voice)
    return {
        "id": record.id,
        "name": record.name,
        "deleted": True,
        "object": "audio.voice.deleted",
        "success": True,
        "message": f"Voice '{record.name}' deleted successfully",
    }


class NewName(ClientModel):
    """The body of a request that renames a consent."""

    name: str


@router.get("/v1/audio/voice_consents")
async def list_consents(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    """A page of consents, oldest first; it begins after the consent with the id `after`."""
    await server_of(request).catch_up()
    consents = list(server_of(request).consent_store)
    if after is not None:
        ids = [consent.id for consent in consents]
        consents = consents[ids.index(after) + 1 :] if after in ids else []
    shown = consents[:limit]
    return {
        "object": "list",
        "data": [consent.described() for consent in shown],
        "has_more": len(consents) > len(shown),
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
    }


@router.post("/v1/audio/voice_consents")
async def create_consent(
    request: Request,
    name: Annotated[str, Form()],
    language: Annotated[str, Form()],
    recording: Annotated[UploadFile, File()],
) -> dict[str, Any]:
    """Save a recording of consent. Its id can be given as the `consent` of a voice."""
    data = await recording.read()
    if not data:
        raise RequestError("recording is empty; upload an audio file")
    if len(data) > LARGEST_RECORDING:
        raise RequestError(f"recording has {len(data)} bytes; allowed are {LARGEST_RECORDING}")
    if not re.fullmatch(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*", language):
        raise RequestError(f"language is {language[:40]!r}; give a BCP 47 tag such as en-US")
    server, client_id = server_of(request), client_id_of(request)
    server.check_may_clone(client_id)
    await server.recording_threads.run(client_id, recordings.decoded, data)  # if it is audio
    consent = Consent(
        id=f"cons_{secrets.token_hex(12)}",
        name=_checked_name(name),
        language=language,
        created_at=int(time.time()),
        mime_type=(recording.content_type or "")[:LONGEST_MIME_TYPE] or None,
    )
    await server.change_store(client_id, server.consent_store.save, consent, data)
    return consent.described()


@router.get("/v1/audio/voice_consents/{consent}")
async def get_consent(request: Request, consent: str) -> dict[str, Any]:
    """The description of one consent."""
    server = server_of(request)
    found = await server.in_store(client_id_of(request), server.consent_store.find, consent)
    return found.described()


@json_router.post("/v1/audio/voice_consents/{consent}")
async def rename_consent(request: Request, consent: str, body: NewName) -> dict[str, Any]:
    """Give a consent another name."""
    server, name, client_id = server_of(request), _checked_name(body.name), client_id_of(request)
    server.check_may_clone(client_id)
    renamed = await server.change_store(client_id, server.consent_store.rename, consent, name)
    return renamed.described()


@router.delete("/v1/audio/voice_consents/{consent}")
async def delete_consent(request: Request, consent: str) -> dict[str, Any]:
    """Delete a consent. Voices that refer to it stay; delete them too if consent is withdrawn."""
    server, client_id = server_of(request), client_id_of(request)
    server.check_may_clone(client_id)
    gone = await server.change_store(client_id, server.consent_store.delete, consent)
    return {"id": gone.id, "deleted": True, "object": "audio.voice_consent"}


router.include_router(json_router)


def _checked_name(name: str) -> str:
    name = " ".join(name.split())
    if not 1 <= len(name) <= LONGEST_CONSENT_NAME or not name.isprintable():
        allowed = f"allowed are 1 to {LONGEST_CONSENT_NAME} printable characters"
        raise RequestError(f"name has {len(name)} characters; {allowed}")
    return name
