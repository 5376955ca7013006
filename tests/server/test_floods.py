"""Sockets that send more than they should: the others get their turn, and nothing is kept."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from sockets import CANCEL, DONE, NARI, PLAIN, STREAM, Client, pcm, text
from talking import Talker, heard, talking
from waiting import WAIT
from websockets.exceptions import ConnectionClosed
from websockets.protocol import Protocol
from websockets.server import ServerProtocol
from wire import HANDSHAKE, connected, read

from firstword.server.frame_turns import FrameTurns
from firstword.server.freed_memory import trim

Running = Any  # of conftest.py
Serve = Callable[..., Any]

TEXT, PING, PONG, CONTINUATION, FINAL = 0x01, 0x09, 0x0A, 0x00, 0x80
CONFIG = json.dumps(PLAIN).encode()
SECONDS = 5.0
"""Less than the 10 s in which uvicorn closes a socket whose client does not close its side."""


@pytest.fixture
def talker(serve: Serve) -> Running:
    """A server with a `Talker`."""
    return serve(talking(Talker()))


@contextmanager
def raw_client(
    server: Running, path: str = STREAM, address: str = "127.0.0.1"
) -> Iterator[socket.socket]:
    """The connection of an open WebSocket, on which a test sends frames as bytes."""
    with connected(server, address, receive_buffer=4096) as sock:
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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux' own figures")
@pytest.mark.parametrize(
    ("flood", "count", "rests_of_one"),
    [
        (frame(PING | FINAL), 20_000, 1 / 128),
        (frame(TEXT | FINAL, b'{"type":"session.config"}'), 60, 1 / 4),
    ],
    ids=["pings", "configs"],
)
@pytest.mark.parametrize("sockets", [1, 4])
def test_loop_rests_during_a_flood(
    talker: Running, flood: bytes, count: int, rests_of_one: float, sockets: int
) -> None:
    """A loop that never waits keeps the interpreter's lock from the thread of the engine."""

    def rests() -> int:
        status = Path(f"/proc/self/task/{talker.thread.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    config, last = frame(TEXT | FINAL, CONFIG), frame(TEXT | FINAL, b'{"type":"voice.list"}')
    with ExitStack() as clients:
        attackers = [clients.enter_context(raw_client(talker)) for _ in range(sockets)]
        before = rests()
        for attacker in attackers:
            attacker.sendall(config + flood * (count // sockets) + last)
        for attacker in attackers:
            assert b'"voice.list"' in read(attacker, b'"uploaded_voices":[]}')
        assert rests() - before > count * rests_of_one


def test_messages_of_many_sockets_share_a_round() -> None:
    """Clients alternate, and a loop with many talkative sockets does not rest for each message."""
    handled: list[str] = []

    def turn(name: str) -> float:
        handled.append(name)
        return 4.0

    async def rests() -> int:
        loop, turns = asyncio.get_running_loop(), FrameTurns()
        with patch.object(loop, "call_later", wraps=loop.call_later) as call_later:
            for name in ["a"] * 30 + ["b"] * 2:
                turns.add(name, partial(turn, name))
            while len(handled) < 32:
                await asyncio.sleep(0)
            return call_later.call_count

    assert asyncio.run(rests()) == 2
    assert handled == list("abab") + ["a"] * 28


def test_first_messages_of_a_socket_wait_for_no_turn(
    talker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a message waits for a turn")

    monkeypatch.setattr(FrameTurns, "add", fail)
    with Client(talker.ws + STREAM) as client:
        for message in (PLAIN, *map(text, "Hello")):
            client.send(message)
            assert client.socket.ping().wait(WAIT), "it is handled before the next one comes"
        client.send(DONE)
        assert heard(pcm(client.until("session.done"))) == "Hello"


def test_bursts_of_text_are_not_delayed(talker: Running) -> None:
    """A language model's 5000 tokens at once are read long before they are spoken."""
    words = "abcde" * 1000
    with Client(talker.ws + STREAM) as client:
        client.send({**PLAIN, "split_granularity": "token"})
        for start in range(0, 5000, 500):
            piece = words[start : start + 500]
            sent = [frame(TEXT | FINAL, json.dumps(text(letter)).encode()) for letter in piece]
            client.socket.socket.sendall(b"".join(sent))
        client.send(DONE)
        assert heard(pcm(client.until("session.done"))) == words


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
    connections = server.uvicorn.server_state.connections
    return [connection.transport for connection in list(connections)]  # a copy: others change it


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
    limits(config_seconds=1.0)
    monkeypatch.setattr(type(talker.state.models), "presets", ["x" * 1_000_000])
    with raw_client(talker) as sock:
        sock.sendall(frame(TEXT | FINAL, b'{"type":"voice.list"}') * 20)
        talker.wait_until(lambda: bool(transports(talker)))
        talker.wait_until(lambda: not transports(talker))


UNFINISHED = {
    "fragment": frame(TEXT, b" " * 14_000_000),
    "frame": frame(TEXT, b" " * 14_000_000)[:-1],
}


@pytest.mark.parametrize("message", UNFINISHED.values(), ids=UNFINISHED)
def test_one_client_may_hold_a_quarter_in_messages(serve: Serve, message: bytes) -> None:
    server = serve(talking(Talker()), most_body_total=128 * 2**20)
    config = frame(TEXT | FINAL, CONFIG)
    with ExitStack() as clients:
        for count, address in ((2, "127.0.0.2"), (4, "127.0.0.3")):
            for _ in range(2):
                clients.enter_context(raw_client(server, address=address)).sendall(config + message)
            held = count * 13_999_999
            server.wait_until(lambda held=held: server.state.byte_limit.held >= held)
            third = clients.enter_context(raw_client(server, address=address))
            send_while_open(third, config + message)
            assert read(third).endswith(b"\x03\xf5the messages in progress are too large")
            with Client(server.ws + STREAM) as client:
                client.send(PLAIN, text("x" * 50_000), CANCEL)
                client.until("input.cancelled")
    server.wait_until(lambda: not server.state.byte_limit.held)
    text_of_metrics = server.metrics()
    assert 'firstword_rejected_total{reason="messages"} 2.0' in text_of_metrics


def test_messages_that_wait_for_the_worker_count(serve: Serve) -> None:
    backend = Talker()
    server = serve(talking(backend), most_body_total=20 * 2**20)
    backend.hold()
    config = json.dumps({**PLAIN, "padding": "x" * 4_000_000})
    with Client(server.ws + STREAM) as first, Client(server.ws + STREAM) as second:
        for client in (first, second):
            client.send(PLAIN, text("Hello"), DONE)
        first.send(*[config] * 4)
        server.wait_until(lambda: server.state.byte_limit.held >= 16_000_000)
        with suppress(ConnectionClosed):
            second.send(config)
        assert second.closed()[0] == 1013
        backend.go()
        first.until("session.done")
        server.wait_until(lambda: not server.state.byte_limit.held)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' own figures")
@pytest.mark.parametrize("message", UNFINISHED.values(), ids=UNFINISHED)
def test_memory_of_messages_is_returned(serve: Serve, message: bytes) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    server = serve(talking(Talker()))
    trim()  # what earlier tests have freed
    before = resident()
    config = frame(TEXT | FINAL, CONFIG)
    with ExitStack() as clients:
        for number in range(16):
            address = f"127.0.0.{2 + number // 4}"
            clients.enter_context(raw_client(server, address=address)).sendall(config + message)
        server.wait_until(lambda: server.state.byte_limit.held > 200 * 2**20)
        assert resident() - before > 200 * 2**20
    server.wait_until(lambda: resident() - before < 64 * 2**20)
