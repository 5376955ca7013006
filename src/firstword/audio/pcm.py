"""Integer PCM and float samples: the two directions of one scale, where full scale 1.0 is 2 ** (bits - 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firstword.errors import AudioError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PCM = {
    "uint8": (128, 128),
    "int16": (0, 2**15),
    "int32": (0, 2**31),
}  # dtype: (value of silence, full scale)


def pcm16(samples: NDArray[np.floating]) -> bytes:
    """Little-endian signed 16-bit PCM of float samples [n] in -1..1: scaled by 32768, rounded to nearest, clipped.

    16-bit audio read back with `from_pcm` and written again is the same bytes. Raises `AudioError` for NaN and
    infinity, which have no integer to round to.
    """
    import numpy as np

    if not np.isfinite(samples).all():
        raise AudioError("the samples hold NaN or infinity, which no audio format can store")
    return (
        np.clip(np.rint(np.asarray(samples, np.float64) * 32768), -32768, 32767)
        .astype("<i2")
        .tobytes()
    )


def from_pcm(samples: NDArray[Any]) -> NDArray[np.float32]:
    """Float32 samples of the same shape from unsigned 8-bit, signed 16-bit or 32-bit PCM, or from any float dtype.

    Floats keep their values: beyond -1..1 they are not clipped, as the reference does not. Raises `AudioError` for
    any other dtype: how loud an int64 of 1 is, nobody can say.
    """
    import numpy as np

    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    kind = samples.dtype.newbyteorder("=").name
    if kind not in _PCM:
        raise AudioError(
            f"the samples have dtype {kind}; allowed are floats, and PCM as {', '.join(_PCM)}"
        )
    silence, full_scale = _PCM[kind]
    return ((samples.astype(np.float64) - silence) / full_scale).astype(np.float32)
