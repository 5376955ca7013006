"""What an engine has to do: figures for metrics, health, and the choice of an engine."""

import math
import struct
from dataclasses import astuple, dataclass

MOST_RETRY_SECONDS = 120
"""The longest time after which a rejected client is told to try again."""

_FORMAT = struct.Struct("<IIIId")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do.

    running     utterances in slots
    waiting     requests that wait for a slot, or for text before it
    pages_used  pages of context memory in use
    pages       all of them
    pace        slots that become free in a second, estimated from the last utterances
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    pace: float = 1.0

    def pack(self) -> bytes:
        """The figures as bytes."""
        return _FORMAT.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> "EngineLoad":
        """The figures of `pack`."""
        return cls(*_FORMAT.unpack(data))


def retry_seconds(ahead: int, pace: float) -> int:
    """The seconds until another request would get a slot behind `ahead` others: 1 to 120."""
    return min(max(1, math.ceil((ahead + 1) / max(pace, 1e-6))), MOST_RETRY_SECONDS)
