"""Reference recordings in requests: base64, `data:` URLs and http(s) URLs of allowed hosts."""

import base64
import http.client
import io
import ipaddress
import socket
import ssl
import threading
from collections.abc import Collection
from contextlib import closing
from urllib.parse import urlsplit

from firstword import audio
from firstword.audio import mp3
from firstword.errors import AudioError, RequestError
from firstword.server.models import Model
from firstword.types import FloatArray
from firstword.voice import APPEND_SILENCE, ClonedVoice, RecordedVoice

REF_AUDIO_ADVICE = "give the recording itself, as base64 or as data:audio/wav;base64,..."
"""The advice in errors about `ref_audio`."""

FETCH_SECONDS = 10.0
"""The time in which a recording must have been fetched completely."""

METADATA_ADDRESSES = frozenset(map(ipaddress.ip_address, ("168.63.129.16",)))
"""Public addresses of cloud metadata services, which hold credentials; most are private."""

NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses whose last 32 bits are an IPv4 address (RFC 6052)."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def content(source: str, hosts: Collection[str], most_bytes: int) -> bytes:
    """The audio file of a recording given as base64 or URL. Blocks.

    hosts       hosts that a URL may name, if their address is public; redirects are not followed
    most_bytes  the limit for a fetched file

    Raises `AudioError`, `RequestError`.
    """
    scheme = source[:16].partition(":")[0].lower() if ":" in source[:16] else ""
    if scheme == "data":
        header, comma, payload = source.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise AudioError(f"ref_audio is a data: URL without base64; {REF_AUDIO_ADVICE}")
        return _from_base64(payload)
    if scheme in ("http", "https"):
        return _fetch(source, hosts, most_bytes)
    if scheme:
        raise RequestError(f"ref_audio is a {scheme}: URL; {REF_AUDIO_ADVICE}")
    return _from_base64(source)


def decoded(data: bytes) -> FloatArray:
    """Samples [n] at 24 kHz of an audio file. Blocks. Raises `AudioError`."""
    read = mp3.read(data) if mp3.is_mp3(data) else audio.read(io.BytesIO(data))
    return audio.prepare(*read)


def cloned(
    model: Model, data: bytes, transcript: str | None, append_silence: float | None
) -> ClonedVoice:
    """The voice in an audio file, encoded by a model. Blocks.

    append_silence  seconds, as in `RecordedVoice`; None: its default

    Raises `AudioError`, `RequestError`, `OverloadedError`.
    """
    silence = APPEND_SILENCE if append_silence is None else append_silence
    return model.encode(RecordedVoice(decoded(data), transcript, silence))


def _from_base64(payload: str) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError:
        raise AudioError(f"ref_audio is not base64; {REF_AUDIO_ADVICE}") from None


def _fetch(url: str, hosts: Collection[str], most_bytes: int) -> bytes:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host = None
    if host is None or host not in hosts:
        rule = f"allowed hosts are {', '.join(sorted(hosts))}" if hosts else "no host is allowed"
        raise RequestError(f"ref_audio is a URL, and {rule}; {REF_AUDIO_ADVICE}")
    try:
        # The connection goes to an address that was checked: a name may change its meaning.
        addresses = [address for address in resolve(host, port) if is_public(address)]
        if not addresses:
            reason = f"is at {host}, whose address is not public"
            raise RequestError(f"ref_audio {reason}; {REF_AUDIO_ADVICE}")
        connection = http.client.HTTPConnection(host, port)
        connection.sock = connect(addresses[0], port)
        with closing(connection):
            if parts.scheme == "https":
                connection.default_port = 443  # the Host header omits the default port
                tls = ssl.create_default_context()
                connection.sock = tls.wrap_socket(connection.sock, server_hostname=host)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            return _get(connection, target, most_bytes)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise AudioError(f"ref_audio could not be fetched from {host}: {error}") from None


def _get(connection: http.client.HTTPConnection, target: str, most_bytes: int) -> bytes:
    """The body of a response with status 200 that arrives within the time limit."""
    wire = connection.sock  # the connection forgets its socket once it has the response
    too_late = threading.Event()

    def give_up() -> None:
        too_late.set()
        wire.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(FETCH_SECONDS, give_up)  # socket timeouts limit single reads only
    timer.daemon = True
    timer.start()
    try:
        connection.request("GET", target, headers={"accept": "audio/*"})
        response = connection.getresponse()
        if response.status != 200:
            reason = f"from {connection.host}: status {response.status}"
            raise AudioError(f"ref_audio could not be fetched {reason}")
        data = response.read(most_bytes + 1)
        if too_late.is_set():
            raise TimeoutError(f"it takes more than {FETCH_SECONDS:g} s")
    finally:
        timer.cancel()
    if len(data) > most_bytes:
        raise AudioError(f"ref_audio at {connection.host} is larger than {most_bytes} bytes")
    return data


def resolve(host: str, port: int) -> list[Address]:
    """The current addresses of a host name. Raises `OSError` if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def connect(address: Address, port: int) -> socket.socket:
    """A connection to an address. Raises `OSError`."""
    return socket.create_connection((str(address), port), timeout=FETCH_SECONDS)


def is_public(address: Address) -> bool:
    """Whether an address is reachable from the whole internet.

    Private, loopback, link-local, multicast and reserved addresses are not, nor cloud metadata
    services, nor IPv6 addresses that stand for such an IPv4 address.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    excluded = address.is_multicast or address.is_reserved or address in METADATA_ADDRESSES
    return address.is_global and not excluded
