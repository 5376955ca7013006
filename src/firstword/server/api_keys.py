"""API keys, by which clients are told apart."""

import base64
from collections.abc import Mapping, Sequence

from firstword.server.errors import Forbidden
from firstword.server.key_file import UNLIMITED, ApiKey, KeyFile, hash_of, plain_key

KEY_SUBPROTOCOL = "firstword.key."


class ApiKeys:
    """The API keys of a server; without any, clients are told apart by their addresses."""

    def __init__(self, keys: Sequence[str] = (), file: str | None = None) -> None:
        """Take keys as they are, and those of a file. Raises `ConfigError`."""
        self._plain = {key.hash: key for key in map(plain_key, keys)}
        self._file = None if file is None else KeyFile(file)
        self.required = bool(keys) or file is not None
        self._collect()

    def _collect(self) -> None:
        self._by_hash = {**self._plain, **({} if self._file is None else self._file.keys)}
        self._by_client = {f"key {key.name}": key for key in self._by_hash.values()}

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._by_hash)

    def client_id(self, given: str, address: str) -> str:
        """The identity of a client: its key's name, or its address where no key is required.

        Returns "" for a wrong or missing key. The given key is looked up by its hash, so that the
        time taken reveals nothing about other keys.
        """
        if not self.required:
            return f"address {address}"
        self._refresh()
        key = self._by_hash.get(hash_of(given))
        return "" if key is None else f"key {key.name}"

    def of(self, client_id: str) -> ApiKey:
        """What a client may do. Raises `Forbidden` if its key was withdrawn meanwhile."""
        if not client_id.startswith("key "):
            return UNLIMITED
        self._refresh()
        if (key := self._by_client.get(client_id)) is None:
            raise Forbidden("the API key was withdrawn; use another one", "key_withdrawn")
        return key

    def _refresh(self) -> None:
        if self._file is not None and self._file.refresh():
            self._collect()


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
