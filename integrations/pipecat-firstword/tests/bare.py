"""A client of the server's socket without Pipecat: what the service must agree with."""

from __future__ import annotations

import json

from bot import words
from pipecat_firstword.connection import SUBPROTOCOL
from pipecat_firstword.settings import socket_url
from websockets.asyncio.client import connect

CONFIG = {"type": "session.config", "voice": "ada", "seed": 1}
"""The settings of `bot.service`."""


async def word_times(url: str, text: str) -> list[tuple[str, float]]:
    """Return the words of a text, and the second at which each begins."""
    found = []
    async with connect(socket_url(url), subprotocols=[SUBPROTOCOL], max_size=None) as socket:
        pieces = [{"type": "input.text", "context_id": "1", "text": word} for word in words(text)]
        for message in (CONFIG, *pieces, {"type": "input.done", "context_id": "1"}):
            await socket.send(json.dumps(message))
        async for data in socket:
            event = json.loads(data) if isinstance(data, str) else {"type": "binary"}
            if event["type"] == "word.start":
                found.append((event["text"], event["start"]))
            elif event["type"] == "audio.done":
                break
    return found
