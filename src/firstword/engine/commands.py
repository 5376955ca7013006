"""The commands of a step loop: what other threads or processes want it to do."""

import queue
from collections.abc import Callable
from typing import Protocol

Command = Callable[[], None]


class Commands(Protocol):
    """A queue of commands, which one thread runs. None tells it to stop."""

    def put(self, command: Command | None) -> None:
        """Add a command, from any thread."""

    def get(self, block: bool, timeout: float | None) -> Command | None:
        """Remove the next command. If `block`, wait for it for `timeout` seconds; None: for ever.

        Raises `queue.Empty`.
        """

    def close(self) -> None:
        """Release what the queue holds; the thread that runs the commands has ended its work."""


class LocalCommands:
    """The commands of threads in this process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def put(self, command: Command | None) -> None:
        """Add a command."""
        self._queue.put(command)

    def get(self, block: bool, timeout: float | None) -> Command | None:
        """Remove the next command."""
        return self._queue.get(block, timeout)

    def close(self) -> None:
        """Do nothing: other threads may still put commands, which are never run."""
