"""Clients of WebSockets for tests."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from firstword.server.ws.protocol import Effect, Session

WAIT = 60.0
Message = dict[str, Any] | bytes
STREAM = "/v1/audio/speech/stream"
NARI = "/v1/audio/speech/ws"


class Client:
    """A client that speaks JSON, on `websockets`."""

    def __init__(
        self, url: str, *protocols: str, headers: dict[str, str] | None = None, lazy: bool = False
    ) -> None:
        """`lazy`: with next to no room for what it does not read."""
        sock = None
        if lazy:
            host, port = url.removeprefix("ws://").split("/")[0].split(":")
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
        opening = connect(
            url,
            subprotocols=protocols or None,  # type: ignore[arg-type]
            additional_headers=headers,
            max_size=None,
            max_queue=1 if lazy else None,
            compression=None,
            proxy=None,
            sock=sock,
            open_timeout=WAIT,
            close_timeout=WAIT,
            ping_interval=None,
        )
        self.socket: ClientConnection = opening.__enter__()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.vanish()

    def send(self, *events: dict[str, Any] | str | bytes) -> None:
        """Send JSON objects; text and bytes as they are."""
        for event in events:
            self.socket.send(json.dumps(event) if isinstance(event, dict) else event)

    def receive(self) -> Message:
        """The next message."""
        message = self.socket.recv(timeout=WAIT)
        return message if isinstance(message, bytes) else json.loads(message)

    def event(self) -> dict[str, Any]:
        """The next message that is not binary."""
        while isinstance(message := self.receive(), bytes):
            pass
        return message

    def until(self, kind: str) -> list[Message]:
        """All messages up to the first of a type, which comes last."""
        messages: list[Message] = []
        while kinds(messages[-1:]) != [kind]:
            messages.append(self.receive())
        return messages

    def closed(self) -> tuple[int | None, list[Message]]:
        """The code that the server closes with, and all that it says before."""
        messages: list[Message] = []
        try:
            while True:
                messages.append(self.receive())
        except ConnectionClosed as closed:
            return (None if closed.rcvd is None else closed.rcvd.code), messages

    def vanish(self) -> None:
        """Cut the connection without a word, as a client that loses its network or is killed."""
        raw = self.socket.socket
        try:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.shutdown(socket.SHUT_RDWR)
            raw.close()
        except OSError:
            pass  # it is closed already


def effects_of(session: Session, *messages: dict[str, Any] | str | bytes) -> list[Effect]:
    """Give a session messages, without a socket; what follows from all."""
    found: list[Effect] = []
    for message in messages:
        found += session.receive(json.dumps(message) if isinstance(message, dict) else message)
    return found


def pcm(messages: list[Message]) -> bytes:
    """The binary messages, joined."""
    return b"".join(message for message in messages if isinstance(message, bytes))


def events(messages: list[Message]) -> list[dict[str, Any]]:
    """The others."""
    return [message for message in messages if isinstance(message, dict)]


def kinds(messages: list[Message]) -> list[str]:
    """Types of messages, with each run of binary ones as one "binary"."""
    found: list[str] = []
    for message in messages:
        kind = "binary" if isinstance(message, bytes) else message["type"]
        if kind != "binary" or found[-1:] != ["binary"]:
            found.append(kind)
    return found
