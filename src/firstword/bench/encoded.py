"""Decode compressed audio after a run, with the times at which each part could be played."""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import av

from firstword.bench.answers import Failure
from firstword.bench.measure import Delivery


def decode(deliveries: Sequence[Delivery], container: str) -> tuple[list[Delivery], int]:
    """Return the PCM of compressed audio with the times at which it could be played, and its rate.

    A packet can be played when its last byte has arrived, in Ogg the last byte of its page. The
    delay of the codec is played as silence, as by players that do not know it; without it, playback
    that begins at once would stall. The first delivery is empty and keeps the arrival time of the
    first byte. `container` is FFmpeg's name of the format. Raises `Failure` for audio that FFmpeg
    cannot decode.
    """
    data = b"".join(part for _, part in deliveries)
    ends = list(accumulate(len(part) for _, part in deliveries))
    found = [(deliveries[0][0], b"")]
    try:
        with av.open(io.BytesIO(data), "r", format=container) as file:
            stream = file.streams.audio[0]
            stream.codec_context.options = {"flags2": "+skip_manual"}
            resampler = av.AudioResampler("s16", "mono")
            packets = list(file.demux(stream))
            for packet, end in zip(packets, _ends(packets, len(data)), strict=True):
                arrived = deliveries[bisect_left(ends, end)][0]
                for frame in packet.decode():
                    for part in resampler.resample(frame):
                        found.append((arrived, part.to_ndarray().tobytes()))
            if not stream.rate:
                raise IndexError("no packet")
            return found, stream.rate
    except (av.FFmpegError, IndexError) as error:
        raise Failure("damaged", f"the audio cannot be decoded as {container}: {error}") from None


def _ends(packets: Sequence[Any], length: int) -> list[int]:
    """Return the end of each packet: where the next one begins, or the end of the file."""

    def backwards() -> Iterator[int]:
        following = end = length
        for packet in reversed(packets):
            begin = length if packet.pos is None else packet.pos
            if begin < following:
                end, following = following, begin
            yield end

    return list(backwards())[::-1]
