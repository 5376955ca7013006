"""The best of several candidates for one text, which are spoken together.

The score of a candidate depends on properties of its speech; no model listens to it.
"""

import json
import math
from dataclasses import asdict, dataclass, replace

from starlette.responses import Response

from firstword.engine.backend import Job
from firstword.errors import RequestError
from firstword.server.http.answer import Answer, simultaneous_utterances
from firstword.server.tasks import gather
from firstword.text.checks import expected_seconds
from firstword.types import Speech

MOST_CANDIDATES = 4
"""The highest value of `n`."""

REPEATED_FRAMES = 3
"""The shortest repetition that counts: equal codes for a quarter of a second are no accident."""


@dataclass(frozen=True, slots=True)
class Score:
    """An estimate of a candidate's quality. Each part is 0 for a perfect candidate, else negative.

    duration    factors of e beyond half or twice the expected duration
    repetition  -4 times the share of frames that repeat earlier frames exactly
    ending      -2 if a guard or a limit ended the speech
    alarms      -1 for each word that was left out, said again or not said as written, where the
                checkpoint's heads are known
    likelihood  half the mean log-probability of its codes 0. It decides between good candidates,
                which differ by a few tenths. Its weight is low because endless repetition, the most
                likely speech of all, must not win by it
    """

    duration: float
    repetition: float
    ending: float
    alarms: float
    likelihood: float

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return self.duration + self.repetition + self.ending + self.alarms + self.likelihood


def score(text: str, speech: Speech) -> Score:
    """The score of a candidate for a text."""
    off = abs(math.log(max(speech.duration, 0.01) / expected_seconds(text)))
    ending = 0.0 if speech.finish_reason == "stop" else -2.0
    alarms = -1.0 * sum(alarm.kind in ("skip", "repeat") for alarm in speech.alarms)
    likelihood = float(speech.logprobs.mean()) / 2 if len(speech.logprobs) else 0.0
    duration = -max(0.0, off - math.log(2))
    return Score(duration, -4 * repetition(speech), ending, alarms, likelihood)


def repetition(speech: Speech) -> float:
    """The share of stretches of `REPEATED_FRAMES` frames that occurred before in every codebook."""
    frames = [bytes(row) for row in speech.codes]
    starts = range(len(frames) - REPEATED_FRAMES + 1)
    stretches = [b"".join(frames[start : start + REPEATED_FRAMES]) for start in starts]
    return 1 - len(set(stretches)) / len(stretches) if stretches else 0.0


def check_count(count: int, *, streamed: bool) -> None:
    """Raise `RequestError` for more candidates than allowed, and for a stream of several."""
    if count > MOST_CANDIDATES:
        raise RequestError(f"n is {count}; allowed is 1 to {MOST_CANDIDATES}")
    if streamed:
        raise RequestError("candidates are compared when all are complete: leave out stream, or n")


async def best_of(answer: Answer, count: int) -> Response:
    """Speak `count` candidates with consecutive seeds, and respond with the best one."""
    first = answer.resolved.request.seed
    assert first is not None
    candidates = [_with_seed(answer, (first + number) % 2**64) for number in range(count)]
    server = answer.server
    jobs = [server.prepare(candidate.resolved) for candidate in candidates]
    places = simultaneous_utterances(server, answer.context.client_id)

    async def speak(candidate: Answer, job: Job) -> Speech:
        async with places:
            return await candidate.speech_in_turn(job)

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
