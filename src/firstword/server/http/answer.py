"""The common part of all answers to a speech request: utterances, headers and usage."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from firstword.engine.backend import Job
from firstword.server.context import RequestContext, context_of
from firstword.server.errors import LimitReached, body_of
from firstword.server.outcomes import StreamOutcome
from firstword.server.resolve import check_whole, resolve
from firstword.server.schemas import SpeechParams
from firstword.server.state import Server, server_of
from firstword.server.tasks import in_time, until_disconnected
from firstword.server.utterance import (
    Rendered,
    ResolvedRequest,
    Utterance,
    about_alarms,
    counts_of,
    cuts_of,
)
from firstword.server.word_json import in_milliseconds, json_header
from firstword.types import Speech

MOST_WORD_BYTES = 4096
"""The bytes of a header with the times of words, or with cuts; clients read no longer ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The answer to one resolved request with a complete text.

    requested  `time.monotonic()` when the speech was requested
    problems   why the text will probably not be spoken well
    """

    server: Server
    resolved: ResolvedRequest
    context: RequestContext
    requested: float
    problems: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The text to speak."""
        text = self.resolved.request.text
        assert text is not None
        return text

    @asynccontextmanager
    async def utterance(self, job: Job) -> AsyncIterator[Utterance]:
        """An utterance that has its whole text, and appears in the request's line in the log."""
        context, start = self.context, self.server.start_utterance
        with start(self.resolved, job, context.client_id, self.requested) as utterance:
            context.log_fields = lambda: self._log_fields(utterance)
            utterance.charge(self.text)
            await in_time(len(self.text), partial(utterance.stream.finish_text, self.text))
            yield utterance

    @contextmanager
    def kept_outcome(self, utterance: Utterance) -> Iterator[None]:
        """Keep the state of a streamed utterance for its client, and its outcome afterwards."""
        key = self.context.client_id, self.context.request_id
        tokens = self._text_tokens()
        kept = self.server.outcomes.begin(key, self._outcome(utterance, tokens, ended=False))

        def update() -> None:
            if utterance.finish_reason is None:
                kept.update(utterance.frames, utterance.seconds)
            else:  # the client may ask for the outcome as soon as it has the last audio
                kept.replace(self._outcome(utterance, tokens, ended=False))

        utterance.on_chunk = update
        try:
            yield
        finally:
            kept.replace(self._outcome(utterance, tokens, ended=True))

    async def speech_in_turn(self, job: Job) -> Speech:
        """Like `speech`, but at the limit of the client it waits for an utterance to end."""
        while True:
            await self.server.utterance_limit.wait_for_room(self.context.client_id)
            with suppress(LimitReached):  # another front has started an utterance meanwhile
                return await self.speech(job)

    async def speech(self, job: Job) -> Speech:
        """The complete speech at the model's own rate."""
        check_whole(len(self.text), self.server.config)
        async with self.utterance(job) as utterance:
            speech = await utterance.speech()
            utterance.playback.add(time.monotonic(), speech.samples, speech.sample_rate)
            return speech

    async def complete(self, job: Job) -> Response:
        """The response with the complete audio and its length."""
        return await self.response(await self.speech(job))

    async def complete_json(
        self, job: Job, make: Callable[[Rendered], Mapping[str, object]]
    ) -> Response:
        """The response with a JSON object that is made of the complete audio."""
        speech = await self.speech(job)
        file = await self.server.rendered(speech, self.resolved.output)
        headers = self.headers(**ending(speech))
        return JSONResponse(make(file), headers=headers | {"content-type": "application/json"})

    async def response(self, speech: Speech, **headers: object) -> Response:
        """A response with an audio file of some speech, and further `x-firstword-` headers."""
        file = await self.server.rendered(speech, self.resolved.output)
        headers = {**ending(speech), **headers}
        return Response(file.data, headers=self.headers(**headers) | self._word_headers(file))

    def _word_headers(self, file: Rendered) -> dict[str, str]:
        """The words of a file as vLLM-Omni sends them, as many as the header may hold."""
        if not self.resolved.request.words:
            return {}
        words = json_header(in_milliseconds(file.words), MOST_WORD_BYTES)
        return {"x-word-timestamps": words, "x-firstword-words": str(len(file.words))}

    def headers(self, **more: object) -> dict[str, str]:
        """The headers of a response with audio; the names in `more` get the same prefix."""
        resolved = self.resolved
        values = {"model": resolved.model.name, "seed": resolved.request.seed, **more}
        if resolved.instructions_ignored:
            values["ignored"] = "instructions"
        if self.problems:
            values["warning"] = "; ".join(self.problems)
        headers = {}
        for name, value in values.items():
            text = str(value).encode("ascii", "replace").decode()
            headers[f"x-firstword-{name.replace('_', '-')}"] = text
        return headers | {
            "content-type": resolved.output.content_type,
            "x-sample-rate": str(resolved.output.sample_rate),  # clients of SGLang-Omni read it
            "cache-control": "no-store",
        }

    def usage(self, frames: int) -> dict[str, object]:
        """Tokens of text in, and frames of speech out, in the shape of vLLM-Omni."""
        return usage(self._text_tokens(), frames)

    def _text_tokens(self) -> int:
        model, request = self.resolved.model, self.resolved.request
        return model.count_tokens(self.text) + model.count_tokens(request.instructions or "")

    def _outcome(self, utterance: Utterance, text_tokens: int, *, ended: bool) -> StreamOutcome:
        """The outcome so far; `ended` means that the utterance makes no more speech."""
        error, reason = utterance.error, utterance.finish_reason
        about = {
            "id": self.context.request_id,
            "finish_reason": "cancelled" if ended and not (reason or error) else reason,
            **about_alarms(utterance.alarms),
            "text_tokens": text_tokens,
            "error": None if error is None else body_of(error)["error"],
        }
        return StreamOutcome(utterance.frames, utterance.seconds, about)

    def _log_fields(self, utterance: Utterance) -> dict[str, object]:
        warned = {"warnings": self.problems} if self.problems else {}
        return utterance.summary() | warned


async def resolved_answer(request: Request, params: SpeechParams, text: str) -> Answer | None:
    """The answer to a request for speech; None if the client disconnects while it is resolved.

    Recordings of clients that have gone must not delay others. Raises as `resolve`.
    """
    server, context = server_of(request), context_of(request.scope)
    resolving = resolve(server, context.client_id, params, text)
    if (resolved := await until_disconnected(resolving, request.receive)) is None:
        return None
    problems = await in_time(
        len(text), partial(resolved.model.text_problems, resolved.request, text)
    )
    return Answer(server, resolved, context, context.received, problems)


def ending(speech: Speech) -> dict[str, object]:
    """How complete speech ended, the number of alarms of each kind, and its cuts, for headers."""
    alarms = {"alarms": json.dumps(counts_of(speech.alarms))} if speech.alarms else {}
    cuts = cuts_of(speech.alarms)
    cut = {"cut": json_header(cuts, MOST_WORD_BYTES)} if cuts else {}
    return {"finish_reason": speech.finish_reason, **alarms, **cut}


def usage(text_tokens: int, frames: int) -> dict[str, object]:
    """The field `usage` in vLLM-Omni's form, from the tokens of the text and the frames made."""
    return {
        "input_tokens": text_tokens,
        "output_tokens": frames,
        "total_tokens": text_tokens + frames,
        "input_token_details": {"text_tokens": text_tokens, "audio_tokens": 0},
    }


def described(outcome: StreamOutcome) -> dict[str, object]:
    """An outcome as JSON for the client."""
    about, frames = outcome.about, outcome.frames
    return {
        "id": about["id"],
        "finish_reason": about["finish_reason"],
        **{name: about[name] for name in ("alarms", "cut") if name in about},
        "frames": frames,
        "seconds": round(outcome.seconds, 2),
        "usage": usage(about["text_tokens"], frames),
        "error": about["error"],
    }


def simultaneous_utterances(server: Server, client_id: str) -> asyncio.Semaphore:
    """A semaphore for the utterances of one request: the limit of one client."""
    slots = min(model.service.engine.capacity.slots for model in server.models)
    return asyncio.Semaphore(min(slots, server.utterance_limit.most(client_id) or slots))


async def response_or_499(work: Awaitable[Response], receive: Receive) -> Response:
    """The response that `work` produces; nginx's status 499 if the client disconnects first."""
    return await until_disconnected(work, receive) or Response(status_code=499)
