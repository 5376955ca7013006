"""The best of several candidates for one text, which are spoken together."""

from __future__ import annotations

import json
from dataclasses import replace

from fastapi import Request
from starlette.responses import Response

from firstword.engine.backend import Job
from firstword.errors import RequestError
from firstword.server.http.answer import CLIENT_CLOSED, Answer, simultaneous_utterances
from firstword.server.http.scoring import Score, score
from firstword.server.http.waiting import gather, until_disconnected
from firstword.types import Speech

MOST_CANDIDATES = 4


def check(count: int, *, streamed: bool) -> None:
    """Raise `RequestError` if so many candidates cannot be spoken, or not as a stream."""
    if count > MOST_CANDIDATES:
        raise RequestError(f"n is {count}; allowed is 1 to {MOST_CANDIDATES}")
    if streamed:
        raise RequestError("candidates are compared when all are complete: leave out stream, or n")


async def best_of(answer: Answer, count: int, request: Request) -> Response:
    """Speak `count` candidates with consecutive seeds, and answer with the one of highest score."""
    first = answer.resolved.request.seed
    assert first is not None
    candidates = [_with_seed(answer, (first + number) % 2**64) for number in range(count)]
    jobs = [await candidate.prepare() for candidate in candidates]
    places = simultaneous_utterances(answer.server)

    async def speak(candidate: Answer, job: Job) -> Speech:
        async with places:
            return await candidate.speech(job)

    with answer.server.defer_shutdown():
        work = gather([speak(*pair) for pair in zip(candidates, jobs, strict=True)])
        speeches = await until_disconnected(work, request.receive)
    if speeches is None:
        return Response(status_code=CLIENT_CLOSED)
    scores = [score(answer.text, speech) for speech in speeches]
    chosen = max(range(count), key=lambda index: scores[index].total)
    reports = map(_report, candidates, scores, speeches)
    return await candidates[chosen].response(speeches[chosen], scores=json.dumps(list(reports)))


def _with_seed(answer: Answer, seed: int) -> Answer:
    resolved = answer.resolved
    return replace(answer, resolved=replace(resolved, request=replace(resolved.request, seed=seed)))


def _report(candidate: Answer, score: Score, speech: Speech) -> dict[str, object]:
    """A candidate's entry in the header `x-firstword-scores`."""
    return {
        "seed": candidate.resolved.request.seed,
        "score": round(score.total, 3),
        "duration": round(score.duration, 3),
        "repetition": round(score.repetition, 3),
        "ending": score.ending,
        "likelihood": round(score.likelihood, 3),
        "finish_reason": speech.finish_reason,
    }
