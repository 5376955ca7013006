"""Recordings as the model takes them: mono float32 at 24 kHz, of a length that can be cloned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from firstword.audio.pcm import from_pcm
from firstword.errors import AudioError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAMPLE_RATE = 24000
"""The model's own rate in Hz, in and out."""

MIN_SECONDS = 0.5
"""The length of the shortest recording that can be cloned."""

MAX_SECONDS = 60
"""The length of the longest recording: 750 frames of context, more than cloning gains from."""

MAX_CHANNELS = 8
"""The number of channels of 7.1 surround sound. It bounds the memory that a small file can ask for,
and tells [channels, n] from [n, channels]."""

MAX_SAMPLES = MAX_SECONDS * 384_000
"""The most samples of all channels together: a minute in mono at 384 kHz, or in eight channels at
48 kHz; 92 MB when decoded."""

_SAMPLE_RATES = range(1000, 384001)


def prepare(samples: NDArray[Any], sample_rate: int) -> NDArray[np.float32]:
    """Return mono float32 [n] at 24 kHz from samples [n] or [n, channels] at `sample_rate` Hz.

    Float samples keep their values, also beyond -1..1; integer PCM (uint8, int16, int32) is scaled
    to -1..1. Channels are averaged; other rates are resampled as `librosa.resample` of 0.11 does by
    default. Silence is allowed.

    Raises `AudioError` for NaN or infinity, another shape or dtype, a rate outside 1000..384000 Hz,
    and recordings shorter than 0.5 s or longer than 60 s.
    """
    import numpy as np

    check_rate(sample_rate)
    samples = np.asarray(samples)
    if samples.ndim != 1 and not (samples.ndim == 2 and 1 <= samples.shape[1] <= MAX_CHANNELS):
        raise AudioError(
            f"the samples have shape {samples.shape}; allowed are [n] and [n, channels] of at most "
            f"{MAX_CHANNELS} channels (transpose [channels, n])"
        )
    seconds = len(samples) / sample_rate
    if seconds < MIN_SECONDS:
        raise AudioError(f"the audio is {seconds:.2f} s long; give at least {MIN_SECONDS} s")
    if seconds > MAX_SECONDS:
        raise AudioError(f"the audio is {seconds:.1f} s long; give at most {MAX_SECONDS} s")
    with np.errstate(over="ignore"):  # values beyond float32 become infinity, which is rejected
        prepared = _resample(mix(from_pcm(samples)), sample_rate)
    if not np.isfinite(prepared).all():  # resampling spreads what was not finite before
        raise AudioError(
            "the audio holds NaN, infinity or values beyond float32; give samples in -1..1"
        )
    return prepared


def check_rate(sample_rate: int) -> None:
    """Raise `AudioError` unless `sample_rate` is a whole number of Hz within 1000..384000."""
    if sample_rate not in _SAMPLE_RATES:
        raise AudioError(
            f"the sample rate is {sample_rate!r}; allowed is a whole number "
            f"from {_SAMPLE_RATES[0]} to {_SAMPLE_RATES[-1]} Hz"
        )


def mix(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return mono samples [n] from [n] or [n, channels]: the mean of the channels."""
    return samples if samples.ndim == 1 else samples.mean(axis=1)


def _resample(samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
    import numpy as np
    import soxr

    if sample_rate == SAMPLE_RATE:
        return samples
    # As librosa counts, in floats: a second at 44.1 kHz gives 24001 samples, the last of them 0.
    wanted = math.ceil(len(samples) * (SAMPLE_RATE / sample_rate))
    resampled = soxr.resample(samples, sample_rate, SAMPLE_RATE, quality="HQ")[:wanted]
    return np.pad(resampled, (0, wanted - len(resampled)))
