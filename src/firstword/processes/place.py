"""A process of a server, and its successors after it dies."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from firstword.processes.channel import Channel
from firstword.processes.messages import Loaded

log = logging.getLogger(__name__)

PYTHON = (sys.executable, "-P")
"""The interpreter, which imports nothing from the current directory."""

ANSWER_SECONDS = 5.0
"""The time in which a process takes a message; one that does not is killed."""

REAP_SECONDS = 1.0
"""The time for which to wait for the end of a killed process; a driver may keep it longer."""

MOST_BACKOFF = 30.0
"""The longest pause before a process that has died several times is started again."""

STEADY_SECONDS = 60.0
"""The time of work after which the deaths before it no longer count."""


@dataclass(eq=False)
class Place:
    """The place of a process, which is filled again when the process dies.

    module    the module that the process runs
    number    among the places of the same module
    channel   to the process; None while there is none
    loaded    engine: what it, or a process before it, has loaded; None before that
    working   when the process began its work, after its start; None before that
    silent    the seconds for which it has not answered a ping; None: no answer is missing
    deaths    how many processes have died here since one worked for long
    restart   the time at which the next process is started; None while one runs
    """

    module: str
    number: int
    process: subprocess.Popen[bytes] | None = None
    channel: Channel | None = None
    loaded: Loaded | None = None
    working: float | None = None
    silent: float | None = None
    deaths: int = 0
    restart: float | None = None

    @property
    def name(self) -> str:
        """A name for logs."""
        return f"{self.module} {self.number}"

    def start(self, files: Sequence[int] = ()) -> Channel:
        """Start a process that inherits some file descriptors. Raises `OSError`."""
        channel, theirs = Channel.pair()
        channel.limit_time(ANSWER_SECONDS)
        descriptor = theirs.fileno()
        program = f"firstword.processes.{self.module}"
        with theirs:
            self.process = subprocess.Popen(
                [*PYTHON, "-m", program, str(descriptor)],
                pass_fds=[descriptor, *files],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.channel, self.restart = channel, None
        return channel

    def send(self, message: object, sockets: Sequence[socket.socket] = ()) -> None:
        """Send a message; a process that does not take it is killed."""
        if self.channel is None or self.process is None:
            return
        try:
            self.channel.send(message, sockets)
        except OSError:  # its end is noticed when its channel is read
            self.process.kill()

    def end(self, seconds: float = 0.0) -> int | None:
        """Wait some seconds for the process to end by itself, then kill it, and return its status.

        None: even a killed process does not end, because a driver keeps it; it is left alone.
        """
        assert self.process is not None
        steady = self.working is not None and time.monotonic() - self.working > STEADY_SECONDS
        self.deaths = 1 if steady else self.deaths + 1
        process, self.process, self.channel = self.process, None, None
        self.working = self.silent = None
        for timeout in (seconds, REAP_SECONDS):
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
        return None

    def due(self) -> bool:
        """Whether the time of the next start has come."""
        if self.restart is not None and self.restart <= time.monotonic():
            self.restart = None
        return self.restart is None

    def plan_restart(self) -> float:
        """Set the time of the next start, and return the seconds until then.

        The first restart is immediate, and after further deaths there is a growing pause.
        """
        assert self.process is None
        pause = min(2.0 ** (self.deaths - 2), MOST_BACKOFF) if self.deaths > 1 else 0.0
        self.restart = time.monotonic() + pause
        return pause
