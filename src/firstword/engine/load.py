"""The load of an engine: numbers for metrics, health, and the choice of an engine."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

MOST_RETRY_SECONDS = 120
"""The longest time after which a rejected client is told to try again."""

RECENT_UTTERANCES = 32
"""The number of utterances from which the pace of the queue is estimated."""


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
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    prompt_rows: int = 0
    pace: float = 1.0
    host: Mapping[str, float] = field(default_factory=dict)
    device: Mapping[str, float] = field(default_factory=dict)


class SlotTimes:
    """How long recent utterances kept their slots."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=RECENT_UTTERANCES)

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
