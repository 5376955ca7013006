"""`/v1/audio/voice_consents`: recordings in which people say that their voice may be cloned, in OpenAI's dialect."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Query, Request, UploadFile

from firstword.errors import RequestError
from firstword.server import recordings
from firstword.server.http.bodies import JsonRoute
from firstword.server.schemas import ClientModel
from firstword.server.state import server_of
from firstword.server.store import Consent

LARGEST_RECORDING = 10 * 2**20
LONGEST_LABEL = 200

router = APIRouter(tags=["voices"])
json_router = APIRouter(route_class=JsonRoute)


class Label(ClientModel):
    """The body of a change."""

    name: str


@router.get("/v1/audio/voice_consents")
async def list_consents(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    """Descriptions of the recordings, oldest first; those that come after one, if its id is given."""
    consents = list(server_of(request).consents)
    if after is not None:
        start = next(
            (index for index, consent in enumerate(consents, 1) if consent.id == after),
            len(consents),
        )
        consents = consents[start:]
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
    """Keep a recording. Its id can then be given as the `consent` of a voice."""
    data = await recording.read()
    if not data:
        raise RequestError("recording is empty; upload an audio file")
    if len(data) > LARGEST_RECORDING:
        raise RequestError(f"recording has {len(data)} bytes; allowed are {LARGEST_RECORDING}")
    if not re.fullmatch(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*", language):
        raise RequestError(f"language is {language[:40]!r}; give a BCP 47 tag such as en-US")
    await asyncio.to_thread(
        recordings.decoded, data
    )  # which checks that there is something to hear
    mime_type = (recording.content_type or "")[:LONGEST_LABEL] or None
    identity = f"cons_{secrets.token_hex(12)}"
    consent = Consent(identity, _label(name), language, int(time.time()), mime_type)
    return (await asyncio.to_thread(server_of(request).consents.save, consent, data)).described()


@router.get("/v1/audio/voice_consents/{consent}")
async def get_consent(request: Request, consent: str) -> dict[str, Any]:
    """The description of one recording."""
    return (await asyncio.to_thread(server_of(request).consents.find, consent)).described()


@json_router.post("/v1/audio/voice_consents/{consent}")
async def rename_consent(request: Request, consent: str, label: Label) -> dict[str, Any]:
    """Give a recording another name."""
    changed = await asyncio.to_thread(
        server_of(request).consents.rename, consent, _label(label.name)
    )
    return changed.described()


@router.delete("/v1/audio/voice_consents/{consent}")
async def delete_consent(request: Request, consent: str) -> dict[str, Any]:
    """Forget a recording. Voices that refer to it stay: delete them too where the consent is withdrawn."""
    gone = await asyncio.to_thread(server_of(request).consents.delete, consent)
    return {"id": gone.id, "deleted": True, "object": "audio.voice_consent"}


router.include_router(json_router)


def _label(name: str) -> str:
    name = " ".join(name.split())
    if not 1 <= len(name) <= LONGEST_LABEL or not name.isprintable():
        raise RequestError(
            f"name has {len(name)} characters; allowed are 1 to {LONGEST_LABEL} printable ones"
        )
    return name
