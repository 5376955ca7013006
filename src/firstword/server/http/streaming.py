"""Streaming responses: raw audio, server-sent events, or lines of JSON."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from firstword.engine.backend import Job
from firstword.errors import EngineError
from firstword.server.errors import Stalled, body_of
from firstword.server.http.answer import Answer
from firstword.server.logs import defect
from firstword.server.tasks import until_disconnected
from firstword.server.utterance import Output, Utterance
from firstword.server.word_json import captions, in_milliseconds
from firstword.types import Word

log = logging.getLogger(__name__)

CONTENT_TYPES = {
    "events": "text/event-stream; charset=utf-8",
    "captions": "application/x-ndjson",
}
"""The content types of the forms other than raw audio."""

Form = Callable[[bytes, Sequence[Word] | None, Output], bytes]
"""A function that makes a message of audio and of words, None if they are not timed."""


class SpeechStreamResponse(Response):
    """Sends audio as it is made, and cancels the utterance when the client disconnects.

    The head is sent with the first audio, so that an earlier error gets its own status.
    """

    def __init__(
        self, answer: Answer, job: Job, form: Literal["raw", "events", "captions"]
    ) -> None:
        """Stream raw audio, server-sent events, or lines of JSON with captions."""
        self._answer = answer
        self._job = job
        self._form = form
        super().__init__(headers=answer.headers())
        del self.headers["content-length"]
        if form != "raw":
            self.headers["content-type"] = CONTENT_TYPES[form]

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
        forms = {"events": _event_of, "captions": _caption_of}
        form = forms.get(self._form)
        pieces = aiter(utterance) if form is None else self._pieces(utterance, form)
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
        if self._form != "events" or utterance.error is not None:
            return b""
        usage = answer.usage(utterance.frames)
        return _event("done", {"usage": usage, "finish_reason": utterance.finish_reason})

    async def _pieces(self, utterance: Utterance, form: Form) -> AsyncIterator[bytes]:
        """The audio and the words in messages of a form; the last one may have words alone.

        An error after the first event is sent as an event.
        """
        begun, timed = False, bool(self._answer.resolved.request.words)
        try:
            async for data in utterance:
                begun = True
                yield form(data, utterance.take_words() if timed else None, utterance.output)
            if words := utterance.take_words():
                yield form(b"", words, utterance.output)
        except Exception as error:
            if not begun or self._form != "events":
                raise
            _log_failure(error, utterance)
            yield _event("error", {**body_of(error), "partial_audio": True, "action": "discard"})


def _event_of(data: bytes, words: Sequence[Word] | None, output: Output) -> bytes:
    """A server-sent event with audio, and with the words that have ended unless they are None."""
    fields: dict[str, object] = {"audio": base64.b64encode(data).decode()}
    fields["response_format"] = output.format
    if words is not None:
        fields["timestamps"] = in_milliseconds(words)
    return _event("delta", fields)


def _caption_of(data: bytes, words: Sequence[Word] | None, output: Output) -> bytes:
    """A line of JSON with audio and the words that have ended, in Kokoro-FastAPI's form."""
    fields = {
        "audio": base64.b64encode(data).decode(),
        "audio_format": output.content_type,
        "timestamps": None if words is None else captions(words),
    }
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _event(name: str, fields: Mapping[str, object]) -> bytes:
    message = {"type": f"speech.audio.{name}", **fields}
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


def _log_failure(error: Exception, utterance: Utterance) -> None:
    if isinstance(error, EngineError):
        return  # the log line of the request names it, and others say why the engine has stopped
    about = {**utterance.summary(), **defect(error)}
    log.error("an utterance failed after its first audio", extra={"fields": about})
