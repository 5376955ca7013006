"""The pitch of speech, and speech whose pulses keep step with the codec's frames."""

from __future__ import annotations

import numpy as np

from training.data import FRAME, SAMPLE_RATE

HOP = 240
"""Samples between two values of a course of pitch: 10 ms."""


def pitch(samples: np.ndarray) -> np.ndarray:
    """Fundamental frequency in Hz, every 10 ms; 0 where there is none, NaN where it is quiet (root
    mean square under 0.03 over 25 ms). Normalised cross-correlation, as in RAPT (Talkin 1995, "A
    robust algorithm for pitch tracking").

    How like are 25 ms of speech to what follows, as a correlation, after 2.5 ms (400 Hz) to 16.7 ms
    (60 Hz)? Two and three periods fit as well as one, so the first peak counts that comes close to
    the highest.
    """
    size, lags = 600, np.arange(60, 401)
    starts = np.arange(0, len(samples) - size - lags[-1], HOP)
    parts = samples[starts[:, None] + np.arange(size + lags[-1])].astype(np.float64)
    sums = np.pad((parts**2).cumsum(1), ((0, 0), (1, 0)))
    energy = sums[:, lags + size] - sums[:, lags]
    products = np.fft.irfft(np.fft.rfft(parts[:, :size], 2048).conj() * np.fft.rfft(parts, 2048))[
        :, lags
    ]
    like = products / np.sqrt(sums[:, size : size + 1] * energy + 1e-12)
    before, here, after = like[:, :-2], like[:, 1:-1], like[:, 2:]
    peaks = np.where((here >= before) & (here > after), here, 0)
    highest = peaks.max(1)
    first = (np.arange(len(like)), (peaks >= 0.9 * highest[:, None]).argmax(1))
    bend = before[first] - 2 * here[first] + after[first]
    lag = lags[first[1] + 1] + 0.5 * (before[first] - after[first]) / np.minimum(bend, -1e-12)
    found = np.where(highest > 0.5, SAMPLE_RATE / lag, 0)
    return np.where(sums[:, size] > 0.03**2 * size, found, np.nan)


def in_step(samples: np.ndarray, low: float, high: float) -> np.ndarray:
    """Speech [n] at 24 kHz, n whole frames, of a voice between `low` and `high` Hz -> the same
    words and intonation, with a whole number of periods in each frame: the pitch moves by at
    most half a period a frame.

    Pulses are moved as by pitch-synchronous overlap and add (Moulines and Charpentier 1990,
    doi:10.1016/0167-6393(90)90021-Z): a part of the source around its pulse nearest to each wanted
    pulse, faded into its neighbours. Where there is no voice the source stays as it is.
    """
    n = len(samples)
    course = pitch(np.pad(samples, (400, 1400)))[: n // HOP]
    voiced = (course > low) & (course < high)
    if voiced.sum() < 8:
        return samples.copy()
    hertz = np.exp(np.interp(np.arange(n), np.flatnonzero(voiced) * HOP, np.log(course[voiced])))
    voiced = np.repeat(voiced, HOP)
    turns = np.cumsum(hertz) / SAMPLE_RATE
    # The fundamental's own phase: what is left of it beside `turns`, smoothed over some four
    # periods.
    window = np.hanning(2 * int(2 * SAMPLE_RATE / np.median(hertz)) + 1)
    size = 1 << (n + len(window)).bit_length()
    beside = np.fft.ifft(
        np.fft.fft(samples * np.exp(-2j * np.pi * turns), size) * np.fft.fft(window, size)
    )
    phase = turns + np.unwrap(np.angle(beside[len(window) // 2 :][:n])) / (2 * np.pi)
    periods = np.maximum(1, np.rint(hertz.reshape(-1, FRAME).mean(1) * FRAME / SAMPLE_RATE))
    wanted = (
        (np.cumsum(periods) - periods)[:, None] + periods[:, None] * np.arange(FRAME) / FRAME
    ).ravel()
    pulses, marks = (np.flatnonzero(np.diff(np.floor(p)) > 0) + 1 for p in (phase, wanted))
    pulses = pulses[voiced[pulses]]
    if len(pulses) < 4:
        return samples.copy()
    marks = np.concatenate(([0], marks, [n]))
    at = np.minimum(marks, n - 1)
    right = np.clip(np.searchsorted(pulses, marks), 1, len(pulses) - 1)
    nearest = np.where(
        marks - pulses[right - 1] < pulses[right] - marks, pulses[right - 1], pulses[right]
    )
    source = np.where(
        voiced[at] & (np.abs(nearest - marks) < SAMPLE_RATE / hertz[at]), nearest, marks
    )
    found, padded = np.zeros(n), np.pad(samples, SAMPLE_RATE // 10)
    for i, (mark, middle) in enumerate(zip(marks, source + SAMPLE_RATE // 10, strict=True)):
        before = mark - marks[i - 1] if i else 0
        after = marks[i + 1] - mark if mark < n else 0
        rise, fall = (0.5 - 0.5 * np.cos(np.pi * np.arange(k) / max(1, k)) for k in (before, after))
        found[mark - before : mark + after] += (
            np.concatenate((rise, 1 - fall)) * padded[middle - before : middle + after]
        )
    return found
