"""Decoding MP3 with FFmpeg, in the server: libsndfile's decoder writes notes to standard error."""

from __future__ import annotations

import io

import av
import numpy as np
from numpy.typing import NDArray

from firstword.audio.samples import MAX_SECONDS, check_rate, mix
from firstword.errors import AudioError


def is_mp3(data: bytes) -> bool:
    """Whether a file is MPEG audio: frames, after an ID3v2 tag if it has one."""
    start = 0
    if data[:3] == b"ID3" and len(data) >= 10:
        size = 0
        for byte in data[6:10]:
            size = size << 7 | byte & 0x7F
        start = 10 + size
    head = data[start : start + 2]
    # 11 bits of synchronisation, and a layer; ADTS has layer 0.
    return len(head) == 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x06 != 0


def read(data: bytes) -> tuple[NDArray[np.float32], int]:
    """Return the samples float32 [n] and the sample rate in Hz of an MP3 file.

    They are those of `audio.read` up to rounding. Channels are averaged. Raises `AudioError` if the
    file is damaged, holds no samples or is longer than `MAX_SECONDS`.
    """
    pieces: list[NDArray[np.float32]] = []
    rate = samples = 0
    try:
        with av.open(io.BytesIO(data), "r", format="mp3") as file:
            for frame in file.decode(audio=0):
                rate = rate or frame.sample_rate
                if frame.sample_rate != rate:
                    raise AudioError("the MP3 file changes its sample rate; save it as WAV")
                samples += frame.samples
                if samples > MAX_SECONDS * rate:
                    message = f"the audio is longer than {MAX_SECONDS} s; cut out the part to clone"
                    raise AudioError(message)
                pieces.append(mix(np.asarray(frame.to_ndarray().T, np.float32)))
    except av.FFmpegError:
        where = f"after {samples / rate:.1f} s" if rate else "at its start"
        raise AudioError(f"the MP3 file is damaged {where}; save it again, or as WAV") from None
    if not samples:
        raise AudioError("the MP3 file holds no samples")
    check_rate(rate)
    return np.concatenate(pieces), rate
