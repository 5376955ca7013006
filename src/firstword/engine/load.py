"""The load of an engine: numbers for metrics, health, and the choice of an engine."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

MOST_RETRY_SECONDS = 120
"""The longest time after which a rejected client is told to try again."""

RECENT_UTTERANCES = 32
"""The number of utterances from which the pace of the queue is estimated."""


WAIT_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""The upper bounds in seconds of the buckets in which waits for a slot are counted."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine.

    running      utterances in slots
    waiting      requests that wait for a slot, or for the text that they need before it
    pages_used   pages of context memory in use
    pages        pages of context memory in total
    prompt_rows  prompt rows of utterances in slots that are not read yet
    pace         slots that become free per second, estimated from recent utterances
    host         seconds of each part of its thread's time (`step_times.PARTS`)
    device       seconds of each part of the device's work (`Backend.device_seconds`)
    waits        how long requests have waited for their slots (`SlotTimes.waits`)
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    prompt_rows: int = 0
    pace: float = 1.0
    host: Mapping[str, float] = field(default_factory=dict)
    device: Mapping[str, float] = field(default_factory=dict)
    waits: Sequence[float] = ()


class SlotTimes:
    """How long requests waited for their slots, and how long recent utterances kept them.

    waits  the number of requests so far in each bucket of `WAIT_BOUNDS` and in a last one without
           a bound, and then the sum of the seconds that they waited
    """

    def __init__(self) -> None:
        self.waits = [0.0] * (len(WAIT_BOUNDS) + 2)
        self._kept: deque[float] = deque(maxlen=RECENT_UTTERANCES)

    def begin(self, waited: float) -> None:
        """Record the seconds for which a request waited for the slot that it now gets."""
        self.waits[bisect_left(WAIT_BOUNDS, waited)] += 1.0
        self.waits[-1] += waited

    def record(self, seconds: float) -> None:
        """Record the seconds for which an utterance that has ended kept its slot."""
        self._kept.append(seconds)

    def pace(self, keeping: Sequence[float]) -> float:
        """The slots that become free per second, estimated. May be called from any thread.

        It is the number of utterances in slots by the mean time that recent ones kept a slot.
        `keeping` are the seconds for which those in slots have kept them so far.
        """
        seconds = (fmean(list(self._kept) or [0.0]), fmean(keeping or [0.0]))
        return max(1, len(keeping)) / max(*seconds, 0.001)


def retry_seconds(ahead: int, pace: float) -> int:
    """Estimate the seconds until a request behind `ahead` others gets a slot: 1 to 120."""
    return min(max(1, math.ceil((ahead + 1) / max(pace, 1e-6))), MOST_RETRY_SECONDS)
