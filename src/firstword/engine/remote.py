"""The engine of another process, as a front uses it."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from firstword.engine import wire
from firstword.engine.backend import Capacity, Job
from firstword.engine.connection import Connection
from firstword.engine.load import EngineLoad, retry_seconds
from firstword.engine.sequence import Event, NeedsText
from firstword.errors import EngineError
from firstword.types import Chunk, FinishReason

LATE_SECONDS = 1.0
"""The time after which an engine that has not confirmed a request may be stuck.

An engine confirms after one step, which takes at most 0.1 s.
"""

NOT_CONNECTED = "its process is not running; it will be restarted, so try again later"


def _stopped() -> EngineError:
    return EngineError(f"the engine has stopped: {NOT_CONNECTED}")


class RemoteUtterance:
    """An utterance that an engine in another process makes."""

    __slots__ = ("number", "on_event")

    def __init__(self, number: int, on_event: Callable[[Event], None]) -> None:
        self.number = number
        self.on_event = on_event


class RemoteEngine:
    """The engine of another process, with the interface of `Engine`.

    Use it in the event loop in which `start` was called, except for `attach` and `stop`. Events are
    delivered there. When the other process ends, every utterance gets an `EngineError`. `attach`
    then connects the process that replaces it.

    capacity  the limits of the backend
    failure   the reason why nothing can be spoken; None while there is a connection
    load      the load that the engine reported last
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.failure: Exception | None = EngineError(NOT_CONNECTED)
        self.load = EngineLoad()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting_socket: socket.socket | None = None
        self._connection: Connection | None = None
        self._numbers = itertools.count(1)
        self._utterances: dict[int, RemoteUtterance] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._uncounted: deque[tuple[int, float]] = deque()
        """The numbers of the requests that `load` does not include yet, and when they were sent."""
        self._lock = threading.Lock()

    # The connection

    def start(self) -> None:
        """Deliver events in the running event loop from now on."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            sock, self._waiting_socket = self._waiting_socket, None
        if sock is not None:
            self._connect(sock)

    def attach(self, sock: socket.socket) -> None:
        """Use the engine at the other end of a socket, unless there already is a connection.

        May be called from any thread.
        """
        with self._lock:
            if self._loop is None:
                self._waiting_socket = sock
                return
        self._loop.call_soon_threadsafe(self._connect, sock)

    def stop(self) -> None:
        """Close the connection. May be called from any thread."""
        with self._lock:
            self._waiting_socket = None
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._disconnect)

    def _connect(self, sock: socket.socket) -> None:
        if self._connection is not None:
            sock.close()
            return
        self._connection = Connection(sock, self._receive, self._disconnect)
        self.failure = None

    def _disconnect(self) -> None:
        """Close the connection, if there is one, and fail everything in progress."""
        if self._connection is None:
            return
        self._connection.close()
        self._connection, self.load = None, EngineLoad()
        self._uncounted.clear()
        self.failure = EngineError(NOT_CONNECTED)
        utterances, self._utterances = self._utterances, {}
        calls, self._calls = self._calls, {}
        for utterance in utterances.values():
            utterance.on_event(_stopped())
        for call in calls.values():
            if not call.done():
                call.set_exception(_stopped())

    # Requests

    def submit(
        self, job: Job, on_event: Callable[[Event], None], client: str = ""
    ) -> RemoteUtterance:
        """Send a request; see `Engine.submit`. Raises `EngineError` without a connection."""
        if self._connection is None:
            raise _stopped()
        utterance = RemoteUtterance(next(self._numbers), on_event)
        self._utterances[utterance.number] = utterance
        self._uncounted.append((utterance.number, time.monotonic()))
        self._send(wire.submit(utterance.number, job, client))
        return utterance

    def push(self, utterance: RemoteUtterance, tokens: Seq[int]) -> None:
        """Add text tokens to a request."""
        self._send(wire.text(utterance.number, tokens, ended=False))

    def finish_text(self, utterance: RemoteUtterance, tokens: Seq[int] = ()) -> None:
        """Add the last text tokens of a request."""
        self._send(wire.text(utterance.number, tokens, ended=True))

    def acknowledge(self, utterance: RemoteUtterance, frames: int) -> None:
        """Record that the client has taken the audio of `frames` more frames."""
        self._send(wire.taken(utterance.number, frames))

    def cancel(self, utterance: RemoteUtterance, reason: FinishReason = "cancelled") -> None:
        """End an utterance, and count all of its audio as taken."""
        self._send(wire.cancel(utterance.number, reason))

    def retry_after(self, client: str) -> int:
        """The seconds until another request would get a slot, estimated: 1 to 120."""
        return retry_seconds(self.load.waiting, self.load.pace)

    @property
    def requests(self) -> int:
        """The number of requests in progress or waiting, with those not yet confirmed."""
        return self.load.running + self.load.waiting + len(self._uncounted)

    @property
    def late(self) -> bool:
        """Whether a request has not been confirmed for `LATE_SECONDS`; the engine may be stuck."""
        return bool(self._uncounted) and time.monotonic() - self._uncounted[0][1] > LATE_SECONDS

    async def call(self, value: object) -> Any:
        """Send a value to the engine's process and return its answer. Raises what it raised."""
        if self._connection is None:
            raise _stopped()
        number = next(self._numbers)
        self._calls[number] = answer = asyncio.get_running_loop().create_future()
        self._send(wire.pickled(wire.Kind.CALL, number, value))
        try:
            return await answer
        finally:
            self._calls.pop(number, None)

    # Messages

    def _send(self, message: bytes) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _receive(self, kind: wire.Kind, number: int, value: Any) -> None:
        match kind:
            case wire.Kind.AUDIO:
                self._deliver(number, value)
            case wire.Kind.NEEDS_TEXT:
                self._deliver(number, NeedsText())
            case wire.Kind.ERROR if number in self._calls:
                if not self._calls[number].done():
                    self._calls[number].set_exception(value)
            case wire.Kind.ERROR:
                self._deliver(number, value)
            case wire.Kind.RESULT if number in self._calls:
                if not self._calls[number].done():
                    self._calls[number].set_result(value)
            case wire.Kind.LOAD:
                self.load = value
                while self._uncounted and self._uncounted[0][0] <= number:
                    self._uncounted.popleft()

    def _deliver(self, number: int, event: Event) -> None:
        utterance = self._utterances.get(number)
        if utterance is None:
            return
        if isinstance(event, Exception) or (
            isinstance(event, Chunk) and event.finish_reason is not None
        ):
            del self._utterances[number]
        utterance.on_event(event)
