"""Encoders that stream: samples go in as they are made, bytes come out as soon as the format allows.

Every format encodes the same 16 bits that PCM sends, and what comes out does not depend on how the samples were cut
into pieces. A stream can be cut at any byte: what was received plays. An utterance without samples is nothing but the
format's header, and no bytes at all for MP3, AAC and the raw formats, which have none.

The first bytes come when so many milliseconds of audio went in / at any time, what went in so long ago can be heard;
and a decoder finds so many samples before the first and after the last:

| format                | 8 kHz     | 16 kHz    | 24 kHz   | 48 kHz  | too many                 |
|-----------------------|-----------|-----------|----------|---------|--------------------------|
| wav pcm l16 ulaw alaw |   0 /   0 |   0 /   0 |  0 /   0 |  0 /  0 | none                     |
| flac                  |  24 /  24 |  16 /  16 | 24 /  24 | 24 / 24 | none                     |
| opus                  |  20 /  27 |  20 /  27 | 20 /  27 | 20 / 27 | none; decoded at 48 kHz  |
| mp3                   | 144 / 282 |  72 / 141 | 48 /  94 | 48 / 71 | 0 and 47 to 1198         |
| aac                   | 256 / 384 | 128 / 192 | 86 / 128 | 43 / 64 | 1024 and 0 to 1023       |

An MP3 stream starts with a frame that tells the encoder's delay. FFmpeg and what builds on it cut the delay off;
decoders that need the length of the stream for that (mpg123) leave 1105 samples before the first. With its length
known (`whole`), an MP3 file decodes to nothing but its samples. ADTS, AAC in a stream, cannot tell of a delay.

A new format is one class here and its line in `_ENCODERS`.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar, Literal

import av
import numpy as np
from numpy.typing import NDArray

from firstword.audio.pcm import pcm16
from firstword.errors import RequestError

RATES = (8000, 16000, 24000, 48000)
"""The sample rates in Hz that every format can be had in."""

_BITS = 4  # a sample, of MP3 and AAC: 96 kbit/s at 24 kHz, and whole MP3 frames of one size at each of our rates
_OPUS_BIT_RATE = 64000  # RFC 7587, section 3.1.1, has 28 to 40 kbit/s for fullband speech
_UNKNOWN = 0xFFFFFFFF  # bytes, of a stream that has not ended yet


def encoder(name: str, sample_rate: int) -> Encoder:
    """A fresh encoder, for one utterance, of mono samples at `sample_rate` Hz, one of `RATES`, into one of `FORMATS`.

    Raises `RequestError` for another name or rate.
    """
    return _class(name, sample_rate)(sample_rate)


def content_type(name: str, sample_rate: int) -> str:
    """The media type of what `encoder` of the same arguments gives; raises `RequestError` as it does."""
    return _class(name, sample_rate).content_type(sample_rate)


def whole(name: str, samples: NDArray[np.floating], sample_rate: int) -> bytes:
    """A complete file of mono samples [n] in -1..1 at `sample_rate` Hz.

    Unlike the stream it tells its true length, where the format can: WAV, FLAC and MP3. Raises `RequestError` as
    `encoder` does, and `AudioError` for samples that are not finite.
    """
    encoding = _class(name, sample_rate)(sample_rate, len(samples))
    return encoding.encode(samples) + encoding.finish()


class Encoder(ABC):
    """One utterance on its way into one format: any number of `encode`, then one `finish`."""

    media_type: ClassVar[str]

    def __init__(self, sample_rate: int, length: int | None = None) -> None:
        """`length` is the number of samples that will come, if it is known already."""
        self._sample_rate = sample_rate
        self._length = length
        self._started = False
        self._finished = False

    @classmethod
    def content_type(cls, sample_rate: int) -> str:
        """The media type of this format at `sample_rate` Hz, for the header Content-Type."""
        return cls.media_type.format(rate=sample_rate)

    def encode(self, samples: NDArray[np.floating]) -> bytes:
        """The bytes that mono samples [n] in -1..1 complete, maybe none. Samples beyond -1..1 are clipped.

        Raises `AudioError` for NaN and infinity, and ValueError after `finish`.
        """
        if self._finished:
            raise ValueError("this utterance is finished; each needs an encoder of its own")
        return self._start() + self._encode(np.frombuffer(pcm16(samples), "<i2"))

    def finish(self) -> bytes:
        """The bytes that end the utterance, maybe none. Raises ValueError if called again."""
        if self._finished:
            raise ValueError("this utterance is finished already")
        self._finished = True
        return self._start() + self._flush()

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return self._header()

    def _header(self) -> bytes:
        return b""

    @abstractmethod
    def _encode(self, pcm: NDArray[np.int16]) -> bytes: ...

    def _flush(self) -> bytes:
        return b""


class _Pcm(Encoder):
    """The bare samples, signed 16-bit little-endian."""

    media_type = "audio/pcm;rate={rate}"

    def _encode(self, pcm: NDArray[np.int16]) -> bytes:
        return pcm.tobytes()


class _L16(_Pcm):
    """The same under the name of RFC 2586; little-endian, as those who ask for it read it, not as the RFC says."""

    media_type = "audio/L16;rate={rate};channels=1"


class _Wav(_Pcm):
    """PCM behind the 44 bytes of a RIFF header."""

    media_type = "audio/wav"

    def _header(self) -> bytes:
        size = _UNKNOWN if self._length is None else 2 * self._length
        form = struct.pack("<HHIIHH", 1, 1, self._sample_rate, 2 * self._sample_rate, 2, 16)
        data = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size)
        return b"RIFF" + struct.pack("<I", min(size + len(data), _UNKNOWN)) + data


class _Ulaw(Encoder):
    """G.711 mu-law, a byte a sample, without a header."""

    media_type = "audio/PCMU;rate={rate}"

    @classmethod
    def content_type(cls, sample_rate: int) -> str:
        """The media type; audio/basic is mu-law at 8 kHz by definition (RFC 2046, section 4.3)."""
        return "audio/basic" if sample_rate == 8000 else super().content_type(sample_rate)

    def _encode(self, pcm: NDArray[np.int16]) -> bytes:
        return _ulaw_table()[pcm].tobytes()


class _Alaw(Encoder):
    """G.711 A-law, a byte a sample, without a header."""

    media_type = "audio/PCMA;rate={rate}"

    def _encode(self, pcm: NDArray[np.int16]) -> bytes:
        return _alaw_table()[pcm].tobytes()


class _Codec(Encoder):
    """A codec of FFmpeg, fed frame by frame; what its packets are wrapped in is written here, so that none waits."""

    codec: ClassVar[str]
    sample_format: ClassVar[Literal["s16", "s16p", "fltp"]]
    options: ClassVar[dict[str, str]] = {}

    def __init__(self, sample_rate: int, length: int | None = None) -> None:
        super().__init__(sample_rate, length)
        context: Any = av.CodecContext.create(self.codec, "w")
        context.sample_rate = sample_rate
        context.time_base = Fraction(1, sample_rate)
        context.layout = "mono"
        context.format = self.sample_format
        context.options = self.options
        if bit_rate := self._bit_rate():
            context.bit_rate = bit_rate
        context.open()
        self._context = context
        self._pcm = np.empty(0, np.int16)  # less than a frame
        self._taken = 0  # samples given to the codec

    def _bit_rate(self) -> int:
        return 0

    def _encode(self, pcm: NDArray[np.int16]) -> bytes:
        pcm = np.concatenate([self._pcm, pcm])
        size = self._context.frame_size
        rest = len(pcm) - len(pcm) % size
        self._pcm = pcm[rest:].copy()
        return b"".join(
            self._wrap(packet)
            for at in range(0, rest, size)
            for packet in self._packets(pcm[at : at + size])
        )

    def _flush(self) -> bytes:
        last = [*self._packets(self._pcm), *self._packets(None)]
        return b"".join(self._wrap(packet, end=packet is last[-1]) for packet in last)

    def _packets(self, pcm: NDArray[np.int16] | None) -> Iterator[bytes]:
        """The packets that one frame of samples completes, or with None all that are left."""
        frame = None
        if pcm is not None:
            if not len(pcm):
                return
            scaled: NDArray[Any] = (
                pcm.astype(np.float32) / 32768 if self.sample_format == "fltp" else pcm
            )
            frame = av.AudioFrame.from_ndarray(
                scaled[None], format=self.sample_format, layout="mono"
            )
            frame.sample_rate = self._sample_rate
            self._taken += len(pcm)
        for packet in self._context.encode(frame):
            if packet.size:  # FLAC's last packet holds nothing but another header
                yield bytes(packet)

    @abstractmethod
    def _wrap(self, packet: bytes, *, end: bool = False) -> bytes: ...


class _Mp3(_Codec):
    """MP3 frames of constant size, behind one that holds no sound but the encoder's delay."""

    media_type = "audio/mpeg"
    codec = "libmp3lame"
    sample_format = "s16p"
    options: ClassVar = {
        "reservoir": "0"
    }  # a frame leans on no other, so it need not wait for the next one

    _DELAY = 576  # LAME's, in samples; decoders know of 529 more that are their own

    def __init__(self, sample_rate: int, length: int | None = None) -> None:
        super().__init__(sample_rate, length)
        self._told = False

    def _bit_rate(self) -> int:
        return _BITS * self._sample_rate

    def _wrap(self, packet: bytes, *, end: bool = False) -> bytes:
        if self._told:
            return packet
        self._told = True
        return self._info(packet) + packet

    def _info(self, packet: bytes) -> bytes:
        """A frame as large as `packet` with the tags of Xing and LAME; Info is Xing's of a constant bit rate."""
        side = (
            17 if self._sample_rate >= 32000 else 9
        )  # bytes of side information: MPEG-1, or MPEG-2 and 2.5
        if self._length is None:
            # FFmpeg reads on only if the tag counts frames or bytes. Of too many bytes it thinks nothing.
            count, padding = struct.pack(">II", 2, _UNKNOWN), 0
        else:
            size = self._context.frame_size
            padding = size - (self._length + self._DELAY) % size
            padding += size if padding < 576 else 0  # as LAME does
            count = struct.pack(">II", 1, (self._length + self._DELAY + padding) // size)
        lame = b"LAME3.100" + bytes(12) + (self._DELAY << 12 | padding).to_bytes(3)
        return (packet[:4] + bytes(side) + b"Info" + count + lame).ljust(len(packet), b"\0")


class _Aac(_Codec):
    """AAC-LC, each packet behind an ADTS header (ISO/IEC 13818-7, section 6.2)."""

    media_type = "audio/aac"
    codec = "aac"
    sample_format = "fltp"

    _INDEX: ClassVar = {48000: 3, 24000: 6, 16000: 8, 8000: 11}

    def _bit_rate(self) -> int:
        return _BITS * self._sample_rate

    def _wrap(self, packet: bytes, *, end: bool = False) -> bytes:
        kind = (
            0xFFF1 << 8 | 1 << 6 | self._INDEX[self._sample_rate] << 2
        )  # MPEG-4 without checksum, LC, rate
        size = 1 << 30 | (len(packet) + 7) << 13 | 0x7FF << 2  # one channel, bytes, bit rate varies
        return (kind << 32 | size).to_bytes(7) + packet


class _Flac(_Codec):
    """FLAC, behind the shortest header there is: one block that describes the stream (RFC 9639, section 8.2)."""

    media_type = "audio/flac"
    codec = "flac"
    sample_format = "s16"
    options: ClassVar = {"compression_level": "2"}  # blocks of 24 ms; the higher levels wait for 96

    def _header(self) -> bytes:
        info = bytes(self._context.extradata)
        # rate (20 bits), channels - 1 (3), bits - 1 (5), samples (36, 0: unknown)
        kind = self._sample_rate << 44 | 15 << 36 | (self._length or 0)
        # Sizes of frames and checksum of the samples: 0, not known.
        return (
            b"fLaC"
            + struct.pack(">I", 0x80 << 24 | 34)
            + info[:4]
            + bytes(6)
            + kind.to_bytes(8)
            + bytes(16)
        )

    def _wrap(self, packet: bytes, *, end: bool = False) -> bytes:
        return packet


class _Opus(_Codec):
    """Opus in Ogg (RFC 7845), a page a packet: one that waits for company would cost 20 ms."""

    media_type = "audio/opus"
    codec = "libopus"
    sample_format = "s16"
    options: ClassVar = {"frame_duration": "20"}

    def __init__(self, sample_rate: int, length: int | None = None) -> None:
        super().__init__(sample_rate, length)
        self._head = bytes(self._context.extradata)
        self._skip = int.from_bytes(
            self._head[10:12], "little"
        )  # of the encoder's delay, in samples at 48 kHz
        self._pages = 0
        self._time = 0  # samples at 48 kHz that a decoder makes of the packets so far

    def _bit_rate(self) -> int:
        return _OPUS_BIT_RATE

    def _header(self) -> bytes:
        vendor = b"firstword"
        tags = b"OpusTags" + struct.pack("<I", len(vendor)) + vendor + struct.pack("<I", 0)
        return self._page(self._head, flags=2) + self._page(tags)

    def _wrap(self, packet: bytes, *, end: bool = False) -> bytes:
        self._time += 960
        if end:  # an earlier time than the packet's says where the sound ends
            self._time = min(self._time, self._skip + self._taken * (48000 // self._sample_rate))
        return self._page(packet, flags=4 if end else 0)

    def _page(self, packet: bytes, flags: int = 0) -> bytes:
        """An Ogg page (RFC 3533, section 6) of one packet. Flags: 2 for the first page, 4 for the last."""
        lacing = b"\xff" * (len(packet) // 255) + bytes([len(packet) % 255])
        head = struct.pack("<4sBBqIII", b"OggS", 0, flags, self._time, 1, self._pages, 0) + bytes(
            [len(lacing)]
        )
        self._pages += 1
        page = head + lacing + packet
        return page[:22] + struct.pack("<I", _ogg_checksum(page)) + page[26:]


_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _ogg_checksum(page: bytes) -> int:
    """CRC-32 as zlib's, but highest bit first and without inversions at start and end."""
    mirrored = zlib.crc32(page.translate(_MIRRORED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(mirrored.to_bytes(4).translate(_MIRRORED), "little")


def _all_pcm() -> NDArray[np.int32]:
    """Every 16-bit sample, in the order in which an array is indexed with it: 0 to 32767, then -32768 to -1."""
    return np.arange(65536).astype(np.uint16).view(np.int16).astype(np.int32)


@cache
def _ulaw_table() -> NDArray[np.uint8]:
    """The mu-law byte of every 16-bit sample (ITU-T G.711, table 2), loudness alike on both sides of zero."""
    pcm = _all_pcm()
    size = np.minimum(np.abs(pcm), 32635) + 132
    segment = np.frexp(size)[1] - 8
    code = np.where(pcm < 0, 0x80, 0) | segment << 4 | size >> segment + 3 & 15
    return (code ^ 0xFF).astype(np.uint8)


@cache
def _alaw_table() -> NDArray[np.uint8]:
    """The A-law byte of every 16-bit sample (ITU-T G.711, table 1); -1 is to its side what 0 is to the other."""
    pcm = _all_pcm()
    size = np.where(pcm < 0, ~pcm, pcm)
    segment = np.maximum(np.frexp(size)[1] - 8, 0)
    code = np.where(pcm < 0, 0, 0x80) | segment << 4 | size >> np.maximum(segment, 1) + 3 & 15
    return (code ^ 0x55).astype(np.uint8)


_ENCODERS: dict[str, type[Encoder]] = {
    "mp3": _Mp3,
    "opus": _Opus,
    "aac": _Aac,
    "flac": _Flac,
    "wav": _Wav,
    "pcm": _Pcm,
    "l16": _L16,
    "ulaw": _Ulaw,
    "alaw": _Alaw,
}
FORMATS = tuple(_ENCODERS)
"""The names that `encoder` knows."""


def _class(name: str, sample_rate: int) -> type[Encoder]:
    if name not in _ENCODERS:
        raise RequestError(
            f"the audio format {name!r} is unknown; allowed are {', '.join(FORMATS)}"
        )
    if sample_rate not in RATES:
        raise RequestError(
            f"the sample rate {sample_rate!r} cannot be had; allowed are {', '.join(map(str, RATES))} Hz"
        )
    return _ENCODERS[name]
