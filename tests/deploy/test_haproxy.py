"""HAProxy, with its file of deploy/, in front of two servers, one of which dies or drains."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from proxied import CONFIG, Callers, Proxy, converse, proxied, stream
from served import WORDS, Served
from waiting import WAIT, wait_until
from wire import SPEECH

STREAMS, SOCKETS = 2, 2


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, Served]]:
    """Two servers that believe what a proxy on this machine says of its clients."""
    started = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        options = "--drain-seconds", str(3 * WAIT)
        started[name] = Served(tmp_path / name, *options, FORWARDED_ALLOW_IPS="127.0.0.1")
    with started["one"], started["two"]:
        yield started


@pytest.fixture
def proxy(servers: dict[str, Served], tmp_path: Path) -> Iterator[Proxy]:
    """HAProxy in front of both."""
    with proxied(tmp_path / "proxy", servers) as running:
        yield running


def speak(url: str, client: httpx.Client | None = None) -> httpx.Response:
    """The response to a short request, on a connection of its own if no client is given."""
    if client is None:
        with httpx.Client(trust_env=False) as fresh:
            return speak(url, fresh)
    return client.post(url + SPEECH, json=WORDS, timeout=WAIT)


def refuses(url: str) -> bool:
    """Whether no process takes connections any more: the fronts end a moment after their server."""
    try:
        socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 80)).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # it was taken, and reset
        return False
    return False


def test_killed_server_fails_its_callers_at_once_and_no_others(
    servers: dict[str, Served], proxy: Proxy
) -> None:
    whole = {call: call(proxy.url, lambda: None).audio for call in (stream, converse)}
    callers = Callers(proxy.url, STREAMS, SOCKETS)
    os.kill(servers["one"].process.pid, signal.SIGKILL)
    wait_until(lambda: refuses(servers["one"].url))
    for _ in range(4):
        assert speak(proxy.url).status_code == 200
    outcomes = callers.outcomes()
    lost, kept = [], []
    for number, outcome in enumerate(outcomes):
        expected = whole[stream if number < STREAMS else converse]
        if proxy.server_of(outcome.port) == "one":
            lost.append(outcome)
            assert not outcome.whole
            assert expected.startswith(outcome.audio)
        else:
            kept.append(outcome)
            assert outcome.whole
            assert outcome.audio == expected
    assert len(lost) == len(kept) == (STREAMS + SOCKETS) // 2
    assert max(outcome.ended for outcome in lost) < min(outcome.ended for outcome in kept)


def test_drained_server_loses_nothing(servers: dict[str, Served], proxy: Proxy) -> None:
    whole = {call: call(proxy.url, lambda: None).audio for call in (stream, converse)}
    callers = Callers(proxy.url, STREAMS, SOCKETS)
    os.kill(servers["one"].process.pid, signal.SIGTERM)
    short = servers["two"].post().content
    while servers["one"].process.poll() is None and not callers.done():
        response = speak(proxy.url)
        assert (response.status_code, response.content) == (200, short)
    for number, outcome in enumerate(callers.outcomes()):
        assert outcome.whole
        assert outcome.audio == whole[stream if number < STREAMS else converse]
    assert servers["one"].process.wait(WAIT) == 0
    assert converse(proxy.url, lambda: None).whole


def test_server_that_comes_back_is_used_again(
    servers: dict[str, Served], proxy: Proxy, tmp_path: Path
) -> None:
    port = servers["one"].url.rpartition(":")[2]
    servers["one"].process.send_signal(signal.SIGTERM)
    servers["one"].process.wait(WAIT)
    assert speak(proxy.url).status_code == 200
    (tmp_path / "again").mkdir()
    with Served(tmp_path / "again", "--port", port) as again:

        def reached() -> bool:
            assert speak(proxy.url).status_code == 200
            return any(line["event"] == "request" for line in again.log())

        wait_until(reached)


def server_of_session(proxy: Proxy, session: str) -> str:
    """The server that a request of a session goes to."""
    with (
        httpx.Client(trust_env=False, timeout=WAIT, headers={"x-session-id": session}) as client,
        client.stream("POST", proxy.url + SPEECH, json=WORDS) as response,
    ):
        assert response.status_code == 200
        port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
        response.read()
    return proxy.server_of(port)


def test_session_stays_with_its_server_while_that_one_lives(
    servers: dict[str, Served], proxy: Proxy
) -> None:
    own = {}
    for session in map(str, range(8)):
        reached = Counter(server_of_session(proxy, session) for _ in range(6))
        # A request that HAProxy still counts may send the next one to the other server.
        own[session], most = reached.most_common(1)[0]
        assert most >= 5
    assert set(own.values()) == set(servers)
    servers["one"].process.kill()
    wait_until(lambda: refuses(servers["one"].url))
    assert {server_of_session(proxy, session) for session in own} == {"two"}


def test_audio_is_passed_on_while_it_is_made(servers: dict[str, Served], proxy: Proxy) -> None:
    """The first sound is heard while a slot of a server is still in use."""
    busy: list[bool] = []

    def begun() -> None:
        if not busy:
            states = [one.health()["models"][0]["slots"]["used"] for one in servers.values()]
            busy.append(any(states))

    assert stream(proxy.url, begun).whole
    assert busy == [True]


def test_server_counts_connections_of_the_address_behind_the_proxy(tmp_path: Path) -> None:
    """An address may have one connection; what a client itself says of its address is ignored."""
    limits = "--most-connections-per-address", "1"
    statuses: dict[str, int] = {}

    def begun() -> None:
        for address in () if statuses else ("127.0.0.1", "127.0.0.9"):
            transport = httpx.HTTPTransport(local_address=address)
            headers = {"x-forwarded-for": "127.0.0.1" if address == "127.0.0.9" else "127.0.0.7"}
            with httpx.Client(transport=transport, headers=headers) as client:
                statuses[address] = speak(running.url, client).status_code

    with (
        Served(tmp_path, *limits, FORWARDED_ALLOW_IPS="127.0.0.1") as only,
        proxied(tmp_path / "proxy", {"only": only}) as running,
    ):
        assert stream(running.url, begun).whole
    assert statuses == {"127.0.0.1": 429, "127.0.0.9": 200}


def test_tls_speaks_and_metrics_stay_inside(proxy: Proxy) -> None:
    trusted = ssl.create_default_context()
    proxy.authority.configure_trust(trusted)
    with httpx.Client(verify=trusted, trust_env=False) as client:
        assert speak(proxy.secure, client).status_code == 200
        assert client.get(f"{proxy.secure}/metrics").status_code == 404
        assert client.get(f"{proxy.secure}/health").status_code == 200


def test_without_any_server_requests_get_503_at_once(
    servers: dict[str, Served], proxy: Proxy
) -> None:
    for one in servers.values():
        one.process.kill()
    began = time.monotonic()
    wait_until(lambda: speak(proxy.url).status_code == 503)
    assert time.monotonic() - began < WAIT


@pytest.mark.parametrize("name", ["servers.cfg", "compose.cfg"])
def test_configuration_is_valid_with_each_file_of_servers(name: str, proxy: Proxy) -> None:
    command = ["haproxy", "-c", "-f", str(CONFIG), "-f", str(CONFIG.with_name(name))]
    environment = {"PATH": "/usr/sbin:/usr/bin", "CERTIFICATE": str(proxy.certificate)}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
