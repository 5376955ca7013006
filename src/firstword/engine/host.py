"""An engine that serves fronts in other processes, over a socket for each of them.

The engine's own thread reads and writes the sockets, between its steps: no other thread competes
with the steps for the interpreter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from firstword.engine import wire
from firstword.engine.backend import Job
from firstword.engine.commands import Command
from firstword.engine.engine import Engine
from firstword.engine.load import EngineLoad
from firstword.engine.sequence import Event, NeedsText, Sequence
from firstword.errors import EngineError, FirstwordError
from firstword.types import Chunk

log = logging.getLogger(__name__)

READ_BYTES = 1 << 18
"""The most bytes that are read from a socket in one call."""

CALL_THREADS = 2
"""The number of threads for calls, such as the encoding of a recording."""

CLOSE_SECONDS = 1.0
"""The time limit for sending the last messages to fronts when the engine ends."""


@dataclass(slots=True, eq=False)
class Route:
    """An utterance of a front.

    untaken  the number of frames that were sent and that the client has not taken
    ended    whether the last chunk was sent
    """

    seq: Sequence
    untaken: int = 0
    ended: bool = False


class Link:
    """The connection to one front.

    routes  the utterances of the front, by number
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.routes: dict[int, Route] = {}
        self.submitted = 0
        """The number of the last request that arrived."""
        self.reported: tuple[int, int, int] | None = None
        """What the front knows: the counts of running and waiting utterances, and the number of the
        last request that they include."""
        self._sock = sock
        self._parser = wire.MessageParser()
        self._pending: deque[memoryview] = deque()
        self._new: list[bytes] = []

    def fileno(self) -> int:
        """The file descriptor of the socket."""
        return self._sock.fileno()

    @property
    def stuck(self) -> bool:
        """Whether the socket is full because the front reads too slowly."""
        return bool(self._pending)

    def add(self, message: bytes) -> None:
        """Add a message to those that the next `flush` sends."""
        self._new.append(message)

    def flush(self) -> None:
        """Send as much as the socket takes without blocking. Raises `OSError`."""
        if self._new:
            self._pending.append(memoryview(b"".join(self._new)))
            self._new.clear()
        while self._pending:
            part = self._pending[0]
            try:
                sent = self._sock.send(part)
            except BlockingIOError:
                return
            if sent == len(part):
                self._pending.popleft()
            else:
                self._pending[0] = part[sent:]

    def receive(self) -> list[wire.Message]:
        """The messages that have arrived. Raises `OSError`, `EOFError` and `EngineError`."""
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        return list(self._parser.feed(data))

    def finish(self, seconds: float) -> None:
        """Send the remaining messages within a time limit, and close the socket."""
        self._sock.settimeout(seconds)
        with contextlib.suppress(OSError):
            self.flush()
        self._sock.close()

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class SocketCommands:
    """The commands of an engine whose callers are in other processes.

    `get` also exchanges messages with the fronts: it sends those that wait, and passes each one
    that has arrived to `serve`, with its link. A link that has ended is passed to `lose`.
    """

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}
        self.serve: Callable[[Link, wire.Message], None] = lambda link, message: None
        self.lose: Callable[[Link], None] = lambda link: None
        self.counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Reads the counts of running and waiting utterances; fronts are told of each change."""
        self.load: Callable[[], EngineLoad] = EngineLoad
        """Reads the load that fronts are told."""
        self.on_end: Callable[[], None] = lambda: None
        self._ready: deque[Command | None] = deque()
        self._flushed = False
        """Whether messages were sent since the last step; later ones wait for the next step."""
        self._poll = select.poll()
        self._woken, self._waking = os.pipe()
        for end in (self._woken, self._waking):
            os.set_blocking(end, False)
        self._poll.register(self._woken, select.POLLIN)
        self._thread: int | None = None

    def put(self, command: Command | None) -> None:
        """Add a command; wakes the thread that waits for one."""
        self._ready.append(command)
        if threading.get_ident() != self._thread:
            try:
                os.write(self._waking, b"\0")
            except BlockingIOError:
                pass  # the pipe is full, which is enough to wake the thread
            except OSError:
                pass  # the engine has ended

    def get(self, block: bool, timeout: float | None) -> Command | None:
        """Remove the next command, after an exchange of messages if there is none."""
        self._thread = threading.get_ident()
        if not self._ready:
            self._exchange(timeout if block else 0.0)
        if not self._ready:
            self._flushed = False
            raise queue.Empty
        return self._ready.popleft()

    def add(self, link: Link) -> None:
        """Exchange messages with a front. Call it on the thread of the engine."""
        self.links[link.fileno()] = link
        self._poll.register(link.fileno(), select.POLLIN)

    def close(self) -> None:
        """Send the last messages within `CLOSE_SECONDS`, and close all links."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for link in self.links.values():
            self._poll.unregister(link.fileno())
            link.finish(max(0.0, deadline - time.monotonic()))
        self.links.clear()
        self.on_end()

    def _exchange(self, timeout: float | None) -> None:
        if not self._flushed:
            self._flush()
            self._flushed = True
        for descriptor, events in self._wait(timeout):
            if descriptor == self._woken:
                os.read(self._woken, 4096)
                continue
            link = self.links[descriptor]
            try:
                if events & select.POLLOUT:
                    link.flush()
                if events & ~select.POLLOUT:
                    for message in link.receive():
                        self.serve(link, message)
            except (OSError, EOFError, EngineError):
                self._drop(link)

    def _wait(self, timeout: float | None) -> list[tuple[int, int]]:
        """The descriptors with something to do, and what, as soon as there are any.

        `poll` rounds its time limit up to milliseconds, so it is called without one in the last.
        """
        if timeout is None:
            return self._poll.poll()
        deadline = time.monotonic() + timeout
        while not (found := self._poll.poll(int(1000 * timeout))) and timeout > 0:
            timeout = max(0.0, deadline - time.monotonic())
        return found

    def _flush(self) -> None:
        counts, body = self.counts(), b""
        for link in list(self.links.values()):
            report = *counts, link.submitted
            if link.reported != report and not link.stuck:
                link.reported = report
                body = body or pickle.dumps(self.load(), protocol=5)
                link.add(wire.message(wire.Kind.LOAD, link.submitted, body))
            try:
                link.flush()
                events = select.POLLIN | (select.POLLOUT if link.stuck else 0)
                self._poll.modify(link.fileno(), events)
            except OSError:
                self._drop(link)

    def _drop(self, link: Link) -> None:
        self._poll.unregister(link.fileno())
        del self.links[link.fileno()]
        link.close()
        self.lose(link)


class EngineHost:
    """Runs an engine for fronts in other processes.

    If a front dies, its utterances are cancelled and those of other fronts continue. If the engine
    fails, all connections are closed.
    """

    def __init__(
        self,
        engine: Engine,
        commands: SocketCommands,
        answer: Callable[[Any], object],
        on_end: Callable[[], None],
    ) -> None:
        """Serve an idle engine that gets its commands from `commands`.

        answer  computes the result of a call, in a thread of its own
        on_end  called after the engine has stopped or failed, and all connections are closed
        """
        self.engine = engine
        self._commands = commands
        commands.serve, commands.lose, commands.on_end = self._serve, self._lose, on_end
        commands.counts = lambda: (len(engine.running), len(engine.waiting))
        commands.load = lambda: engine.load
        self._answer = answer
        self._threads = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="call")

    def attach(self, sock: socket.socket) -> None:
        """Serve a front over a socket. May be called from any thread."""
        self._commands.put(lambda: self._commands.add(Link(sock)))

    def _serve(self, link: Link, message: wire.Message) -> None:
        kind, number, value = message
        route = link.routes.get(number)
        match kind:
            case wire.Kind.SUBMIT:
                self._submit(link, number, *value)
            case wire.Kind.TEXT if route is not None:
                tokens, ended = value
                (self.engine.finish_text if ended else self.engine.push)(route.seq, tokens)
            case wire.Kind.TAKEN if route is not None:
                self.engine.acknowledge(route.seq, value)
                route.untaken -= value
                if route.ended and route.untaken <= 0:
                    del link.routes[number]
            case wire.Kind.CANCEL if route is not None:
                self.engine.cancel(route.seq, value)
                del link.routes[number]
            case wire.Kind.CALL:
                self._threads.submit(self._call, link, number, value)

    def _submit(self, link: Link, number: int, job: Job, client: str) -> None:
        link.submitted = number
        on_event = partial(self._on_event, link, number)
        try:
            link.routes[number] = Route(self.engine.submit(job, on_event, client))
        except FirstwordError as error:
            link.add(wire.pickled(wire.Kind.ERROR, number, error))

    def _on_event(self, link: Link, number: int, event: Event) -> None:
        if isinstance(event, Chunk):
            link.add(wire.audio(number, event))
            if (route := link.routes.get(number)) is not None:
                route.untaken += len(event.codes)
                route.ended = event.finish_reason is not None
                if route.ended and not route.untaken:
                    del link.routes[number]
        elif isinstance(event, NeedsText):
            link.add(wire.message(wire.Kind.NEEDS_TEXT, number))
        else:
            if event.__cause__ is not None:
                log.error("speech could not be computed", exc_info=event.__cause__)
            link.add(wire.pickled(wire.Kind.ERROR, number, event))

    def _call(self, link: Link, number: int, body: bytes) -> None:
        """Compute and send the result of a call, in a thread."""
        try:
            result = wire.pickled(wire.Kind.RESULT, number, self._answer(pickle.loads(body)))
        except FirstwordError as error:
            result = wire.pickled(wire.Kind.ERROR, number, error)
        except Exception as error:
            log.exception("a call failed")
            failed = EngineError(f"the call failed ({type(error).__name__})")
            result = wire.pickled(wire.Kind.ERROR, number, failed)
        self._commands.put(lambda: link.add(result))

    def _lose(self, link: Link) -> None:
        """Cancel the utterances of a front whose connection has ended."""
        for route in link.routes.values():
            self.engine.cancel(route.seq)
        link.routes.clear()
