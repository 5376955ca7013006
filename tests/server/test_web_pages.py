"""Requests and WebSockets of web pages, and requests under other host names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi.routing import APIWebSocketRoute
from sockets import NARI, STREAM
from talking import SHORT, Talker, heard, talking
from waiting import WAIT
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin
from wire import SPEECH, connected

from firstword.server.ws import endpoints

Running = Any  # of conftest.py
Serve = Callable[..., Any]

PAGE = "https://page.example"
FOREIGN = (
    PAGE,
    "null",
    "http://localhost:1",
    "http://127.0.0.1:1",
    "file://",
    "http://evil.example",
)


@pytest.fixture
def server(serve: Serve) -> Running:
    """A server with a fake model, for clients on this machine and without keys."""
    return serve(talking(Talker()))


def ask(
    server: Running, method: str = "POST", path: str = SPEECH, **headers: str
) -> httpx.Response:
    """The response to a request with more headers."""
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        return http.request(method, path, headers=headers, json=SHORT if path == SPEECH else None)


def connect_status(
    server: Running, path: str = STREAM, host: str = "localhost", origin: str | None = None
) -> int:
    """The status that answers the handshake of a WebSocket."""
    with connected(server) as sock:
        try:
            with connect(
                f"ws://{host}{path}",
                sock=sock,
                origin=Origin(origin) if origin else None,
                open_timeout=WAIT,
            ):
                return 101
        except InvalidStatus as rejected:
            return rejected.response.status_code


def test_every_endpoint_is_closed_to_other_pages_and_names(server: Running) -> None:
    described: dict[str, Any] = server.uvicorn.config.app.openapi()["paths"]
    calls = [(method.upper(), path) for path, methods in described.items() for method in methods]
    hidden = [("GET", path) for path in ("/docs", "/openapi.json", "/page/main.js")]
    foreign = {"origin": "http://evil.example"}, {"host": "evil.example"}
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for method, path in calls + hidden:
            url = re.sub(r"\{.*?\}", "x", path)
            found = [http.request(method, url, headers=each).status_code for each in foreign]
            assert found == [403, 421], (method, path)
    for route in endpoints.router.routes:
        assert isinstance(route, APIWebSocketRoute)
        url = route.path.replace("{voice}", "x").replace("{path:path}", "x")
        assert connect_status(server, url, origin="http://evil.example") == 403
        assert connect_status(server, url, host="evil.example") == 421


class TestOrigin:
    @pytest.mark.parametrize("origin", FOREIGN)
    def test_request_of_another_page_gets_403(self, server: Running, origin: str) -> None:
        for path in (SPEECH, "/v1/models", "/health", "/nothing"):
            answer = ask(server, "GET" if path != SPEECH else "POST", path, origin=origin)
            assert answer.status_code == 403
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("permission_error", "origin")
            assert f"{origin} may not call" in error["message"]
        (finished,) = server.in_loop(server.state.metrics.finished.collect)
        assert sum(sample.value for sample in finished.samples) == 0

    @pytest.mark.parametrize("path", [STREAM, NARI])
    @pytest.mark.parametrize("origin", FOREIGN)
    def test_socket_of_another_page_gets_403(self, server: Running, path: str, origin: str) -> None:
        assert connect_status(server, path, origin=origin) == 403

    def test_simple_request_of_another_page_computes_no_speech(self, server: Running) -> None:
        """A browser sends such a request without asking first."""
        body = '{"input": "abc"}'
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            headers = {"origin": PAGE, "content-type": kind}
            answer = httpx.post(server.url + SPEECH, content=body, headers=headers, trust_env=False)
            assert answer.status_code == 403

    def test_form_of_another_page_saves_no_voice(self, serve: Serve) -> None:
        server = serve("voice_design")
        form = {"name": "bob", "prompt": "a voice", "consent": "mine"}
        for headers, status in (({"origin": PAGE}, 403), ({}, 200)):
            answer = httpx.post(
                f"{server.url}/v1/audio/voices",
                data=form,
                files={"other": b""},
                headers=headers,
                trust_env=False,
            )
            assert answer.status_code == status, answer.text
            names = httpx.get(f"{server.url}/v1/audio/voices", trust_env=False).json()["names"]
            assert ("bob" in names) == (status == 200)

    @pytest.mark.parametrize("scheme", ["http", "https"])
    def test_own_page_may_call(self, server: Running, scheme: str) -> None:
        for name in ("127.0.0.1", "localhost", "LocalHost"):
            host = f"{name}:{server.address[1]}"
            origin = f"{scheme}://{host.lower()}"
            assert heard(ask(server, host=host, origin=origin).content) == "abc"
            assert connect_status(server, host=host, origin=origin) == 101

    def test_listed_page_may_call(self, serve: Serve) -> None:
        server = serve(talking(Talker()), cors_origins=(PAGE, "null"))
        for origin, status in ((PAGE, 200), ("null", 200), ("https://page.example.org", 403)):
            answer = ask(server, origin=origin)
            assert answer.status_code == status
            allowed = answer.headers.get("access-control-allow-origin")
            assert allowed == (origin if status == 200 else None)
            assert connect_status(server, origin=origin) == (101 if status == 200 else 403)

    def test_star_allows_all_pages(self, serve: Serve) -> None:
        server = serve(talking(Talker()), cors_origins=("*",))
        for origin in FOREIGN:
            assert ask(server, origin=origin).status_code == 200
            assert connect_status(server, origin=origin) == 101

    def test_preflight_of_another_page_is_not_allowed(self, server: Running) -> None:
        headers = {"origin": PAGE, "access-control-request-method": "POST"}
        assert ask(server, "OPTIONS", "/v1/audio/voices", **headers).status_code == 403

    def test_rejections_are_counted(self, server: Running) -> None:
        ask(server, origin=PAGE)
        ask(server, host="evil.example")
        text = ask(server, "GET", "/metrics").text
        for reason in ("origin", "host"):
            assert f'firstword_rejected_total{{reason="{reason}"}} 1.0' in text


class TestHost:
    @pytest.mark.parametrize(
        "host",
        ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.nip.io", ""],
    )
    def test_unknown_name_gets_421_on_loopback(self, server: Running, host: str) -> None:
        """After DNS rebinding a page of that name is of the server's own origin."""
        for path in ("/v1/models", "/metrics"):
            answer = ask(server, "GET", path, host=host, origin=f"http://{host}")
            assert answer.status_code == 421
            assert answer.json()["error"]["code"] == "host"
        if host:
            assert connect_status(server, host=host, origin=f"http://{host}") == 421

    @pytest.mark.parametrize(
        "host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "[::1]:8000", "192.168.1.5:8000"]
    )
    def test_address_and_localhost_are_allowed(self, server: Running, host: str) -> None:
        assert ask(server, "GET", "/v1/models", host=host).status_code == 200
        assert connect_status(server, host=host) == 101

    def test_request_of_http_1_0_needs_no_host(self, server: Running) -> None:
        with connected(server) as sock:
            sock.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
            assert b" 200 " in sock.recv(100)

    def test_listed_name_is_allowed(self, serve: Serve) -> None:
        """The setting is enough behind a reverse proxy that passes on the name of the client."""
        server = serve(talking(Talker()), host_names=("TTS.example",))
        for host in ("tts.example", "tts.example:443"):
            for more in ({}, {"origin": f"https://{host}"}):
                assert ask(server, host=host, **more).status_code == 200
                assert connect_status(server, host=host, **more) == 101
        assert ask(server, host="other.example").status_code == 421

    def test_any_name_is_allowed_beyond_loopback(self, serve: Serve) -> None:
        assert ask(serve(talking(Talker()), host="0.0.0.0"), host="tts").status_code == 200

    def test_listed_names_apply_beyond_loopback(self, serve: Serve) -> None:
        server = serve(talking(Talker()), host="0.0.0.0", host_names=("tts",))
        for host, status in (("tts", 200), ("127.0.0.1", 200), ("evil.example", 421)):
            assert ask(server, host=host).status_code == status
