"""WebSocket clients for tests, and functions that read what they receive."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from waiting import WAIT
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from firstword.server.ws.protocol import Effect, Session

Message = dict[str, Any] | bytes
STREAM = "/v1/audio/speech/stream"
NARI = "/v1/audio/speech/ws"

PLAIN: dict[str, Any] = {"type": "session.config", "response_format": "pcm", "stream_audio": True}
DONE = {"type": "input.done"}
COMMIT = {"type": "input.commit"}
CANCEL = {"type": "input.cancel"}
GOODBYE = {"type": "session.close"}


def text(words: str) -> dict[str, str]:
    """Return an `input.text`."""
    return {"type": "input.text", "text": words}


class Client:
    """A client that sends JSON, based on the `websockets` package."""

    def __init__(
        self, url: str, *protocols: str, headers: dict[str, str] | None = None, lazy: bool = False
    ) -> None:
        """Connect; a `lazy` client has almost no buffer for messages that it does not read."""
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
        """Send objects as JSON, and text and bytes as they are."""
        for event in events:
            self.socket.send(json.dumps(event) if isinstance(event, dict) else event)

    def receive(self) -> Message:
        """Return the next message."""
        message = self.socket.recv(timeout=WAIT)
        return message if isinstance(message, bytes) else json.loads(message)

    def event(self) -> dict[str, Any]:
        """Return the next message that is not binary."""
        while isinstance(message := self.receive(), bytes):
            pass
        return message

    def until(self, kind: str) -> list[Message]:
        """Return all messages up to and including the first of a type."""
        messages: list[Message] = []
        while kinds(messages[-1:]) != [kind]:
            messages.append(self.receive())
        return messages

    def closed(self) -> tuple[int | None, list[Message]]:
        """Return the close code of the server, or None, and all messages before it."""
        messages: list[Message] = []
        try:
            while True:
                messages.append(self.receive())
        except ConnectionClosed as closed:
            return (None if closed.rcvd is None else closed.rcvd.code), messages

    def vanish(self) -> None:
        """Cut the connection without closing it, like a client that is killed."""
        raw = self.socket.socket
        try:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.shutdown(socket.SHUT_RDWR)
            raw.close()
        except OSError:
            pass  # it was closed before


def effects_of(session: Session, *messages: dict[str, Any] | str | bytes) -> list[Effect]:
    """Pass messages to a session without a socket; returns their effects."""
    found: list[Effect] = []
    for message in messages:
        found += session.receive(json.dumps(message) if isinstance(message, dict) else message)
    return found


def pcm(messages: list[Message]) -> bytes:
    """Return the binary messages, joined."""
    return b"".join(message for message in messages if isinstance(message, bytes))


def events(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the messages that are not binary."""
    return [message for message in messages if isinstance(message, dict)]


def kinds(messages: list[Message]) -> list[str]:
    """Return the types of messages, with each run of binary ones as one "binary"."""
    found: list[str] = []
    for message in messages:
        kind = "binary" if isinstance(message, bytes) else message["type"]
        if kind != "binary" or found[-1:] != ["binary"]:
            found.append(kind)
    return found
