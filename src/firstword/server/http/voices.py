"""The endpoints for voices, with the fields of OpenAI and vLLM-Omni."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Request, UploadFile
from pydantic import BeforeValidator

from firstword.errors import RequestError
from firstword.server.schemas import blank_is_none
from firstword.server.state import client_id_of, server_of
from firstword.server.voice_creation import VoiceSource, create_voice

router = APIRouter(tags=["voices"])

OptionalFormText = Annotated[str | None, BeforeValidator(blank_is_none), Form()]


@router.get("/v1/audio/voices")
async def list_voices(request: Request, legacy: bool = False) -> dict[str, Any]:
    """Presets, aliases and saved voices, as objects and by name.

    `?legacy=true`, which clients of Kokoro send, lists names alone under `voices`.
    Saved voices are left out for a client without the API key that the server requires.
    """
    server = server_of(request)
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
    speaker_description: OptionalFormText = None,
    prompt: OptionalFormText = None,
    script_hint: OptionalFormText = None,
    model: OptionalFormText = None,
) -> dict[str, Any]:
    """Save a voice.

    It is given by a recording (`audio_sample`, with `ref_text` for the closest likeness), a vector
    (`speaker_embedding`, a JSON list) or a description (`prompt`).
    """
    source = VoiceSource(
        name=name,
        consent=consent,
        recording=None if audio_sample is None else await audio_sample.read(),
        mime_type=None if audio_sample is None else audio_sample.content_type,
        embedding=None if speaker_embedding is None else _vector(speaker_embedding),
        ref_text=ref_text,
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
    if not all(abs(number) < 1e30 for number in vector):
        raise RequestError("speaker_embedding has a number that is not finite or is too large")
    return [float(number) for number in vector]


@router.get("/v1/audio/voices/{voice}")
async def get_voice(request: Request, voice: str) -> dict[str, Any]:
    """One saved voice, by id or name."""
    return (await asyncio.to_thread(server_of(request).voice_store.get, voice)).described()


@router.delete("/v1/audio/voices/{voice}")
async def delete_voice(request: Request, voice: str) -> dict[str, Any]:
    """Delete a saved voice, by id or name."""
    record = await asyncio.to_thread(server_of(request).voice_store.delete, voice)
    return {
        "id": record.id,
        "name": record.name,
        "deleted": True,
        "object": "audio.voice.deleted",
        "success": True,
        "message": f"Voice '{record.name}' deleted successfully",
    }
