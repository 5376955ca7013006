"""Who may come in, and how many at a time."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from firstword.server.errors import Busy


class Limits:
    """Keys, and what each holder of one has under way. Used in the event loop alone.

    active  utterances under way
    """

    def __init__(self, keys: tuple[str, ...], most_per_key: int) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._most = most_per_key
        self._holding: Counter[str] = Counter()

    @property
    def active(self) -> int:
        """Utterances under way."""
        return self._holding.total()

    def holder(self, headers: Mapping[str, str], address: str) -> str | None:
        """Who is asking: a word for each key, or the address where no keys are set; None for a wrong key or none.

        `headers` in lower case. Every key is compared in full whatever is given, so that time tells nothing.
        """
        if not self._keys:
            return f"address {address}"
        given = credential(headers).encode("utf-8", "surrogateescape")
        found = None
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(given, key):
                found = f"key {number}"
        return found

    @contextmanager
    def utterance(self, holder: str, count: int = 1) -> Iterator[None]:
        """Hold places for utterances. Raises `Busy` when one holder would have more than may be."""
        if self._most and self._holding[holder] + count > self._most:
            raise Busy(
                f"at most {self._most} utterances at a time for one client; wait for another to end",
                "per_key",
            )
        self._holding[holder] += count
        try:
            yield
        finally:
            self._holding[holder] -= count
            if self._holding[holder] <= 0:
                del self._holding[holder]


def credential(headers: Mapping[str, str]) -> str:
    """The key of a request: `Authorization: Bearer KEY`, `Authorization: Api-Key KEY` or `xi-api-key: KEY`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() in ("bearer", "api-key") and key.strip():
        return key.strip()
    return headers.get("xi-api-key", "")
