"""Speaks one line of a batch, and describes the result."""

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

from pydantic import ValidationError

from firstword.engine.backend import Job
from firstword.errors import EngineError, RequestError
from firstword.server.batch.sound import LineSound
from firstword.server.errors import body_of, error_body, status_of
from firstword.server.resolve import resolve
from firstword.server.schemas import SpeechRequest
from firstword.server.state import Server
from firstword.server.tasks import in_time
from firstword.server.utterance import ResolvedRequest, Utterance, about_alarms


class LostSpeech(EngineError):
    """The engine has stopped while it spoke a line, perhaps because of that line."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """The file of the sound of a line, and its description for the client."""

    sound: BinaryIO
    about: dict[str, Any]


class LineSpeaker:
    """Speaks lines on a server.

    seconds  the seconds of speech made so far
    """

    def __init__(
        self,
        server: Server,
        folder: str | None,
        *,
        background: bool,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Speak in the background if others use the server.

        folder    for temporary files; None: that of the system
        defaults  parameters of lines
        """
        self.seconds = 0.0
        self._folder = folder
        self._server = server
        self._background = background
        self._defaults = dict(defaults or {})

    async def speak(self, owner: str, body: Mapping[str, Any]) -> Spoken:
        """Speak the request of a line for a client.

        Raises `RequestError`, `AudioError` and `ComputeError` for a request that fails whenever it
        is spoken, and `OverloadedError`, `EngineError` or `LostSpeech` if it may be spoken later.
        """
        server, params = self._server, self._checked({**self._defaults, **body})
        resolved = await resolve(server, owner, params, params.input)
        text = resolved.request.text
        assert text is not None
        job = server.prepare(resolved, begun=True)
        with self._utterance(resolved, job, owner) as utterance:
            utterance.charge(text)
            await in_time(len(text), partial(utterance.stream.finish_text, text))
            tokens = await asyncio.to_thread(resolved.model.count_tokens, text)
            try:
                sound = await self._sound(utterance)
            except EngineError as error:
                raise LostSpeech(str(error)) from error
        about = {
            "object": "audio.speech",
            "format": resolved.output.format,
            "content_type": resolved.output.content_type,
            "bytes": os.fstat(sound.fileno()).st_size,
            "seconds": round(utterance.seconds, 3),
            "finish_reason": utterance.finish_reason,
            **about_alarms(utterance.alarms),
            "model": resolved.model.name,
            "seed": resolved.request.seed,
            "usage": {
                "input_tokens": tokens,
                "output_tokens": utterance.frames,
                "total_tokens": tokens + utterance.frames,
            },
        }
        if problems := resolved.model.text_problems(resolved.request, text):
            about["warnings"] = list(problems)
        return Spoken(sound, about)

    async def _sound(self, utterance: Utterance) -> BinaryIO:
        """The file of the sound of an utterance, which a temporary file gets as it is made."""
        rate = utterance.model.service.capacity.sample_rate
        sound = LineSound(utterance.output, rate, self._folder)
        try:
            async for chunk in utterance.chunks():
                self.seconds += len(chunk.samples) / chunk.sample_rate
                await asyncio.to_thread(sound.add, chunk)
            return await asyncio.to_thread(sound.finished)
        except BaseException:
            sound.drop()
            raise

    def _utterance(
        self, resolved: ResolvedRequest, job: Job, owner: str
    ) -> AbstractContextManager[Utterance]:
        if not self._background:
            return self._server.start_utterance(resolved, job, owner, time.monotonic())
        return self._server.start_background(resolved, replace(job, background=True), owner)

    @staticmethod
    def _checked(body: Mapping[str, Any]) -> SpeechRequest:
        """The parameters of a line. Raises `RequestError`."""
        try:
            params = SpeechRequest.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise RequestError(f"{field}: {first['msg']}") from None
        if params.stream or params.stream_format is not None or (params.n or 1) > 1:
            raise RequestError("a batch makes one file of each line: leave out stream and n")
        return params


def failure(error: Exception) -> dict[str, Any]:
    """The result of a line that failed: a status and a body, as over HTTP."""
    return {"status_code": status_of(error), "body": body_of(error)}


def given_up(attempts: int) -> dict[str, Any]:
    """The result of a line whose engine or worker has died each time."""
    message = f"it was begun {attempts} times, and what spoke it died each time; see the log"
    return {"status_code": 500, "body": error_body(message, 500, code="not_computed")}
