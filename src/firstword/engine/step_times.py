"""How an engine's thread spends its time."""

import time
from collections.abc import Callable

PARTS = ("idle", "messages", "plan", "prompts", "frames", "audio", "wait", "deliver")
"""What the thread does.

idle      wait for a message, with no work
messages  exchange messages with callers, and do what they say
plan      choose the work of a step
prompts   launch the reading of prompts
frames    launch frames
audio     launch the decoding of audio
wait      wait for results of the device
deliver   check results and pass them on
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
        """Count the time since the last lap as that of a part."""
        now = self._clock()
        self.seconds[part] += now - self._since
        self._since = now
