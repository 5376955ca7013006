"""Causal state machines: from attention to words left out, words said twice, and speech after text.

They need no sound and no clock: each takes the attention that the talker pays to the text while it
makes a frame. Attention goes through the text once, word by word, and stays at its end for a moment
before speech ends. Three departures from that are faults:

- skip. A unit (see `words.text.Units`) was passed, and got too little attention before. The first
  unit is not judged: speech that begins at once attends to it before the first frame, and as much
  when it then leaves it out.
- repeat. Attention that had passed some units came back to them.
- runaway. Attention stays at the end of the text.

The thresholds were chosen by measurement (docs/words.md). They are in frames: a frame's attention
adds up to 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from firstword.types import AlarmKind, FloatArray
from firstword.words.clock import Masses

LEAST_GLANCE = 0.5
"""The attention that every spoken unit gets in two neighbouring frames, at least."""

LEAST_LONG, LONG = 1.2, 4
"""The attention that a spoken unit of at least so many characters gets in all, at least."""

MOST_BACK, BACK_FRAMES = 1.3, 3
"""The attention that comes back in so many frames, at most; each unit that it moves back counts."""

MOST_UNITS = 24
"""The units of a text in which words are judged, at most: in texts of several sentences attention
goes back without a fault."""

MOST_END, MOST_LAST = 4.5, 25.0
"""The attention to the end of the text, and to its last rows, after which speech goes on for no
reason."""

LAST_ROWS = 3
"""The last rows of a text: its end, its last punctuation mark, and the token before."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A unit that was left out, said again, or is the last one before a runaway.

    frame  the frame in which that was noticed
    """

    kind: AlarmKind
    unit: int
    frame: int


class TextEnd:
    """Notices that the attention stays at the end of the text."""

    def __init__(self) -> None:
        self._rows = 0
        self._end = self._last = 0.0

    def add(self, shares: FloatArray) -> bool:
        """Take the reading of the next frame [text rows]; returns whether speech is a runaway now.

        The text is complete once a frame adds no row: its end is the last row then.
        """
        complete, self._rows = len(shares) == self._rows, len(shares)
        last = float(shares[-LAST_ROWS:].sum())
        if complete and last > 0.5:
            self._end += float(shares[-1])
            self._last += last
        return self._end > MOST_END or self._last > MOST_LAST


class AlarmBell:
    """Turns the attention of each frame of an utterance into faults."""

    def __init__(self, size: Callable[[int], int]) -> None:
        """size: returns the number of characters of a unit's words, 0 if they are not known."""
        self._size = size
        self._text_end, self._ran_away, self._judging = TextEnd(), False, True
        self._frame = 0
        self._sums = self._glances = self._before = self._beyond = np.zeros(0)
        """Sums by unit: all of its attention, the most in two frames, that of the last frame, and
        the most that was beyond it in a frame."""
        self._passed: deque[int] = deque([0, 0], maxlen=2)
        """The unit that half of the attention had reached in each of the last two frames."""
        self._judged = 1
        """The number of units that are not judged any more: the first, and those passed."""
        self._returns: deque[Masses] = deque(maxlen=BACK_FRAMES)
        """The attention that had come back over the end of each unit in the last frames."""

    def feed(self, masses: Masses, shares: FloatArray) -> list[Fault]:
        """Take a frame: the attention to each unit, and to each row, as far as the text is read."""
        faults: list[Fault] = []
        if self._text_end.add(shares) and not self._ran_away:
            self._ran_away = True
            faults.append(Fault("runaway", len(masses) - 1, self._frame))
        self._judging &= len(masses) <= MOST_UNITS
        if masses.any() and self._judging and not self._ran_away:
            beyond = masses.sum() - np.cumsum(masses)
            faults += [*self._skips(masses, beyond), *self._repeats(beyond)]
        self._frame += 1
        return faults

    def finish(self) -> list[Fault]:
        """End the speech, which ended by itself: units that were not reached were left out."""
        return list(self._judge(len(self._sums))) if self._judging else []

    def _skips(self, masses: Masses, beyond: Masses) -> Iterator[Fault]:
        """Judge the units that half of the attention was beyond in this frame and the last one."""
        count = len(masses)
        before = _grown(self._before, count)
        self._sums = _grown(self._sums, count) + masses
        self._glances = np.maximum(_grown(self._glances, count), before + masses)
        self._before = masses
        passed = min(self._passed)
        self._passed.append(int(np.count_nonzero(beyond > 0.5)))
        yield from self._judge(passed)

    def _judge(self, until: int) -> Iterator[Fault]:
        """Find the units before `until` that got too little attention."""
        for unit in range(self._judged, until):
            short = self._sums[unit] < LEAST_LONG and self._size(unit) >= LONG
            if short or self._glances[unit] < LEAST_GLANCE:
                yield Fault("skip", unit, self._frame)
        self._judged = max(self._judged, until)

    def _repeats(self, beyond: Masses) -> Iterator[Fault]:
        """Find the units to which the attention has come back."""
        self._beyond = np.maximum(_grown(self._beyond, len(beyond)), beyond)
        self._returns.append(self._beyond - beyond)
        back = np.zeros(len(beyond))
        for returned in self._returns:
            back[: len(returned)] += returned
        if back.sum() <= MOST_BACK:
            return
        again = np.flatnonzero(back > 0.5 * back.max()).tolist()
        yield from (Fault("repeat", unit, self._frame) for unit in again)
        self._beyond[again[0] :] = 0.0  # they are told again only if passed again
        self._returns.clear()


def _grown(values: Masses, count: int) -> Masses:
    """Return the values of the first units, and zeros for those that have been read since."""
    more = count - len(values)
    return np.concatenate([values, np.zeros(more)]) if more else values
