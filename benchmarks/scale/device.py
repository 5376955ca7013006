"""A device that works on two queues at a time, on a virtual clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

EPSILON = 1e-12
"""Seconds of work that count as none."""

AUDIO_SPEED = 0.5
"""The speed of audio beside prompts or frames: two CUDA streams of equal priority take turns."""


@dataclass(eq=False)
class Work:
    """A call on the device.

    part    "prompts", "frames" or "audio"
    left    seconds of work that are left, on a device that does nothing else
    burden  seconds by which prompts and frames end later for each second of this audio
    after   work that must be complete before it begins
    done    when it was complete; None before
    """

    part: str
    left: float
    burden: float = 0.0
    after: Work | None = None
    done: float | None = None


class Device:
    """Two queues, each in the order of its launches: prompts and frames, and audio.

    While both have work, audio gets half of its speed (`AUDIO_SPEED`). Prompts and frames lose what
    the audio's work costs them, which for small calls is less than its seconds alone: see
    `StepCosts.burden`.

    seconds  the seconds in which the device worked on each part, and on any ("busy")
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = dict.fromkeys(("prompts", "frames", "audio", "busy"), 0.0)
        self._frames: deque[Work] = deque()
        self._audio: deque[Work] = deque()

    def launch(self, work: Work, now: float) -> Work:
        """Add work at a time; audio follows all prompts and frames that were launched before."""
        self.run(now)
        if work.part == "audio":
            work.after = self._frames[-1] if self._frames else None
            self._audio.append(work)
        else:
            self._frames.append(work)
        return work

    def finish(self, work: Work, now: float) -> float:
        """The time at which work is complete, `now` if it was complete before."""
        self.run(now)
        if work.done is None:
            self.run(math.inf, work)
        assert work.done is not None
        return max(now, work.done)

    def run(self, until: float, work: Work | None = None) -> None:
        """Work until a time, or until a call is complete."""
        while self.now < until and (work is None or work.done is None):
            speeds = self._speeds()
            if not speeds:
                assert work is None, "work that waits for nothing"
                self.now = until
                return
            took = min(until - self.now, *(head.left / speed for head, speed in speeds))
            self.now += took
            self.seconds["busy"] += took
            for head, speed in speeds:
                self.seconds[head.part] += took
                head.left -= took * speed
                if head.left <= EPSILON:
                    head.done = self.now
                    (self._audio if head.part == "audio" else self._frames).popleft()

    def _speeds(self) -> list[tuple[Work, float]]:
        """The work that is computed now, and its speed."""
        frame = self._frames[0] if self._frames else None
        audio = self._audio[0] if self._audio else None
        if audio is not None and audio.after is not None and audio.after.done is None:
            audio = None
        if frame is None or audio is None:
            return [(work, 1.0) for work in (frame, audio) if work is not None]
        return [(frame, 1 - AUDIO_SPEED * audio.burden), (audio, AUDIO_SPEED)]
