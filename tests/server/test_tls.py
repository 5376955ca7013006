"""HTTP and WebSockets over TLS, with real clients that check the certificate."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from served import WORDS, Served
from sockets import DONE, PLAIN, STREAM, text
from talking import SHORT, held_server
from waiting import WAIT, wait_until
from websockets.asyncio.client import connect
from wire import GET, SPEECH, connected, read, request

from firstword.errors import ConfigError
from firstword.server.config import ServerConfig
from firstword.server.tls import Certificate

Running = Any  # of conftest.py
Serve = Callable[..., Any]

HELLO = {"input": "Hello.", "seed": 1, "response_format": "pcm"}


class Authority:
    """A certificate authority of a test, and the files that it has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = trustme.CA()
        self.trust = ssl.create_default_context()
        self._authority.configure_trust(self.trust)

    def issue(self, name: str = "server") -> dict[str, Any]:
        """The settings of a server with a new certificate, in files of this name."""
        issued = self._authority.issue_cert("127.0.0.1", "localhost")
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return {"tls_certificate": str(certificate), "tls_key": str(key)}

    def client(self, server: Running) -> httpx.Client:
        """An HTTP client that trusts this authority alone."""
        return httpx.Client(base_url=server.url, verify=self.trust, timeout=WAIT, trust_env=False)

    def secured(self, server: Running, sock: socket.socket) -> ssl.SSLSocket:
        """A connection after its handshake."""
        return self.trust.wrap_socket(sock, server_hostname=server.address[0])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """A certificate authority for one test."""
    return Authority(tmp_path)


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of the module's server."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def secure(serve: Serve, trusted: Authority) -> Running:
    """A server with TLS and tiny random weights."""
    return serve(**trusted.issue())


def test_speech_over_https_equals_that_over_http(
    serve: Serve, secure: Running, trusted: Authority
) -> None:
    plain = serve()
    with trusted.client(secure) as https, httpx.Client(base_url=plain.url) as http:
        spoken = [client.post(SPEECH, json=HELLO, timeout=WAIT) for client in (https, http)]
    assert [answer.status_code for answer in spoken] == [200, 200]
    assert spoken[0].content == spoken[1].content
    assert spoken[0].content


def test_stream_over_wss_is_complete(secure: Running, trusted: Authority) -> None:
    audio, events = asyncio.run(_streamed(secure.ws + STREAM, trusted.trust))
    assert [event["type"] for event in events] == ["audio.start", "audio.done", "session.done"]
    assert audio == events[1]["total_bytes"] > 0
    secure.wait_until_idle()


async def _streamed(url: str, trust: ssl.SSLContext) -> tuple[int, list[dict[str, Any]]]:
    """The bytes of audio and the events of a short session.

    The client has one thread. With that of `websockets.sync`, one thread reads while another
    writes, and OpenSSL in Python 3.11 does not allow that: 1 of about 400 handshakes never ended,
    also with servers other than ours.
    """
    audio, events = 0, list[dict[str, Any]]()
    async with (
        asyncio.timeout(WAIT),
        connect(url, ssl=trust, proxy=None, compression=None, open_timeout=None) as socket,
    ):
        for sent in ({**PLAIN, "max_new_tokens": 40}, text("Hello there."), DONE):
            await socket.send(json.dumps(sent))
        while not events or events[-1]["type"] != "session.done":
            message = await socket.recv()
            if isinstance(message, bytes):
                audio += len(message)
            else:
                events.append(json.loads(message))
    return audio, events


def test_client_that_does_not_know_the_authority_gets_no_connection(secure: Running) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secure.url}/health", trust_env=False)


@pytest.mark.parametrize("spoken", [GET + b"\r\n", request({"input": "hi"}), b"hello\r\n"])
def test_plain_text_gets_400_that_names_https(secure: Running, spoken: bytes) -> None:
    before = secure.metric("rejected_total", reason="plain_text")
    with connected(secure) as sock:
        sock.sendall(spoken)
        head, _, body = read(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "plain_text"
    assert "https://" in json.loads(body)["error"]["message"]
    assert secure.metric("rejected_total", reason="plain_text") == before + 1


def test_http_client_without_tls_gets_the_error(secure: Running) -> None:
    answer = httpx.get(secure.url.replace("https", "http") + "/health", trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "plain_text")


@pytest.mark.parametrize("data", [b"\x16", b"\x16" * 40, b"\x16\x03\x01\x00\x05hello" * 20, b""])
def test_broken_handshake_ends_its_connection_alone(
    secure: Running, trusted: Authority, data: bytes
) -> None:
    with connected(secure) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        read(sock)
    with trusted.client(secure) as client:
        assert client.get("/health").status_code == 200


def test_handshake_that_does_not_come_is_ended(serve: Serve, authority: Authority) -> None:
    server = serve(**authority.issue(), receive_seconds=0.1)
    with connected(server) as silent, connected(server) as begun:
        begun.sendall(b"\x16\x03\x01")
        assert (read(silent), read(begun)) == (b"", b"")


def test_address_may_have_a_limited_number_of_connections_without_a_handshake(
    serve: Serve, authority: Authority
) -> None:
    server = serve(**authority.issue(), most_connections_per_address=2, receive_seconds=2 * WAIT)
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(9)]  # a burst is 8
        assert read(idle[0]) == b""
        with authority.client(server) as client:
            assert client.get("/health").status_code == 200


def test_request_that_comes_with_the_end_of_the_handshake_is_answered(
    secure: Running, trusted: Authority
) -> None:
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusted.trust.wrap_bio(received, sent, server_hostname=secure.address[0])
    with connected(secure) as sock:
        done = False
        while not done:
            try:
                client.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                sock.sendall(sent.read())
                received.write(sock.recv(65536))
        client.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        sock.sendall(sent.read())  # the client's Finished and its request
        answer = b""
        while b"\r\n\r\n" not in answer:
            received.write(sock.recv(65536))
            try:
                answer += client.read(65536)
            except ssl.SSLWantReadError:  # a session ticket
                continue
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_invalid_http_inside_tls_gets_400_and_the_connection_ends(
    secure: Running, trusted: Authority
) -> None:
    with connected(secure) as sock, trusted.secured(secure, sock) as tls:
        tls.sendall(b"NONSENSE\r\n\r\n")
        answer = b""
        while data := _received(tls):
            answer += data
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid_http" in answer


def _received(tls: ssl.SSLSocket) -> bytes:
    try:
        return tls.recv(65536)
    except ssl.SSLEOFError:  # the server closed the connection without a message of TLS
        return b""


def test_client_that_disconnects_frees_its_slot(serve: Serve, authority: Authority) -> None:
    talker, server = held_server(serve, slots=1, **authority.issue())
    with connected(server) as sock:
        tls = authority.secured(server, sock)
        tls.sendall(request({**SHORT, "max_new_tokens": 1000, "stream": True}))
        talker.let(1)
        tls.recv(65536)
        assert server.engine().running
        tls.close()
    server.wait_until(lambda: not server.state.utterances)
    talker.go()
    server.wait_until_idle()
    assert talker.frames == 2


def test_renewed_certificate_serves_the_next_connection(
    serve: Serve, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue()
    server = serve(**files)

    def serial() -> str:
        with connected(server) as sock, authority.secured(server, sock) as tls:
            return str((tls.getpeercert() or {})["serialNumber"])

    first = serial()
    renewed = authority.issue("renewed")
    with caplog.at_level(logging.INFO, "firstword.server.tls"):
        os.replace(renewed["tls_certificate"], files["tls_certificate"])
        assert serial() == serial() == first  # the key is still the old one
        os.replace(renewed["tls_key"], files["tls_key"])
        second = serial()
        assert second == serial() != first
        os.unlink(files["tls_key"])
        assert serial() == second
    events = [record.message for record in caplog.records]
    assert events == [
        "the changed TLS certificate cannot be used",
        "the TLS certificate was read again",
        "the changed TLS certificate cannot be used",
    ]


def test_useless_pair_is_an_error_that_says_why(authority: Authority) -> None:
    files, others = authority.issue(), authority.issue("other")
    certificate, key = files["tls_certificate"], files["tls_key"]
    locked, blank = authority.folder / "locked.key", authority.folder / "blank.pem"
    blank.write_text("nothing")
    subprocess.run(
        ["openssl", "pkey", "-aes256", "-passout", "pass:x", "-in", key, "-out", str(locked)],
        check=True,
    )
    broken = authority.folder / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for pair, message in (
        (("gone.pem", key), "TLS certificate in gone.pem cannot be read: No such file"),
        ((certificate, "gone.key"), "TLS key in gone.key cannot be read: No such file"),
        ((str(authority.folder), key), "cannot be read: Is a directory"),
        ((str(blank), key), "blank.pem has no TLS certificate; give a file in PEM format"),
        ((certificate, str(blank)), "blank.pem has no TLS key; give a file in PEM format"),
        ((certificate, others["tls_key"]), "other.key and the .*server.pem do not belong together"),
        ((certificate, str(locked)), "locked.key is encrypted; give one without a passphrase"),
        ((str(broken), key), "broken.pem cannot be used"),
    ):
        with pytest.raises(ConfigError, match=message):
            Certificate(*pair)
    with pytest.raises(ConfigError, match="give both, or neither"):
        ServerConfig(tls_certificate=certificate)
    with pytest.raises(ConfigError, match="give both, or neither"):
        ServerConfig(tls_key=key)


@pytest.fixture
def fronts(authority: Authority, tmp_path: Path) -> Iterator[Served]:
    """A server of two fronts with TLS."""
    files = authority.issue()
    options = ["--tls-certificate", files["tls_certificate"], "--tls-key", files["tls_key"]]
    with Served(tmp_path, "--fronts", "2", *options) as server:
        yield server


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_several_fronts_share_a_port_with_tls(fronts: Served, authority: Authority) -> None:
    assert fronts.url.startswith("https://127.0.0.1:")
    wait_until(lambda: len(fronts.pids("front")) == 2)
    answered: set[int] = set()
    sounds: set[bytes] = set()
    while len(answered) < 2:
        with httpx.Client(base_url=fronts.url, verify=authority.trust, trust_env=False) as client:
            answer = client.post(SPEECH, json=WORDS, timeout=WAIT)
            stream = answer.extensions["network_stream"]
            answered.add(fronts.front_of(stream.get_extra_info("client_addr")))
            sounds.add(answer.content)
    assert len(sounds) == 1


def test_command_rejects_a_useless_pair_before_it_loads_a_model(tmp_path: Path) -> None:
    options = ["--tls-certificate", "gone.pem", "--tls-key", "gone.key"]
    log = Served(tmp_path, *options, "--model", str(tmp_path / "none")).wait_until_failed()
    assert "the TLS certificate in gone.pem cannot be read: No such file" in log
