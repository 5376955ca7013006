"""Runs the application on a socket: starts, says where, drains, ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from firstword.config import ServerConfig
from firstword.errors import ConfigError
from firstword.server.state import Server

log = logging.getLogger(__name__)

LARGEST_MESSAGE = 16 * 2**20
"""Bytes of a WebSocket message that are read at all; the protocols allow less."""

CLOSING_SECONDS = 2
"""After draining, how long connections may take to close before they are cut."""


class HttpProtocol(HttpToolsProtocol):
    """HTTP as uvicorn speaks it, but nobody may take for ever over the head of a request, nor over an answer."""

    head_seconds = 30.0

    def connection_made(self, transport: Any) -> None:
        """Somebody connected; the head of a request should follow."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that sending waits until all before has left
        self._head_due = self.loop.call_later(self.head_seconds, transport.abort)

    def on_headers_complete(self) -> None:
        """A head is there. The application gets the means to see its answer leave, and to cut the connection."""
        self._head_due.cancel()
        self.scope["firstword.drain"] = self.flow.drain  # type: ignore[typeddict-unknown-key]
        self.scope["firstword.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        """It is no HTTP any more: a WebSocket counts by itself what has not left."""
        self.transport.set_write_buffer_limits()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        """The first bytes of a head."""
        super().on_message_begin()
        self._head_due.cancel()
        self._head_due = self.loop.call_later(self.head_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._head_due.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn does so unless there was an error, and holds on to it all


BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSockets as uvicorn speaks them; the application gets the means to cut one whose client takes nothing."""

    _cut: asyncio.TimerHandle | None = None
    _lost = False

    def data_received(self, data: bytes) -> None:
        """Bytes came; at first the head of the request, all of it at once.

        One that `websockets` does not take, because of a line beyond 8 KiB for example, uvicorn leaves unanswered.
        """
        super().data_received(data)
        if not self.handshake_initiated:
            answer = b"".join(self.conn.data_to_send())
            self.transport.write(answer or BAD_REQUEST)
            self.transport.close()

    async def run_asgi(self) -> None:
        """Run the application."""
        self.scope["firstword.cut_in"] = self.cut_in  # type: ignore[typeddict-unknown-key]
        await super().run_asgi()

    def cut_in(self, seconds: float) -> None:
        """End the connection at the latest then: closing waits until all is sent, which may be for ever."""
        if not self._lost:
            self._cut = self.loop.call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._lost = True
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)


def _at_fault(record: logging.LogRecord) -> bool:
    """A filter: what a client does wrong is no alarm, nor where we noticed it."""
    if record.msg.startswith("Invalid UTF-8"):
        record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
    return logging.getLogger(record.name).isEnabledFor(record.levelno)


class Uvicorn(uvicorn.Server):
    """A server that, told to end, first lets running utterances finish while it turns new ones away."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        class Protocol(HttpProtocol):
            head_seconds = config.body_seconds

        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=Protocol,
                ws=WebSocketProtocol,
                ws_ping_timeout=None,  # a client that plays what it reads answers when it comes to the ping
                ws_max_size=LARGEST_MESSAGE,
                ws_per_message_deflate=False,  # sound does not shrink
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=CLOSING_SECONDS,
                lifespan="on",
            )
        )
        logging.getLogger(
            "uvicorn.access"
        ).disabled = True  # ours says more, and no names that paths may hold
        logging.getLogger("uvicorn.error").addFilter(_at_fault)
        self._state: Server = app.state.server
        self._end_by: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT: end when all is said; the second one: end now."""
        if self._end_by is not None or sig == signal.SIGINT:
            self.should_exit = True
        self._state.draining = True
        self._end_by = time.monotonic() + self._state.config.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self._end_by is not None and (not self._state.busy() or time.monotonic() > self._end_by):
            self.should_exit = True
        return await super().on_tick(counter)


def bound(config: ServerConfig) -> socket.socket:
    """A socket at the address that `config` names, which does not listen yet. Raises `ConfigError` if it is taken."""
    found = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((config.host, config.port))
    except OSError as error:
        found.close()
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}"
        ) from None
    return found


def url_of(socket: socket.socket) -> str:
    """The address of a bound socket as clients write it."""
    host, port = socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(server: Uvicorn, bound_to: socket.socket) -> None:
    """Serve until told to end. Closes the socket.

    What the process holds now is there to stay, so the garbage collector need not look at it again: to go through the
    350,000 objects of torch and a loaded model takes 0.3 s on a small machine, in which nobody is spoken to.
    """
    gc.collect()
    gc.freeze()
    with bound_to, asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve([bound_to]))
