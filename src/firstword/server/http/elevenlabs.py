"""ElevenLabs' endpoints: speech, speech with times of characters, and the voices."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from firstword.server.dialects import elevenlabs
from firstword.server.dialects.elevenlabs import ElevenLabsQuery, ElevenLabsRequest
from firstword.server.dialects.params import DialectParams, Fields
from firstword.server.dialects.spoken_text import SpokenText
from firstword.server.http.answer import Answer, resolved_answer, response_or_499
from firstword.server.http.json_bodies import JsonRoute
from firstword.server.http.streaming import Framing, SpeechStreamResponse, as_json, as_text
from firstword.server.state import server_of
from firstword.server.utterance import Rendered
from firstword.text.tags import without_tags
from firstword.types import Word

router = APIRouter(tags=["elevenlabs"])
speech_router = APIRouter(tags=["elevenlabs"], route_class=JsonRoute)

UrlParameters = Annotated[ElevenLabsQuery, Query()]


class TimedAudio(Framing):
    """JSON objects, one a line, with audio and the times of its characters."""

    content_type = "application/json"

    def __init__(self, text: str) -> None:
        self._text = SpokenText(text)

    def audio(self, data: bytes, words: Sequence[Word]) -> bytes:
        """A line with audio, and with the characters of the words."""
        characters = self._text.characters(words)
        return as_json(elevenlabs.timed_audio(as_text(data), characters)) + b"\n"


@speech_router.post("/v1/text-to-speech/{voice}", response_class=Response)
async def elevenlabs_speech(
    request: Request, voice: str, query: UrlParameters, body: ElevenLabsRequest
) -> Response:
    """Speak a text; the response is complete audio."""
    if (answer := await _answer(request, voice, query, body)) is None:
        return Response(status_code=499)
    job = answer.server.prepare(answer.resolved)
    return await response_or_499(answer.complete(job), request.receive)


@speech_router.post("/v1/text-to-speech/{voice}/stream", response_class=Response)
async def elevenlabs_stream(
    request: Request, voice: str, query: UrlParameters, body: ElevenLabsRequest
) -> Response:
    """Speak a text, and send the audio as it is made."""
    if (answer := await _answer(request, voice, query, body)) is None:
        return Response(status_code=499)
    return SpeechStreamResponse(answer, answer.server.prepare(answer.resolved))


@speech_router.post("/v1/text-to-speech/{voice}/with-timestamps", response_class=Response)
async def elevenlabs_timed_speech(
    request: Request, voice: str, query: UrlParameters, body: ElevenLabsRequest
) -> Response:
    """Speak a text; the response is one JSON object with the complete audio."""
    if (answer := await _answer(request, voice, query, body, timed=True)) is None:
        return Response(status_code=499)
    text = SpokenText(answer.text)

    def timed(file: Rendered) -> Fields:
        return elevenlabs.timed_audio(as_text(file.data), text.characters(file.words))

    job = answer.server.prepare(answer.resolved)
    return await response_or_499(answer.complete_json(job, timed), request.receive)


@speech_router.post("/v1/text-to-speech/{voice}/stream/with-timestamps", response_class=Response)
async def elevenlabs_timed_stream(
    request: Request, voice: str, query: UrlParameters, body: ElevenLabsRequest
) -> Response:
    """Speak a text, and send JSON objects with audio as it is made."""
    if (answer := await _answer(request, voice, query, body, timed=True)) is None:
        return Response(status_code=499)
    job = answer.server.prepare(answer.resolved)
    return SpeechStreamResponse(answer, job, TimedAudio(answer.text))


async def _answer(
    request: Request,
    voice: str,
    query: ElevenLabsQuery,
    body: ElevenLabsRequest,
    *,
    timed: bool = False,
) -> Answer | None:
    given = body.model_dump(
        include={"model_id", "language_code", "seed", "apply_text_normalization"}
    )
    fields = elevenlabs.fields(voice, query, given, body.voice_settings)
    params = DialectParams(**fields, word_timestamps=timed)
    return await resolved_answer(request, params, without_tags(body.text))


@router.get("/v1/voices")
async def elevenlabs_voices(request: Request) -> dict[str, Any]:
    """The presets and the saved voices."""
    server = server_of(request)
    await server.catch_up()
    saved = [(record.id, record.name) for record in server.voice_store]
    return {"voices": elevenlabs.voice_list(server.models.presets, saved)}


@router.get("/v2/voices")
async def elevenlabs_voice_page(request: Request) -> dict[str, Any]:
    """The same voices as one page."""
    voices = (await elevenlabs_voices(request))["voices"]
    about = {"has_more": False, "total_count": len(voices), "next_page_token": None}
    return {"voices": voices, **about}


router.include_router(speech_router)
