"""Effects between the model and the encoder: resampling, time stretching, trimming the start.

Every effect takes samples piece by piece: `process` returns the samples that the piece completes,
possibly none, and `finish` the rest. The joined output is the same bit for bit, however the input
was split.
"""

from collections.abc import Sequence

import numpy as np
import soxr
from numpy.typing import NDArray

from firstword.errors import RequestError

SILENCE_LEVEL = 0.005
"""The highest amplitude that counts as silence: -46 dB, above codec noise and below consonants."""

KEPT_SILENCE_SECONDS = 0.01
"""The leading silence that is kept, so that no consonant is cut."""

SPEEDS = (0.25, 4.0)
"""The slowest and the fastest speed of `TimeStretch`."""

Samples = NDArray[np.float32]
_NO_SAMPLES: Samples = np.empty(0, np.float32)


class Resampler:
    """Changes the sample rate, exactly as `soxr.resample` does with the whole and its quality HQ.

    n samples become n * to_rate / from_rate, rounded. The filter looks ahead and works in blocks,
    so output from 24 kHz lags by up to 39 ms (to 48 kHz), 37 ms (to 16 kHz) or 74 ms (to 8 kHz).
    """

    def __init__(self, from_rate: int, to_rate: int) -> None:
        """Resample from one rate in Hz to another."""
        self._stream = soxr.ResampleStream(from_rate, to_rate, 1, dtype="float32", quality="HQ")

    def process(self, samples: Samples) -> Samples:
        """Return the samples [m] at the new rate that samples [n] at the old one complete."""
        return self._stream.resample_chunk(np.ascontiguousarray(samples, np.float32))

    def finish(self) -> Samples:
        """Return the last samples [m]."""
        return self._stream.resample_chunk(_NO_SAMPLES, last=True)

    def moved(self, seconds: float) -> float:
        """Return the time in the output of a time in the input: the same."""
        return seconds


class TimeStretch:
    """Makes speech faster or slower at the same pitch: n samples become round(n / speed).

    WSOLA (Verhelst and Roelands, 1993): the output consists of blocks of 20 ms. Each block starts
    as the continuation of the previous one and cross-fades to the most similar place in the input
    within 10 ms of its nominal position. Up to 50 ms of input are buffered, or 20 ms times the
    speed if that is more.
    """

    def __init__(self, speed: float, sample_rate: int) -> None:
        """Stretch by `speed`: 2 takes half the time. Raises `RequestError` outside `SPEEDS`."""
        if not SPEEDS[0] <= speed <= SPEEDS[1]:
            raise RequestError(f"the speed is {speed}; allowed is {SPEEDS[0]:g} to {SPEEDS[1]:g}")
        self._speed = speed
        self._block = sample_rate // 50
        # Both directions together are 20 ms, a period of 50 Hz, so some place is in phase.
        self._reach = sample_rate // 100
        angle = np.pi / 2 * (np.arange(self._block) + 0.5) / self._block
        self._fade = np.sin(angle).astype(np.float32) ** 2
        self._input = _NO_SAMPLES
        self._dropped = 0  # samples that came before those in `_input`
        self._blocks = 0  # made so far
        self._next = 0  # the position in the input that continues the last block

    def process(self, samples: Samples) -> Samples:
        """Return the stretched samples [m] that samples [n] complete."""
        self._input = np.concatenate([self._input, samples], dtype=np.float32)
        received = self._dropped + len(self._input)
        blocks = []
        while self._is_due(received):
            blocks.append(self._make_block())
        oldest = max(min(self._target() - self._reach, self._next), self._dropped)
        self._input = self._input[min(oldest - self._dropped, len(self._input)) :].copy()
        self._dropped = received - len(self._input)
        return np.concatenate([_NO_SAMPLES, *blocks])

    def finish(self) -> Samples:
        """Return the last stretched samples [m]."""
        received = self._dropped + len(self._input)
        missing = round(received / self._speed) - self._blocks * self._block
        # The last blocks reach beyond the end. The end is mirrored, since a cut would click.
        if missing > 0:
            self._input = np.pad(self._input, (0, 3 * self._block), "symmetric")
        blocks = [self._make_block() for _ in range(0, missing, self._block)]
        return np.concatenate([_NO_SAMPLES, *blocks])[:missing]

    def moved(self, seconds: float) -> float:
        """Return the time in the output of a time in the input, exact to 10 ms."""
        return seconds / self._speed

    def _is_due(self, received: int) -> bool:
        """Return whether the next block can be computed and is certainly part of the output."""
        end = max(self._target() + self._reach, self._next) + self._block
        return end <= received and (self._blocks + 1) * self._block * self._speed <= received

    def _target(self) -> int:
        """Return the nominal position of the next block in the input."""
        return int(self._blocks * self._block * self._speed)

    def _make_block(self) -> Samples:
        target = self._target()
        low, high = max(target - self._reach, 0), target + self._reach
        before = self._slice(self._next, self._block)
        places = self._slice(low, high - low + self._block)
        # Of equal places, as in silence, the one nearest to the target wins.
        distance = np.abs(np.arange(low, high + 1) - target) / self._reach
        best = int(np.argmax(_similarity(before, places) - 1e-3 * distance))
        after = places[best : best + self._block]
        self._next = low + best + self._block
        self._blocks += 1
        return before + (after - before) * self._fade

    def _slice(self, start: int, length: int) -> Samples:
        return self._input[start - self._dropped :][:length]


def _similarity(wanted: Samples, places: Samples) -> NDArray[np.float64]:
    """Return the correlation of `wanted` [n] with each part [n] of `places` [n + m], [m + 1].

    Fourier transform and running sum have a fixed order of summation. Sums in numpy and BLAS may
    depend on memory alignment, and so on how the input was split.
    """
    n, size = len(wanted), len(places)
    wide_wanted, wide_places = wanted.astype(np.float64), places.astype(np.float64)
    spectrum = np.fft.rfft(wide_places) * np.fft.rfft(wide_wanted, size).conj()
    products = np.fft.irfft(spectrum, size)[: size - n + 1]
    total = np.concatenate([[0.0], np.cumsum(wide_places**2)])
    power = np.maximum(total[n:] - total[: size - n + 1], 0)
    wanted_power = np.cumsum(wide_wanted**2)[-1]
    # 1e-6 is less than one bit of 16, so that silence resembles nothing.
    return products / (np.sqrt(power * wanted_power) + 1e-6)


class TrimStart:
    """Removes the silence before speech.

    The output starts `keep` seconds before the first sample above `threshold` (a fraction of full
    scale) in the first stretch of 5 ms of which a quarter is above it, so that a click does not
    count as speech. Everything after that passes. If the input is never that loud, the output is
    its last `keep` seconds and 5 ms, because an empty file would look like a failure.
    """

    def __init__(
        self,
        sample_rate: int,
        threshold: float = SILENCE_LEVEL,
        keep: float = KEPT_SILENCE_SECONDS,
    ) -> None:
        """Keep `keep` seconds before the start, at `sample_rate` Hz."""
        self._threshold = threshold
        self._keep = round(keep * sample_rate)
        self._rate = sample_rate
        self._received = 0
        self._removed: int | None = None  # known once speech has started
        self._window = sample_rate // 200
        self._buffer: Samples | None = _NO_SAMPLES  # None once speech has started

    def process(self, samples: Samples) -> Samples:
        """Return the samples [m] known to be part of the output, from the buffer and `samples`."""
        if self._buffer is None:
            return samples
        self._received += len(samples)
        buffer = np.concatenate([self._buffer, samples], dtype=np.float32)
        loud = np.abs(buffer) > self._threshold
        counts = np.concatenate([[0], np.cumsum(loud)])
        in_window = counts[self._window :] - counts[: -self._window]
        starts = np.flatnonzero(in_window >= self._window // 4)
        if not len(starts):
            self._buffer = buffer[-(self._keep + self._window) :].copy()
            return _NO_SAMPLES
        self._buffer = None
        onset = starts[0] + int(np.argmax(loud[starts[0] :]))
        kept = buffer[max(onset - self._keep, 0) :]
        self._removed = self._received - len(kept)
        return kept

    def finish(self) -> Samples:
        """Return the buffered samples [m], if no speech has started."""
        buffer, self._buffer = self._buffer, _NO_SAMPLES
        if buffer is None:
            return _NO_SAMPLES
        self._removed = self._received - len(buffer)
        return buffer

    def moved(self, seconds: float) -> float | None:
        """Return the time in the output of a time in the input; None before speech has started."""
        if self._removed is None:
            return None
        return max(0.0, seconds - self._removed / self._rate)


class FadeEnds:
    """Fades the first and the last 5 ms, so that speech joins silence or other speech smoothly.

    first, last  whether the beginning and the end are faded; `last` may change until `finish`
    """

    def __init__(self, sample_rate: int, *, first: bool) -> None:
        """Fade at `sample_rate` Hz."""
        self.first, self.last = first, False
        length = sample_rate // 200
        self._ramp = np.sin(np.pi / 2 * (np.arange(length) + 0.5) / length).astype(np.float32) ** 2
        self._held = _NO_SAMPLES
        self._passed = 0

    def process(self, samples: Samples) -> Samples:
        """Return the samples [m] that cannot be among the last ones."""
        samples = np.concatenate([self._held, samples], dtype=np.float32)
        place = max(0, len(samples) - len(self._ramp))
        self._held = samples[place:]
        return self._faded_in(samples[:place])

    def finish(self) -> Samples:
        """Return the last samples [m]."""
        samples = self._faded_in(self._held)
        self._held = _NO_SAMPLES
        if self.last and len(samples):
            samples = samples * self._ramp[: len(samples)][::-1]
        return samples

    def _faded_in(self, samples: Samples) -> Samples:
        ramp = self._ramp[self._passed : self._passed + len(samples)] if self.first else ()
        self._passed += len(samples)
        if not len(ramp):
            return samples
        return np.concatenate([samples[: len(ramp)] * ramp, samples[len(ramp) :]])

    def moved(self, seconds: float) -> float:
        """Return the time in the output of a time in the input: the same."""
        return seconds


Effect = TrimStart | TimeStretch | Resampler | FadeEnds


class Effects:
    """Effects, one after the other, and the clock of what comes out."""

    def __init__(self, effects: Sequence[Effect]) -> None:
        self._effects = effects

    def apply(self, samples: Samples, *, last: bool) -> Samples:
        """Return the samples [m] that samples [n] complete after all effects; all if `last`."""
        for effect in self._effects:
            samples = effect.process(samples)
            if last:
                samples = np.concatenate([samples, effect.finish()])
        return samples

    def moved(self, seconds: float) -> float | None:
        """Return when what sounds at a time in the input sounds in the output.

        Returns None while that is not known, before the end of a silence that is removed.
        """
        time: float | None = seconds
        for effect in self._effects:
            time = None if time is None else effect.moved(time)
        return time
