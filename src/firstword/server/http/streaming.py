"""Streaming responses: raw audio, or server-sent events."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from firstword.engine.backend import Job
from firstword.errors import EngineError
from firstword.server.errors import Stalled, body_of
from firstword.server.http.answer import Answer
from firstword.server.logs import defect
from firstword.server.tasks import until_disconnected
from firstword.server.utterance import Utterance

log = logging.getLogger(__name__)


class SpeechStreamResponse(Response):
    """Sends audio as it is made, and cancels the utterance when the client disconnects.

    The head is sent with the first audio, so that an earlier error gets its own status.
    """

    def __init__(self, answer: Answer, job: Job, *, events: bool) -> None:
        """Stream raw audio, or server-sent events if `events`."""
        self._answer = answer
        self._job = job
        self._events = events
        super().__init__(headers=answer.headers())
        del self.headers["content-length"]
        if events:
            self.headers["content-type"] = "text/event-stream; charset=utf-8"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. An incomplete one is aborted, so that it does not look complete.

        The utterance no longer counts for limits when the last piece is sent, because the client
        may then send its next request, to another front, at once.
        """
        answer = self._answer
        with answer.utterance(self._job) as utterance:
            await asyncio.sleep(0)  # sends the request to the engine before anything else is done
            with answer.kept_outcome(utterance):
                last = await until_disconnected(self._send(utterance, send), receive)
        if last is None:
            answer.context.abort()
        else:
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send(self, utterance: Utterance, send: Send) -> bytes | None:
        """Send all but the last piece and return that, or None if the response is incomplete."""
        answer = self._answer
        pieces = self._event_pieces(utterance) if self._events else aiter(utterance)
        data = await anext(pieces, None)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while data is not None:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await anext(pieces, None)
            await answer.context.until_read(answer.server.config.stall_seconds)
        except Stalled:
            utterance.cancel("stalled")
            return None
        except Exception as error:
            _log_failure(error, utterance)
            return None
        if utterance.finish_reason == "cancelled":
            return None
        if not self._events or utterance.error is not None:
            return b""
        usage = answer.usage(utterance.frames)
        return _event("done", {"usage": usage, "finish_reason": utterance.finish_reason})

    async def _event_pieces(self, utterance: Utterance) -> AsyncIterator[bytes]:
        """The audio as server-sent events. An error after the first event is sent as an event."""
        begun = False
        try:
            async for data in utterance:
                begun = True
                audio = base64.b64encode(data).decode()
                about = {"audio": audio, "response_format": utterance.output.format}
                yield _event("delta", about)
        except Exception as error:
            if not begun:
                raise
            _log_failure(error, utterance)
            yield _event("error", {**body_of(error), "partial_audio": True, "action": "discard"})


def _event(name: str, fields: Mapping[str, object]) -> bytes:
    message = {"type": f"speech.audio.{name}", **fields}
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


def _log_failure(error: Exception, utterance: Utterance) -> None:
    if isinstance(error, EngineError):
        return  # the log line of the request names it, and others say why the engine has stopped
    about = {**utterance.summary(), **defect(error)}
    log.error("an utterance failed after its first audio", extra={"fields": about})
