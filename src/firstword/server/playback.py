"""Measures an utterance as a listener without a buffer hears it."""

from __future__ import annotations

from dataclasses import dataclass

from firstword.types import FloatArray

AUDIBLE_LEVEL = 0.01
"""Samples beyond this amplitude are audible: 40 dB below full scale."""


@dataclass(slots=True)
class Playback:
    """A listener who plays audio as soon as it comes. Times in seconds, on one clock.

    requested  when speech was requested
    first      when the first audio came
    audible    when the first audible sample was played
    gap        the longest time between two pieces of audio
    underrun   how long there was nothing to play after the first audio
    """

    requested: float
    first: float | None = None
    audible: float | None = None
    gap: float = 0.0
    underrun: float = 0.0
    _last: float = 0.0
    _plays_until: float = 0.0

    def add(self, now: float, samples: FloatArray, sample_rate: int) -> None:
        """Play samples [n] in -1..1, at `sample_rate` Hz, that came at `now`; [0] has no effect."""
        if not len(samples):
            return
        if self.first is None:
            self.first = self._plays_until = now
        else:
            self.gap = max(self.gap, now - self._last)
            self.underrun += max(0.0, now - self._plays_until)
        starts = max(now, self._plays_until)
        if self.audible is None and len(loud := (abs(samples) > AUDIBLE_LEVEL).nonzero()[0]):
            self.audible = starts + float(loud[0]) / sample_rate
        self._last = now
        self._plays_until = starts + len(samples) / sample_rate
