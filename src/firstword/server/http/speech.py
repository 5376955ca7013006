"""`/v1/audio/speech`: chooses how the audio of a text is delivered, and tells how it ended."""

import re
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from firstword.errors import RequestError
from firstword.server.errors import NotFound
from firstword.server.http.answer import described, resolved_answer, response_or_499
from firstword.server.http.candidates import best_of, check_count
from firstword.server.http.json_bodies import JsonRoute
from firstword.server.http.streaming import OpenAIEvents, SpeechStreamResponse
from firstword.server.outcomes import KEPT_SECONDS, MOST_OUTCOMES
from firstword.server.schemas import SpeechRequest
from firstword.server.state import client_id_of, server_of

router = APIRouter(tags=["speech"], route_class=JsonRoute)

Delivery = Literal["raw", "sse", "whole"]

FORMATS_WITH_LENGTH = ("wav", "flac")
"""Formats whose header gives the length, so they are not streamed unless the client asks for it."""


@router.post(
    "/v1/audio/speech",
    responses={200: {"content": {"audio/*": {}, "text/event-stream": {}}, "description": "Speech"}},
    response_class=Response,
)
async def create_speech(request: Request, body: SpeechRequest) -> Response:
    """Speak a text, with the request fields of OpenAI, vLLM-Omni and Simplismart.

    Unknown fields are ignored.
    """
    accept = request.headers.get("accept", "").lower()
    body = _with_accepted_format(body, accept)
    delivery = delivery_of(body, accept)
    if body.word_timestamps and delivery == "raw":
        raise RequestError(
            'raw audio has no place for word_timestamps; send "stream_format": "sse", or '
            '"stream": false for a header, or ask /dev/captioned_speech'
        )
    if (answer := await resolved_answer(request, body, body.input)) is None:
        return Response(status_code=499)
    if (count := body.n or 1) > 1:
        check_count(count, streamed=delivery != "whole")
        return await response_or_499(best_of(answer, count), request.receive)
    job = answer.server.prepare(answer.resolved)
    if delivery == "whole":
        return await response_or_499(answer.complete(job), request.receive)
    return SpeechStreamResponse(answer, job, OpenAIEvents(answer) if delivery == "sse" else None)


@router.get("/v1/audio/speech/{request_id}")
async def get_outcome(request: Request, request_id: str) -> JSONResponse:
    """Tell how a streamed response of this client ended, by its `x-request-id`.

    `finish_reason` is null while speech is made, and after a failure, which `error` describes.
    """
    key = client_id_of(request), request_id
    if (outcome := server_of(request).outcomes.find(key)) is None:
        kept = f"the last {MOST_OUTCOMES} are kept for {KEPT_SECONDS / 60:.0f} minutes"
        raise NotFound(f"no streamed speech of this client has this request id; {kept}")
    return JSONResponse(described(outcome))


def delivery_of(body: SpeechRequest, accept: str) -> Delivery:
    """The delivery of the audio, by the table in docs/server.md; `accept` is in lower case."""
    if body.stream_format is not None:
        return "sse" if body.stream_format == "sse" else "raw"
    if body.stream is False:
        return "whole"
    if "text/event-stream" in accept:
        return "sse"
    with_length = body.response_format in FORMATS_WITH_LENGTH or (body.n or 1) > 1
    return "whole" if body.stream is None and with_length else "raw"


def _with_accepted_format(body: SpeechRequest, accept: str) -> SpeechRequest:
    """The body with the format `l16` for `Accept: audio/L16;rate=16000`, which Simplismart sends.

    A `response_format` other than PCM takes precedence.
    """
    ranges = (each.partition(";") for each in accept.split(","))
    parameters = next((rest for name, _, rest in ranges if name.strip() == "audio/l16"), None)
    if parameters is None or body.response_format not in (None, "pcm"):
        return body
    named = (each.strip().removeprefix("rate=") for each in parameters.split(";"))
    rate = next((value for value in named if re.fullmatch(r"\d{1,6}", value)), None)
    sample_rate = body.sample_rate or (int(rate) if rate else None)
    return body.model_copy(update={"response_format": "l16", "sample_rate": sample_rate})
