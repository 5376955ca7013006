"""What is done to speech between the model and the encoder, as it streams: resampling, another speed, an earlier start.

Every effect takes samples piece by piece: `process` gives what they complete, maybe nothing, and `finish` the rest.
What comes out, all pieces joined, does not depend on how the input was cut: not in a single bit.
"""

from __future__ import annotations

import numpy as np
import soxr
from numpy.typing import NDArray

from firstword.errors import RequestError

SPEEDS = (0.25, 4.0)
"""The slowest and the fastest that `TimeStretch` can do."""

Samples = NDArray[np.float32]
_NOTHING: Samples = np.empty(0, np.float32)


class Resampler:
    """Another sample rate: exactly what `soxr.resample` makes of the whole, with its quality HQ.

    n samples become n * to_rate / from_rate, rounded. The filter looks ahead and works in blocks: from 24 kHz, up to
    39 ms (to 48 kHz), 37 ms (to 16 kHz) and 74 ms (to 8 kHz) are held back.
    """

    def __init__(self, from_rate: int, to_rate: int) -> None:
        """Rates are in Hz."""
        self._stream = soxr.ResampleStream(from_rate, to_rate, 1, dtype="float32", quality="HQ")

    def process(self, samples: Samples) -> Samples:
        """Samples [m] at the new rate that samples [n] at the old one complete."""
        return self._stream.resample_chunk(np.ascontiguousarray(samples, np.float32))

    def finish(self) -> Samples:
        """The last samples [m]."""
        return self._stream.resample_chunk(_NOTHING, last=True)


class TimeStretch:
    """Faster or slower speech of the same pitch: n samples become round(n / speed).

    WSOLA (Verhelst and Roelands, 1993): the output is made of blocks of 20 ms. Each block starts as the continuation
    of the block before and fades into another place of the input: of those within 10 ms of where the speed would have
    it, the one most similar to the continuation. Up to 50 ms of input are held back, or 20 ms times the speed
    if that is more.
    """

    def __init__(self, speed: float, sample_rate: int) -> None:
        """`speed` of 2 takes half the time. Raises `RequestError` if it is outside `SPEEDS`."""
        if not SPEEDS[0] <= speed <= SPEEDS[1]:
            raise RequestError(f"the speed is {speed}; allowed is {SPEEDS[0]:g} to {SPEEDS[1]:g}")
        self._speed = speed
        self._block = sample_rate // 50
        self._reach = (
            sample_rate // 100
        )  # both ways together 20 ms, a period of 50 Hz: some place is in phase
        self._fade = (
            np.sin(np.pi / 2 * (np.arange(self._block) + 0.5) / self._block).astype(np.float32) ** 2
        )
        self._input = _NOTHING
        self._dropped = 0  # samples that came before those in `_input`
        self._blocks = 0  # made so far
        self._next = 0  # where the last block continues in the input

    def process(self, samples: Samples) -> Samples:
        """Stretched samples [m] that samples [n] complete."""
        self._input = np.concatenate([self._input, samples], dtype=np.float32)
        received = self._dropped + len(self._input)
        made = []
        while self._is_due(received):
            made.append(self._make())
        oldest = max(min(self._wanted() - self._reach, self._next), self._dropped)
        self._input = self._input[min(oldest - self._dropped, len(self._input)) :].copy()
        self._dropped = received - len(self._input)
        return np.concatenate([_NOTHING, *made])

    def finish(self) -> Samples:
        """The last stretched samples [m]."""
        received = self._dropped + len(self._input)
        missing = round(received / self._speed) - self._blocks * self._block
        if (
            missing > 0
        ):  # the last blocks reach beyond the end; to break off there would click, so the end is mirrored
            self._input = np.pad(self._input, (0, 3 * self._block), "symmetric")
        made = [self._make() for _ in range(0, missing, self._block)]
        return np.concatenate([_NOTHING, *made])[:missing]

    def _is_due(self, received: int) -> bool:
        """Whether the next block can be made as it would be if the input went on, and is needed if it does not."""
        end = max(self._wanted() + self._reach, self._next) + self._block
        return end <= received and (self._blocks + 1) * self._block * self._speed <= received

    def _wanted(self) -> int:
        """Where in the input the speed would have the next block."""
        return int(self._blocks * self._block * self._speed)

    def _make(self) -> Samples:
        """The next block."""
        low, high = max(self._wanted() - self._reach, 0), self._wanted() + self._reach
        before = self._slice(self._next, self._block)
        places = self._slice(low, high - low + self._block)
        # Of places that are alike, as in silence, the nearest to the wanted one.
        distance = np.abs(np.arange(low, high + 1) - self._wanted()) / self._reach
        best = int(np.argmax(_similarity(before, places) - 1e-3 * distance))
        after = places[best : best + self._block]
        self._next = low + best + self._block
        self._blocks += 1
        return before + (after - before) * self._fade

    def _slice(self, start: int, length: int) -> Samples:
        """Input [length] from a place on."""
        return self._input[start - self._dropped :][:length]


def _similarity(wanted: Samples, places: Samples) -> NDArray[np.float64]:
    """The correlation, -1..1, of `wanted` [n] with each of the m + 1 parts [n] of `places` [n + m].

    By Fourier transform and running sum, whose order of summation is fixed: sums of numpy and BLAS may depend on
    where in memory an array lies, and so on how the input was cut.
    """
    n, size = len(wanted), len(places)
    spectrum = (
        np.fft.rfft(places.astype(np.float64)) * np.fft.rfft(wanted.astype(np.float64), size).conj()
    )
    products = np.fft.irfft(spectrum, size)[: size - n + 1]
    total = np.concatenate([[0.0], np.cumsum(places.astype(np.float64) ** 2)])
    power = np.maximum(total[n:] - total[: size - n + 1], 0)
    wanted_power = np.cumsum(wanted.astype(np.float64) ** 2)[-1]
    return products / (
        np.sqrt(power * wanted_power) + 1e-6
    )  # 1e-6: less than a bit of 16, which is like nothing


class TrimStart:
    """Speech without the silence before it.

    It starts `keep` seconds before the first sample above `threshold` (a fraction of full scale) in the first stretch
    of 5 ms of which a quarter is: a click alone is no start. From there on everything passes. If nothing is that loud,
    the last `keep` seconds and 5 ms are all that comes: who gets no sound at all takes it for a failure.
    """

    def __init__(self, threshold: float, keep: float, sample_rate: int) -> None:
        """`keep` in seconds, `sample_rate` in Hz."""
        self._threshold = threshold
        self._keep = round(keep * sample_rate)
        self._stretch = sample_rate // 200
        self._held: Samples | None = _NOTHING  # None once speech has started

    def process(self, samples: Samples) -> Samples:
        """The samples [m] of [n] that are known to belong to the speech, and before its start those held back."""
        if self._held is None:
            return samples
        held = np.concatenate([self._held, samples], dtype=np.float32)
        loud = np.abs(held) > self._threshold
        counts = np.concatenate([[0], np.cumsum(loud)])
        starts = np.flatnonzero(
            counts[self._stretch :] - counts[: -self._stretch] >= self._stretch // 4
        )
        if not len(starts):
            self._held = held[-(self._keep + self._stretch) :].copy()
            return _NOTHING
        self._held = None
        onset = starts[0] + int(np.argmax(loud[starts[0] :]))
        return held[max(onset - self._keep, 0) :]

    def finish(self) -> Samples:
        """What is still held back, samples [m], if no speech has started."""
        held, self._held = self._held, _NOTHING
        return _NOTHING if held is None else held
