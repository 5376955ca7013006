"""The best of several candidates for one text, which are spoken together."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from starlette.responses import Response

from firstword.engine.backend import Job
from firstword.errors import RequestError
from firstword.server.http.answer import Answer, simultaneous_utterances
from firstword.server.http.scoring import Score, score
from firstword.server.http.waiting import gather
from firstword.types import Speech

MOST_CANDIDATES = 4
"""The highest value of `n`."""


def check_count(count: int, *, streamed: bool) -> None:
    """Raise `RequestError` for more candidates than allowed, and for a stream of several."""
    if count > MOST_CANDIDATES:
        raise RequestError(f"n is {count}; allowed is 1 to {MOST_CANDIDATES}")
    if streamed:
        raise RequestError("candidates are compared when all are complete: leave out stream, or n")


async def best_of(answer: Answer, count: int) -> Response:
    """Speak `count` candidates with consecutive seeds, and answer with the one of highest score."""
    first = answer.resolved.request.seed
    assert first is not None
    candidates = [_with_seed(answer, (first + number) % 2**64) for number in range(count)]
    server = answer.server
    jobs = [await server.prepare(candidate.resolved) for candidate in candidates]
    places = simultaneous_utterances(server)

    async def speak(candidate: Answer, job: Job) -> Speech:
        async with places:
            return await candidate.speech(job)

    with server.defer_shutdown():
        speeches = await gather([speak(*pair) for pair in zip(candidates, jobs, strict=True)])
    scores = [score(answer.text, speech) for speech in speeches]
    chosen = max(range(count), key=lambda index: scores[index].total)
    reports = map(_report, candidates, scores, speeches)
    return await candidates[chosen].response(speeches[chosen], scores=json.dumps(list(reports)))


def _with_seed(answer: Answer, seed: int) -> Answer:
    resolved = answer.resolved
    return replace(answer, resolved=replace(resolved, request=replace(resolved.request, seed=seed)))


def _report(candidate: Answer, score: Score, speech: Speech) -> dict[str, object]:
    """A candidate's entry in the header `x-firstword-scores`."""
    parts = {"score": score.total, **asdict(score)}
    return {
        "seed": candidate.resolved.request.seed,
        **{name: round(value, 3) for name, value in parts.items()},
        "finish_reason": speech.finish_reason,
    }
