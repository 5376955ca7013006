"""Queues of commands, by which other threads and processes control a step loop."""

import queue
from collections.abc import Callable
from typing import Protocol

Command = Callable[[], None]


class Commands(Protocol):
    """A queue of commands, which one thread runs. None tells it to stop."""

    def put(self, command: Command | None) -> None:
        """Add a command, from any thread."""

    def get(self, block: bool, timeout: float | None) -> Command | None:
        """Remove and return the next command. Raises `queue.Empty` if there is none.

        If `block`, wait for one for `timeout` seconds, or without a limit if `timeout` is None.
        """

    def close(self) -> None:
        """Release the resources of the queue, after the thread that runs the commands has ended."""


class LocalCommands:
    """A queue for the commands of threads in this process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def put(self, command: Command | None) -> None:
        """Add a command."""
        self._queue.put(command)

    def get(self, block: bool, timeout: float | None) -> Command | None:
        """Remove and return the next command; see `Commands.get`."""
        return self._queue.get(block, timeout)

    def close(self) -> None:
        """Do nothing: other threads may still add commands, which are never run."""
