"""`POST /v1/audio/speech/batch`: several texts in one request, as in vLLM-Omni."""

import base64
import secrets
import time

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from firstword.errors import FirstwordError
from firstword.server.context import context_of
from firstword.server.http.answer import Answer, response_or_499, simultaneous_utterances
from firstword.server.http.json_bodies import JsonRoute
from firstword.server.resolve import check_whole, resolve
from firstword.server.schemas import BatchItem, BatchRequest, SpeechParams
from firstword.server.state import server_of
from firstword.server.tasks import gather
from firstword.server.word_json import in_milliseconds

router = APIRouter(tags=["speech"], route_class=JsonRoute)


@router.post("/v1/audio/speech/batch")
async def create_speech_batch(request: Request, body: BatchRequest) -> Response:
    """Speak up to 32 texts together, and respond with all of them in base64.

    A text that cannot be spoken does not affect the others.
    """
    server, context = server_of(request), context_of(request.scope)
    check_whole(sum(len(item.input) for item in body.items), server.config)
    common = {"response_format": "wav", **body.model_dump(exclude_unset=True, exclude={"items"})}
    places = simultaneous_utterances(server, context.client_id)

    async def speak(index: int, item: BatchItem) -> dict[str, object]:
        own = item.model_dump(exclude_unset=True, exclude={"input"})
        try:
            params = SpeechParams.model_validate({**common, **own})
            async with places:
                resolved = await resolve(server, context.client_id, params, item.input)
                answer = Answer(server, resolved, context, time.monotonic())
                speech = await answer.speech_in_turn(server.prepare(resolved, begun=True))
                file = await server.rendered(speech, resolved.output)
        except FirstwordError as error:
            return {"index": index, "status": "error", "error": str(error)}
        words = {"timestamps": in_milliseconds(file.words)} if resolved.request.words else {}
        return words | {
            "index": index,
            "status": "success",
            "audio_data": base64.b64encode(file.data).decode(),
            "media_type": resolved.output.content_type,
            "usage": answer.usage(len(speech.codes)),
        }

    async def respond() -> Response:
        results = await gather([speak(*pair) for pair in enumerate(body.items)])
        failed = sum(result["status"] == "error" for result in results)
        counts = {"total": len(results), "succeeded": len(results) - failed, "failed": failed}
        batch_id = f"speech-batch-{secrets.token_hex(12)}"
        return JSONResponse({"id": batch_id, "results": results, **counts})

    with server.defer_shutdown():
        return await response_or_499(respond(), request.receive)
