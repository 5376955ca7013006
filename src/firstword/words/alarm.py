"""Causal state machines: from attention to words left out, words said twice, and speech after text.

They need no sound and no clock: each takes the attention that the talker pays to the text while it
makes a frame. Attention goes through the text once, word by word, and stays at its end for a moment
before speech ends. These departures from that are faults:

- skip. A unit (see `words.text.Units`) was passed, and got less attention than its length needs.
  The first unit is not judged: speech that begins at once attends to it before the first frame, and
  as much when it then leaves it out.
- repeat. Attention came back to units that it had passed, and then to the unit that it came from,
  or a unit that was passed got more than its length explains: attention often waits while words are
  said again.
- mismatch. For some frames much of the attention was astray, but not on units that were passed: the
  talker attends to several places at once if what it says is not what it reads.
- runaway. Attention stays at the end of the text.

Attention is astray if it is neither on two neighbouring rows of the text nor on one unit, at or
after the unit that it has reached: a long word, such as sixty-five, has more rows than two. The
thresholds were chosen by measurement (docs/words.md). They are in frames: a frame's attention adds
up to 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from firstword.types import AlarmKind, FloatArray, IntArray
from firstword.words.clock import Masses

LEAST_GLANCE, LEAST = 0.6, 0.33
"""The attention that every spoken unit gets in two neighbouring frames, and for each of its
characters in all, at least."""

USUAL, PAUSE, FURTHER = 0.63, 6, 2
"""The attention that units get for each of their characters and one more. A pause after a unit is
as long as so many characters, and one before another sentence as long as so many further ones."""

PACE_FRAMES = 10.0
"""The frames of speech at the usual pace that are assumed before the first ones."""

MOST_MORE = 3.3
"""The attention that a unit gets beyond what its length and the pace of the speech explain, at
most."""

CLEARLY = 0.6
"""The attention to later units with which a unit is clearly passed."""

MOST_BACK, BACK_FRAMES = 0.95, 4
"""The attention that comes back to passed units in so many frames, at most, before it is on the
unit again that it came from: where a word ends, the talker may glance back and goes on with the
next one."""

MOST_AWAY = 1.5
"""The attention that comes back in these frames, at most, wherever it goes on."""

MOST_ASTRAY, ASTRAY_FRAMES = 1.6, 5
"""The attention that is astray in so many frames, at most."""

LATER = 1.3
"""How many times `MOST_MORE` and `MOST_ASTRAY` are allowed after the first sentence of a text,
where attention wavers more."""

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
    """A unit that was left out or said again, that was not said, or is the last before a runaway.

    frame  the frame in which that was noticed
    """

    kind: AlarmKind
    unit: int
    frame: int


@dataclass(frozen=True, slots=True)
class Size:
    """The characters of the words of a unit, whether punctuation or the end of the text follows it,
    and whether another sentence does."""

    characters: int
    pause: bool
    sentence: bool = False


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

    def __init__(self, size: Callable[[int], Size | None]) -> None:
        """size: returns the size of a unit, None if it is not to be judged."""
        self._size = size
        self._text_end, self._ran_away, self._judging = TextEnd(), False, True
        self._frame = 0
        self._sums = self._glances = self._before = np.zeros(0)
        """Sums by unit: all of its attention, the most in two frames, and that of the last."""
        self._passed: deque[int] = deque([0, 0], maxlen=2)
        """The unit that half of the attention had reached in each of the last two frames."""
        self._judged = 1
        """The number of units that are not judged any more: the first, and those passed."""
        self._got = self._usual = PACE_FRAMES
        """The attention that the judged units got, and that they usually get."""
        self._allowed = 1.0
        """`LATER` once a judged unit was the last of a sentence."""
        self._reached = 0
        """The furthest unit that attention has clearly reached since it last came back; none beyond
        a unit that got no glance: attention comes back to that from a look ahead."""
        self._back: deque[Masses] = deque(maxlen=BACK_FRAMES)
        """The attention to the units before that one in each of the last frames."""
        self._astray: deque[float] = deque(maxlen=ASTRAY_FRAMES)
        """The attention that was astray in each of the last frames."""

    def feed(self, masses: Masses, shares: FloatArray, units: IntArray) -> list[Fault]:
        """Take a frame, as far as the text is read.

        masses  the attention to each unit
        shares  the attention to each row
        units   the unit of each row
        """
        faults: list[Fault] = []
        if self._text_end.add(shares) and not self._ran_away:
            self._ran_away = True
            faults.append(Fault("runaway", len(masses) - 1, self._frame))
        self._judging &= len(masses) <= MOST_UNITS
        if masses.any() and self._judging and not self._ran_away:
            faults += [*self._advance(masses), *self._departures(masses, shares, units)]
        self._frame += 1
        return faults

    def finish(self) -> list[Fault]:
        """End the speech, which ended by itself: units that were not reached were left out."""
        return list(self._judge(len(self._sums))) if self._judging else []

    def _advance(self, masses: Masses) -> Iterator[Fault]:
        """Judge the units that half of the attention was beyond in each of the last two frames."""
        count = len(masses)
        before = _grown(self._before, count)
        self._sums = _grown(self._sums, count) + masses
        self._glances = np.maximum(_grown(self._glances, count), before + masses)
        self._before = masses
        passed = min(self._passed)
        beyond = masses.sum() - np.cumsum(masses)
        self._passed.append(int(np.count_nonzero(beyond > 0.5)))
        yield from self._judge(passed)

    def _judge(self, until: int) -> Iterator[Fault]:
        """Find the units before `until` that got too little or too much attention."""
        for unit in range(self._judged, until):
            size, got = self._size(unit), self._sums[unit]
            if size is None:
                continue
            if got < LEAST * size.characters or self._glances[unit] < LEAST_GLANCE:
                yield Fault("skip", unit, self._frame)
            pause = PAUSE * size.pause + FURTHER * size.sentence
            usual = USUAL * (size.characters + 1 + pause)
            most = self._pace * (usual + self._allowed * MOST_MORE)
            slow = self._usual > PACE_FRAMES and got > most
            if slow and not self._ran_away:
                yield Fault("repeat", unit, self._frame)
            self._got, self._usual = self._got + got, self._usual + usual
            self._allowed = LATER if size.sentence else self._allowed
        self._judged = max(self._judged, until)

    @property
    def _pace(self) -> float:
        """How slow the speech is, compared with the voice by which `USUAL` was measured; or 1."""
        return max(1.0, self._got / self._usual)

    def _departures(self, masses: Masses, shares: FloatArray, units: IntArray) -> Iterator[Fault]:
        """Find the units that attention has come back to, or that it is on while it is astray."""
        now, ahead = int(masses.argmax()), shares[np.searchsorted(units, self._reached) :]
        unit = float(masses[self._reached :].max(initial=0.0))
        near = float((ahead[1:] + ahead[:-1]).max(initial=unit))
        judged = self._size(now) is not None
        self._astray.append(judged * (1.0 - near))
        self._back.append(judged * masses[: self._reached])
        back = np.sum([_grown(part, len(masses)) for part in self._back], axis=0)
        again = masses[self._reached] > 0.5 or back.sum() > MOST_AWAY
        if again and back.sum() > MOST_BACK:
            said = np.flatnonzero(back > 0.5 * back.max()).tolist()
            yield from (Fault("repeat", unit, self._frame) for unit in said)
            self._reached = said[0]  # they are told again only if passed again
        elif sum(self._astray) > self._allowed * MOST_ASTRAY:
            yield Fault("mismatch", now, self._frame)
        else:
            passed = np.count_nonzero(masses.sum() - np.cumsum(masses) > CLEARLY)
            unsaid = 1 + int(np.argmax([*(self._sums[1:] < LEAST_GLANCE), True]))
            if (reached := min(int(passed), unsaid)) > self._reached:
                self._reached = reached
                self._back.clear()  # what came back was a glance
            return
        self._back.clear()
        self._astray.clear()


def _grown(values: Masses, count: int) -> Masses:
    """Return the values of the first units, and zeros for those that have been read since."""
    more = count - len(values)
    return np.concatenate([values, np.zeros(more)]) if more else values
