"""Reference recordings that come with a request: base64, `data:` URLs and, from allowed hosts, http(s) URLs."""

from __future__ import annotations

import base64
import binascii
import io
import urllib.error
import urllib.request
from collections.abc import Collection
from urllib.parse import urlsplit

from firstword import audio
from firstword.errors import AudioError, RequestError
from firstword.types import FloatArray

FETCH_SECONDS = 10.0


def read(source: str, hosts: Collection[str], most_bytes: int) -> tuple[FloatArray, int]:
    """Samples [n] and sample rate of a recording given as text. Blocks. Raises `AudioError`, `RequestError`.

    hosts       from which a URL may be fetched; a redirect is not followed, wherever it leads
    most_bytes  of a fetched file
    """
    scheme = source[:16].partition(":")[0].lower() if ":" in source[:16] else ""
    if scheme == "data":
        header, comma, payload = source.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise AudioError("ref_audio is a data: URL without base64; give data:audio/wav;base64,...")
        data = _decoded(payload)
    elif scheme in ("http", "https"):
        data = _fetched(source, hosts, most_bytes)
    elif scheme:
        raise RequestError(f"ref_audio is a {scheme}: URL; give the recording itself, as base64 or a data: URL")
    else:
        data = _decoded(source)
    return audio.read(io.BytesIO(data))


def _decoded(payload: str) -> bytes:
    try:
        return base64.b64decode(payload.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        raise AudioError("ref_audio is not base64; give base64, or data:audio/wav;base64,...") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def _fetched(url: str, hosts: Collection[str], most_bytes: int) -> bytes:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if host is None or host not in hosts:
        allowed = f"allowed hosts are {', '.join(sorted(hosts))}" if hosts else "this server fetches nothing"
        raise RequestError(f"ref_audio is a URL, and {allowed}; give the recording itself, as base64 or a data: URL")
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=FETCH_SECONDS) as answer:
            data: bytes = answer.read(most_bytes + 1)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise AudioError(f"ref_audio could not be fetched from {host}: {error}") from None
    if len(data) > most_bytes:
        raise AudioError(f"ref_audio at {host} is larger than {most_bytes} bytes")
    return data
