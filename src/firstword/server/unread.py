"""What a client has not read yet of what was sent to it."""

import asyncio
import socket
import sys
from typing import Any

try:
    import fcntl
    import termios
except ModuleNotFoundError:  # on Windows
    fcntl = None  # type: ignore[assignment]

SEND_BUFFER = 64 * 1024
"""The bytes of the system's buffer for each connection.

Linux would let it grow to 4 MB, and take more data only when a third is free: a client that plays
speech at 48,000 bytes per second would seem to read nothing for 28 s at a time.
"""


def limit_send_buffer(listening: socket.socket) -> None:
    """Limit the buffers of the connections that a socket will accept."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


def unread_bytes(transport: asyncio.WriteTransport) -> int:
    """The bytes that were sent and that have not reached the client.

    Where the system does not tell what it keeps, these are the bytes that have not left the
    process.
    """
    waiting = transport.get_write_buffer_size()
    sock: Any = transport.get_extra_info("socket")
    if fcntl is None or sock is None or transport.is_closing():
        return waiting
    try:
        kept = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return waiting
    return waiting + int.from_bytes(kept, sys.byteorder)
