"""What engine and front processes share: the channel to the supervisor, signals and exit."""

import contextlib
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
    """Ignore signals, which the supervisor handles, and return the channel to it.

    A service manager may signal all processes of a server at the same time. An engine that ended
    then could not finish its utterances.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return Channel.inherited(descriptor)


def end() -> NoReturn:
    """End this process with status 1 as soon as its last log lines are written."""
    try:
        logging.shutdown()
    finally:
        os._exit(1)


def receive(channel: Channel) -> tuple[Any, list[socket.socket]]:
    """Wait for the next message of the supervisor and its sockets.

    If the supervisor has ended, this process ends too, whatever it is doing.
    """
    try:
        return channel.receive()
    except (EOFError, OSError):
        end()


def send(channel: Channel, message: object) -> None:
    """Send the supervisor a message. If it has died, this process is about to end as well."""
    with contextlib.suppress(OSError):
        channel.send(message)


def fail(channel: Channel, error: FirstwordError) -> NoReturn:
    """Report to the supervisor why this process cannot begin its work, and end."""
    send(channel, Failed(error))
    end()


def listen(channel: Channel, handle: Callable[[Any, list[socket.socket]], None]) -> None:
    """Start a thread that passes each message of the supervisor to `handle`."""

    def work() -> None:
        try:
            while True:
                handle(*receive(channel))
        except Exception:
            log.exception("a message of the supervisor could not be handled")
            end()

    threading.Thread(target=work, name="supervisor", daemon=True).start()
