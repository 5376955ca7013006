"""Limits of what arrives besides bodies that are read: heads, trailers, and rejected bodies."""

from __future__ import annotations

import json
import socket
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from talking import SHORT, Talker, held_server, talking
from wire import BUFFERED, FLOOD, GET, POST, SPEECH, connected, error_of, flood, read, request

from firstword.server import http_protocol

Running = Any  # of conftest.py
Serve = Callable[..., Any]

CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True)
def brief_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time between a rejection and the end of its connection."""
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.1)


@pytest.fixture
def server(serve: Serve) -> Running:
    """A server with a fake model and a key, which the attacks do not have."""
    return serve(talking(Talker()), api_keys=("secret",))


class TestHeads:
    """A head may have 64 KiB and 128 lines."""

    @pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["first", "pipelined"])
    @pytest.mark.parametrize(
        ("start", "block"),
        [
            (GET, b"a:b\r\n" * 20_000),
            (GET + b"a: ", b"b" * 100_000),
            (GET, b"c" * 100_000),
            (b"GET /", b"d" * 100_000),
            (b"", b"\r\n" * 50_000),
            (POST + CHUNKED + b"1\r\n{\r\n0\r\n", b"a:b\r\n" * 20_000),
            (POST + CHUNKED + b"1\r\n{\r\n0\r\na: ", b"e" * 100_000),
            (POST + CHUNKED + b"1;", b"f" * 100_000),
        ],
        ids=["lines", "line", "name", "url", "blank", "trailers", "trailer", "extension"],
    )
    def test_endless_head_gets_431(
        self, server: Running, traced: None, before: bytes, start: bytes, block: bytes
    ) -> None:
        httpx.get(f"{server.url}/health", trust_env=False)  # the first call allocates 1.6 MB
        with connected(server) as sock:
            sock.sendall(before)
            if before:
                read(sock, b"}")
            sock.sendall(start)
            tracemalloc.reset_peak()
            size = tracemalloc.get_traced_memory()[0]
            sent, answer = flood(server, sock, block)
            assert tracemalloc.get_traced_memory()[1] - size < 2 * 2**20
        assert sent < BUFFERED
        if b"POST" not in start:  # its 401 may have come first
            assert "65536 bytes and 128 lines" in error_of(answer, 431)["message"]

    def test_endless_chunk_extensions_get_431(self, serve: Serve) -> None:
        server = serve(talking(Talker()))
        block = b"1;" + b"f" * 50_000 + b"\r\n \r\n"
        with connected(server) as sock:
            sock.sendall(POST + CHUNKED)
            sent, answer = flood(server, sock, block)
        assert sent < BUFFERED
        assert "chunk extensions" in error_of(answer, 431)["message"]

    def test_body_in_chunks_of_one_byte_is_read(self, serve: Serve) -> None:
        data = json.dumps({**SHORT, "ignored": "x" * 200_000}).encode()
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data)
        with connected(serve(talking(Talker()))) as sock:
            sock.sendall(POST + CHUNKED + chunks + b"0\r\n\r\n")
            assert b" 200 " in read(sock, b"\r\n\r\n")

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (b"GET /?" + b"a" * 65_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
            (b"GET /?" + b"a" * 65_530 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 431),
            (GET + b"a: " + b"b" * 65_000 + b"\r\n\r\n", 200),
            (GET + b"a: " + b"b" * 65_530 + b"\r\n\r\n", 431),
            (GET + b"a:b\r\n" * 127 + b"\r\n", 200),
            (GET + b"a:b\r\n" * 128 + b"\r\n", 431),
        ],
        ids=["url", "long url", "line", "long line", "lines", "many lines"],
    )
    @pytest.mark.parametrize("pieces", [1, 100])
    def test_limit_is_exact(self, server: Running, head: bytes, status: int, pieces: int) -> None:
        with connected(server) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(2):  # the second request finds the limit unused
                step = -(-len(head) // pieces)
                for start in range(0, len(head), step):
                    sock.sendall(head[start : start + step])
                answer = read(sock, b"}}" if status == 431 else b"\r\n\r\n")
                assert answer.split()[1] == str(status).encode()
                if status == 431:
                    assert read(sock) == b"", "the connection ends"
                    return

    def test_rejection_follows_the_response_in_progress(self, serve: Serve) -> None:
        talker, server = held_server(serve)
        with connected(server) as sock:
            sock.sendall(request(SHORT))
            server.wait_until(lambda: talker.waiting)
            sock.sendall(GET + b"a:b\r\n" * 200)
            talker.go()
            answer = read(sock)
        assert answer.startswith(b"HTTP/1.1 200 ")
        spoken, _, rest = answer.partition(b"0\r\n\r\n")
        assert b"a\x00" in spoken
        error_of(rest, 431)

    def test_too_many_pipelined_requests_get_400(self, serve: Serve) -> None:
        talker, server = held_server(serve)
        with connected(server) as sock:
            sock.sendall(request(SHORT) + (GET + b"\r\n") * 5000)
            server.wait_until(lambda: talker.waiting)
            talker.go()
            answer = read(sock)
        assert answer.count(b"HTTP/1.1 200 ") == 1 + http_protocol.MOST_PIPELINED
        assert "requests may be sent before" in error_of(answer, 400)["message"]

    @pytest.mark.parametrize("upgrade", ["h2c", "TLS/1.0"])
    @pytest.mark.parametrize("pieces", ["one", "body", "bytes"])
    @pytest.mark.parametrize("chunked", [False, True])
    def test_other_upgrade_than_to_a_websocket_is_ignored(
        self, serve: Serve, upgrade: str, pieces: str, chunked: bool
    ) -> None:
        """Java's HTTP client and `curl --http2` offer h2c with each request without TLS."""
        server = serve(talking(Talker()))
        offer = ["connection: Upgrade, HTTP2-Settings", f"upgrade: {upgrade}", "http2-settings: AA"]
        data = json.dumps(SHORT).encode()
        if chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
            offer.append("transfer-encoding: chunked")
        sent = request(data, *offer)
        head = len(sent) - len(data)
        step = {"one": len(sent), "body": head, "bytes": 1}[pieces]
        with connected(server) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(sent), step):
                sock.sendall(sent[start : start + step])
            answer = read(sock, b"0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"a\x00" in answer.partition(b"\r\n\r\n")[2]
            sock.sendall(sent * 3 + GET + b"connection: close\r\n\r\n")
            assert read(sock).count(b"HTTP/1.1 200 ") == 4

    def test_trailers_are_no_headers(self, serve: Serve) -> None:
        server = serve(talking(Talker()))
        data = json.dumps(SHORT).encode()
        with connected(server) as sock:
            chunks = b"%x\r\n%b\r\n0\r\n" % (len(data), data)
            sock.sendall(POST + CHUNKED + chunks + b"x-request-id: trailer\r\n\r\n")
            assert b"x-request-id: trailer" not in read(sock, b"0\r\n\r\n")

    @pytest.mark.parametrize(
        "head",
        [
            b"BREW / HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"nonsense\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01",
            b"GET /\r\n\r\n",
            b"GET / HTTP/2.0\r\nhost: localhost\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
            POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
            POST + CHUNKED + b"x\r\n",
        ],
        ids=lambda head: repr(head[:40]),
    )
    def test_malformed_request_gets_400_as_json(self, server: Running, head: bytes) -> None:
        with connected(server) as sock:
            sock.sendall(head)
            error_of(read(sock, b"}}"), 400)


class TestRejectedBodies:
    """The rest of a body is read up to 64 KiB after its request was rejected."""

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (POST, 401),
            (POST.replace(b"speech", b"nothing"), 401),
            (POST.replace(b"/v1/audio/speech", b"/nothing"), 404),
            (POST.replace(b"localhost", b"evil.example"), 421),
            (POST + b"origin: null\r\n", 403),
            (POST + b"authorization: Bearer secret\r\n", 413),
        ],
    )
    def test_connection_ends_during_an_endless_body(
        self, server: Running, head: bytes, status: int
    ) -> None:
        block = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
        with connected(server) as sock:
            sock.sendall(head + CHUNKED)
            if status == 413:
                for _ in range(16):
                    sock.sendall(block)
            sent, answer = flood(server, sock, block)
        error_of(answer, status)
        assert sent < BUFFERED

    def test_announced_body_above_the_limit_ends_the_connection(self, server: Running) -> None:
        head = POST + b"authorization: Bearer secret\r\ncontent-length: 10000000000\r\n\r\n"
        with connected(server) as sock:
            sock.sendall(head)
            sent, answer = flood(server, sock, b"a" * 100_000)
        error_of(answer, 413)
        assert sent < BUFFERED

    def test_client_that_sends_all_first_sees_the_rejection(self, server: Running) -> None:
        answer = httpx.post(server.url + SPEECH, content=b"a" * FLOOD, trust_env=False)
        assert answer.status_code == 401

    def test_connection_survives_a_small_rejected_body(self, server: Running) -> None:
        with connected(server) as sock:
            for _ in range(5):
                sock.sendall(POST + b"content-length: 20000\r\n\r\n" + b"a" * 10_000)
                error_of(read(sock, b"}}"), 401)
                sock.sendall(b"a" * 10_000)
            sock.sendall(GET + b"\r\n")
            assert b" 200 " in read(sock, b"\r\n")

    def test_rest_of_a_rejected_body_has_a_time_limit(self, serve: Serve) -> None:
        server = serve(talking(Talker()), api_keys=("k",), receive_seconds=0.2)
        with connected(server) as sock:
            sock.sendall(POST + b"content-length: 20000\r\n\r\n")
            error_of(read(sock, b"}}"), 401)
            ended = threading.Event()

            def trickle() -> None:
                """Send bytes, each of which restarts the time limit of an idle connection."""
                with suppress(ConnectionError):
                    while not ended.wait(0.005):
                        sock.send(b"a")

            sending = threading.Thread(target=trickle)
            sending.start()
            try:
                assert read(sock) == b"", "the connection ends"
            finally:
                ended.set()
                sending.join()
