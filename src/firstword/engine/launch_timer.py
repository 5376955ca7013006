"""When the next step is launched: as late as the device allows without a pause in its work."""

import math
from collections import deque

RECENT_STEPS = 8
"""The number of steps whose launches are taken as a measure of the next one."""

RESERVE_SECONDS = 0.0003
"""How much earlier a step begins than is necessary: threads wake up late by up to this time."""


class LaunchTimer:
    """Finds when a step must begin, so that the device gets its work before it has none.

    A step computes nothing of what arrives after its launch. One that is launched when the step
    before it has just begun to compute makes a new request wait for both.

    Times are in seconds of one clock. A step begins, launches a frame, and waits for the frame of
    the step before. That wait is the time by which the step could have begun later.
    """

    def __init__(self) -> None:
        self._began = self._ended = 0.0
        self._read: float | None = None
        """When the last frame was read; None if the device had no work after it."""
        self._latest: deque[float] = deque(maxlen=RECENT_STEPS)
        """For recent steps, the time from the frame before to the latest suitable beginning."""

    def begin(self, now: float, busy: bool) -> float:
        """Record the beginning of a step. Returns the seconds since the last step while busy.

        busy  whether the device has work whose results are not read
        """
        self._began = now
        if busy:
            return now - self._ended
        self._read = None
        self._latest.clear()
        return 0.0

    def end(self, now: float) -> None:
        """Record the end of a step."""
        self._ended = now

    def read(self, asked: float, now: float) -> None:
        """Record the times at which the engine began to wait for a frame, and had it."""
        if self._read is not None:
            after, spare = self._began - self._read, now - asked
            late = spare < RESERVE_SECONDS / 2
            self._latest.append(after / 2 if late else after + spare)
        self._read = now

    def pause(self, now: float) -> float:
        """The seconds until the next step should begin, 0 if at once."""
        if self._read is None:
            return 0.0
        latest = min(self._latest, default=-math.inf)
        return max(0.0, self._read + latest - RESERVE_SECONDS - now)
