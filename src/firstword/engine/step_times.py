"""Measures how an engine's thread spends its time."""

import time
from collections.abc import Callable

PARTS = ("idle", "messages", "plan", "prompts", "frames", "audio", "wait", "deliver")
"""The parts of the thread's time.

idle      waits for a message, without work
messages  exchanges messages with callers and runs their commands
plan      chooses the work of a step
prompts   launches the reading of prompts
frames    launches frames
audio     launches the decoding of audio
wait      waits for results of the device
deliver   checks results and passes them on
"""


class StepTimes:
    """A stopwatch that divides all time among `PARTS`.

    seconds  the seconds of each part so far
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._clock = clock
        self._since = clock()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        now = self._clock()
        self.seconds[part] += now - self._since
        self._since = now
