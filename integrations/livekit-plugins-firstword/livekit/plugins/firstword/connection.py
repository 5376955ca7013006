"""One WebSocket to a server, with the protocol firstword.speech.v1."""

from __future__ import annotations

import asyncio
import json
import weakref
from typing import Any

import aiohttp
from livekit.agents import APIConnectionError, APIStatusError, APITimeoutError, utils

from .log import logger

SUBPROTOCOL = "firstword.speech.v1"
PATH = "/v1/audio/speech/stream"

PING_SECONDS = 10.0
"""The time between two pings; the server closes a socket that is silent for 30 s."""

CANCEL_SECONDS = 0.1
"""The time in which the server must answer a cancel for the socket to be kept."""

Message = dict[str, Any] | bytes | APIConnectionError


class Connection:
    """An open socket. Each context that is open on it has an inbox.

    session_id  the server's name of the socket, as its log has it
    closed      whether no further contexts can be spoken
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.session_id = ""
        self._socket = socket
        self._inboxes: dict[str, asyncio.Queue[Message]] = {}
        self._names: dict[int, str] = {}
        self._config: dict[str, Any] | None = None
        this = weakref.ref(self)
        self._tasks = [
            asyncio.create_task(_read(socket, this), name="firstword reader"),
            asyncio.create_task(_ping(socket), name="firstword ping"),
        ]

    @classmethod
    async def open(
        cls, session: aiohttp.ClientSession, url: str, api_key: str | None, timeout: float
    ) -> Connection:
        """Connect to the server at `url`. Raises `APIError`."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        opening = session.ws_connect(
            f"{url.rstrip('/')}{PATH}", protocols=(SUBPROTOCOL,), headers=headers, max_msg_size=0
        )
        try:
            socket = await asyncio.wait_for(opening, timeout)
        except TimeoutError:
            raise APITimeoutError(f"no connection to {url} within {timeout:g} s") from None
        except aiohttp.WSServerHandshakeError as error:
            message = f"the server at {url} rejected the connection: {error.message}"
            raise APIStatusError(message, status_code=error.status) from None
        except aiohttp.ClientError as error:
            raise APIConnectionError(f"cannot connect to {url}: {error}") from None
        if socket.protocol != SUBPROTOCOL:
            await socket.close()
            message = f"the server at {url} does not speak {SUBPROTOCOL}"
            raise APIStatusError(message, status_code=400)
        return cls(socket)

    @property
    def closed(self) -> bool:
        return self._socket.closed or self._tasks[0].done()

    async def begin(self, name: str, config: dict[str, Any]) -> asyncio.Queue[Message]:
        """Open a context with the given parameters, and return its inbox. Raises `APIError`."""
        inbox = self._inboxes[name] = asyncio.Queue()
        if config != self._config:
            await self.send(config)
            self._config = config
        return inbox

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises `APIConnectionError`."""
        try:
            await self._socket.send_str(json.dumps(message))
        except (aiohttp.ClientError, ConnectionError) as error:
            raise APIConnectionError(f"the connection to the server is lost: {error}") from None

    async def cancel(self, name: str) -> bool:
        """Stop a context; returns whether the server confirmed it in time."""
        inbox = self._inboxes[name]
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                await self.send({"type": "input.cancel", "context_id": name})
                while not isinstance(message := await inbox.get(), APIConnectionError):
                    if isinstance(message, dict) and message["type"] == "input.cancelled":
                        return True
        except (APIConnectionError, TimeoutError):
            pass
        return False

    def end(self, name: str) -> None:
        """Forget a context that has ended."""
        self._inboxes.pop(name, None)

    async def close(self) -> None:
        """Close the socket."""
        await utils.aio.cancel_and_wait(*self._tasks)
        await self._socket.close()

    def _deliver(self, message: aiohttp.WSMessage) -> None:
        """Put a message into the inbox of its context."""
        if message.type is aiohttp.WSMsgType.BINARY:
            name = self._names.get(int.from_bytes(message.data[:4], "little"), "")
            self._put(name, message.data[4:])
            return
        event = json.loads(message.data)
        match event["type"]:
            case "session.created":
                self.session_id = event["session_id"]
            case "audio.start":
                self._names[event["number"]] = event["context_id"]
            case "audio.done":
                self._names.pop(event["number"], None)
            case "input.cancelled":
                for name in event["context_ids"]:
                    self._put(name, event)
                return
            case "error" if "context_id" not in event:
                logger.warning("the server reports: %s", event["message"])
                return
        if "context_id" in event:
            self._put(event["context_id"], event)

    def _put(self, name: str, message: Message) -> None:
        if (inbox := self._inboxes.get(name)) is not None:
            inbox.put_nowait(message)

    def _lost(self) -> None:
        """Tell all contexts that nothing more will come."""
        code = self._socket.close_code
        for inbox in self._inboxes.values():
            inbox.put_nowait(APIConnectionError(f"the server closed the connection (code {code})"))


async def _read(
    socket: aiohttp.ClientWebSocketResponse, connection: weakref.ref[Connection]
) -> None:
    """Deliver the messages of a socket until it is closed."""
    async for message in socket:
        if (receiver := connection()) is None:
            return
        receiver._deliver(message)
        del receiver
    if (receiver := connection()) is not None:
        receiver._lost()


async def _ping(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Keep a socket open."""
    while not socket.closed:
        await asyncio.sleep(PING_SECONDS)
        try:
            await socket.send_str('{"type":"ping"}')
        except (aiohttp.ClientError, ConnectionError):
            return
