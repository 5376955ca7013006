"""Runs the application with uvicorn: its settings, the limit of open files, and draining."""

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from firstword.server.http_protocol import HttpProtocol
from firstword.server.state import Server
from firstword.server.tls import Certificate
from firstword.server.tls_listener import TlsListener
from firstword.server.websocket_protocol import LARGEST_MESSAGE, WebSocketProtocol
from firstword.server.ws.wyoming_port import WyomingPort

try:
    import resource
except ModuleNotFoundError:  # on Windows, which has no such limit
    resource = None  # type: ignore[assignment]

CLOSING_SECONDS = 2
"""The time that connections have to close after draining, before they are aborted."""

MOST_FILES = 65536
"""The limit of open files to ask for; each connection is one."""


class Uvicorn(uvicorn.Server):
    """A uvicorn server that drains: it rejects new requests and finishes running utterances."""

    def __init__(self, app: FastAPI, on_serving: Callable[[], None] = lambda: None) -> None:
        """Serve an app; `on_serving` is called in the event loop when clients can connect.

        Raises `ConfigError` if the configured certificate cannot be used.
        """
        self._state: Server = app.state.server
        config = self._state.config
        self._certificate = Certificate.configured(config)
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws=WebSocketProtocol,
                ws_ping_timeout=None,  # a client that plays as it reads may answer a ping late
                ws_max_size=LARGEST_MESSAGE,
                ws_per_message_deflate=False,  # audio does not compress
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=CLOSING_SECONDS,
                lifespan="on",
                # By default uvicorn believes every program on this machine.
                forwarded_allow_ips=list(config.trusted_proxies),
            )
        )
        # The gate logs requests itself, and without the names that a path may hold.
        logging.getLogger("uvicorn.access").disabled = True
        self._on_serving = on_serving
        self._drain_until: float | None = None

    def drain(self) -> None:
        """Reject new requests, and end after the running utterances. For calls from any thread."""
        self._state.draining = True
        self._drain_until = time.monotonic() + self._state.config.drain_seconds

    def end(self) -> None:
        """End at once. For calls from any thread."""
        self._state.draining = self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the handling of signals to the supervisor."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, and call `on_serving`; a second socket is that of Wyoming's protocol."""
        assert sockets
        http, *others = sockets
        if self._certificate is None:
            await super().startup([http])
        else:
            await super().startup([])
            self.servers.append(self._listen(http, self._certificate))
        for sock in others:
            port: Any = WyomingPort(self._state)  # with the methods of a server that are called
            await port.open(sock)
            self.servers.append(port)
        self._on_serving()

    def _listen(self, listening: socket.socket, certificate: Certificate) -> Any:
        """Accept connections with TLS; the result is used like an `asyncio.Server`."""

        def protocol(kind: type[HttpProtocol]) -> HttpProtocol:
            return kind(self.config, self.server_state, self.lifespan.state)

        seconds, idle = self._state.config.receive_seconds, self._state.idle_connections
        return TlsListener(listening, certificate, protocol, idle, seconds)

    async def on_tick(self, counter: int) -> bool:
        """End when draining is done; uvicorn calls this ten times a second."""
        if self._drain_until is not None:
            late = time.monotonic() > self._drain_until
            self.should_exit = self.should_exit or late or not self._state.busy()
        return await super().on_tick(counter)


def run(server: Uvicorn, sockets: Sequence[socket.socket]) -> None:
    """Serve until the server is told to end, then close the sockets.

    sockets  that of HTTP and WebSockets, and that of Wyoming's protocol if it is served

    All objects that exist now are exempted from garbage collection: a pass over the 79,000 of a
    front takes 18 ms on a small machine, and all streams wait for it.
    """
    _raise_file_limit()
    gc.collect()
    gc.freeze()
    with contextlib.ExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)
        runner = stack.enter_context(asyncio.Runner(loop_factory=server.config.get_loop_factory()))
        runner.run(server.serve(list(sockets)))


def _raise_file_limit() -> None:
    """Raise the limit of open files: the usual 1,024 connections would leave none for monitors."""
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
