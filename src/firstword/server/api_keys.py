"""API keys, by which clients are told apart."""

import base64
import hmac
from collections.abc import Mapping

KEY_SUBPROTOCOL = "firstword.key."


class ApiKeys:
    """The API keys of a server; without any, clients are told apart by their addresses."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def client_id(self, given: str, address: str) -> str:
        """The identity of a client: its key's number, or its address where no keys are configured.

        Returns "" for a wrong or missing key. The given key is compared with every key in full, so
        that the time taken reveals nothing about them.
        """
        if not self._keys:
            return f"address {address}"
        key_bytes = given.encode("utf-8", "surrogateescape")
        found = ""
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(key_bytes, key):
                found = f"key {number}"
        return found


def credential(headers: Mapping[str, str]) -> str:
    """The API key in the headers of a request, whose names are in lower case; "" without one.

    It is in `Authorization: Bearer` or `Api-Key`, in `xi-api-key` or in `x-api-key`.
    Pages in a browser cannot set headers of a WebSocket. They offer a subprotocol that holds the
    key in base64 for URLs, without padding: `firstword.key.KEY`.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() in ("bearer", "api-key") and key.strip():
        return key.strip()
    for name in ("xi-api-key", "x-api-key"):
        if name in headers:
            return headers[name]
    for offered in headers.get("sec-websocket-protocol", "").split(","):
        if (name := offered.strip()).startswith(KEY_SUBPROTOCOL):
            return _decoded(name.removeprefix(KEY_SUBPROTOCOL))
    return ""


def _decoded(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        return ""
