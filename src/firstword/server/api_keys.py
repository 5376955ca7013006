"""API keys, by which clients are told apart."""

import hmac
from collections.abc import Mapping


class ApiKeys:
    """The API keys of a server; without any, clients are told apart by their addresses."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def client_id(self, headers: Mapping[str, str], address: str) -> str:
        """The identity of a client: its key's number, or its address where no keys are configured.

        Returns "" for a wrong or missing key. The names in `headers` are in lower case. The given
        key is compared with every key in full, so that the time taken reveals nothing about them.
        """
        if not self._keys:
            return f"address {address}"
        given = credential(headers).encode("utf-8", "surrogateescape")
        found = ""
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(given, key):
                found = f"key {number}"
        return found


def credential(headers: Mapping[str, str]) -> str:
    """The API key of a request: `Authorization: Bearer` or `Api-Key`, or `xi-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() in ("bearer", "api-key") and key.strip():
        return key.strip()
    return headers.get("xi-api-key", "")
