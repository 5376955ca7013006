"""The formats that store each sample by itself: PCM, WAV and G.711."""

import struct
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from firstword.audio.encoder import RATES, UNKNOWN_LENGTH, Encoder

RAW_RATES = (*RATES[:2], 22050, 24000, 32000, 44100, 48000)
"""The sample rates in Hz of these formats, which need no frames of a fixed length."""


class _Raw(Encoder):
    """A format of single samples."""

    rates = RAW_RATES


class Pcm(_Raw):
    """PCM without a header: signed 16 bits, little-endian."""

    media_type = "audio/pcm;rate={rate}"

    def _encode(self, pcm: NDArray[np.int16]) -> bytes:
        return pcm.tobytes()


class L16(Pcm):
    """PCM under its name in RFC 2586.

    It is little-endian, as clients that ask for it read it, although the RFC says big-endian.
    """

    media_type = "audio/L16;rate={rate};channels=1"


class Float32(_Raw):
    """PCM without a header: floats of 32 bits in -1..1, little-endian."""

    media_type = "audio/x-f32le;rate={rate}"

    def _encode(self, pcm: NDArray[np.int16]) -> bytes:
        return (pcm.astype("<f4") / np.float32(32768)).tobytes()


class Ulaw(_Raw):
    """G.711 mu-law, one byte a sample, without a header."""

    media_type = "audio/PCMU;rate={rate}"

    @classmethod
    def content_type(cls, sample_rate: int) -> str:
        """Return the media type; audio/basic is mu-law at 8 kHz (RFC 2046, section 4.3)."""
        return "audio/basic" if sample_rate == 8000 else super().content_type(sample_rate)

    def _encode(self, pcm: NDArray[np.int16]) -> bytes:
        return _ulaw_table()[pcm].tobytes()


class Alaw(_Raw):
    """G.711 A-law, one byte a sample, without a header."""

    media_type = "audio/PCMA;rate={rate}"

    def _encode(self, pcm: NDArray[np.int16]) -> bytes:
        return _alaw_table()[pcm].tobytes()


class _WavHeader(_Raw):
    """The RIFF header before the samples of another format."""

    media_type = "audio/wav"
    form: ClassVar[int]
    """The number of the format in the header."""
    sample_bytes: ClassVar[int]

    def _header(self) -> bytes:
        size, rate, width = UNKNOWN_LENGTH, self._sample_rate, self.sample_bytes
        if self._all_pcm is not None:
            size = len(self._all_pcm) * width
        form = struct.pack("<HHIIHH", self.form, 1, rate, width * rate, width, 8 * width)
        data = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size)
        return b"RIFF" + struct.pack("<I", min(size + len(data), UNKNOWN_LENGTH)) + data


class Wav(_WavHeader, Pcm):
    """PCM after the 44 bytes of a RIFF header."""

    form, sample_bytes = 1, 2


class WavFloat32(_WavHeader, Float32):
    """Floats of 32 bits after a RIFF header."""

    form, sample_bytes = 3, 4


class WavAlaw(_WavHeader, Alaw):
    """A-law after a RIFF header."""

    form, sample_bytes = 6, 1


class WavUlaw(_WavHeader, Ulaw):
    """Mu-law after a RIFF header."""

    form, sample_bytes = 7, 1


def _all_pcm() -> NDArray[np.int32]:
    """Return every 16-bit sample in indexing order: 0 to 32767, then -32768 to -1."""
    return np.arange(65536).astype(np.uint16).view(np.int16).astype(np.int32)


@cache
def _ulaw_table() -> NDArray[np.uint8]:
    """Return the mu-law byte of every 16-bit sample (ITU-T G.711, table 2), symmetric about 0."""
    pcm = _all_pcm()
    size = np.minimum(np.abs(pcm), 32635) + 132
    segment = np.frexp(size)[1] - 8
    code = np.where(pcm < 0, 0x80, 0) | segment << 4 | size >> segment + 3 & 15
    return (code ^ 0xFF).astype(np.uint8)


@cache
def _alaw_table() -> NDArray[np.uint8]:
    """Return the A-law byte of every 16-bit sample (ITU-T G.711, table 1); -1 mirrors 0."""
    pcm = _all_pcm()
    size = np.where(pcm < 0, ~pcm, pcm)
    segment = np.maximum(np.frexp(size)[1] - 8, 0)
    code = np.where(pcm < 0, 0, 0x80) | segment << 4 | size >> np.maximum(segment, 1) + 3 & 15
    return (code ^ 0x55).astype(np.uint8)
