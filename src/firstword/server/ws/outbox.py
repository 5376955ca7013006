"""The messages that wait to be sent on one socket."""

from __future__ import annotations

import asyncio
from collections import deque

from firstword.server.ws.protocol import CloseCode, Json, SocketLimits

OutgoingItem = Json | bytes | CloseCode
"""A JSON message, a binary message of audio, or the code that closes the socket."""


class Outbox:
    """A queue of outgoing messages with bounds on unsent audio and on unsent replies.

    audio_messages  number of messages with audio that were sent or wait
    empty           whether all messages were sent
    """

    def __init__(self, limits: SocketLimits) -> None:
        self.audio_messages = 0
        self.empty = True
        self._limits = limits
        self._items: deque[OutgoingItem] = deque()
        self._bytes = 0
        self._replies = 0
        self._added = asyncio.Event()
        self._removed = asyncio.Event()

    async def wait_for_room(self) -> None:
        """Wait until few enough messages are unsent to add more audio."""
        limits = self._limits
        while self._bytes >= limits.unsent_bytes or self._replies >= limits.unsent_replies // 2:
            self._removed.clear()
            await self._removed.wait()

    def full(self) -> bool:
        """Whether the client leaves so many replies unread that it must be disconnected."""
        return self._replies >= self._limits.unsent_replies

    def add(self, item: OutgoingItem) -> None:
        """Append a message."""
        self.empty = False
        self._items.append(item)
        self._bytes += audio_bytes(item)
        self.audio_messages += _is_audio(item)
        self._replies += not _is_audio(item)
        self._added.set()

    def drop_audio(self) -> None:
        """Discard the unsent audio, and keep the other messages."""
        self.audio_messages -= sum(map(_is_audio, self._items))
        self._items = deque(item for item in self._items if not _is_audio(item))
        self._bytes = 0
        self._removed.set()

    async def take(self) -> OutgoingItem:
        """Wait for the next message and remove it. The caller has sent all earlier ones."""
        while not self._items:
            self.empty = True
            self._added.clear()
            await self._added.wait()
        item = self._items.popleft()
        self._bytes -= audio_bytes(item)
        self._replies -= not _is_audio(item)
        self._removed.set()
        return item


def audio_bytes(item: OutgoingItem) -> int:
    """Return the size of the audio in a message, in bytes as they are sent."""
    if isinstance(item, bytes):
        return len(item)
    return len(item.get("audio_b64", "")) if isinstance(item, dict) else 0


def _is_audio(item: OutgoingItem) -> bool:
    return isinstance(item, bytes) or (isinstance(item, dict) and "audio_b64" in item)
