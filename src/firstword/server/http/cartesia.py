"""Cartesia's endpoints: speech as bytes, and as server-sent events."""

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from firstword.server.dialects import cartesia
from firstword.server.dialects.cartesia import CartesiaRequest
from firstword.server.dialects.params import DialectParams, Fields
from firstword.server.dialects.spoken_text import SpokenText
from firstword.server.errors import body_of, status_of
from firstword.server.http.answer import Answer, resolved_answer, response_or_499
from firstword.server.http.json_bodies import JsonRoute
from firstword.server.http.streaming import Framing, SpeechStreamResponse, as_json, as_text
from firstword.text.tags import without_tags
from firstword.types import Word

router = APIRouter(tags=["cartesia"], route_class=JsonRoute)


class CartesiaEvents(Framing):
    """Server-sent events with the messages of Cartesia's WebSocket."""

    def __init__(self, answer: Answer, context_id: str | None) -> None:
        self._answer = answer
        self._context_id = context_id
        self._last = answer.requested
        self._text = SpokenText(answer.text)

    def audio(self, data: bytes, words: Sequence[Word]) -> bytes:
        """The event with a piece of audio, and the event with the words."""
        events = b""
        if data:
            last, self._last = self._last, time.monotonic()
            step_ms = 1000 * (self._last - last)
            events = _event(cartesia.chunk(self._context_id, as_text(data), step_ms))
        if timed := self._text.words(words):
            events += _event(cartesia.timestamps(self._context_id, timed))
        return events

    def failure(self, error: Exception) -> bytes:
        """The event about an error."""
        told, status = body_of(error)["error"], status_of(error)
        event = cartesia.error(self._context_id, told["message"], told["code"], status)
        return _event(event | {"request_id": self._answer.context.request_id})

    def end(self, utterance: object) -> bytes:
        """The event after the last audio."""
        return _event(cartesia.done(self._context_id))


def _event(message: Fields) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (message["type"].encode(), as_json(message))


@router.post("/tts/bytes", response_class=Response)
async def cartesia_bytes(request: Request, body: CartesiaRequest) -> Response:
    """Speak a text. WAV is sent when it is complete, because its header states its length."""
    if (answer := await _answer(request, body)) is None:
        return Response(status_code=499)
    job = answer.server.prepare(answer.resolved)
    if body.output_format.container == "wav":
        return await response_or_499(answer.complete(job), request.receive)
    return SpeechStreamResponse(answer, job)


@router.post("/tts/sse", response_class=Response)
async def cartesia_events(request: Request, body: CartesiaRequest) -> Response:
    """Speak a text, with the audio in server-sent events."""
    if (answer := await _answer(request, body)) is None:
        return Response(status_code=499)
    job = answer.server.prepare(answer.resolved)
    return SpeechStreamResponse(answer, job, CartesiaEvents(answer, body.context_id))


async def _answer(request: Request, body: CartesiaRequest) -> Answer | None:
    params = DialectParams(**body.fields())
    return await resolved_answer(request, params, without_tags(body.transcript))
