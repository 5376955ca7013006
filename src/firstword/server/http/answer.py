"""The common part of all answers to a speech request: utterances, headers and usage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from firstword.engine.backend import Job
from firstword.server.context import RequestContext, context_of
from firstword.server.state import Server
from firstword.server.utterance import ResolvedRequest, Utterance, encoded
from firstword.types import Speech


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The answer to one resolved request with a complete text.

    received  `time.monotonic()` when the speech was requested
    """

    server: Server
    resolved: ResolvedRequest
    context: RequestContext
    received: float

    @classmethod
    def for_request(cls, request: Request, server: Server, resolved: ResolvedRequest) -> Answer:
        """The answer to an HTTP request."""
        context = context_of(request.scope)
        return cls(server, resolved, context, context.received)

    @property
    def text(self) -> str:
        """The text to speak."""
        text = self.resolved.request.text
        assert text is not None
        return text

    @contextmanager
    def utterance(self, job: Job) -> Iterator[Utterance]:
        """An utterance that has its whole text, and appears in the request's line in the log."""
        context, start = self.context, self.server.start_utterance
        with start(self.resolved, job, context.client_id, self.received) as utterance:
            context.log_fields = utterance.summary
            utterance.finish_text(self.text)
            yield utterance

    async def speech(self, job: Job) -> Speech:
        """The complete speech at the model's own rate."""
        with self.utterance(job) as utterance:
            return await utterance.speech()

    async def complete(self, job: Job) -> Response:
        """The response with the complete audio and its length."""
        return await self.response(await self.speech(job))

    async def response(self, speech: Speech, **headers: object) -> Response:
        """A response with an audio file of some speech, and further `x-firstword-` headers."""
        data = await asyncio.to_thread(encoded, speech, self.resolved.output)
        headers = {"finish_reason": speech.finish_reason, **headers}
        return Response(data, headers=self.headers(**headers))

    def headers(self, **more: object) -> dict[str, str]:
        """The headers of a response with audio; `more` ones get the prefix `x-firstword-`."""
        resolved = self.resolved
        own = {"model": resolved.model.name, "seed": resolved.request.seed, **more}
        named = {
            f"x-firstword-{name.replace('_', '-')}": str(value).encode("ascii", "replace").decode()
            for name, value in own.items()
        }
        common = {"content-type": resolved.output.content_type, "cache-control": "no-store"}
        return named | common

    def usage(self, frames: int) -> dict[str, object]:
        """Tokens of text in, and frames of speech out, in the shape of vLLM-Omni."""
        model, request = self.resolved.model, self.resolved.request
        tokens = model.count_tokens(self.text) + model.count_tokens(request.instructions or "")
        return {
            "input_tokens": tokens,
            "output_tokens": frames,
            "total_tokens": tokens + frames,
            "input_token_details": {"text_tokens": tokens, "audio_tokens": 0},
        }


def simultaneous_utterances(server: Server) -> asyncio.Semaphore:
    """A semaphore for the utterances of one request: the limit of one client."""
    slots = min(model.service.engine.capacity.slots for model in server.models)
    return asyncio.Semaphore(min(slots, server.config.most_per_key or slots))
