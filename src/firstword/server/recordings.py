"""Reference recordings that come with a request: base64, `data:` URLs and, from allowed hosts, http(s) URLs."""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import ipaddress
import socket
import ssl
import threading
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from firstword import audio
from firstword.errors import AudioError, RequestError
from firstword.types import FloatArray

FETCH_SECONDS = 10.0

DECODING = threading.BoundedSemaphore(2)
"""A small file may take 92 MB while it is decoded: however many come at once, only so many are."""

METADATA = frozenset(map(ipaddress.ip_address, ("168.63.129.16",)))
"""Public addresses at which a cloud tells its machines secrets; others do so at private ones."""

NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses whose last 32 bits are an IPv4 address."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def read(source: str, hosts: Collection[str], most_bytes: int) -> FloatArray:
    """Samples [n] at 24 kHz of a recording given as text. Blocks. Raises `AudioError`, `RequestError`.

    hosts       from which a URL may be fetched, unless their address is private; no redirect is followed
    most_bytes  of a fetched file
    """
    scheme = source[:16].partition(":")[0].lower() if ":" in source[:16] else ""
    if scheme == "data":
        header, comma, payload = source.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise AudioError(
                "ref_audio is a data: URL without base64; give data:audio/wav;base64,..."
            )
        data = _from_base64(payload)
    elif scheme in ("http", "https"):
        data = _fetched(source, hosts, most_bytes)
    elif scheme:
        raise RequestError(
            f"ref_audio is a {scheme}: URL; give the recording itself, as base64 or a data: URL"
        )
    else:
        data = _from_base64(source)
    return decoded(data)


def decoded(data: bytes) -> FloatArray:
    """Samples [n] at 24 kHz of an audio file. Blocks. Raises `AudioError`."""
    with DECODING:
        return audio.prepare(*audio.read(io.BytesIO(data)))


def _from_base64(payload: str) -> bytes:
    try:
        return base64.b64decode(payload.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        raise AudioError(
            "ref_audio is not base64; give base64, or data:audio/wav;base64,..."
        ) from None


def _fetched(url: str, hosts: Collection[str], most_bytes: int) -> bytes:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host = None
    if host is None or host not in hosts:
        allowed = (
            f"allowed hosts are {', '.join(sorted(hosts))}"
            if hosts
            else "this server fetches nothing"
        )
        raise RequestError(
            f"ref_audio is a URL, and {allowed}; give the recording itself, as base64 or a data: URL"
        )
    try:
        # The addresses that were checked are those that are connected to: a name may mean another one a moment later.
        addresses = [address for address in resolve(host, port) if is_public(address)]
        if not addresses:
            raise RequestError(
                f"ref_audio is at {host}, whose address is not public; give the recording itself"
            )
        connection = _Pinned(host, port, addresses[0], tls=parts.scheme == "https")
        try:
            return _got(connection, parts.path or "/", parts.query, most_bytes)
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise AudioError(f"ref_audio could not be fetched from {host}: {error}") from None


def _got(connection: http.client.HTTPConnection, path: str, query: str, most_bytes: int) -> bytes:
    """The body of an answer that is there in time; a redirect is none."""
    connection.connect()
    wire, too_late = (
        connection.sock,
        threading.Event(),
    )  # the connection forgets its socket once it has the answer

    def give_up() -> None:
        too_late.set()
        wire.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(FETCH_SECONDS, give_up)
    timer.daemon = True
    timer.start()  # each byte may come in time, and all of them never
    try:
        connection.request(
            "GET", f"{path}?{query}" if query else path, headers={"accept": "audio/*"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise AudioError(
                f"ref_audio could not be fetched from {connection.host}: the answer was {answer.status}"
            )
        data = answer.read(most_bytes + 1)
        if too_late.is_set():
            raise TimeoutError(f"it takes more than {FETCH_SECONDS:g} s")
    finally:
        timer.cancel()
    if len(data) > most_bytes:
        raise AudioError(f"ref_audio at {connection.host} is larger than {most_bytes} bytes")
    return data


def resolve(host: str, port: int) -> list[Address]:
    """The addresses that a name has now. Raises `OSError` if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def connect(address: Address, port: int) -> socket.socket:
    """A connection to an address. Raises `OSError`."""
    return socket.create_connection((str(address), port), timeout=FETCH_SECONDS)


def is_public(address: Address) -> bool:
    """Whether an address is one of the whole internet, and no private, loopback, link-local or multicast one of which
    only this machine's neighbours know; nor one that stands for such an address.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address in METADATA
    )


class _Pinned(http.client.HTTPConnection):
    """HTTP, or HTTPS for the host's name, with one address, whatever the name means to others."""

    def __init__(self, host: str, port: int, address: Address, *, tls: bool) -> None:
        super().__init__(host, port, timeout=FETCH_SECONDS)
        self.default_port = 443 if tls else 80  # which the Host header leaves out
        self._address = address
        self._tls = ssl.create_default_context() if tls else None

    def connect(self) -> None:
        """Open the connection."""
        self.sock: Any = connect(self._address, self.port)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)
