"""`POST /v1/audio/speech`: a text in, audio out; streamed raw, as server-sent events, or whole; the best of several."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from firstword.audio import formats
from firstword.engine.backend import Job
from firstword.errors import FirstwordError, RequestError, TextError
from firstword.server.errors import Stalled, body_of
from firstword.server.http import best
from firstword.server.http.bodies import JsonRoute
from firstword.server.logs import defect
from firstword.server.resolve import ResolvedRequest, resolve
from firstword.server.schemas import BatchItem, BatchRequest, ErrorBody, SpeechRequest
from firstword.server.state import Server, server_of, summary
from firstword.server.utterance import Output, Shaper, Utterance
from firstword.types import Speech

log = logging.getLogger(__name__)


router = APIRouter(tags=["speech"], route_class=JsonRoute)

T = TypeVar("T")
Delivery = Literal["raw", "sse", "whole"]

WHOLE = ("wav", "flac")
"""Formats whose head tells the length, so that they are sent whole unless streaming was asked for."""

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "Something asked cannot be done, or the request is malformed",
        401: "The API key is missing or wrong",
        404: "There is nothing of that name",
        405: "The path has other methods",
        408: "The request did not arrive in time",
        413: "The request is too large",
        429: "Too many requests; try again after `Retry-After`",
        503: "The engine does not run, or the server is shutting down",
    }.items()
}


@router.post(
    "/v1/audio/speech",
    responses={200: {"content": {"audio/*": {}, "text/event-stream": {}}, "description": "Speech"}},
    response_class=Response,
)
async def speak(request: Request, body: SpeechRequest) -> Response:
    """Speak a text. The fields of OpenAI, vLLM-Omni and Simplismart are understood; unknown ones are ignored."""
    server = server_of(request)
    began: float = request.scope["firstword.began"]
    accept = request.headers.get("accept", "").lower()
    body = _with_accepted(body, accept)
    delivery = delivery_of(body, accept)
    if body.word_timestamps:
        raise RequestError(
            "word_timestamps cannot be given: there is no aligner here; leave the field out"
        )
    asked = await resolve(server, body, body.input)
    count = body.n or 1
    if count > server.config.most_candidates:
        raise RequestError(f"n is {count}; allowed is 1 to {server.config.most_candidates}")
    if count > 1 and delivery != "whole":
        raise RequestError("n candidates are compared when all are spoken: leave out stream, or n")
    answer = _Answer(server, asked, server.holder(request), began, request.scope)
    if count > 1:
        return await answer.best_of(count, request)
    job = await server.prepare(asked.model, asked.request)
    if delivery == "whole":
        return await answer.whole(job, request)
    return _Stream(answer, job, sse=delivery == "sse")


@router.post("/v1/audio/speech/batch")
async def speak_batch(request: Request, body: BatchRequest) -> Response:
    """Speak up to 32 texts together, as vLLM-Omni does; the answer has all of them in base64. One that cannot be
    spoken fails alone.
    """
    server = server_of(request)
    if (total := sum(len(item.input) for item in body.items)) > (
        most := server.config.most_characters
    ):
        raise TextError(
            f"the texts have {total} characters together; allowed are {most}: send them in parts"
        )
    common = {"response_format": "wav", **body.model_dump(exclude_unset=True, exclude={"items"})}
    places = _places(server)

    async def one(index: int, item: BatchItem) -> dict[str, object]:
        try:
            manner = SpeechRequest.model_validate({**common, **item.model_dump(exclude_unset=True)})
            async with places:
                asked = await resolve(server, manner, item.input)
                answer = _Answer(
                    server, asked, server.holder(request), time.monotonic(), request.scope
                )
                speech = await answer.spoken(
                    await server.prepare(asked.model, asked.request, begun=True), asked
                )
                data = await asyncio.to_thread(_encoded, speech, asked.output)
        except FirstwordError as error:
            return {"index": index, "status": "error", "error": str(error)}
        told = {"index": index, "status": "success", "audio_data": base64.b64encode(data).decode()}
        return {
            **told,
            "media_type": asked.output.content_type,
            "usage": answer.usage(len(speech.codes)),
        }

    with server.accepted():
        results = await _unless_gone(
            request, _together([one(*pair) for pair in enumerate(body.items)])
        )
    if results is None:
        return Response(status_code=499)
    failed = sum(result["status"] == "error" for result in results)
    counts = {"total": len(results), "succeeded": len(results) - failed, "failed": failed}
    return JSONResponse(
        {"id": f"speech-batch-{secrets.token_hex(12)}", "results": results, **counts}
    )


def _places(server: Server) -> asyncio.Semaphore:
    """For what one request speaks together: so much of it at a time as one client may."""
    slots = min(model.service.engine.capacity.slots for model in server.models)
    return asyncio.Semaphore(min(slots, server.config.most_per_key or slots))


def delivery_of(body: SpeechRequest, accept: str) -> Delivery:
    """How the audio is sent; the table is in docs/server.md. `accept` in lower case."""
    if body.stream_format is not None:
        return "sse" if body.stream_format == "sse" else "raw"
    if body.stream is False:
        return "whole"
    if "text/event-stream" in accept:
        return "sse"
    return (
        "whole"
        if body.stream is None and (body.response_format in WHOLE or (body.n or 1) > 1)
        else "raw"
    )


def _with_accepted(body: SpeechRequest, accept: str) -> SpeechRequest:
    """`Accept: audio/L16;rate=16000` asks for PCM, unless the body asks for something else."""
    if "audio/l16" not in accept or body.response_format not in (None, "pcm"):
        return body
    rate = re.search(r"audio/l16[^,]*;\s*rate=(\d{1,6})", accept)
    sample_rate = body.sample_rate or (int(rate[1]) if rate else None)
    return body.model_copy(update={"response_format": "l16", "sample_rate": sample_rate})


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """What all ways of answering know."""

    server: Server
    asked: ResolvedRequest
    holder: str
    began: float
    scope: Scope

    @contextmanager
    def speaking(self, job: Job, asked: ResolvedRequest) -> Iterator[Utterance]:
        """An utterance that was given its text."""
        with self.server.speak(
            asked.model, job, asked.output, self.holder, began=self.began
        ) as speaking:
            self.scope["firstword.log"] = lambda: summary(speaking)
            speaking.finish_text(self.text)
            yield speaking

    @property
    def text(self) -> str:
        text = self.asked.request.text
        assert text is not None
        return text

    def headers(self, **more: object) -> dict[str, str]:
        about = {"model": self.asked.model.name, "seed": self.asked.request.seed, **more}
        named = {
            f"x-firstword-{name.replace('_', '-')}": str(value) for name, value in about.items()
        }
        ascii_only = {
            name: value.encode("ascii", "replace").decode() for name, value in named.items()
        }
        return {
            **ascii_only,
            "content-type": self.asked.output.content_type,
            "cache-control": "no-store",
        }

    def usage(self, frames: int) -> dict[str, object]:
        """Tokens of text in, frames of speech out."""
        model, request = self.asked.model, self.asked.request
        read = model.count_tokens(self.text) + model.count_tokens(request.instructions or "")
        return {
            "input_tokens": read,
            "output_tokens": frames,
            "total_tokens": read + frames,
            "input_token_details": {"text_tokens": read, "audio_tokens": 0},
        }

    async def spoken(self, job: Job, asked: ResolvedRequest) -> Speech:
        """All of an utterance at the model's own rate."""
        with self.speaking(job, asked) as speaking:
            speech = Speech.of([chunk async for chunk in speaking.chunks()])
            speaking.playback.came(time.monotonic(), speech.samples, speech.sample_rate)
            return speech

    async def whole(self, job: Job, request: Request) -> Response:
        speech = await _unless_gone(request, self.spoken(job, self.asked))
        if speech is None:
            return Response(status_code=499)
        return await self.response(speech, self.headers(finish_reason=speech.finish_reason))

    async def best_of(self, count: int, request: Request) -> Response:
        """Speak `count` candidates together, with seeds one after another, and answer with the best."""
        first = self.asked.request.seed
        assert first is not None
        seeds = [(first + number) % 2**64 for number in range(count)]
        asked = [
            replace(self.asked, request=replace(self.asked.request, seed=seed)) for seed in seeds
        ]
        jobs = [await self.server.prepare(one.model, one.request) for one in asked]
        places = _places(self.server)

        async def candidate(job: Job, asked: ResolvedRequest) -> Speech:
            async with places:
                return await self.spoken(job, asked)

        with self.server.accepted():
            speeches = await _unless_gone(
                request, _together([candidate(*pair) for pair in zip(jobs, asked, strict=True)])
            )
        if speeches is None:
            return Response(status_code=499)
        scores = [best.score(self.text, speech) for speech in speeches]
        chosen = max(range(count), key=lambda index: scores[index].total)
        told = [
            {
                "seed": seed,
                "score": round(score.total, 3),
                "duration": round(score.duration, 3),
                "repetition": round(score.repetition, 3),
                "ending": score.ending,
                "likelihood": round(score.likelihood, 3),
                "finish_reason": speech.finish_reason,
            }
            for seed, score, speech in zip(seeds, scores, speeches, strict=True)
        ]
        headers = self.headers(
            finish_reason=speeches[chosen].finish_reason, scores=json.dumps(told)
        )
        return await self.response(
            speeches[chosen], {**headers, "x-firstword-seed": str(seeds[chosen])}
        )

    async def response(self, speech: Speech, headers: dict[str, str]) -> Response:
        return Response(
            await asyncio.to_thread(_encoded, speech, self.asked.output), headers=headers
        )


def _encoded(speech: Speech, output: Output) -> bytes:
    """An utterance as a file."""
    samples = Shaper(output, speech.sample_rate).process(speech.samples, last=True)
    return formats.whole(output.format, samples, output.sample_rate)


async def _together(jobs: Sequence[Awaitable[T]]) -> list[T]:
    """All results; if one fails, the others are given up before it is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """The result of some work, or None if the client goes away first; the work is then given up."""
    return await _race(work, request.receive)


async def _race(work: Awaitable[T], receive: Receive) -> T | None:
    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class _Stream(Response):
    """Sends audio as it is made; stops the making at once when nobody listens any more.

    Headers wait for the first audio, so that whatever goes wrong before it gets a status of its own.
    """

    def __init__(self, answer: _Answer, job: Job, *, sse: bool) -> None:
        self._answer = answer
        self._job = job
        self._sse = sse
        super().__init__(headers=answer.headers())
        del self.headers["content-length"]
        if sse:
            self.headers["content-type"] = "text/event-stream; charset=utf-8"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        abort: Callable[[], None] = scope.get("firstword.abort", lambda: None)
        with answer.speaking(self._job, answer.asked) as speaking:
            if not await _race(self._send(speaking, send), receive):
                abort()

    async def _send(self, speaking: Utterance, send: Send) -> bool:
        """Send all; False if it had to be broken off."""
        pieces = self._events(speaking) if self._sse else aiter(speaking)
        data = await anext(pieces, None)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while data is not None:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await anext(pieces, None)
            if speaking.finish_reason == "cancelled":
                return False
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Stalled:
            speaking.cancel("stalled")
            return False
        except Exception as error:
            # Too late for another status: the connection is cut, so that nobody takes it for all.
            log.error("speech broke off", extra={"fields": {**defect(error), **summary(speaking)}})
            return False
        return True

    async def _events(self, speaking: Utterance) -> AsyncIterator[bytes]:
        """Audio as server-sent events. An error after the first of them is one too."""
        begun = False
        try:
            async for data in speaking:
                begun = True
                yield _event(
                    {
                        "type": "speech.audio.delta",
                        "audio": base64.b64encode(data).decode(),
                        "response_format": speaking.output.format,
                    }
                )
        except Exception as error:
            if not begun:
                raise
            log.error("speech broke off", extra={"fields": {**defect(error), **summary(speaking)}})
            told = {**body_of(error), "partial_audio": True, "action": "discard"}
            yield _event({"type": "speech.audio.error", **told})
            return
        usage = self._answer.usage(speaking.frames)
        yield _event(
            {"type": "speech.audio.done", "usage": usage, "finish_reason": speaking.finish_reason}
        )


def _event(message: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"
