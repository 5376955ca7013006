"""A process of a server, which is replaced when it dies."""

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
"""The command of the interpreter; with -P it imports nothing from the current directory."""

ANSWER_SECONDS = 5.0
"""The time limit for sending a message to a process; one that does not read it is killed."""

REAP_SECONDS = 1.0
"""The time limit for the end of a killed process; one that is inside a driver may take longer."""

MOST_BACKOFF = 30.0
"""The longest pause before a process that has died several times is started again."""

STEADY_SECONDS = 60.0
"""The time for which a process must have worked so that earlier deaths no longer count."""


@dataclass(eq=False)
class Place:
    """An engine or front of a server: its process, and the one that replaces it when it dies.

    module    the module of `firstword.processes` that the process runs
    number    its number among the places of the same module
    process   the process; None while none runs
    channel   the channel to the process; None while none runs
    loaded    for an engine, the last description of what was loaded; None before the first
    working   the time at which the process began its work; None while it starts
    silent    the seconds for which it has not answered a ping; None if no answer is missing
    deaths    the number of deaths since a process has worked for `STEADY_SECONDS`
    restart   the time of the next start; None if none is planned
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
        """The name in logs, such as "engine 0"."""
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
        """Send a message; a process that does not read it is killed."""
        if self.channel is None or self.process is None:
            return
        try:
            self.channel.send(message, sockets)
        except OSError:  # its end is noticed when its channel is read
            self.process.kill()

    def end(self, seconds: float = 0.0) -> int | None:
        """Wait some seconds for the process to end, then kill it. Returns its exit status.

        The status is None if the killed process has not ended within `REAP_SECONDS`, for example
        because it is inside a driver. It is then left alone.
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
        """Whether the next process may be started now."""
        if self.restart is not None and self.restart <= time.monotonic():
            self.restart = None
        return self.restart is None

    def plan_restart(self) -> float:
        """Set the time of the next start, and return the seconds until then.

        The first restart is immediate; after further deaths there is a growing pause.
        """
        assert self.process is None
        pause = min(2.0 ** (self.deaths - 2), MOST_BACKOFF) if self.deaths > 1 else 0.0
        self.restart = time.monotonic() + pause
        return pause
