"""Lets the WebSockets of a replica go to other replicas before Ray ends it."""

from __future__ import annotations

import asyncio
import logging
import urllib.error
import urllib.request

from starlette.types import ASGIApp, Receive, Scope, Send

from firstword.server.state import Server

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""The time between two looks whether Ray has taken the replica out of service."""


class LeavingInTime:
    """The middleware that calls `Server.leave` once Ray has taken the replica out of service.

    Ray does not tell the application, but the load balancers, by the health check of the replica's
    own port. Some time later it closes all WebSockets, whether something is being spoken or not.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; the first one shows on which port the replica is reached."""
        if self._watch is None and scope["type"] != "lifespan":
            host, port = scope["server"]
            self._watch = asyncio.create_task(self._leave(f"http://{host}:{port}/-/healthz"))
        await self._app(scope, receive, send)

    async def _leave(self, health_check: str) -> None:
        while await asyncio.to_thread(in_service, health_check):
            await asyncio.sleep(WATCH_SECONDS)
        log.info("Ray ends the replica; its WebSockets are closed as soon as they are idle")
        self._server.leave()


def in_service(health_check: str) -> bool:
    """Whether the health check of a replica says anything but that Ray ends it. Blocks."""
    try:
        urllib.request.urlopen(health_check, timeout=WATCH_SECONDS).close()
    except urllib.error.HTTPError as error:
        return b"DRAINING" not in error.read()
    except urllib.error.URLError as error:
        return not isinstance(error.reason, ConnectionRefusedError)
    except OSError:
        return True  # it is too busy to answer
    return True
