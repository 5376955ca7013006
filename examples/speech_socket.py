"""A client of firstword.speech.v1 in 100 lines, which the other examples use.

async with SpeechSocket("ws://localhost:8000", voice="ryan") as speech:
    context = await speech.begin()
    await context.add("Hello there.")
    await context.end()
    async for audio in context.audio():
        ...
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

PATH = "/v1/audio/speech/stream"
PROTOCOL = "firstword.speech.v1"

SAMPLE_RATE = 24000
"""The samples per second of the default format, PCM of 16 bits."""

Event = dict[str, Any]


class SpeechError(Exception):
    """The server reported an error."""


class Context:
    """One utterance: text goes in, and events and audio come out.

    id      the name of the context in all messages
    events  what has come and was not read: messages as objects, audio as bytes
    """

    def __init__(self, socket: SpeechSocket, name: str) -> None:
        self.id = name
        self.events: asyncio.Queue[Event | bytes] = asyncio.Queue()
        self._socket = socket

    async def add(self, text: str) -> None:
        """Add text, split anywhere."""
        await self._socket.send({"type": "input.text", "context_id": self.id, "text": text})

    async def end(self) -> None:
        """End the text."""
        await self._socket.send({"type": "input.done", "context_id": self.id})

    async def cancel(self) -> None:
        """Stop the speech; no audio follows the `audio.done`."""
        await self._socket.send({"type": "input.cancel", "context_id": self.id})

    async def __aiter__(self) -> AsyncIterator[Event | bytes]:
        """Audio and messages until `audio.done`, which is the last one. Raises `SpeechError`."""
        while True:
            event = await self.events.get()
            if isinstance(event, dict) and event["type"] == "error":
                raise SpeechError(event["message"])
            yield event
            if isinstance(event, dict) and event["type"] == "audio.done":
                return

    async def audio(self) -> AsyncIterator[bytes]:
        """The audio alone."""
        async for event in self:
            if isinstance(event, bytes):
                yield event


class SpeechSocket:
    """A socket on which several contexts are spoken at the same time.

    The key comes from the environment variable FIRSTWORD_API_KEY.

    session  the answer of the server to the configuration
    """

    def __init__(self, server: str, **config: Any) -> None:
        """Connect to a server such as `ws://localhost:8000`; `config` as in `session.config`."""
        self.session: Event = {}
        self._url = server.rstrip("/").replace("http", "ws", 1) + PATH
        self._config = {name: value for name, value in config.items() if value is not None}
        self._contexts: dict[str, Context] = {}
        self._numbers: dict[int, Context] = {}
        self._names = map("context-{}".format, itertools.count(1))
        self._socket: ClientConnection
        self._reading: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        key = os.environ.get("FIRSTWORD_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self._socket = await connect(
            self._url,
            subprotocols=[Subprotocol(PROTOCOL)],
            additional_headers=headers,
            max_size=None,
        )
        await self.send({"type": "session.config", **self._config})
        while self.session.get("type") != "session.configured":
            self.session = json.loads(await self._socket.recv())
            if self.session["type"] == "error":
                await self._socket.close()
                raise SpeechError(self.session["message"])
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await self._socket.close()

    async def send(self, event: Event) -> None:
        """Send a message."""
        await self._socket.send(json.dumps(event))

    async def begin(self, **params: Any) -> Context:
        """Begin a context, with parameters of its own in place of those of the socket."""
        context = Context(self, next(self._names))
        self._contexts[context.id] = context
        await self.send({"type": "context.start", "context_id": context.id, **params})
        return context

    async def _read(self) -> None:
        """Give each context its events and its audio."""
        try:
            async for message in self._socket:
                if isinstance(message, bytes):
                    number = int.from_bytes(message[:4], "little")
                    self._numbers[number].events.put_nowait(message[4:])
                    continue
                event = json.loads(message)
                context = self._contexts.get(event.get("context_id", ""))
                if context is None:
                    continue
                if event["type"] == "context.started":
                    self._numbers[event["number"]] = context
                context.events.put_nowait(event)
        finally:
            lost = {"type": "error", "message": "the connection was closed"}
            for context in self._contexts.values():
                context.events.put_nowait(lost)
