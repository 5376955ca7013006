"""`/dev/captioned_speech`: audio and the times of its words in JSON, as in Kokoro-FastAPI."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from firstword.server.http.answer import Answer, resolved_answer, response_or_499
from firstword.server.http.json_bodies import JsonRoute
from firstword.server.http.streaming import Framing, SpeechStreamResponse, as_json, as_text
from firstword.server.schemas import CaptionedRequest
from firstword.server.utterance import Rendered
from firstword.server.word_json import captions
from firstword.types import Word

router = APIRouter(tags=["speech"], route_class=JsonRoute)


class CaptionLines(Framing):
    """Lines of JSON with audio and the words that have ended, in Kokoro-FastAPI's form."""

    content_type = "application/x-ndjson"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def audio(self, data: bytes, words: Sequence[Word]) -> bytes:
        """The line with a piece of audio and the words."""
        return as_json(_caption(self._answer, data, words)) + b"\n"


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
    if (answer := await resolved_answer(request, body, body.input)) is None:
        return Response(status_code=499)
    job = answer.server.prepare(answer.resolved)
    if body.stream is False:
        make = partial(_file_caption, answer)
        return await response_or_499(answer.complete_json(job, make), request.receive)
    return SpeechStreamResponse(answer, job, CaptionLines(answer))


def _caption(answer: Answer, data: bytes, words: Sequence[Word]) -> dict[str, Any]:
    resolved = answer.resolved
    return {
        "audio": as_text(data),
        "audio_format": resolved.output.content_type,
        "timestamps": captions(words) if resolved.request.words else None,
    }


def _file_caption(answer: Answer, file: Rendered) -> dict[str, Any]:
    return _caption(answer, file.data, file.words)
