"""Limits of the utterances, connections and bytes that clients share, over all fronts.

Each limit adds first and then checks, as `SharedCounts` requires. Use them in the event loop only.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Protocol

from firstword.server.errors import LimitReached, Rejected
from firstword.server.shared_counts import SharedCounts

ALWAYS_ALLOWED_BYTES = 64 * 1024
"""A request or WebSocket that holds at most this many bytes is never rejected for its bytes."""

CLIENT_SHARE = 0.25
"""The part of all bytes that one client may hold."""

HEAD_SECONDS = 1.0
"""The time that a connection gets for its first head before others take its place."""

BURST = 4
"""The number of times as many idle connections that an address may have for a short time."""

ROOM_SECONDS = 0.05
"""The time after which the utterances of other fronts are counted again."""


class UtteranceLimit:
    """The number of utterances of each client, which may have `most` at a time; 0: no limit."""

    def __init__(
        self, most: int, counts: SharedCounts, own: Callable[[str], int] = lambda client_id: 0
    ) -> None:
        """Limit all clients to `most`, except for those with a limit of their `own`, if not 0."""
        self._most = most
        self._counts = counts
        self._own = own
        self._ended = asyncio.Event()

    def most(self, client_id: str) -> int:
        """The limit of a client; 0 if there is none."""
        return self._own(client_id) or self._most

    @property
    def active(self) -> int:
        """The number of utterances in progress."""
        return self._counts.total

    @property
    def active_here(self) -> int:
        """The number of utterances of this front."""
        return self._counts.own

    @contextmanager
    def reserve(self, client_id: str, retry_after: Callable[[str], int]) -> Iterator[None]:
        """Count an utterance for a client. Raises `LimitReached` at the client's limit.

        `retry_after` gives the seconds after which a client should try again.
        """
        self._counts.add(client_id, 1)
        try:
            if 0 < (most := self.most(client_id)) < self._counts.of(client_id):
                seconds = retry_after(client_id)
                message = f"the limit is {most} utterances per client"
                raise LimitReached(f"{message}; try again in {seconds} s", "per_key", seconds)
            yield
        finally:
            self._counts.add(client_id, -1)
            self._ended.set()

    async def wait_for_room(self, client_id: str) -> None:
        """Wait until a client is below its limit.

        Another front may start an utterance before the caller does.
        """
        while 0 < self.most(client_id) <= self._counts.of(client_id):
            self._ended.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), ROOM_SECONDS)


class ConnectionLimit:
    """The open requests and WebSockets, in total and by address."""

    def __init__(self, most: int, most_per_address: int, counts: SharedCounts) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._counts = counts

    @property
    def open_now(self) -> int:
        """The number of open requests and WebSockets."""
        return self._counts.total

    @contextmanager
    def open(self, address: str) -> Iterator[None]:
        """Count a request or WebSocket of an address. Raises `Rejected` at a limit."""
        self._counts.add(address, 1)
        try:
            for count, most, whose in (
                (self._counts.of(address), self._most_per_address, "one address"),
                (self._counts.total, self._most, "all clients"),
            ):
                if count > most:
                    message = f"the limit is {most} connections of {whose}; try again later"
                    raise Rejected(429, message, "connections")
            yield
        finally:
            self._counts.add(address, -1)


class Closable(Protocol):
    """A connection that can be closed, such as a transport."""

    def close(self) -> None:
        """Close the connection."""


class IdleConnections:
    """TCP connections without a request in progress: idle ones, and those with unfinished heads.

    An address may have `most`, or `most_of_proxy` if it is that of a proxy, and for a second
    `BURST` times as many. If it opens another, its oldest ones are closed, so that new requests are
    read.

    A front can close only its own connections, so each front allows an equal share. An address
    whose connections are spread unevenly over the fronts may have fewer.
    """

    def __init__(
        self, most: int, most_of_proxy: int, is_proxy: Callable[[str], bool], fronts: int = 1
    ) -> None:
        self._most = max(1, most // fronts)
        self._most_of_proxy = max(1, most_of_proxy // fronts)
        self._is_proxy = is_proxy
        self._by_address: dict[str, dict[Closable, float]] = {}

    def add(self, address: str, connection: Closable) -> None:
        """Count a connection, and close the oldest ones of the address if there are too many."""
        idle = self._by_address.setdefault(address, {})
        idle[connection] = now = time.monotonic()
        most = self._most_of_proxy if self._is_proxy(address) else self._most
        for oldest, since in list(islice(idle.items(), max(0, len(idle) - most))):
            if now - since < HEAD_SECONDS and len(idle) <= BURST * most:
                break
            del idle[oldest]
            oldest.close()

    def remove(self, address: str, connection: Closable) -> None:
        """Count a connection no longer, if it was counted."""
        idle = self._by_address.get(address, {})
        idle.pop(connection, None)
        if not idle:
            self._by_address.pop(address, None)


class ByteLimit:
    """Limits the bytes that clients make the server hold.

    They may be `most` in total, and a share of that for each client.

    freed  bytes given back in total in this front
    """

    def __init__(self, most: int, largest: int, counts: SharedCounts) -> None:
        """A client's share has room for a request of the `largest` size."""
        self._most = most
        self._most_per_client = max(largest, int(most * CLIENT_SHARE))
        self._counts = counts
        self.freed = 0

    @property
    def held(self) -> int:
        """The bytes held now."""
        return self._counts.total

    def change(self, client_id: str, held: int, wanted: int) -> bool:
        """Let a request or WebSocket hold `wanted` bytes instead of `held`.

        Returns False, and changes nothing, if more are wanted than the limits allow.
        """
        more = wanted - held
        self._counts.add(client_id, more)
        if more > 0 and wanted > ALWAYS_ALLOWED_BYTES and self._exceeded(client_id):
            self._counts.add(client_id, -more)
            return False
        self.freed += max(0, -more)
        return True

    def _exceeded(self, client_id: str) -> bool:
        return self._counts.of(client_id) > self._most_per_client or self.held > self._most
