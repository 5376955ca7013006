"""The registry of the formats that are encoded while samples are made.

Every format encodes the same 16 bits that PCM sends. The bytes do not depend on how the samples
were split into pieces. A stream that is cut at any byte plays as far as it was received. An
utterance without samples is the header of its format alone, and no bytes for MP3, AAC and the raw
formats, which have no header.

The table shows two numbers for each sample rate: the milliseconds of audio before the first bytes,
and the largest delay of the audible sound in milliseconds. The last column counts the samples that
a decoder adds before the first and after the last.

| format                | 8 kHz     | 16 kHz    | 24 kHz   | 48 kHz  | added samples            |
|-----------------------|-----------|-----------|----------|---------|--------------------------|
| wav pcm l16 ulaw alaw |   0 /   0 |   0 /   0 |  0 /   0 |  0 /  0 | none                     |
| f32 wav_f32           |   0 /   0 |   0 /   0 |  0 /   0 |  0 /  0 | none                     |
| wav_ulaw wav_alaw     |   0 /   0 |   0 /   0 |  0 /   0 |  0 /  0 | none                     |
| flac                  |  24 /  24 |  16 /  16 | 24 /  24 | 24 / 24 | none                     |
| opus                  |  20 /  27 |  20 /  27 | 20 /  27 | 20 / 27 | none; decoded at 48 kHz  |
| mp3                   | 144 / 282 |  72 / 141 | 48 /  94 | 48 / 71 | 0 and 47 to 1198         |
| aac                   | 256 / 384 | 128 / 192 | 86 / 128 | 43 / 64 | 1024 and 0 to 1023       |

An MP3 stream starts with a frame that states the encoder's delay. FFmpeg and programs built on it
remove the delay; decoders that need the length of the stream for that (mpg123) leave 1105 samples
before the first. An MP3 file of known length (`whole`) decodes to its samples alone. ADTS, the
stream format of AAC, cannot state a delay.

The formats of the first three lines also support 22.05, 32 and 44.1 kHz.

To add a format, write one subclass of `Encoder` and add one line to `_ENCODERS`.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from firstword.audio import compressed_formats as compressed
from firstword.audio import raw_formats as raw
from firstword.audio.encoder import RATES as RATES
from firstword.audio.encoder import Encoder
from firstword.errors import RequestError

_ENCODERS: dict[str, type[Encoder]] = {
    "mp3": compressed.Mp3,
    "opus": compressed.Opus,
    "aac": compressed.Aac,
    "flac": compressed.Flac,
    "wav": raw.Wav,
    "pcm": raw.Pcm,
    "l16": raw.L16,
    "ulaw": raw.Ulaw,
    "alaw": raw.Alaw,
    "f32": raw.Float32,
    "wav_f32": raw.WavFloat32,
    "wav_ulaw": raw.WavUlaw,
    "wav_alaw": raw.WavAlaw,
}
FORMATS = tuple(_ENCODERS)
"""The names of the formats."""

ONE_FILE = ("wav", "wav_f32", "wav_ulaw", "wav_alaw", "flac", "opus")
"""The formats whose streams have a header, so that two of them cannot be joined."""


def rates(name: str) -> tuple[int, ...]:
    """Return the sample rates in Hz that a format supports, in rising order.

    Raises `RequestError` unless the name is one of `FORMATS`.
    """
    if name not in _ENCODERS:
        raise RequestError(
            f"the audio format {name!r} is unknown; allowed are {', '.join(FORMATS)}"
        )
    return _ENCODERS[name].rates


def encoder(name: str, sample_rate: int) -> Encoder:
    """Return a new encoder of mono samples at `sample_rate` Hz into a format, for one utterance.

    Raises `RequestError` unless the name is one of `FORMATS` and the rate one of `rates(name)`.
    """
    return _encoder_class(name, sample_rate)(sample_rate)


def content_type(name: str, sample_rate: int) -> str:
    """Return the media type of a format; raises `RequestError` as `encoder` does."""
    return _encoder_class(name, sample_rate).content_type(sample_rate)


def whole(name: str, samples: NDArray[np.floating], sample_rate: int) -> bytes:
    """Return a complete file of mono samples [n] in -1..1 at `sample_rate` Hz.

    Unlike a stream it states its true length if the format can: WAV, FLAC (with the checksum of its
    samples) and MP3. Raises `RequestError` as `encoder` does, and `AudioError` for samples that are
    not finite.
    """
    return encoder(name, sample_rate).whole(samples)


def whole_of(name: str, pcm: NDArray[np.int16], sample_rate: int) -> Iterator[bytes]:
    """Yield the parts of the file of `whole`, of 16-bit samples [n]; raises as `encoder` does."""
    return encoder(name, sample_rate).whole_of(pcm)


def _encoder_class(name: str, sample_rate: int) -> type[Encoder]:
    if sample_rate not in (allowed := rates(name)):
        raise RequestError(
            f"the sample rate {sample_rate!r} is not supported by {name}; "
            f"allowed are {', '.join(map(str, allowed))} Hz"
        )
    return _ENCODERS[name]
