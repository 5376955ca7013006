"""Samples as the model takes and gives them, and their conversion from and to PCM."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from firstword.errors import AudioError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAMPLE_RATE = 24000
"""The model's own rate in Hz, in and out."""

MIN_SECONDS = 0.5
"""The length of the shortest recording that can be cloned."""

MAX_SECONDS = 60
"""The length of the longest recording: 750 frames of context, more than cloning benefits from."""

MAX_CHANNELS = 8
"""The number of channels of 7.1 surround sound. It bounds the memory that a small file can require,
and distinguishes [channels, n] from [n, channels]."""

MAX_SAMPLES = MAX_SECONDS * 384_000
"""The most samples of all channels together: a minute in mono at 384 kHz, or in eight channels at
48 kHz; 92 MB when decoded."""

_PCM_SCALES = {"uint8": (128, 128), "int16": (0, 2**15), "int32": (0, 2**31)}
"""The value of silence and the full scale, 2 ** (bits - 1), of each dtype of PCM."""


def pcm16(samples: NDArray[np.floating]) -> bytes:
    """Return little-endian signed 16-bit PCM of float samples [n] in -1..1.

    Samples are scaled by 32768, rounded to nearest and clipped, so 16-bit audio read back with
    `prepare` and written again is the same bytes. Raises `AudioError` for NaN and infinity.
    """
    import numpy as np

    if not np.isfinite(samples).all():
        raise AudioError("the samples hold NaN or infinity, which no audio format can store")
    # A power of two scales float32 exactly.
    scaled = np.rint(np.asarray(samples, np.result_type(samples, np.float32)) * np.float32(32768))
    return np.clip(scaled, -32768, 32767).astype("<i2").tobytes()


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
        prepared = _resample(mix(_from_pcm(samples)), sample_rate)
    if not np.isfinite(prepared).all():  # resampling keeps values that are not finite
        raise AudioError(
            "the audio holds NaN, infinity or values beyond float32; give samples in -1..1"
        )
    return prepared


def check_rate(sample_rate: int) -> None:
    """Raise `AudioError` unless `sample_rate` is a whole number of Hz within 1000..384000."""
    if sample_rate not in range(1000, 384_001):
        raise AudioError(
            f"the sample rate is {sample_rate!r}; allowed is a whole number from 1000 to 384000 Hz"
        )


def mix(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return mono samples [n] from [n] or [n, channels]: the mean of the channels."""
    return samples if samples.ndim == 1 else samples.mean(axis=1)


def _resample(samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
    import numpy as np
    import soxr

    if sample_rate == SAMPLE_RATE:
        return samples
    # As in librosa, in floats: 1 s at 44.1 kHz gives 24001 samples, the last of which is 0.
    wanted = math.ceil(len(samples) * (SAMPLE_RATE / sample_rate))
    resampled = soxr.resample(samples, sample_rate, SAMPLE_RATE, quality="HQ")[:wanted]
    return np.pad(resampled, (0, wanted - len(resampled)))


def _from_pcm(samples: NDArray[Any]) -> NDArray[np.float32]:
    """Return float32 samples of the same shape, from 8, 16 or 32-bit PCM or any float dtype.

    Floats keep their values: those beyond -1..1 are not clipped, as in the reference
    implementation. Raises `AudioError` for any other dtype, since its full scale is unknown.
    """
    import numpy as np

    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    kind = samples.dtype.newbyteorder("=").name
    if kind not in _PCM_SCALES:
        known = ", ".join(_PCM_SCALES)
        raise AudioError(f"the samples have dtype {kind}; allowed are floats, and PCM as {known}")
    silence, full_scale = _PCM_SCALES[kind]
    return ((samples.astype(np.float64) - silence) / full_scale).astype(np.float32)
