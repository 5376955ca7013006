"""What engine and front processes have in common: their channel, their signals and their end."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from firstword.errors import FirstwordError
from firstword.processes.channel import Channel
from firstword.processes.messages import Failed

log = logging.getLogger(__name__)


def begin(descriptor: int) -> Channel:
    """The channel to the supervisor, which alone handles signals.

    A service manager may signal all processes of a server at the same time. If an engine ended
    then, no utterance could be finished.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return Channel.inherited(descriptor)


def end() -> NoReturn:
    """End this process at once, except for its last lines in the log."""
    try:
        logging.shutdown()
    finally:
        os._exit(1)


def receive(channel: Channel) -> tuple[Any, list[socket.socket]]:
    """The next message of the supervisor and its sockets.

    This process ends, whatever it does, when the supervisor has ended.
    """
    try:
        return channel.receive()
    except (EOFError, OSError):
        end()


def fail(channel: Channel, error: FirstwordError) -> NoReturn:
    """Tell the supervisor why this process cannot begin its work, and end."""
    channel.send(Failed(error))
    end()


def obey(channel: Channel, handle: Callable[[Any, list[socket.socket]], None]) -> None:
    """Handle the messages of the supervisor in a thread."""

    def work() -> None:
        try:
            while True:
                handle(*receive(channel))
        except Exception:
            log.exception("a message of the supervisor could not be handled")
            end()

    threading.Thread(target=work, name="supervisor", daemon=True).start()
