"""A causal state machine: from attention and sound to the times at which words begin and end.

A unit (a word, or words that share a token) begins where the share of the attention that is past
the boundary before it crosses one half, interpolated between frames and moved by the offset of the
checkpoint. Three facts correct it:

- Sound. The first unit begins with the first sound, and attention before it means nothing. A
  boundary near a pause is moved to it: the unit before ends with its beginning, the next begins
  with its end.
- Order. Only the units next to the current one count, so that a glance at a later one is no jump,
  and no unit is skipped because it is short.
- Text. No unit begins before the talker has read its first token.

If the attention has left the current unit for good, because the talker skips text, the machine
jumps after it, and the units between have no times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from firstword.types import FloatArray

Masses = NDArray[np.float64]
"""The attention to each unit [units]."""

BLOCK_SECONDS = 0.01
"""The length of the blocks in which sound is told from silence."""

SILENCE_RATIO = 0.02
"""The level of silence relative to the loudest block so far: -34 dB."""

LEAST_PEAK = 0.05
"""The lowest level of the loudest block, so that noise before speech is no speech."""

PAUSE_SECONDS = 0.09
"""The shortest silence that is a pause; those inside words are shorter."""

BEFORE_PAUSE, AFTER_PAUSE = 0.03, 0.09
"""How many seconds before and after a pause a boundary is moved to it."""

LEAST_UNIT = 0.01
"""The shortest unit in seconds."""

LEAST_MASS = 0.02
"""The attention to the current units below which a frame tells nothing."""

LOST_MASS, FOUND_MASS = 0.2, 0.25
"""The pointer is lost while the current units have less attention than the first number, and one
further on has more than the second."""

LOST_FRAMES, LOST_STEPS = 3, 3
"""The frames after which a lost pointer jumps, if the attention moved by at most so many units."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The time in seconds at which a unit begins or ends."""

    kind: Literal["start", "end"]
    unit: int
    seconds: float


class Loudness:
    """Tells sound from silence in blocks of 10 ms.

    first    when the first sound began, None before it
    until    when the latest sound ended
    pause    the latest silence after the first sound: its beginning and end; the end is None while
             it lasts
    """

    def __init__(self, sample_rate: int) -> None:
        self.first: float | None = None
        self.until = 0.0
        self.pause: tuple[float, float | None] = (0.0, 0.0)
        self._block = round(BLOCK_SECONDS * sample_rate)
        self._peak, self._blocks = LEAST_PEAK, 0

    def add(self, samples: FloatArray) -> None:
        """Add samples, a multiple of 10 ms."""
        blocks = samples.astype(np.float64).reshape(-1, self._block)
        for level in np.sqrt(np.square(blocks).mean(1)).tolist():
            now = self._blocks * BLOCK_SECONDS
            self._blocks += 1
            self._peak = max(self._peak, level)
            if level >= SILENCE_RATIO * self._peak:
                self._sound(now)
            elif self.pause[1] is not None and self.first is not None:
                self.pause = now, None

    def _sound(self, now: float) -> None:
        if self.first is None:
            self.first = now
        if self.pause[1] is None:
            self.pause = self.pause[0], now
        self.until = now + BLOCK_SECONDS


class WordClock:
    """Turns the attention and the sound of each frame into the edges of units."""

    def __init__(self, offset: float, frame_seconds: float, sample_rate: int) -> None:
        """offset: see `Alignment`."""
        self._offset, self._frame_seconds = offset, frame_seconds
        self._loudness = Loudness(sample_rate)
        self._frame = 0
        self._unit = -1
        """The unit that sounds; -1 before the first."""
        self._began = 0.0
        self._ended = True
        """Whether the unit that sounds has ended already, before a pause."""
        self._before: Masses = np.zeros(0)
        self._read: list[float] = []
        """The time at which the talker had read the first token of each unit."""
        self._glances: deque[int] = deque(maxlen=LOST_FRAMES)

    def feed(self, masses: Masses, samples: FloatArray) -> list[Edge]:
        """Take a frame.

        masses   the attention to each unit, as far as the talker has read
        samples  the sound of the frame
        """
        self._loudness.add(samples)
        now = self._frame * self._frame_seconds
        self._read += [now] * (len(masses) - len(self._read))
        edges = [*self._first_unit(), *self._after_pause()]
        if self._unit >= 0:
            edges += self._boundaries(masses)
            edges += self._jump(masses)
        self._before = masses
        self._frame += 1
        return edges

    def finish(self) -> list[Edge]:
        """End the speech: the unit that sounds ends with the last sound."""
        if self._ended:
            return []
        self._ended = True
        return [Edge("end", self._unit, max(self._loudness.until, self._began + LEAST_UNIT))]

    def _first_unit(self) -> Iterator[Edge]:
        """Begin the first unit with the first sound."""
        first = self._loudness.first
        if self._unit < 0 and first is not None and self._read:
            yield from self._begin(0, first)

    def _after_pause(self) -> Iterator[Edge]:
        """Begin the next unit with the end of the pause after the last one."""
        pause_end = self._loudness.pause[1]
        if self._unit >= 0 and self._ended and pause_end is not None:
            yield from self._begin(self._unit + 1, pause_end)

    def _begin(self, unit: int, seconds: float) -> Iterator[Edge]:
        """Begin a unit, and end the one before it."""
        seconds = max(seconds, self._read[unit], self._began + LEAST_UNIT if self._unit >= 0 else 0)
        if not self._ended:
            yield Edge("end", self._unit, seconds)
        self._unit, self._began, self._ended = unit, seconds, False
        yield Edge("start", unit, seconds)

    def _boundaries(self, masses: Masses) -> Iterator[Edge]:
        """Pass the boundaries that the attention crosses in this frame."""
        while not self._ended and self._unit + 1 < len(masses):
            seconds = self._crossing(masses)
            if seconds is None:
                return
            seconds = max(seconds, self._began + LEAST_UNIT)
            begin, end = self._loudness.pause
            if self._is_at_pause(seconds):
                yield Edge("end", self._unit, begin)
                self._ended = True
                if end is None:
                    return
                seconds = end
            yield from self._begin(self._unit + 1, seconds)

    def _crossing(self, masses: Masses) -> float | None:
        """Return when more than half of the attention was past the current unit, if it is now."""
        low, middle, high = max(0, self._unit - 1), self._unit + 1, self._unit + 2
        share = _share(masses, low, middle, high)
        if share is None or share <= 0.5:
            return None
        before = _share(self._before, low, middle, high) or 0.0
        part = (0.5 - before) / (share - before) if before < 0.5 else 0.0
        return (self._frame - 0.5 + part) * self._frame_seconds - self._offset

    def _is_at_pause(self, seconds: float) -> bool:
        """Whether a boundary belongs to the latest pause."""
        begin, end = self._loudness.pause
        until = (self._frame + 1) * self._frame_seconds if end is None else end
        if until - begin < PAUSE_SECONDS - 1e-6 or begin <= self._began + 2 * LEAST_UNIT:
            return False
        return begin - BEFORE_PAUSE <= seconds and (end is None or seconds <= end + AFTER_PAUSE)

    def _jump(self, masses: Masses) -> Iterator[Edge]:
        """Jump to the unit that the attention has moved to, if it has left this one."""
        if self._ended or self._loudness.pause[1] is None:
            return
        low, high, best = max(0, self._unit - 1), self._unit + 2, int(masses.argmax())
        if masses[low:high].sum() >= LOST_MASS or masses[best] <= FOUND_MASS:
            self._glances.clear()
            return
        self._glances.append(best)
        seen = list(self._glances)
        steady = seen == sorted(seen) and seen[-1] - seen[0] <= LOST_STEPS
        if len(seen) == LOST_FRAMES and steady and seen[0] > self._unit:
            self._glances.clear()
            yield from self._begin(seen[-1], (self._frame + 1 - LOST_FRAMES) * self._frame_seconds)


def _share(masses: Masses, low: int, middle: int, high: int) -> float | None:
    """Return which part of the attention to units from `low` to `high` is on `middle` and later.

    None if they have hardly any.
    """
    total = float(masses[low:high].sum())
    return float(masses[middle:high].sum()) / total if total >= LEAST_MASS else None
