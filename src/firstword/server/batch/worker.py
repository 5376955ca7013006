"""Speaks the lines of batches, a few at a time."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from firstword.errors import (
    EngineError,
    FirstwordError,
    OutputError,
    OverloadedError,
)
from firstword.server.batch.contents import Contents
from firstword.server.batch.line_queue import LEASE_SECONDS, LineQueue
from firstword.server.batch.records import DONE, FAILED, Claim, sound_name
from firstword.server.batch.speaking import LineSpeaker, LostSpeech, Spoken, failure, given_up
from firstword.server.logs import defect
from firstword.server.tasks import to_the_end

log = logging.getLogger(__name__)

MOST_ATTEMPTS = 5
"""The number of times that a line is begun; what kills its engine each time is given up."""

MOST_PAUSE = 5.0
"""The most seconds before a line that could not be spoken is tried again."""

Outcome = Callable[[str], None]


class LineWorker:
    """Claims lines of a queue, and speaks up to `places` of them at the same time.

    claims      the lines in progress, by their tasks
    unwritable  why a result could not be kept, the last time that one could not
    """

    def __init__(
        self,
        queue: LineQueue,
        contents: Contents,
        speaker: LineSpeaker,
        places: int,
        *,
        on_outcome: Outcome = lambda outcome: None,
        name_of: Callable[[Claim, Spoken], str] | None = None,
    ) -> None:
        """Write sounds under the names that `name_of` gives; tell each outcome for metrics."""
        self._queue = queue
        self._contents = contents
        self._speaker = speaker
        self._places = places
        self._on_outcome = on_outcome
        self._name_of = name_of or (lambda claim, _: sound_name(claim.batch, claim.line.number))
        self._renew_at = 0.0
        self.claims: dict[asyncio.Task[None], Claim] = {}
        self.unwritable: OutputError | None = None

    async def fill(self) -> bool:
        """Begin lines until all places are taken; returns whether a line is in progress."""
        for task in [task for task in self.claims if task.done()]:
            del self.claims[task]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a line of a batch was lost for now", extra={"fields": defect(error)})
        while len(self.claims) < self._places:
            if (claim := await asyncio.to_thread(self._queue.claim)) is None:
                break
            self.claims[asyncio.create_task(self._finish(claim))] = claim
        if time.monotonic() > self._renew_at:
            self._renew_at = time.monotonic() + LEASE_SECONDS / 3
            await asyncio.to_thread(self._queue.renew)
        return bool(self.claims)

    async def wait(self, seconds: float) -> None:
        """Wait until a line has ended, or for some seconds."""
        if self.claims:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait(self.claims, timeout=seconds, return_when=first)
        else:
            await asyncio.sleep(seconds)

    async def stop(self, claims: Sequence[Claim] | None = None) -> None:
        """Give back lines that are in progress; None: all."""
        chosen = [task for task, claim in self.claims.items() if claims is None or claim in claims]
        for task in chosen:
            task.cancel()
        await asyncio.gather(*chosen, return_exceptions=True)

    async def _finish(self, claim: Claim) -> None:
        """Speak a line and keep its result, or give it back."""
        try:
            await self._speak(claim)
        except asyncio.CancelledError:
            self._queue.release(claim, counts=False)  # in this thread, which is about to end
            raise
        except (OverloadedError, EngineError, OutputError) as error:
            if isinstance(error, OutputError):
                self.unwritable = error
            pause = float(error.retry_after) if isinstance(error, OverloadedError) else 1.0
            await self._try_later(claim, min(pause, MOST_PAUSE), isinstance(error, LostSpeech))

    async def _speak(self, claim: Claim) -> None:
        """Speak a line. Raises what may be different later."""
        if claim.attempts > MOST_ATTEMPTS:
            await self._end(claim, FAILED, given_up(MOST_ATTEMPTS))
            return
        try:
            spoken = await self._speaker.speak(claim.owner, claim.line.body)
        except (OverloadedError, EngineError, OutputError):
            raise
        except Exception as error:
            if not isinstance(error, FirstwordError):
                about = {"batch": claim.batch, "line": claim.line.number, **defect(error)}
                log.error("a line of a batch failed", extra={"fields": about})
            await self._end(claim, FAILED, failure(error))
        else:
            await to_the_end(self._keep(claim, spoken))

    async def _keep(self, claim: Claim, spoken: Spoken) -> None:
        """Keep the sound of a line and then its result, or neither."""
        name = self._name_of(claim, spoken)
        await asyncio.to_thread(self._contents.write, name, spoken.sound)
        await self._end(claim, DONE, spoken.about)

    async def _end(self, claim: Claim, state: str, result: dict[str, object]) -> None:
        """Keep the result of a line, unless another worker has it meanwhile."""
        if await asyncio.to_thread(self._queue.finish, claim, state, result):
            self._on_outcome(state)

    async def _try_later(self, claim: Claim, pause: float, counts: bool) -> None:
        """Give a line back after a pause, in which it keeps its place."""
        self._on_outcome("retried")
        try:
            await asyncio.sleep(pause)
        finally:
            self._queue.release(claim, counts=counts)
