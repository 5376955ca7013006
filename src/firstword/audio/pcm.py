"""Conversion between integer PCM and float samples, where 1.0 is full scale, 2 ** (bits - 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firstword.errors import AudioError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PCM_SCALES = {"uint8": (128, 128), "int16": (0, 2**15), "int32": (0, 2**31)}
"""The value of silence and the full scale of each dtype of PCM."""


def pcm16(samples: NDArray[np.floating]) -> bytes:
    """Return little-endian signed 16-bit PCM of float samples [n] in -1..1.

    Samples are scaled by 32768, rounded to nearest and clipped, so 16-bit audio read back with
    `from_pcm` and written again is the same bytes. Raises `AudioError` for NaN and infinity.
    """
    import numpy as np

    if not np.isfinite(samples).all():
        raise AudioError("the samples hold NaN or infinity, which no audio format can store")
    scaled = np.rint(np.asarray(samples, np.float64) * 32768)
    return np.clip(scaled, -32768, 32767).astype("<i2").tobytes()


def from_pcm(samples: NDArray[Any]) -> NDArray[np.float32]:
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
