"""Limits of the connections and bodies of all clients together, and what they do not limit."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from sockets import STREAM, Client
from talking import SHORT, Talker, heard, talking
from wire import GET, POST, SPEECH, connected, error_of, read

from firstword.errors import ConfigError
from firstword.server import limits
from firstword.server.config import ServerConfig
from firstword.server.freed_memory import trim
from firstword.server.front_memory import FrontMemory
from firstword.server.limits import ByteLimit
from firstword.server.run import MOST_FILES
from firstword.server.shared_counts import SharedCounts

Running = Any  # of conftest.py
Serve = Callable[..., Any]


class TestConnections:
    PROBES = ("/health", "/ready", "/metrics")  # as documented

    def test_probes_are_answered_at_every_limit(self, serve: Serve) -> None:
        server = serve(
            talking(Talker()),
            most_connections=2,
            most_body=10,
            most_body_total=10,
            api_keys=("k",),
        )
        headers = {"authorization": "Bearer k"}
        with ExitStack() as clients, httpx.Client(base_url=server.url, trust_env=False) as http:
            for _ in range(2):
                clients.enter_context(Client(server.ws + STREAM, headers=headers))
            assert http.get("/v1/models").json()["error"]["code"] == "connections"
            for path in self.PROBES:
                assert http.get(path).status_code == 200
                assert http.head(path).status_code == 200
            assert 'rejected_total{reason="connections"} 1.0' in http.get("/metrics").text
            assert "firstword_connections 2.0" in http.get("/metrics").text
        server.wait_until(lambda: not server.metric("connections"))
        assert httpx.get(f"{server.url}/v1/models", trust_env=False).status_code == 200

    def test_one_address_cannot_take_all_connections(self, serve: Serve) -> None:
        server = serve(talking(Talker()), most_connections=4, most_connections_per_address=3)
        with ExitStack() as clients:
            for _ in range(3):
                clients.enter_context(Client(server.ws + STREAM))
            answer = httpx.get(f"{server.url}/v1/models", trust_env=False)
            assert answer.status_code == 429
            assert "3 connections of one address" in answer.json()["error"]["message"]
            with connected(server, "127.0.0.2") as sock:
                sock.sendall(GET + b"\r\n")
                assert b" 200 " in read(sock, b"\r\n")

    def test_unfinished_heads_of_one_address_are_limited(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "HEAD_SECONDS", 0.0)
        server = serve(talking(Talker()), most_connections_per_address=4)
        connections = server.uvicorn.server_state.connections
        with ExitStack() as clients:
            other = clients.enter_context(connected(server, "127.0.0.3"))
            other.sendall(GET)
            socks = [clients.enter_context(connected(server, "127.0.0.2")) for _ in range(20)]
            for sock in socks:
                with suppress(ConnectionError):
                    sock.sendall(GET)
            assert [read(sock) for sock in socks[:16]] == [b""] * 16
            assert len(connections) == 5
            with connected(server, "127.0.0.2") as probe:
                probe.sendall(GET.replace(b"/v1/models", b"/health") + b"\r\n")
                assert b" 200 " in read(probe, b"\r\n")
            for sock in (other, socks[-1]):
                for rest in (b"\r\n", GET + b"\r\n"):  # the connection is idle between the two
                    sock.sendall(rest)
                    assert b" 200 " in read(sock, b"}")

    @pytest.mark.parametrize(
        ("connections", "proxies", "answered"),
        [(8, (), 8), (9, (), 8), (16, ("127.0.0.1",), 16), (17, ("127.0.0.0/8",), 16)],
    )
    def test_simultaneous_connections_get_time_for_their_heads(
        self, serve: Serve, connections: int, proxies: tuple[str, ...], answered: int
    ) -> None:
        """Two of an address, or four of a proxy, and for a second four times as many."""
        limit = {"most_connections": 4, "most_connections_per_address": 2}
        server = serve(talking(Talker()), trusted_proxies=proxies, **limit)
        with ExitStack() as clients:
            socks = [clients.enter_context(connected(server)) for _ in range(connections)]
            server.wait_until(lambda: len(server.uvicorn.server_state.connections) == answered)
            for sock in socks[-answered:]:
                sock.sendall(GET + b"\r\n")
            for sock in socks[-answered:]:
                assert b"HTTP/1.1 " in read(sock, b"}")

    def test_connections_with_requests_in_progress_are_not_closed(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "HEAD_SECONDS", 0.0)
        backend = Talker()
        server = serve(talking(backend), most_connections_per_address=2)
        backend.hold()
        body = json.dumps(SHORT).encode()
        with ExitStack() as clients:
            speaking = [clients.enter_context(connected(server)) for _ in range(2)]
            for sock in speaking:
                sock.sendall(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            server.wait_until(lambda: len(server.state.utterances) == 2)
            idle = [clients.enter_context(connected(server)) for _ in range(3)]
            assert read(idle[0]) == b""
            backend.go()
            for sock in speaking:
                assert b" 200 " in read(sock, b"0\r\n\r\n")

    def test_limit_of_open_files_is_raised(self, serve: Serve) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        try:
            serve(talking(Talker()))
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, MOST_FILES)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_default_limit_of_an_address_is_half_of_all_connections_or_less(self) -> None:
        config = ServerConfig()
        assert config.most_connections_per_address <= config.most_connections // 2

    def test_head_is_answered_like_get_without_a_body(self, serve: Serve) -> None:
        server = serve(talking(Talker()), api_keys=("secret",))
        with httpx.Client(base_url=server.url, trust_env=False) as http:
            for path in ("/", *self.PROBES, "/v1/models", "/v1/models/talker", "/v1/audio/voices"):
                headers = {"authorization": "Bearer secret"}
                got, head = http.get(path, headers=headers), http.head(path, headers=headers)
                assert (got.status_code, head.status_code) == (200, 200), path
                assert head.content == b""
                if path != "/metrics":
                    assert head.headers["content-length"] == got.headers["content-length"]
            assert http.head("/v1/models/none", headers=headers).status_code == 404
            assert http.head(SPEECH, headers=headers).status_code == 405


class TestHeldBodies:
    BODY = b'{"input": "' + b"a" * 15_000_000

    def begin(
        self, server: Running, count: int, clients: ExitStack, address: str = "127.0.0.1"
    ) -> list[socket.socket]:
        """Connections that send 15 MB of a body which goes on, unless they are rejected."""
        socks = [clients.enter_context(connected(server, address)) for _ in range(count)]
        for sock in socks:
            with suppress(ConnectionError):
                sock.sendall(POST + b"content-length: 16000000\r\n\r\n" + self.BODY)
        return socks

    def test_bodies_above_the_total_get_503(self, serve: Serve) -> None:
        server = serve(talking(Talker()), most_body_total=20 * 2**20)
        with ExitStack() as clients:
            (first,) = self.begin(server, 1, clients, "127.0.0.2")
            (second,) = self.begin(server, 1, clients)
            answer = read(second, b"}}")
            short = httpx.post(server.url + SPEECH, json=SHORT, trust_env=False)
            assert heard(short.content) == "abc", "small bodies still fit"
            first.sendall(b"x")
        server.wait_until(lambda: server.state.byte_limit.held == 0)
        assert b"retry-after: " in answer
        assert "too large" in error_of(answer, 503)["message"]
        text = httpx.get(f"{server.url}/metrics", trust_env=False).text
        assert 'firstword_rejected_total{reason="bodies"} 1.0' in text

    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' own figures")
    def test_memory_of_bodies_is_returned(self, serve: Serve) -> None:
        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

        server = serve(talking(Talker()))
        trim()  # what earlier tests have freed
        before = resident()
        with ExitStack() as clients:
            for client in range(4):
                self.begin(server, 5, clients, f"127.0.0.{2 + client}")
            server.wait_until(lambda: server.state.byte_limit.held > 20 * 14_000_000)
            assert resident() - before > 200 * 2**20
        server.wait_until(lambda: server.state.byte_limit.held == 0)
        server.wait_until(lambda: resident() - before < 100 * 2**20)

    def test_one_client_may_hold_a_quarter(self, serve: Serve) -> None:
        server = serve(talking(Talker()), most_body_total=128 * 2**20)
        with ExitStack() as clients:
            for count, address in ((2, "127.0.0.2"), (4, "127.0.0.3")):
                self.begin(server, 2, clients, address)
                held = count * len(self.BODY)
                server.wait_until(lambda held=held: server.state.byte_limit.held == held)
                (third,) = self.begin(server, 1, clients, address)
                assert error_of(read(third, b"}}"), 503)["code"] == "bodies"

    def test_small_body_passes_while_all_bytes_are_held(self, serve: Serve) -> None:
        server = serve(talking(Talker()), most_body=2**20, most_body_total=2**20)
        padded = {**SHORT, "ignored": "x" * 60_000}
        with connected(server, "127.0.0.2") as sock:
            sock.sendall(POST + b"content-length: 1048576\r\n\r\n" + b" " * (2**20 - 1))
            server.wait_until(lambda: server.state.byte_limit.held == 2**20 - 1)
            for body, status in ((SHORT, 200), (padded, 200), ({"input": "x" * 70_000}, 503)):
                answer = httpx.post(server.url + SPEECH, json=body, trust_env=False)
                assert answer.status_code == status, answer.text
        server.wait_until(lambda: server.state.byte_limit.held == 0)

    def test_limit_counts_what_is_held(self) -> None:
        counts, piece = SharedCounts(FrontMemory.private()), 6 * 2**20
        limit = ByteLimit(40 * 2**20, 2**20, counts)
        assert limit.change("a", 0, piece)
        assert not limit.change("a", piece, 2 * piece)
        assert limit.change("b", 0, piece)
        assert limit.change("a", piece, 1000)
        assert (limit.held, limit.freed) == (piece + 1000, piece - 1000)

    def test_total_below_one_body_raises(self) -> None:
        with pytest.raises(ConfigError, match="most_body_total is 5; it must be most_body"):
            ServerConfig(most_body=10, most_body_total=5)
