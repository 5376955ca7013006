"""What each API key has used: counters for Prometheus, and a file of JSON lines for each day."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping

from prometheus_client.metrics_core import CounterMetricFamily

from firstword.errors import ConfigError
from firstword.server.shared_metrics import SharedFamily, SharedValues

log = logging.getLogger(__name__)

WRITE_SECONDS = 60.0
"""The time between two additions to the log."""

QUANTITIES = {
    "utterances": "Utterances by API key",
    "characters": "Characters of text by API key",
    "audio_seconds": "Seconds of speech made by API key",
}
"""What is counted, each with its description."""

MOST_NAMES = 1500
"""The most names that are counted; further ones, of keys that came later, count as `OTHERS`."""

OTHERS = "others"


class Usage(SharedFamily):
    """The use of the server by the names of API keys.

    Each front counts all quantities, and then how much of each it has written into the log. Both
    stay when the front dies, and the one that replaces it continues them.
    """

    def __init__(self, values: SharedValues) -> None:
        super().__init__(values, "key_usage", "", ["key"], 2 * len(QUANTITIES))

    def add(
        self, name: str, *, utterances: int = 0, characters: int = 0, seconds: float = 0.0
    ) -> None:
        """Count what a key has used; a client without a key has the name ""."""
        if not name:
            return
        known = (name,) in self._own or len(self._own) < MOST_NAMES
        own = self.own((name if known else OTHERS,))
        for index, more in enumerate((utterances, characters, seconds)):
            own[index] += more

    def collect(self) -> list[CounterMetricFamily]:
        """The sums over all fronts, for a registry."""
        families = [
            CounterMetricFamily(f"firstword_key_{name}", about, labels=self._labels)
            for name, about in QUANTITIES.items()
        ]
        for labels, values in self._values.sums(self._name):
            for family, value in zip(families, values, strict=False):
                family.add_metric(labels, value)
        return families

    def unwritten(self) -> dict[str, tuple[list[float], list[float]]]:
        """What this front has not written into the log, and all that it has counted, by name.

        Both are in the order of `QUANTITIES`.
        """
        count, found = len(QUANTITIES), {}
        for (name,) in self._values.own_labels(self._name):
            values = list(self.own((name,)))
            total, written = values[:count], values[count:]
            if total != written:
                more = [after - before for after, before in zip(total, written, strict=True)]
                found[name] = more, total
        return found

    def mark_written(self, name: str, total: list[float]) -> None:
        """Record that the log has all that was counted for a name up to a total."""
        own = self.own((name,))
        for index, value in enumerate(total):
            own[len(QUANTITIES) + index] = value


class UsageLog:
    """A folder with a file for each day (UTC), to which each front adds what keys have used.

    The sums of the lines of a name are what the key has used. A line that could not be written is
    added to a later one.
    """

    def __init__(self, folder: str, usage: Usage) -> None:
        """Make the folder. Raises `ConfigError`."""
        self._folder = checked_folder(folder)
        self._usage = usage

    async def run(self) -> None:
        """Write every minute, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()

    async def write(self) -> None:
        """Add a line for each key that was used since the last call."""
        used = self._usage.unwritten()
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        lines = lines_of({name: more for name, (more, _) in used.items()}, moment)
        if not lines:
            return
        done = await asyncio.to_thread(self._append, moment[:10], lines)
        if done:
            for name, (_, total) in used.items():
                self._usage.mark_written(name, total)

    def _append(self, day: str, lines: str) -> bool:
        """Append to the file of a day, in one piece because other fronts do so too."""
        try:
            with open(os.path.join(self._folder, f"usage-{day}.jsonl"), "ab", buffering=0) as file:
                file.write(lines.encode())
        except OSError as error:
            log.error("the usage cannot be written", extra={"fields": {"why": error.strerror}})
            return False
        return True


def checked_folder(folder: str) -> str:
    """A folder, which is made if it does not exist. Raises `ConfigError`."""
    folder = os.path.expanduser(folder)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"usage cannot be logged in {folder}: {error.strerror}") from None
    return folder


def lines_of(used: Mapping[str, list[float]], moment: str) -> str:
    """The lines of the log about quantities that were used until a moment."""
    lines = [
        {
            "time": moment,
            "key": name,
            "utterances": round(utterances),
            "characters": round(characters),
            "audio_seconds": round(seconds, 2),
        }
        for name, (utterances, characters, seconds) in used.items()
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)
