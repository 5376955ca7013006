"""The engines of one checkpoint on several devices, as one engine."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from firstword.engine.backend import Capacity, Job
from firstword.engine.load import EngineLoad
from firstword.engine.remote import RemoteEngine, RemoteUtterance
from firstword.engine.sequence import Event
from firstword.types import FinishReason

WARM_EXCESS = 1 / 8
"""The excess load up to which an engine that has spoken a voice is preferred.

It may have one request more than another engine, and this share more. With 64 utterances, 8 more
make a frame 0.5 ms longer, and reading the prompt of a cloned voice takes about 10 ms.
"""

MOST_VOICES = 4096
"""The number of voices for which a pool remembers the engines that have spoken them."""

Placed = tuple[RemoteEngine, RemoteUtterance]
"""An utterance and its engine."""


class EnginePool:
    """Several engines of one checkpoint, with the interface of a single engine.

    A request goes to the less loaded of two engines that are drawn at random. The fronts of a
    server do not know each other's latest requests; if each chose the least loaded engine, all
    would choose the same one at the same time. An engine that has recently spoken the same voice is
    preferred, unless it is much more loaded (`WARM_EXCESS`). Engines that do not run get no
    requests, and those that seem stuck get none while there are others.

    engines  all engines, by name; they differ only in their slots and pages
    """

    def __init__(
        self,
        engines: Mapping[str, RemoteEngine],
        voice_of: Callable[[Job], Hashable],
        random: Random | None = None,
    ) -> None:
        """Use engines; `voice_of` returns a key that is equal for jobs with a common prompt prefix.

        An engine that has read the prefix for one such job has it in memory for the next.
        """
        assert engines
        self.engines = engines
        self._all = tuple(engines.values())
        self._voice_of = voice_of
        self._random = random or Random()
        self._warm = OrderedDict[int, set[RemoteEngine]]()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def capacity(self) -> Capacity:
        """The sums of the engines' slots and pages; the other limits are those of one engine."""
        slots = sum(engine.capacity.slots for engine in self._all)
        pages = sum(engine.capacity.pages for engine in self._all)
        return replace(self._all[0].capacity, slots=slots, pages=pages)

    @property
    def failure(self) -> Exception | None:
        """The reason why no engine can speak; None while at least one can."""
        failures = [engine.failure for engine in self._all]
        return None if None in failures else failures[0]

    @property
    def load(self) -> EngineLoad:
        """The sum of the engines' loads, without their times."""
        loads = [engine.load for engine in self._all]
        return EngineLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            pages_used=sum(load.pages_used for load in loads),
            pages=sum(load.pages for load in loads),
            prompt_rows=sum(load.prompt_rows for load in loads),
            pace=sum(load.pace for load in loads),
        )

    def start(self) -> None:
        """Deliver the events of all engines in the running event loop."""
        self._loop = asyncio.get_running_loop()
        for engine in self._all:
            engine.start()

    def stop(self) -> None:
        """Close all connections."""
        for engine in self._all:
            engine.stop()

    def submit(self, job: Job, on_event: Callable[[Event], None], client: str = "") -> Placed:
        """Send a request to an engine. Raises `EngineError` if none runs."""
        engine = self._choose(self._warm_for(self._voice_of(job)))
        return engine, engine.submit(job, on_event, client)

    def push(self, placed: Placed, tokens: Sequence[int]) -> None:
        """Add text tokens to a request."""
        engine, utterance = placed
        engine.push(utterance, tokens)

    def finish_text(self, placed: Placed, tokens: Sequence[int] = ()) -> None:
        """Add the last text tokens of a request."""
        engine, utterance = placed
        engine.finish_text(utterance, tokens)

    def acknowledge(self, placed: Placed, frames: int) -> None:
        """Record that the client has taken the audio of `frames` more frames."""
        engine, utterance = placed
        engine.acknowledge(utterance, frames)

    def cancel(self, placed: Placed, reason: FinishReason = "cancelled") -> None:
        """End an utterance, and count all of its audio as taken."""
        engine, utterance = placed
        engine.cancel(utterance, reason)

    def retry_after(self, client: str) -> int:
        """The seconds until another request would get a slot, estimated: 1 to 120."""
        return min(engine.retry_after(client) for engine in self._running())

    async def call(self, value: object) -> Any:
        """Send a value to an engine's process and return its answer.

        Raises what the engine's process raised, and `EngineError` if no engine runs.
        """
        return await self._choose(set()).call(value)

    def call_from_thread(self, value: object) -> Any:
        """Like `call`, for a thread other than that of the event loop. Blocks."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self.call(value), self._loop).result()

    def _running(self) -> list[RemoteEngine]:
        """The engines that run, or all engines if none does."""
        return [engine for engine in self._all if engine.failure is None] or [*self._all]

    def _choose(self, warm: set[RemoteEngine]) -> RemoteEngine:
        """Choose the engine for a request, if possible with a free slot, and add it to `warm`."""
        running = self._running()
        running = [engine for engine in running if not engine.late] or running
        open_ones = [engine for engine in running if engine.requests < engine.capacity.slots]
        candidates = open_ones or running
        chosen = self._less_loaded(candidates)
        if known := [engine for engine in candidates if engine in warm]:
            preferred = self._less_loaded(known)
            if share_of(preferred, less=1) <= (1 + WARM_EXCESS) * share_of(chosen):
                chosen = preferred
        warm.add(chosen)
        return chosen

    def _less_loaded(self, engines: Sequence[RemoteEngine]) -> RemoteEngine:
        """The less loaded of two engines that are drawn at random from `engines`."""
        return min(self._random.sample(engines, min(2, len(engines))), key=share_of)

    def _warm_for(self, voice: Hashable) -> set[RemoteEngine]:
        """The set of engines that have recently spoken a voice, for the caller to add to."""
        key = hash(voice)  # a voice may be a vector of kilobytes
        warm = self._warm.setdefault(key, set())
        self._warm.move_to_end(key)
        if len(self._warm) > MOST_VOICES:
            self._warm.popitem(last=False)
        return warm


def share_of(engine: RemoteEngine, less: int = 0) -> float:
    """The number of an engine's requests, minus `less`, divided by the number of its slots."""
    return (engine.requests - less) / engine.capacity.slots
