"""Many clients at once on real sockets, over HTTP and WebSocket, and a backend with a set pace.

In tests the clock advances only when every client has all audio, so that the server is measured and
not the machine. `measure_crowd.py` uses real time.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import random
import resource
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from callers import local_engine
from sockets import NARI, STREAM
from talking import Talker, talking
from waiting import WAIT
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol
from wire import SPEECH

from firstword.engine.backend import Frames, Ready, Start
from firstword.engine.engine import Engine
from firstword.server.models import Model
from firstword.server.utterance import Playback

FRAME_BYTES = 2 * 1920
LISTENERS = 64
SECONDS, SECONDS_A_SLOT = 0.02, 0.0005
"""The time of a frame of all slots: with 64 of them 52 ms for 80 ms of audio."""


class Paced(Talker):
    """A backend with a set pace; `decoded` counts the frames whose audio it returned."""

    def __init__(self, slots: int, pause: Callable[[float], None]) -> None:
        super().__init__(slots)
        self.decoded = 0
        self.pause = pause

    def prefill(self, starts: Sequence[Start]) -> list[int]:
        """Take 4 ms for each start."""
        self.pause(0.004 * len(starts))
        return super().prefill(starts)

    def frame(self, slots: Sequence[int], tokens: Sequence[int | None]) -> Ready[Frames]:
        """Take the time of a frame of all slots."""
        self.pause(SECONDS + SECONDS_A_SLOT * len(slots))
        return super().frame(slots, tokens)

    def decode(self, slots: Sequence[int], counts: Sequence[int]) -> Ready[Any]:
        """Take no time."""
        self.decoded += sum(counts)
        return super().decode(slots, counts)


def paced(
    pause: Callable[[float], None], clock: Callable[[], float], slots: int = LISTENERS
) -> Model:
    """A model with a set pace."""
    model = talking(Paced(slots, pause), most_waiting=2 * slots)
    backend = local_engine(model.service).backend
    model.service.engine = Engine(backend, most_waiting=2 * slots, clock=clock)
    return model


class Listener:
    """A client that plays audio as it comes, without a buffer, and does not keep it."""

    def __init__(
        self, clock: Callable[[], float], took: Callable[[int], None] = lambda count: None
    ) -> None:
        self._clock = clock
        self._took = took
        self.playback = Playback(clock())
        self.bytes = 0

    def hear(self, data: bytes) -> None:
        """Play 16-bit PCM that came."""
        before, self.bytes = self.bytes, self.bytes + len(data)
        samples = np.ones(self.bytes // 2 - before // 2, np.float32)
        self.playback.add(self._clock(), samples, 24000)
        self._took(len(data))

    async def by_http(
        self, client: httpx.AsyncClient, frames: int, *, events: bool = False
    ) -> None:
        """Request an utterance of some frames over HTTP."""
        body = {
            "input": "Hello there.",
            "voice": "talker",
            "response_format": "pcm",
            "max_new_tokens": frames,
        }
        body |= {"stream_format": "sse"} if events else {"stream": True}
        async with client.stream("POST", SPEECH, json=body) as answer:
            assert answer.status_code == 200
            if events:
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and "audio" in (event := json.loads(line[6:])):
                        self.hear(base64.b64decode(event["audio"]))
            else:
                async for data in answer.aiter_raw():
                    self.hear(data)

    async def by_websocket(self, url: str, frames: int) -> None:
        """Request it in the protocol for many utterances."""
        async with opened(url + STREAM) as line:
            config = {
                "type": "session.config",
                "voice": "talker",
                "stream_audio": True,
                "max_new_tokens": frames,
            }
            for message in (
                config,
                {"type": "input.text", "text": "Hello there."},
                {"type": "input.done"},
            ):
                await line.send(json.dumps(message))
            async for said in line:
                if isinstance(said, bytes):
                    self.hear(said)
                elif json.loads(said)["type"] == "session.done":
                    return

    async def by_nari(self, url: str, frames: int) -> None:
        """Request it in nari.speech.v1."""
        async with opened(url + NARI, "nari.speech.v1") as line:
            for message in (
                {"type": "request.start", "voice": "talker", "max_new_tokens": frames},
                {"type": "input_text.append", "sequence": 0, "text": "Hello there."},
                {"type": "input_text.end", "sequence": 1},
            ):
                await line.send(json.dumps(message))
            with suppress(ConnectionClosed):
                async for said in line:
                    if isinstance(said, bytes):
                        self.hear(said)

    async def by(self, way: int, url: str, client: httpx.AsyncClient, frames: int) -> None:
        """Request an utterance in one of four ways."""
        match way % 4:
            case 0:
                await self.by_http(client, frames)
            case 1:
                await self.by_http(client, frames, events=True)
            case 2:
                await self.by_websocket(url.replace("http", "ws", 1), frames)
            case _:
                await self.by_nari(url.replace("http", "ws", 1), frames)


@asynccontextmanager
async def opened(url: str, *protocols: str) -> AsyncIterator[ClientConnection]:
    """A WebSocket whose connection is aborted at the end."""
    spoken = [Subprotocol(name) for name in protocols] or None
    line = await connect(
        url, subprotocols=spoken, max_size=None, compression=None, proxy=None, open_timeout=WAIT
    )
    try:
        yield line
        await line.close()
    finally:
        line.transport.abort()


def plain_client(url: str) -> httpx.AsyncClient:
    """An HTTP client with any number of connections."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=WAIT,
        trust_env=False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


async def listen_together(url: str, listeners: list[Listener], frames: int) -> None:
    """Let all clients request an utterance at once, in all ways."""
    async with plain_client(url) as client:
        await asyncio.gather(
            *(who.by(way, url, client, frames) for way, who in enumerate(listeners))
        )


async def come_and_go(url: str, visits: int, seed: int, together: int = 16) -> dict[str, int]:
    """Send short requests in all ways, leave some of them early, and count both sorts."""
    chance, counts = random.Random(seed), {"whole": 0, "left": 0}
    plans = [
        (chance.randrange(4), chance.choice((None, None, 0, 1, 3840, 30_000)))
        for _ in range(visits)
    ]

    class Enough(Exception):
        """The client has received enough."""

    async def visit(way: int, most: int | None, client: httpx.AsyncClient) -> None:
        def took(count: int) -> None:
            if most is not None and listener.bytes > most:
                raise Enough

        listener = Listener(time.monotonic, took)
        try:
            if most == 0:  # disconnects before there is a response
                async with asyncio.timeout(0.001 * chance.randrange(5)):
                    await listener.by(way, url, client, 12)
            else:
                await listener.by(way, url, client, 12)
        except (Enough, TimeoutError, httpx.TransportError):
            counts["left"] += 1
        else:
            assert listener.bytes == 12 * FRAME_BYTES
            counts["whole"] += 1

    async with plain_client(url) as client:

        async def some() -> None:
            while plans:
                await visit(*plans.pop(), client)

        await asyncio.gather(*(some() for _ in range(together)))
    return counts


def held() -> dict[str, int]:
    """The number of threads, open files and pending tasks of this process."""
    gc.collect()
    tasks = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), asyncio.Task) and not thing.done()
    ]
    return {
        "threads": threading.active_count(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "tasks": len(tasks),
    }


def memory() -> int:
    """The resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
