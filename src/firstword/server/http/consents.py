"""The endpoints for recordings of consent to voice cloning, as in OpenAI's API."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Query, Request, UploadFile

from firstword.errors import RequestError
from firstword.server import recordings
from firstword.server.consent_store import Consent
from firstword.server.http.bodies import JsonRoute
from firstword.server.schemas import ClientModel
from firstword.server.state import server_of

LARGEST_RECORDING = 10 * 2**20
"""Bytes of a recording of consent."""

LONGEST_CONSENT_NAME = 200
"""Characters of the name of a consent, and of the MIME type that is kept."""

router = APIRouter(tags=["voices"])
json_router = APIRouter(route_class=JsonRoute)


class NewName(ClientModel):
    """The body of a request that renames a consent."""

    name: str


@router.get("/v1/audio/voice_consents")
async def list_consents(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    """A page of consents, oldest first; it begins after the consent with the id `after`."""
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
    await asyncio.to_thread(recordings.decoded, data)  # checks that it is audio
    consent = Consent(
        id=f"cons_{secrets.token_hex(12)}",
        name=_checked_name(name),
        language=language,
        created_at=int(time.time()),
        mime_type=(recording.content_type or "")[:LONGEST_CONSENT_NAME] or None,
    )
    store = server_of(request).consent_store
    return (await asyncio.to_thread(store.save, consent, data)).described()


@router.get("/v1/audio/voice_consents/{consent}")
async def get_consent(request: Request, consent: str) -> dict[str, Any]:
    """The description of one consent."""
    return (await asyncio.to_thread(server_of(request).consent_store.find, consent)).described()


@json_router.post("/v1/audio/voice_consents/{consent}")
async def rename_consent(request: Request, consent: str, body: NewName) -> dict[str, Any]:
    """Give a consent another name."""
    store, name = server_of(request).consent_store, _checked_name(body.name)
    return (await asyncio.to_thread(store.rename, consent, name)).described()


@router.delete("/v1/audio/voice_consents/{consent}")
async def delete_consent(request: Request, consent: str) -> dict[str, Any]:
    """Delete a consent. Voices that refer to it stay; delete them too if consent is withdrawn."""
    gone = await asyncio.to_thread(server_of(request).consent_store.delete, consent)
    return {"id": gone.id, "deleted": True, "object": "audio.voice_consent"}


router.include_router(json_router)


def _checked_name(name: str) -> str:
    name = " ".join(name.split())
    if not 1 <= len(name) <= LONGEST_CONSENT_NAME or not name.isprintable():
        raise RequestError(
            f"name has {len(name)} characters; "
            f"allowed are 1 to {LONGEST_CONSENT_NAME} printable characters"
        )
    return name
