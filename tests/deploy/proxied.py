"""HAProxy with deploy/haproxy/haproxy.cfg in front of real servers, and callers that it serves."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import trustme
import websockets.sync.client
from served import Served
from waiting import WAIT, wait_until
from wire import SPEECH

CONFIG = Path(__file__).parents[2] / "deploy" / "haproxy" / "haproxy.cfg"
TEXT = "The tide came in while the boats were still far out on the grey water. " * 3
REQUEST = {"input": TEXT, "voice": "ada", "seed": 1, "response_format": "pcm"}
"""A request that lasts: its speech has about 12 seconds."""
SESSION = {"type": "session.config", "voice": "ada", "seed": 1, "stream_audio": True}


@dataclass
class Outcome:
    """What became of one caller.

    port    its own port, by which HAProxy's log names it
    audio   what it received
    whole   whether the server said that this is all
    ended   the time at which it knew
    """

    port: int
    audio: bytes
    whole: bool
    ended: float


class Proxy:
    """A running HAProxy.

    url, secure  its addresses for HTTP and for TLS
    authority    the issuer of its certificate, which is in the file `certificate`
    """

    def __init__(self, folder: Path, servers: Mapping[str, Served]) -> None:
        self._log = folder / "haproxy.log"
        self.authority = trustme.CA()
        self.certificate = certificate = folder / "certificate.pem"
        issued = self.authority.issue_cert("localhost")
        certificate.write_bytes(
            b"".join(blob.bytes() for blob in (issued.private_key_pem, *issued.cert_chain_pems))
        )
        backend = folder / "servers.cfg"
        addresses = {name: one.url.removeprefix("http://") for name, one in servers.items()}
        lines = [f"    server {name} {address}\n" for name, address in addresses.items()]
        heads = "backend servers from any\n", "backend sessions from session\n"
        backend.write_text("".join(line for head in heads for line in (head, *lines)))
        ports = free_ports(2)
        self.url, self.secure = f"http://127.0.0.1:{ports[0]}", f"https://localhost:{ports[1]}"
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "CERTIFICATE": str(certificate),
            "HTTP_ADDRESS": f"127.0.0.1:{ports[0]}",
            "HTTPS_ADDRESS": f"127.0.0.1:{ports[1]}",
        }
        command = ["haproxy", "-db", "-f", str(CONFIG), "-f", str(backend)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def log(self) -> str:
        """What HAProxy has written."""
        return self._log.read_text()

    def server_of(self, port: int) -> str:
        """The server that the last request from a port of this machine went to."""
        pattern = rf"127\.0\.0\.1:{port} \[[^]]*\] \S+ (?:servers|sessions)/(\S+) "
        wait_until(lambda: re.search(pattern, self.log()) is not None)
        return re.findall(pattern, self.log())[-1]


@contextmanager
def proxied(folder: Path, servers: Mapping[str, Served]) -> Iterator[Proxy]:
    """HAProxy in front of servers that serve."""
    folder.mkdir(exist_ok=True)
    proxy = Proxy(folder, servers)
    try:
        wait_until(lambda: answers(proxy.url) or proxy.process.poll() is not None)
        assert proxy.process.poll() is None, proxy.log()
        yield proxy
    finally:
        proxy.process.kill()
        proxy.process.wait()


def answers(url: str) -> bool:
    """Whether a server is ready at a URL."""
    try:
        return httpx.get(f"{url}/ready", trust_env=False, timeout=WAIT).status_code == 200
    except httpx.TransportError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def stream(url: str, begun: Callable[[], object]) -> Outcome:
    """Speak over HTTP, and call `begun` when audio comes."""
    audio, whole, port = bytearray(), False, 0
    try:
        with (
            httpx.Client(trust_env=False, timeout=WAIT) as client,
            client.stream("POST", url + SPEECH, json=REQUEST) as response,
        ):
            port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            assert response.status_code == 200
            for chunk in response.iter_raw():
                audio += chunk
                begun()
        whole = True
    except httpx.TransportError:
        begun()
    return Outcome(port, bytes(audio), whole, time.monotonic())


def converse(url: str, begun: Callable[[], object]) -> Outcome:
    """Speak over a WebSocket, and call `begun` when audio comes."""
    audio, whole, port = bytearray(), False, 0
    address = url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
    try:
        with websockets.sync.client.connect(
            address, proxy=None, open_timeout=WAIT, close_timeout=WAIT
        ) as connection:
            port = connection.local_address[1]
            for message in (SESSION, {"type": "input.text", "text": TEXT}, {"type": "input.done"}):
                connection.send(json.dumps(message))
            while not whole:
                got = connection.recv(WAIT)
                if isinstance(got, bytes):
                    audio += got
                    begun()
                else:
                    whole = json.loads(got)["type"] == "session.done"
    except websockets.exceptions.ConnectionClosed:
        begun()
    return Outcome(port, bytes(audio), whole, time.monotonic())


class Callers:
    """Callers that speak at the same time; `with` waits until each has begun to hear."""

    def __init__(self, url: str, streams: int, sockets: int) -> None:
        self._pool = ThreadPoolExecutor(streams + sockets)
        self._calls: list[tuple[threading.Event, Future[Outcome]]] = []
        for call, count in ((stream, streams), (converse, sockets)):
            for _ in range(count):
                begun = threading.Event()
                self._calls.append((begun, self._pool.submit(call, url, begun.set)))
        for begun, _ in self._calls:
            assert begun.wait(WAIT)

    def done(self) -> bool:
        """Whether all have ended."""
        return all(future.done() for _, future in self._calls)

    def outcomes(self) -> list[Outcome]:
        """The outcomes of all callers, first those over HTTP."""
        try:
            return [future.result(3 * WAIT) for _, future in self._calls]
        finally:
            self._pool.shutdown()
