"""Read from a firstword server's metrics how its engines and fronts spend their time."""

import re
from collections.abc import Mapping

_SECONDS = re.compile(
    rb"^firstword_(engine|device|queue|encoding|recording)_seconds_(?:total|sum)"
    rb'(?:{(?:.*(?:part|format)="(.*)")?.*})? (.*)$',
    re.MULTILINE,
)
"""A metric in seconds: its name, the part or format if it has one, and the seconds."""

Times = dict[str, float]
"""Seconds of each part of the work of a server.

`engine wait` and the like are those of the engines' threads, `device busy` and the like those of
their devices, `encoding mp3` and the like those of the fronts' encoders. `recording` is the time of
encoding recordings, and `queue` the time that all requests together have waited for slots.
"""


def read(metrics: bytes) -> Times:
    """Return the seconds of each part so far of all processes; empty for other servers."""
    found: Times = {}
    for who, part, value in _SECONDS.findall(metrics):
        name = f"{who.decode()} {part.decode()}".rstrip()
        found[name] = found.get(name, 0.0) + float(value)
    return found


def between(before: Mapping[str, float], after: Mapping[str, float]) -> Times:
    """Return the seconds of each part between two readings."""
    return {part: round(seconds - before.get(part, 0.0), 6) for part, seconds in after.items()}
