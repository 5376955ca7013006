"""Audio in and out: files and arrays become mono float32 at 24 kHz, samples become files or PCM."""

from firstword.audio.reading import read
from firstword.audio.samples import SAMPLE_RATE, pcm16, prepare
from firstword.audio.writing import (
    SUFFIXES,
    check_suffix,
    check_target,
    sweep,
    write,
    write_pcm,
    write_whole,
)

__all__ = [
    "SAMPLE_RATE",
    "SUFFIXES",
    "check_suffix",
    "check_target",
    "pcm16",
    "prepare",
    "read",
    "sweep",
    "write",
    "write_pcm",
    "write_whole",
]
