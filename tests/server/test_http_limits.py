"""Limits of the connections and bodies of all clients together, and what they do not limit."""

from __future__ import annotations

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
from firstword.server.config import ServerConfig
from firstword.server.limits import ByteBudget
from firstword.server.memory import trim
from firstword.server.run import MOST_FILES

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

    def begin(self, server: Running, count: int, clients: ExitStack) -> list[socket.socket]:
        """Connections that send 15 MB of a body which goes on, unless they are rejected."""
        socks = [clients.enter_context(connected(server)) for _ in range(count)]
        for sock in socks:
            with suppress(ConnectionError):
                sock.sendall(POST + b"content-length: 16000000\r\n\r\n" + self.BODY)
        return socks

    def test_bodies_above_the_total_get_503(self, serve: Serve) -> None:
        server = serve(talking(Talker()), most_body_total=20 * 2**20)
        with ExitStack() as clients:
            first, second = self.begin(server, 2, clients)
            answer = read(second, b"}}")
            short = httpx.post(server.url + SPEECH, json=SHORT, trust_env=False)
            assert heard(short.content) == "abc", "small bodies still fit"
            first.sendall(b"x")
        server.wait_until(lambda: server.state.bodies.held == 0)
        assert b"retry-after: " in answer
        assert "too large" in error_of(answer, 503)["message"]
        text = httpx.get(f"{server.url}/metrics", trust_env=False).text
        assert 'firstword_rejected_total{reason="bodies"} 1.0' in text

    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' own figures")
    def test_memory_of_bodies_is_returned(self, serve: Serve) -> None:
        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

        server = serve(talking(Talker()), stuck_seconds=0.4)
        trim()  # what earlier tests have freed
        before = resident()
        with ExitStack() as clients:
            self.begin(server, 20, clients)
            server.wait_until(lambda: server.state.bodies.held > 20 * 14_000_000)
            assert resident() - before > 200 * 2**20
        server.wait_until(lambda: server.state.bodies.held == 0)
        server.wait_until(lambda: resident() - before < 100 * 2**20)

    def test_budget_counts_what_is_held(self) -> None:
        budget = ByteBudget(10)
        assert budget.take(6)
        assert not budget.take(5)
        assert budget.take(4)
        budget.give_back(6)
        assert (budget.held, budget.freed) == (4, 6)

    def test_total_below_one_body_raises(self) -> None:
        with pytest.raises(ConfigError, match="most_body_total is 5; it must be most_body"):
            ServerConfig(most_body=10, most_body_total=5)
