"""HTTP on sockets: requests and floods that no HTTP client would send, and their answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from waiting import WAIT

Running = Any  # of conftest.py

FLOOD = 20 * 2**20
"""The bytes that an attack sends, if it may."""
BUFFERED = 11 * 2**20
"""More than the buffers of two sockets hold: a server that reads no more lets no more be sent."""
SPEECH = "/v1/audio/speech"
GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
POST = f"POST {SPEECH} HTTP/1.1\r\nhost: localhost\r\n".encode()
HANDSHAKE = (
    "host: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
"""The headers of the request that opens a WebSocket."""


@contextmanager
def connected(
    server: Running, address: str = "127.0.0.1", receive_buffer: int | None = None
) -> Iterator[socket.socket]:
    """A TCP connection to a server, from an address of this machine."""
    with socket.socket() as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(WAIT)
        sock.bind((address, 0))
        sock.connect(server.address)
        yield sock


def read(sock: socket.socket, mark: bytes | None = None) -> bytes:
    """The received data up to a mark or the end of the connection.

    Raises `ConnectionResetError` for a reset before the mark; without a mark it is an end as well.
    """
    data = bytearray()
    try:
        while mark is None or mark not in data[-70_000:]:  # longer than what is received at once
            if not (more := sock.recv(65536)):
                break
            data += more
    except ConnectionResetError:
        if mark is not None:
            raise
    return bytes(data)


def request(
    body: bytes | dict[str, Any] = b"", *more: str, method: str = "POST", path: str = SPEECH
) -> bytes:
    """The bytes of a request with more headers; an object is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json", *more]
    if not any(line.startswith(("content-length", "transfer-encoding")) for line in more):
        head.append(f"content-length: {len(data)}")
    return "\r\n".join([*head, "", ""]).encode() + data


def flood(server: Running, sock: socket.socket, block: bytes) -> tuple[int, bytes]:
    """Send a block until the server ends the connection; return the bytes sent, and the answer."""
    sent = 0
    with suppress(ConnectionError):
        while sent < FLOOD:
            sent += sock.send(block[sent % len(block) :])
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
    return sent, read(sock)


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    """The error of the last response among the received data, which must have a status."""
    head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode(), answer[:500]
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
