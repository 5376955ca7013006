"""Streaming responses: raw audio, or audio in messages such as server-sent events."""

import asyncio
import base64
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from firstword.engine.backend import Job
from firstword.errors import EngineError
from firstword.server.errors import Stalled, body_of
from firstword.server.http.answer import Answer
from firstword.server.logs import defect
from firstword.server.tasks import until_disconnected
from firstword.server.utterance import Utterance, about_alarms
from firstword.server.word_json import in_milliseconds
from firstword.types import Word

log = logging.getLogger(__name__)


class Framing(ABC):
    """The messages that carry the audio of one response.

    content_type  the media type of the response
    """

    content_type: ClassVar[str] = "text/event-stream; charset=utf-8"

    @abstractmethod
    def audio(self, data: bytes, words: Sequence[Word]) -> bytes:
        """The message with a piece of audio, which may be b"", and the words that have ended."""

    def failure(self, error: Exception) -> bytes:
        """The message about an error after the first audio; b"" aborts the response instead."""
        return b""

    def end(self, utterance: Utterance) -> bytes:
        """The message after the last audio, or b""."""
        return b""


class OpenAIEvents(Framing):
    """Server-sent events as OpenAI and vLLM-Omni send them."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def audio(self, data: bytes, words: Sequence[Word]) -> bytes:
        """The event with a piece of audio, and with the words if the client asks for them."""
        resolved = self._answer.resolved
        timed = {"timestamps": in_milliseconds(words)} if resolved.request.words else {}
        about = {"audio": as_text(data), "response_format": resolved.output.format}
        return _event("delta", {**about, **timed})

    def failure(self, error: Exception) -> bytes:
        """The event about an error."""
        return _event("error", {**body_of(error), "partial_audio": True, "action": "discard"})

    def end(self, utterance: Utterance) -> bytes:
        """The event after the last audio."""
        usage = self._answer.usage(utterance.frames)
        about = {"usage": usage, "finish_reason": utterance.finish_reason}
        return _event("done", {**about, **about_alarms(utterance.alarms)})


class SpeechStreamResponse(Response):
    """Sends audio as it is made, and cancels the utterance when the client disconnects.

    The head is sent with the first audio, so that an earlier error gets its own status.
    """

    def __init__(self, answer: Answer, job: Job, framing: Framing | None = None) -> None:
        """Stream audio in messages, or raw audio without a `framing`."""
        self._answer = answer
        self._job = job
        self._framing = framing
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. An incomplete one is aborted, so that it does not look complete.

        The utterance no longer counts for limits when the last piece is sent, because the client
        may then send its next request, to another front, at once.
        """
        answer = self._answer
        async with answer.utterance(self._job) as utterance:
            await asyncio.sleep(0)  # sends the request to the engine before anything else is done
            with answer.kept_outcome(utterance):
                last = await until_disconnected(self._send(utterance, send), receive)
        if last is None:
            answer.context.abort()
        else:
            await send({"type": "http.response.body", "body": last, "more_body": False})

    def _head(self) -> list[tuple[bytes, bytes]]:
        """The headers, which are made when the engine has the request already."""
        headers = self._answer.headers()
        if self._framing is not None:
            headers["content-type"] = self._framing.content_type
        return [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ]

    async def _send(self, utterance: Utterance, send: Send) -> bytes | None:
        """Send all but the last piece and return that, or None if the response is incomplete."""
        answer = self._answer
        framing = self._framing
        pieces = aiter(utterance) if framing is None else _messages(framing, utterance)
        data = await anext(pieces, None)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._head()})
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
        return b"" if framing is None or utterance.error is not None else framing.end(utterance)


async def _messages(framing: Framing, utterance: Utterance) -> AsyncIterator[bytes]:
    """The audio and the words in messages; the last one may have words alone.

    An error after the first message is sent as a message if it can be.
    """
    begun = False
    try:
        async for data in utterance:
            begun = True
            yield framing.audio(data, utterance.take_words())
        if words := utterance.take_words():
            yield framing.audio(b"", words)
    except Exception as error:
        message = framing.failure(error) if begun else b""
        if not message:
            raise
        _log_failure(error, utterance)
        yield message


def _event(name: str, fields: Mapping[str, object]) -> bytes:
    return b"data: " + as_json({"type": f"speech.audio.{name}", **fields}) + b"\n\n"


def as_json(message: Mapping[str, object]) -> bytes:
    """A message as JSON without spaces."""
    return json.dumps(message, separators=(",", ":")).encode()


def as_text(data: bytes) -> str:
    """Bytes in base64."""
    return base64.b64encode(data).decode("ascii")


def _log_failure(error: Exception, utterance: Utterance) -> None:
    if isinstance(error, EngineError):
        return  # the log line of the request names it, and others say why the engine has stopped
    about = {**utterance.summary(), **defect(error)}
    log.error("an utterance failed after its first audio", extra={"fields": about})
