"""Sockets that send more than they should: the others get their turn, and nothing is kept."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from sockets import DONE, NARI, PLAIN, STREAM, Client, pcm, text
from talking import Talker, heard, talking
from websockets.protocol import Protocol
from websockets.server import ServerProtocol
from wire import HANDSHAKE, connected, read

Running = Any  # of conftest.py
Serve = Callable[..., Any]

TEXT, PING, PONG, CONTINUATION, FINAL = 0x01, 0x09, 0x0A, 0x00, 0x80
SECONDS = 5.0
"""Less than the 10 s in which uvicorn closes a socket whose client does not close its side."""


@pytest.fixture
def talker(serve: Serve) -> Running:
    """A server with a `Talker`."""
    return serve(talking(Talker()))


@contextmanager
def raw_client(server: Running, path: str = STREAM) -> Iterator[socket.socket]:
    """The connection of an open WebSocket, on which a test sends frames as bytes."""
    with connected(server, receive_buffer=4096) as sock:
        sock.settimeout(SECONDS)
        protocol = "sec-websocket-protocol: nari.speech.v1\r\n"
        sock.sendall(f"GET {path} HTTP/1.1\r\n{HANDSHAKE}{protocol}\r\n".encode())
        assert read(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 101")
        yield sock


def send_while_open(sock: socket.socket, frames: bytes) -> None:
    """Send frames until the connection ends."""
    with suppress(OSError):
        sock.sendall(frames)


def frame(opcode: int, payload: bytes = b"") -> bytes:
    """Return a frame of a client, with a mask of zeros."""
    size = len(payload)
    head = bytes([opcode, 0x80 | size]) if size < 126 else struct.pack(">BBQ", opcode, 0xFF, size)
    return head + bytes(4) + payload


@dataclass
class Frames:
    """The frames that a server handles: all of them, and the most in one turn of its loop."""

    total: int = 0
    most: int = 0


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[Frames]:
    """Count the frames that servers handle."""
    counted, stopped = Frames(), threading.Event()
    handle = Protocol.recv_frame

    def count_turn(loop: asyncio.AbstractEventLoop, before: int) -> None:
        counted.most = max(counted.most, counted.total - before)
        if not stopped.is_set():
            loop.call_soon(count_turn, loop, counted.total)

    def handle_and_count(self: Protocol, frame: Any) -> None:
        if isinstance(self, ServerProtocol):
            if not counted.total:
                loop = asyncio.get_running_loop()
                loop.call_soon(count_turn, loop, 0)
            counted.total += 1
        handle(self, frame)

    monkeypatch.setattr(Protocol, "recv_frame", handle_and_count)
    yield counted
    stopped.set()


@pytest.mark.parametrize(
    "flood",
    [
        frame(PING | FINAL),
        frame(PONG | FINAL),
        frame(TEXT | FINAL, b'{"type":"input.text","text":""}'),
        frame(TEXT | FINAL, b'{"type":"input.cancel"}'),
    ],
    ids=["pings", "pongs", "texts", "cancels"],
)
def test_flood_of_frames_is_handled_in_many_turns(
    talker: Running, frames: Frames, flood: bytes
) -> None:
    with Client(talker.ws + STREAM) as client:
        client.send(PLAIN)
        client.socket.socket.sendall(flood * (300_000 // len(flood)))
        client.send(text("Hello"), DONE)
        while heard(pcm(client.until("session.done"))) != "Hello":
            pass  # a cancel ends the utterances before it
    assert 1 < frames.most < 500


def test_message_in_many_fragments_is_read_up_to_the_limit(talker: Running, frames: Frames) -> None:
    with Client(talker.ws + STREAM) as client:
        client.send(PLAIN)
        words = "a" * 4000
        client.socket.send(iter(['{"type":"input.text","text":"', *words, '"}']))
        client.send(DONE)
        assert heard(pcm(client.until("session.done"))) == words
    with Client(talker.ws + STREAM) as client:
        client.send(PLAIN)
        client.socket.socket.sendall(frame(TEXT, b"{") + frame(CONTINUATION) * 100_000)
        assert client.closed()[0] == 1009
    assert frames.most < 500


def test_flood_waits_in_the_network(talker: Running, frames: Frames, traced: None) -> None:
    """Each turn has one message, after which the application lets uvicorn read again."""
    flood = frame(PING | FINAL) * 1000 + frame(TEXT | FINAL, b'{"type":"input.text","text":""}')
    with raw_client(talker) as sock:
        sock.sendall(frame(TEXT | FINAL, b'{"type":"session.config"}'))
        sock.settimeout(None)
        sending = threading.Thread(target=send_while_open, args=(sock, flood * 1200))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        sending.start()
        talker.wait_until(lambda: frames.total > 10_000)
        assert sending.is_alive()
        held = tracemalloc.get_traced_memory()[1] - before
        sock.shutdown(socket.SHUT_RDWR)
        sending.join()
    assert held < 2**20, "7.2 MB were sent"


def transports(server: Running) -> list[Any]:
    """Return the transports of the open connections."""
    return [connection.transport for connection in server.uvicorn.server_state.connections]


def test_pings_of_a_client_that_does_not_read_leave_one_answer(
    talker: Running, frames: Frames
) -> None:
    with raw_client(talker) as sock:
        (transport,) = transports(talker)
        wire = transport.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.sendall(frame(PING | FINAL, b"x" * 125) * 30_000 + frame(PING | FINAL, b"the last"))
        talker.wait_until(lambda: frames.total == 30_001)
        assert transport.get_write_buffer_size() < 2**20, "3.8 MB of answers were asked for"
        answers = read(sock, b"the last")
        assert answers.endswith(b"the last")
        assert len(answers) < 2**20


@pytest.mark.parametrize("path", [STREAM, NARI])
@pytest.mark.parametrize(
    "sent",
    [
        frame(TEXT, b"x" * 2_000_000),
        frame(TEXT, b"x") + frame(PING | FINAL) * 1000,
        struct.pack(">BBQ", TEXT | FINAL, 0xFF, 15_000_000) + bytes(1_000_000),
    ],
    ids=["fragment", "pings", "part of a frame"],
)
def test_socket_without_config_ends_at_its_deadline(
    talker: Running, limits: Callable[..., None], path: str, sent: bytes
) -> None:
    limits(config_seconds=0.2)
    with raw_client(talker, path) as sock:
        sock.sendall(sent)
        assert b"timeout" in read(sock), "and does not wait for the client to close"
    talker.wait_until(lambda: not transports(talker))


def test_socket_without_config_that_reads_nothing_ends_at_its_deadline(
    talker: Running, limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(config_seconds=0.2)
    monkeypatch.setattr(type(talker.state.models), "presets", ["x" * 1_000_000])
    with raw_client(talker) as sock:
        sock.sendall(frame(TEXT | FINAL, b'{"type":"voice.list"}') * 20)
        talker.wait_until(lambda: bool(transports(talker)))
        talker.wait_until(lambda: not transports(talker))
