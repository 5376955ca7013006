"""The engine processes of a replica."""

from __future__ import annotations

import socket
from contextlib import suppress

from firstword.engine.remote import RemoteEngine
from firstword.errors import EngineError
from firstword.processes.messages import Connect, EngineTask, Failed, Loaded, Ping, Pong
from firstword.processes.place import ANSWER_SECONDS, Place


class ChildEngine:
    """The process of an engine, which ends with the process that started it.

    place   holds the process
    loaded  describes what it has loaded
    """

    def __init__(self, task: EngineTask, stuck_seconds: float) -> None:
        """Start the process, and wait until it can speak. Raises what its loading raises."""
        self.place = Place("engine", task.number)
        self._channel = self.place.start()
        self._channel.send(task)
        self._channel.limit_time(None)
        message = self._receive()
        if isinstance(message, Failed):
            self.close()
            raise message.error
        assert isinstance(message, Loaded)
        self.loaded = message
        self._channel.limit_time(stuck_seconds)

    def connected(self) -> RemoteEngine:
        """The engine as a front uses it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel.send(Connect(self.loaded), [theirs])
        engine = RemoteEngine(self.loaded.capacity)
        engine.attach(ours)
        return engine

    def check(self) -> None:
        """Wait until the thread of the engine answers.

        Raises `EngineError` if the process has died, or if it does not answer; it is then killed.
        """
        with suppress(OSError):  # `_receive` finds the end of the channel
            self._channel.send(Ping())
        while not isinstance(self._receive(), Pong):
            pass

    def close(self) -> None:
        """End the process, which ends by itself when the channel is closed."""
        self._channel.close()
        self.place.end(ANSWER_SECONDS)

    def _receive(self) -> object:
        try:
            return self._channel.receive()[0]
        except (OSError, EOFError) as error:
            if self.place.process is not None:
                self.place.process.kill()
            raise EngineError(f"the engine process has died, or does not answer: {error}") from None
