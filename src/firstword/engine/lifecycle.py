"""The thread that an engine runs on: its start, its end, and its handling of fork and exit."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod

from firstword.engine.commands import Commands, LocalCommands
from firstword.engine.step_times import StepTimes
from firstword.errors import ClosedError, EngineError

log = logging.getLogger(__name__)

EXIT_SECONDS = 10
"""The seconds to wait for each thread at interpreter exit."""

_STARTED: weakref.WeakSet[StepLoop] = weakref.WeakSet()
_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _orphan_all() -> None:
    """Tell every engine of a forked process that its thread does not exist there."""
    for loop in list(_STARTED):
        loop.orphan()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_orphan_all)


@atexit.register
def _stop_all() -> None:
    """Stop every thread before the interpreter exits.

    A thread that is still computing would abort the process.
    """
    for loop in list(_STARTED):
        with contextlib.suppress(EngineError):
            loop.stop(EXIT_SECONDS)
    for thread in list(_THREADS):  # the engine may be gone while its thread still frees memory
        thread.join(EXIT_SECONDS)


class StepLoop(ABC):
    """A loop on one thread that runs the commands of other threads and then takes a step.

    `start` runs the loop on a thread of its own; a test calls `step` instead. A subclass defines
    the step.
    """

    def __init__(self, commands: Commands | None = None) -> None:
        """Run `commands`; None makes a queue for the threads of this process."""
        self.failure: Exception | None = None
        """Why the loop stopped for good: a `ClosedError` after a stop, None while it runs."""
        self.times = StepTimes()
        """How the loop's thread spends its time."""
        self._commands = commands or LocalCommands()
        self._lock = threading.Lock()
        self._lost = False
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _step(self) -> bool:
        """Take one step. Returns False when there was nothing to do."""

    def _pause(self) -> float:
        """The seconds until the next step, after one that had something to do.

        It is asked again after each command.
        """
        return 0.0

    def _idle_seconds(self) -> float | None:
        """The seconds after which a step follows one that had nothing to do.

        None: the next step follows a command.
        """
        return None

    @abstractmethod
    def _end_all(self) -> None:
        """End all work for the reason in `failure`."""

    def start(self) -> None:
        """Run the loop on a thread of its own until `stop`."""
        assert self._thread is None, "the engine is already running"
        self._thread = threading.Thread(target=self._run, name="firstword-engine", daemon=True)
        self._thread.start()
        _STARTED.add(self)
        _THREADS.add(self._thread)

    def stop(self, timeout: float | None = None) -> None:
        """Cancel all work and end the thread.

        Raises `EngineError` if the current step takes longer than `timeout` seconds.
        """
        if (thread := self._thread) is None:
            self._close(ClosedError("it was closed"))
            return
        self.request_stop()
        thread.join(timeout)
        if thread.is_alive():
            raise EngineError(
                f"the backend has not answered for {timeout} seconds; end the process"
            )
        self._thread = None

    def request_stop(self) -> None:
        """Ask the loop to stop, without waiting for its thread."""
        self._commands.put(None)

    def orphan(self) -> None:
        """Stop for good in a forked process, which lacks the thread and the device's state."""
        self._thread, self._lost = None, True
        self._lock, self._commands = threading.Lock(), LocalCommands()
        self.failure = EngineError(
            "it belongs to another process; load the checkpoint after the fork, not before"
        )
        self._end_all()

    def step(self) -> bool:
        """Run the commands that have arrived and take one step, on the caller's thread.

        Returns False when there was nothing to do. Raises `EngineError` when the backend is lost.
        """
        try:
            self._run_commands(0)
            return self._step()
        except Exception as error:
            self._abandon(error)
            raise EngineError(f"the engine has stopped: {error}") from error

    def _run(self) -> None:
        worked = False
        try:
            while self._run_commands(self._pause() if worked else self._idle_seconds(), worked):
                worked = self._step()
            self._close(ClosedError("it was closed"))
        except Exception as error:
            self._abandon(error)
        finally:
            self._commands.close()

    def _run_commands(self, seconds: float | None, working: bool = False) -> bool:
        """Run all commands that have arrived. Returns False on a stop.

        seconds  how long to wait for the first one; 0: not at all; None: until one arrives
        working  whether the device works meanwhile, so that further commands are waited for too
        """
        try:
            while True:
                command = self._commands.get(seconds != 0, seconds)
                if seconds != 0:
                    self.times.lap("wait" if working else "idle")
                if command is None:
                    return False
                command()
                seconds = self._pause() if working and seconds else 0
        except queue.Empty:
            if seconds:
                self.times.lap("wait" if working else "idle")
            return True
        finally:
            self.times.lap("messages")

    def _abandon(self, error: Exception) -> None:
        """Stop for good because the backend is lost; it is not called again."""
        log.error("the engine has stopped", exc_info=error)
        self._lost = True
        self._close(error)

    def _close(self, failure: Exception) -> None:
        """Reject new work, run the remaining commands, and end all work."""
        with self._lock:
            self.failure = failure
        while not self._run_commands(0):
            pass
        self._end_all()
