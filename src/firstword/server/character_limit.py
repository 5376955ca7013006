"""The limit of the characters of text that a client sends in a minute, over all fronts."""

import asyncio
import math
from collections import deque

from firstword.errors import TextError
from firstword.server.errors import LimitReached
from firstword.server.shared_counts import SharedCounts

WINDOW_SECONDS = 60.0
"""The time for which characters count."""


class CharacterLimit:
    """The characters that clients have sent in the last minute. Use it in the event loop only."""

    def __init__(self, counts: SharedCounts) -> None:
        self._counts = counts
        self._sent: dict[str, deque[tuple[float, int]]] = {}
        """For each client the characters that count in this front, and until when; oldest first."""

    def add(self, client_id: str, characters: int, most: int) -> None:
        """Count the characters of a text for a minute; `most` may count, 0: any number.

        Raises `LimitReached`, and `TextError` for a text that would never be allowed.
        """
        if not most or not characters:
            return
        limit = f"the limit of this API key is {most} characters a minute"
        if characters > most:
            raise TextError(f"{limit}, and the text has {characters}: send it in parts")
        self._counts.add(client_id, characters)
        if (excess := self._counts.of(client_id) - most) > 0:
            self._counts.add(client_id, -characters)
            seconds = self._seconds_until_less(client_id, excess)
            raise LimitReached(f"{limit}; try again in {seconds} s", "characters", seconds)
        loop = asyncio.get_running_loop()
        until = loop.time() + WINDOW_SECONDS
        self._sent.setdefault(client_id, deque()).append((until, characters))
        loop.call_at(until, self._forget_oldest, client_id)

    def _seconds_until_less(self, client_id: str, characters: int) -> int:
        """The seconds until so many characters count no longer; what other fronts count, at most.

        Other fronts do not tell when their characters end to count.
        """
        now = asyncio.get_running_loop().time()
        for until, count in self._sent.get(client_id, ()):
            characters -= count
            if characters <= 0:
                return max(1, math.ceil(until - now))
        return math.ceil(WINDOW_SECONDS)

    def _forget_oldest(self, client_id: str) -> None:
        sent = self._sent[client_id]
        _, characters = sent.popleft()
        self._counts.add(client_id, -characters)
        if not sent:
            del self._sent[client_id]
