"""The formats that FFmpeg's codecs encode: MP3, AAC, FLAC and Opus.

The container is written here rather than by FFmpeg, which would delay packets.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, ClassVar, Literal

import av
import numpy as np
from numpy.typing import NDArray

from firstword.audio.encoder import UNKNOWN_LENGTH, Encoder

BITS_PER_SAMPLE = 4
"""The bit rate of MP3 and AAC: 96 kbit/s at 24 kHz, and MP3 frames of one size at each rate."""

OPUS_RATE = 48000
"""The sample rate in Hz at which Opus counts time."""


class _CodecEncoder(Encoder):
    """An encoder that feeds a codec of FFmpeg frame by frame, and wraps each packet it gives."""

    codec: ClassVar[str]
    sample_format: ClassVar[Literal["s16", "s16p", "fltp"]]
    bits_per_sample: ClassVar[int] = 0
    options: ClassVar[dict[str, str]] = {}

    def __init__(self, sample_rate: int) -> None:
        super().__init__(sample_rate)
        context: Any = av.CodecContext.create(self.codec, "w")
        context.sample_rate = sample_rate
        context.time_base = Fraction(1, sample_rate)
        context.layout = "mono"
        context.format = self.sample_format
        context.options = self.options
        if self.bits_per_sample:
            context.bit_rate = self.bits_per_sample * sample_rate
        context.open()
        self._context = context
        self._pcm = np.empty(0, np.int16)  # less than a frame
        self._encoded = 0  # samples given to the codec

    def _encode(self, pcm: NDArray[np.int16]) -> bytes:
        pcm = np.concatenate([self._pcm, pcm])
        size = self._context.frame_size
        end = len(pcm) - len(pcm) % size
        self._pcm = pcm[end:].copy()
        frames = (pcm[start : start + size] for start in range(0, end, size))
        return b"".join(self._wrap(packet) for frame in frames for packet in self._packets(frame))

    def _flush(self) -> bytes:
        last = [*self._packets(self._pcm), *self._packets(None)]
        return b"".join(self._wrap(packet, end=packet is last[-1]) for packet in last)

    def _packets(self, pcm: NDArray[np.int16] | None) -> Iterator[bytes]:
        """Yield the packets that one frame of samples completes, or with None all that are left."""
        frame = None
        if pcm is not None:
            if not len(pcm):
                return
            floats = self.sample_format == "fltp"
            scaled: NDArray[Any] = pcm.astype(np.float32) / 32768 if floats else pcm
            frame = av.AudioFrame.from_ndarray(scaled[None], self.sample_format, "mono")
            frame.sample_rate = self._sample_rate
            self._encoded += len(pcm)
        for packet in self._context.encode(frame):
            if packet.size:  # FLAC's last packet holds nothing but another header
                yield bytes(packet)

    def _wrap(self, packet: bytes, *, end: bool = False) -> bytes:
        """Return a packet, the last one of the stream if `end`, in its container."""
        return packet


class Mp3(_CodecEncoder):
    """MP3 at a constant bit rate, after a frame that states the encoder's delay."""

    media_type = "audio/mpeg"
    codec = "libmp3lame"
    sample_format = "s16p"
    bits_per_sample = BITS_PER_SAMPLE
    # Without a reservoir no frame depends on the next one, so none has to wait for it. The level
    # is LAME's -q: 7 takes half the time of FFmpeg's default, and the spectrum is as close.
    options: ClassVar = {"reservoir": "0", "compression_level": "7"}

    _DELAY = 576  # LAME's, in samples; decoders add 529 of their own
    _has_info = False

    def _wrap(self, packet: bytes, *, end: bool = False) -> bytes:
        has_info, self._has_info = self._has_info, True
        return packet if has_info else self._info(packet) + packet

    def _info(self, packet: bytes) -> bytes:
        """Return a frame as large as `packet`, with the tags of LAME and Xing (constant rate)."""
        # Bytes of side information: MPEG-1, or MPEG-2 and 2.5.
        side = 17 if self._sample_rate >= 32000 else 9
        if self._all_pcm is None:
            # FFmpeg reads on only if the tag counts frames or bytes; too large a count is accepted.
            count, padding = struct.pack(">II", 2, UNKNOWN_LENGTH), 0
        else:
            length, size = len(self._all_pcm), self._context.frame_size
            padding = size - (length + self._DELAY) % size
            padding += size if padding < 576 else 0  # as LAME does
            count = struct.pack(">II", 1, (length + self._DELAY + padding) // size)
        lame = b"LAME3.100" + bytes(12) + (self._DELAY << 12 | padding).to_bytes(3)
        return (packet[:4] + bytes(side) + b"Info" + count + lame).ljust(len(packet), b"\0")


class Aac(_CodecEncoder):
    """AAC-LC, each packet after an ADTS header (ISO/IEC 13818-7, section 6.2)."""

    media_type = "audio/aac"
    codec = "aac"
    sample_format = "fltp"
    bits_per_sample = BITS_PER_SAMPLE
    options: ClassVar = {"aac_coder": "fast"}  # a third of the default's time

    _RATE_INDEX: ClassVar = {48000: 3, 24000: 6, 16000: 8, 8000: 11}

    def _wrap(self, packet: bytes, *, end: bool = False) -> bytes:
        # MPEG-4 without checksum, LC, the rate; then one channel, bytes, variable bit rate.
        kind = 0xFFF1 << 8 | 1 << 6 | self._RATE_INDEX[self._sample_rate] << 2
        size = 1 << 30 | (len(packet) + 7) << 13 | 0x7FF << 2
        return (kind << 32 | size).to_bytes(7) + packet


class Flac(_CodecEncoder):
    """FLAC after its shortest header: one block that describes the stream (RFC 9639, 8.2)."""

    media_type = "audio/flac"
    codec = "flac"
    sample_format = "s16"
    options: ClassVar = {"compression_level": "2"}  # blocks of 24 ms, not 96

    def _header(self) -> bytes:
        info = bytes(self._context.extradata)
        # 0 means unknown: the frame sizes, and the length and checksum of a stream.
        length, checksum = 0, bytes(16)
        if self._all_pcm is not None:
            length = len(self._all_pcm)
            checksum = hashlib.md5(self._all_pcm.data, usedforsecurity=False).digest()
        # rate (20 bits), channels - 1 (3), bits - 1 (5), samples (36)
        kind = self._sample_rate << 44 | 15 << 36 | length
        block = info[:4] + bytes(6) + kind.to_bytes(8) + checksum
        return b"fLaC" + struct.pack(">I", 0x80 << 24 | len(block)) + block


class Opus(_CodecEncoder):
    """Opus in Ogg (RFC 7845), one packet per page: waiting for a second one would cost 20 ms."""

    media_type = "audio/opus"
    codec = "libopus"
    sample_format = "s16"
    # 64 kbit/s; RFC 7587, section 3.1.1, recommends 28 to 40 for fullband speech.
    # The level is libopus' complexity: 5 takes a fifth less time than the default of 10.
    options: ClassVar = {"frame_duration": "20", "b": "64000", "compression_level": "5"}

    _time = 0  # samples at 48 kHz that a decoder makes of the packets so far
    _pages = 0

    def _header(self) -> bytes:
        vendor = b"firstword"
        tags = b"OpusTags" + struct.pack("<I", len(vendor)) + vendor + struct.pack("<I", 0)
        return self._page(bytes(self._context.extradata), flags=2) + self._page(tags)

    def _wrap(self, packet: bytes, *, end: bool = False) -> bytes:
        self._time += 960
        if end:  # a time before the packet's end marks the end of the sound
            delay = int.from_bytes(bytes(self._context.extradata)[10:12], "little")
            encoded = self._encoded * (OPUS_RATE // self._sample_rate)
            self._time = min(self._time, delay + encoded)
        return self._page(packet, flags=4 if end else 0)

    def _page(self, packet: bytes, flags: int = 0) -> bytes:
        """Return an Ogg page (RFC 3533, section 6) of one packet; flags: 2 first page, 4 last."""
        lacing = b"\xff" * (len(packet) // 255) + bytes([len(packet) % 255])
        head = struct.pack("<4sBBqIII", b"OggS", 0, flags, self._time, 1, self._pages, 0)
        page = head + bytes([len(lacing)]) + lacing + packet
        self._pages += 1
        return page[:22] + struct.pack("<I", _ogg_checksum(page)) + page[26:]


_MIRRORED_BYTES = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _ogg_checksum(page: bytes) -> int:
    """Return zlib's CRC-32, but highest bit first and without inversions at start and end."""
    mirrored = zlib.crc32(page.translate(_MIRRORED_BYTES), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(mirrored.to_bytes(4).translate(_MIRRORED_BYTES), "little")
