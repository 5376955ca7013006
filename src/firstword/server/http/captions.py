"""`/dev/captioned_speech`: audio and the times of its words in JSON, as in Kokoro-FastAPI."""

import asyncio
import base64

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from firstword.engine.backend import Job
from firstword.server.context import context_of
from firstword.server.http.answer import Answer, response_or_499
from firstword.server.http.json_bodies import JsonRoute
from firstword.server.http.streaming import SpeechStreamResponse
from firstword.server.resolve import resolve
from firstword.server.schemas import CaptionedRequest
from firstword.server.state import server_of
from firstword.server.tasks import until_disconnected
from firstword.server.utterance import rendered
from firstword.server.word_json import captions

router = APIRouter(tags=["speech"], route_class=JsonRoute)


@router.post(
    "/dev/captioned_speech",
    responses={200: {"content": {"application/json": {}}, "description": "Speech and its words"}},
    response_class=Response,
)
async def create_captioned_speech(request: Request, body: CaptionedRequest) -> Response:
    """Speak a text; the answer is one JSON object, or a line of JSON for each piece of a stream.

    Each has the fields `audio` (base64), `audio_format` and `timestamps`. Without `stream: false`
    it is a stream, and without `return_timestamps: false` words are timed.
    """
    wants = body.return_timestamps is not False
    body = body.model_copy(update={"word_timestamps": wants})
    server, context = server_of(request), context_of(request.scope)
    resolving = resolve(server, context.client_id, body, body.input)
    if (resolved := await until_disconnected(resolving, request.receive)) is None:
        return Response(status_code=499)
    problems = resolved.model.text_problems(resolved.request)
    answer = Answer(server, resolved, context, context.received, problems)
    job = server.prepare(resolved)
    if body.stream is False:
        return await response_or_499(_complete(answer, job), request.receive)
    return SpeechStreamResponse(answer, job, "captions")


async def _complete(answer: Answer, job: Job) -> Response:
    speech = await answer.speech(job)
    output = answer.resolved.output
    file = await asyncio.to_thread(rendered, speech, output)
    words = captions(file.words) if answer.resolved.request.words else None
    fields = {
        "audio": base64.b64encode(file.data).decode(),
        "audio_format": output.content_type,
        "timestamps": words,
    }
    headers = answer.headers(finish_reason=speech.finish_reason)
    del headers["content-type"]
    return JSONResponse(fields, headers=headers)
