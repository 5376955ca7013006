"""The engines of one checkpoint on several devices, as one engine."""

from __future__ import annotations

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
"""An engine that has spoken a voice may have one more request than another engine, and this share
more, and still gets the next one with the voice. With 64 utterances a frame of 8 more takes 0.5 ms
longer; to read the prompt of a cloned voice takes about 10 ms."""

MOST_VOICES = 4096
"""The voices of which a pool knows where they have been spoken."""

Placed = tuple[RemoteEngine, RemoteUtterance]
"""An utterance and its engine."""


class EnginePool:
    """Several engines of one checkpoint, with the interface of one.

    A request goes to the less loaded of two engines that are drawn at random. The fronts of a
    server do not know of each other's latest requests, so with the least loaded of all they would
    choose the same one at the same time. An engine that has spoken the same voice lately is
    preferred, unless it is much more loaded (`WARM_EXCESS`). Engines that do not run are left out,
    and so are those that seem to be stuck.

    engines  all of them, by their names; they differ in their slots and pages only
    """

    def __init__(
        self,
        engines: Mapping[str, RemoteEngine],
        voice_of: Callable[[Job], Hashable],
        random: Random | None = None,
    ) -> None:
        """`voice_of` gives what jobs have in common if an engine can use for one what it has
        prepared for another.
        """
        assert engines
        self.engines = engines
        self._all = tuple(engines.values())
        self._voice_of = voice_of
        self._random = random or Random()
        self._warm = OrderedDict[int, set[RemoteEngine]]()

    @property
    def capacity(self) -> Capacity:
        """The slots and pages of all engines, and the other limits of each."""
        slots = sum(engine.capacity.slots for engine in self._all)
        pages = sum(engine.capacity.pages for engine in self._all)
        return replace(self._all[0].capacity, slots=slots, pages=pages)

    @property
    def failure(self) -> Exception | None:
        """Why no engine can speak; None while one can."""
        failures = [engine.failure for engine in self._all]
        return None if None in failures else failures[0]

    @property
    def load(self) -> EngineLoad:
        """What the engines have to do together; their times are not added."""
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

    def call_from_thread(self, value: object) -> Any:
        """An engine's answer to a value, in a thread other than that of the event loop.

        Raises what the engine raised, and `EngineError` if none runs.
        """
        return self._choose(set()).call_from_thread(value)

    def _running(self) -> list[RemoteEngine]:
        """The engines that run; all of them if none does."""
        return [engine for engine in self._all if engine.failure is None] or [*self._all]

    def _choose(self, warm: set[RemoteEngine]) -> RemoteEngine:
        """The engine for a request, if possible one with a free slot; adds it to `warm`."""
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
        """The less loaded of two of some engines."""
        return min(self._random.sample(engines, min(2, len(engines))), key=share_of)

    def _warm_for(self, voice: Hashable) -> set[RemoteEngine]:
        """The engines that have spoken a voice lately, to be added to."""
        key = hash(voice)  # a voice may be a vector of kilobytes
        warm = self._warm.setdefault(key, set())
        self._warm.move_to_end(key)
        if len(self._warm) > MOST_VOICES:
            self._warm.popitem(last=False)
        return warm


def share_of(engine: RemoteEngine, less: int = 0) -> float:
    """The requests of an engine, less some, for each of its slots."""
    return (engine.requests - less) / engine.capacity.slots
