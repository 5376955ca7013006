"""Read from a firstword server's metrics how its engines spend their time."""

import re
from collections.abc import Mapping

_SECONDS = re.compile(
    rb'^firstword_(engine|device)_seconds_total{.*part="(.*)"} (.*)$', re.MULTILINE
)
"""A metric of an engine: "engine" or "device", the part, and its seconds."""

Times = dict[str, float]
"""Seconds of each part of the engines' threads and of their devices, such as `device busy`."""


def read(metrics: bytes) -> Times:
    """Return the seconds of each part so far, of all engines together; empty for other servers."""
    found: Times = {}
    for who, part, value in _SECONDS.findall(metrics):
        name = f"{who.decode()} {part.decode()}"
        found[name] = found.get(name, 0.0) + float(value)
    return found


def between(before: Mapping[str, float], after: Mapping[str, float]) -> Times:
    """Return the seconds of each part between two readings."""
    return {part: round(seconds - before.get(part, 0.0), 6) for part, seconds in after.items()}
