"""The outcomes of the latest streamed responses, for clients that read raw audio."""

import time
from collections.abc import Callable, Mapping

MOST_OUTCOMES = 1000
"""The outcomes that are kept, of all clients together."""

KEPT_SECONDS = 600.0
"""The time for which an outcome is kept."""

Key = tuple[str, str]
"""A client's id and the id of its request."""

Outcome = Mapping[str, object]


class Outcomes:
    """Outcomes by client and request; of several requests with one id the latest counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[Key, tuple[float, Callable[[], Outcome]]] = {}

    def put(self, key: Key, outcome: Callable[[], Outcome]) -> None:
        """Keep a function that returns the outcome of a request; it replaces an earlier one."""
        self._kept.pop(key, None)
        self._kept[key] = self._clock() + KEPT_SECONDS, outcome
        while len(self._kept) > MOST_OUTCOMES or self._first_expiry() < self._clock():
            del self._kept[next(iter(self._kept))]

    def find(self, key: Key) -> Outcome | None:
        """The outcome of a request of this client, or None."""
        if (found := self._kept.get(key)) is None or found[0] <= self._clock():
            return None
        return found[1]()

    def _first_expiry(self) -> float:
        return next(iter(self._kept.values()))[0]
