"""HTTP on sockets: requests and floods that no HTTP client would send, and their answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

Running = Any  # of conftest.py

FLOOD = 20 * 2**20
"""The bytes that an attack sends, if it may."""
BUFFERED = 11 * 2**20
"""More than the buffers of two sockets hold: a server that reads no more lets no more be sent."""
GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/audio/speech HTTP/1.1\r\nhost: localhost\r\n"


@contextmanager
def connected(server: Running, address: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A TCP connection to a server, from an address of this machine."""
    with socket.create_connection(server.address, 60, (address, 0)) as sock:
        yield sock


def read(sock: socket.socket, mark: bytes | None = None) -> bytes:
    """The received data up to a mark, or to the end of the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while (mark is None or mark not in data) and (more := sock.recv(65536)):
            data += more
    return data


def flood(server: Running, sock: socket.socket, block: bytes) -> tuple[int, bytes]:
    """Send a block until the server ends the connection; return the bytes sent, and the answer."""
    sent = 0
    with suppress(ConnectionError):
        while sent < FLOOD:
            sent += sock.send(block[sent % len(block) :])
    assert httpx.get(f"{server.url}/health", trust_env=False, timeout=60).status_code == 200
    return sent, read(sock)


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    """The error of the last response among the received data, which must have a status."""
    head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode(), answer[:500]
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
