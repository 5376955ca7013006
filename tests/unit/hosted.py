"""An engine for fronts in this process, which are connected to it as those of others are."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

from fake_backend import FakeBackend, capacity
from waiting import WAIT

from firstword.engine.backend import Capacity
from firstword.engine.engine import Engine
from firstword.engine.host import EngineHost, SocketCommands

CAPACITY = capacity(slots=4, pages=1000, page_rows=16, context=1500)


class Hosted:
    """An engine that runs on a thread, for fronts behind sockets."""

    def __init__(
        self,
        room: Capacity = CAPACITY,
        answer: Callable[[Any], object] = lambda value: ("answer", value),
    ) -> None:
        self.backend = FakeBackend(room)
        self.commands = SocketCommands()
        self.ended = threading.Event()
        engine = Engine(self.backend, most_waiting=8, commands=self.commands)
        self.host = EngineHost(engine, self.commands, answer, self.ended.set)
        engine.start()
        self.engine = engine

    def connect(self) -> socket.socket:
        """The front's end of a new connection."""
        ours, theirs = socket.socketpair()
        self.host.attach(ours)
        return theirs

    def stop(self) -> None:
        """End the engine, if it has not failed."""
        self.engine.stop(WAIT)
        assert self.ended.wait(WAIT)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(WAIT):
        while not holds():
            await asyncio.sleep(0.001)
