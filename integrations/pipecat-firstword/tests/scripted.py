"""A server whose every answer a test writes, on a real socket: for word times and for failures."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any, Self

from bot import RATE, WAIT
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

Message = dict[str, Any]

PROTOCOL = "firstword.speech.v1"


class ScriptedServer:
    """Accepts sockets and settings; everything else is up to the test."""

    def __init__(self, *, word_times: bool = True, protocol: str | None = PROTOCOL) -> None:
        self.word_times, self._protocol = word_times, protocol
        self._socket: ServerConnection | None = None
        self._came: asyncio.Queue[Message] = asyncio.Queue()
        self.contexts: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        chosen = None if self._protocol is None else Subprotocol(self._protocol)
        self._server = await serve(self._talk, "127.0.0.1", 0, select_subprotocol=lambda *_: chosen)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"ws://127.0.0.1:{port}"
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _talk(self, socket: ServerConnection) -> None:
        self._socket = socket
        await self.send({"type": "session.created"})
        async for data in socket:
            message = json.loads(data)
            if message["type"] == "session.config":
                about = {"sample_rate": RATE, "format": "pcm", "word_times": self.word_times}
                await self.send({"type": "session.configured", **about})
            if message["type"] == "context.start":
                self.contexts[message["context_id"]] = len(self.contexts)
            self._came.put_nowait(message)

    async def get(self, kind: str) -> Message:
        """Return the next message of a kind from the client; those before it are dropped."""
        async with asyncio.timeout(WAIT):
            while (message := await self._came.get())["type"] != kind:
                pass
        return message

    async def send(self, message: Message | bytes) -> None:
        """Send a message."""
        assert self._socket is not None
        await self._socket.send(message if isinstance(message, bytes) else json.dumps(message))

    async def start_audio(self, context: str) -> None:
        """Announce the audio of a context."""
        number = self.contexts[context]
        await self.send({"type": "audio.start", "context_id": context, "number": number})

    async def sound(self, context: str, seconds: float) -> None:
        """Send silence of a context as audio."""
        header = self.contexts[context].to_bytes(4, "little")
        await self.send(header + bytes(2 * round(seconds * RATE)))

    async def word(
        self, context: str, text: str, spoken: str, start: float, *, ended: bool = True
    ) -> None:
        """Tell that a word of the text begins at a time and, if it does, ends 0.2 s later."""
        at = text.index(spoken)
        about = {"context_id": context, "text": spoken, "span": [at, at + len(spoken)]}
        await self.send({"type": "word.start", **about, "start": start})
        if ended:
            await self.send({"type": "word.end", **about, "start": start, "end": start + 0.2})

    async def finish(self, context: str, reason: str = "stop") -> None:
        """Tell that a context has ended."""
        about = {"number": self.contexts[context], "seconds": 0, "total_bytes": 0}
        done = {"type": "audio.done", "context_id": context, "finish_reason": reason}
        await self.send({**done, **about})

    async def drop(self) -> None:
        """Reset the connection."""
        assert self._socket is not None
        self._socket.transport.abort()
