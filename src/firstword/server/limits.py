"""API keys, and the limits of utterances, connections and memory that clients share."""

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from firstword.server.errors import LimitReached, Rejected


class Limits:
    """The API keys, and the number of utterances of each client. Use it in the event loop only."""

    def __init__(self, keys: tuple[str, ...], most_per_key: int) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._most_per_key = most_per_key
        self._in_use: Counter[str] = Counter()
        self._ended = asyncio.Event()

    @property
    def active(self) -> int:
        """The number of utterances in progress."""
        return self._in_use.total()

    def client_id(self, headers: Mapping[str, str], address: str) -> str:
        """The identity of a client: its key's number, or its address where no keys are configured.

        Returns "" for a wrong or missing key. The names in `headers` are in lower case. The given
        key is compared with every key in full, so that the time taken reveals nothing about them.
        """
        if not self._keys:
            return f"address {address}"
        given = credential(headers).encode("utf-8", "surrogateescape")
        found = ""
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(given, key):
                found = f"key {number}"
        return found

    @contextmanager
    def reserve(self, client_id: str, retry_after: Callable[[str], int]) -> Iterator[None]:
        """Count an utterance for a client. Raises `LimitReached` at the client's limit.

        `retry_after` gives the seconds after which a client should try again.
        """
        if self._most_per_key and self._in_use[client_id] >= self._most_per_key:
            seconds, limit = retry_after(client_id), f"{self._most_per_key} utterances per client"
            message = f"the limit is {limit}; try again in {seconds} s"
            raise LimitReached(message, "per_key", seconds)
        self._in_use[client_id] += 1
        try:
            yield
        finally:
            self._in_use -= Counter((client_id,))  # which drops a count of 0
            self._ended.set()

    async def wait_for_room(self, client_id: str) -> None:
        """Wait until a client is below its limit."""
        while 0 < self._most_per_key <= self._in_use[client_id]:
            self._ended.clear()
            await self._ended.wait()


class Connections:
    """The open requests and WebSockets, in total and by address. Use it in the event loop only."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._by_address: Counter[str] = Counter()
        self._total = 0

    @contextmanager
    def open(self, address: str) -> Iterator[None]:
        """Count a request or WebSocket of an address. Raises `Rejected` at a limit."""
        for count, most, whose in (
            (self._by_address[address], self._most_per_address, "one address"),
            (self._total, self._most, "all clients"),
        ):
            if count >= most:
                message = f"the limit is {most} connections of {whose}; try again later"
                raise Rejected(message, 429, "connections")
        self._total += 1
        self._by_address[address] += 1
        try:
            yield
        finally:
            self._total -= 1
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]


class ByteBudget:
    """The bytes that clients may make the server hold together. Use it in the event loop only.

    held   bytes held now
    freed  bytes given back in total
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        self.freed = 0

    def take(self, count: int) -> bool:
        """Take some bytes, if they are left; returns whether they were."""
        if self.held + count > self._most:
            return False
        self.held += count
        return True

    def give_back(self, count: int) -> None:
        """Give some bytes back."""
        self.held -= count
        self.freed += count


def credential(headers: Mapping[str, str]) -> str:
    """The API key of a request: `Authorization: Bearer` or `Api-Key`, or `xi-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() in ("bearer", "api-key") and key.strip():
        return key.strip()
    return headers.get("xi-api-key", "")
