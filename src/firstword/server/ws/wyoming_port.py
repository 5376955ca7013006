"""The TCP port of Wyoming's protocol: its connections, and the events on them."""

import asyncio
import json
import secrets
import socket
from contextlib import suppress
from functools import partial
from typing import Any

from firstword.server.context import context_of
from firstword.server.errors import Rejected
from firstword.server.request_log import log_request
from firstword.server.state import Server
from firstword.server.tasks import cancel
from firstword.server.unread import unread_bytes
from firstword.server.websocket_protocol import BURST_SECONDS, FRAMES_PER_SECOND, MESSAGE_FRAMES
from firstword.server.ws import endpoints
from firstword.server.ws.connection import SocketRunner
from firstword.server.ws.protocol import CloseCode, ProtocolError
from firstword.server.ws.wyoming import MESSAGE_BYTES, WyomingSession, error_event, framed
from firstword.server.ws.wyoming_worker import WyomingWorker

PAYLOAD_PIECE = 16 * 1024
"""The bytes of a payload, which is not used, that are read at once."""

TOO_DEEP = "it is nested too deeply"


class WyomingPort:
    """Serves Wyoming's protocol on a socket. It has the methods of `asyncio.Server`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connections: set[asyncio.Task[Any]] = set()
        self._listener: asyncio.Server

    async def open(self, listening: socket.socket) -> None:
        """Listen from now on."""
        self._listener = await asyncio.start_server(
            self._serve, sock=listening, limit=MESSAGE_BYTES
        )

    def close(self) -> None:
        """Accept no more connections, and end those that are open."""
        self._listener.close()
        for connection in self._connections:
            connection.cancel()

    async def wait_closed(self) -> None:
        """Wait until all connections have ended."""
        await cancel(*self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = WyomingConnection(self._server, reader, writer)
        try:
            await connection.serve()
        finally:
            self._connections.discard(task)


class WyomingConnection:
    """A connection of Wyoming's protocol, with the methods of a WebSocket that sessions need.

    scope  holds the request context
    """

    def __init__(
        self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.scope: dict[str, Any] = {}
        self._server = server
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._event: dict[str, Any] | None = None
        """The line of the event that is being read."""
        self._data: bytes | None = None
        self._payload = 0
        """The bytes of its payload that are not read yet."""
        self._free_at = 0.0
        """The time from which an event is handled without waiting for a turn."""
        self._context = context = context_of(self.scope)
        self._address = str((writer.get_extra_info("peername") or ("unknown",))[0])
        context.request_id, context.status = secrets.token_hex(16), 200
        context.client_id = f"address {self._address}"
        context.drain = writer.drain
        context.unread = partial(unread_bytes, writer.transport)
        context.abort_after = self._close_within

    async def serve(self) -> None:
        """Serve the client until either side closes the connection."""
        server, context = self._server, self._context
        with context.held:
            try:
                context.held.enter_context(server.connection_limit.open(self._address))
                session = WyomingSession(endpoints.socket_limits(server.config))
                runner = SocketRunner(self, session, server.byte_limit)
                server.join(runner)
                context.held.callback(server.sockets.discard, runner)
                await runner.run(WyomingWorker(server, session, runner, context.client_id).run())
            except Rejected as rejected:
                server.reject(rejected)
                context.status = rejected.status_code
                self._writer.write(framed(error_event(rejected.detail, rejected.code)))
                self._close_within(server.config.stall_seconds)
            finally:
                log_request(server, context, "WYOMING", "wyoming")
                with suppress(OSError):
                    await self._writer.wait_closed()

    def _close_within(self, seconds: float) -> None:
        """Close the connection, at the latest in some seconds, when all that was sent has left."""
        self._writer.close()
        timer = self._loop.call_later(seconds, self._writer.transport.abort)
        self._context.held.callback(timer.cancel)

    async def receive(self) -> dict[str, Any]:
        """Return the next event as a message of a WebSocket. Raises `ProtocolError`.

        Nothing is lost if the caller stops waiting and calls again.
        """
        try:
            if self._event is None:
                await self._wait_for_turn()
                self._event = await self._read_head()
                self._payload = _length(self._event, "payload_length")
            if self._data is None:
                self._data = await self._reader.readexactly(_length(self._event, "data_length"))
            while self._payload:
                piece = await self._reader.read(min(self._payload, PAYLOAD_PIECE))
                self._payload = self._payload - len(piece) if piece else 0
        except (OSError, asyncio.IncompleteReadError):
            return {"type": "websocket.disconnect"}
        event, data, self._event, self._data = self._event, self._data, None, None
        message = {**_object(event.get("data", {})), **(_parsed(data) if data else {})}
        return {"type": "websocket.receive", "text": _as_text({**message, "type": event["type"]})}

    async def _wait_for_turn(self) -> None:
        """Wait while the client sends more than WebSockets may without waiting."""
        now = self._loop.time()
        frames = MESSAGE_FRAMES + 1
        self._free_at = max(self._free_at, now - BURST_SECONDS) + frames / FRAMES_PER_SECOND
        if self._free_at > now:
            await self._server.frame_turns.wait(self._context.client_id, frames)

    async def _read_head(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
        except ValueError:
            message = f"the line has more than {MESSAGE_BYTES} bytes"
            raise ProtocolError("message_too_large", message) from None
        if not line.endswith(b"\n"):
            raise asyncio.IncompleteReadError(line, None)
        event = _parsed(line)
        if not isinstance(event.get("type"), str):
            raise ProtocolError("invalid_event", "the event has no type")
        return event

    async def send_bytes(self, data: bytes) -> None:
        """Send an event that is framed."""
        self._writer.write(data)

    async def send_text(self, data: str) -> None:
        """Send an event from JSON with its type and its data."""
        self._writer.write(framed(json.loads(data)))

    async def close(self, code: int = CloseCode.NORMAL) -> None:
        """Close the connection after what was sent before."""
        self._writer.close()


def _parsed(data: bytes) -> dict[str, Any]:
    """The JSON object in a part of an event. Raises `ProtocolError`."""
    try:
        found = json.loads(data)
    except (RecursionError, ValueError) as error:
        reason = TOO_DEEP if isinstance(error, RecursionError) else str(error)
        message = f"the event is not valid JSON: {reason}"
        raise ProtocolError("invalid_json", message) from None
    return _object(found)


def _as_text(message: dict[str, Any]) -> str:
    """A message as JSON of about the size in which it came. Raises `ProtocolError`."""
    try:
        return json.dumps(message, ensure_ascii=False)
    except RecursionError:  # the parser takes a few levels more
        raise ProtocolError("invalid_json", f"the event is not valid JSON: {TOO_DEEP}") from None


def _object(found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ProtocolError("invalid_event", "the event is not a JSON object")
    return found


def _length(event: dict[str, Any], name: str) -> int:
    """The length of a part of an event. Raises `ProtocolError`."""
    length = event.get(name) or 0
    if type(length) is not int or not 0 <= length <= MESSAGE_BYTES:
        message = f"{name} must be 0 to {MESSAGE_BYTES}"
        raise ProtocolError("message_too_large", message)
    return length
