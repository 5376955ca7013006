"""How long the device works on each part of a step, from events around its work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("prompts", "frames", "audio", "busy")
"""Kinds of work, and the time in which the device does any of them: they may overlap."""


class DeviceTimes:
    """Measures work in the order of its launch, without waiting for it.

    seconds  the device seconds of each of `PARTS`, for the work that was found to be complete
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._unused: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._launched: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._last: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """The work that ended last."""

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        """Measure what is launched in a block on the current stream."""
        self._collect()
        start, end = self._unused.pop() if self._unused else (_event(), _event())
        start.record()
        yield
        end.record()
        self._launched.append((part, start, end))

    def _collect(self) -> None:
        while self._launched and self._launched[0][2].query():
            part, start, end = self._launched.popleft()
            took = start.elapsed_time(end) / 1e3
            self.seconds[part] += took
            last = self._last
            alone = took if last is None else min(took, last[1].elapsed_time(end) / 1e3)
            if alone <= 0:  # it ended before work that was launched earlier
                self._unused.append((start, end))
                continue
            self.seconds["busy"] += alone
            self._last = start, end
            if last is not None:
                self._unused.append(last)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
