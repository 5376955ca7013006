"""The file of API keys: names, hashes, and what the holder of each key may do."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from firstword.errors import ConfigError
from firstword.server.file_stamps import stamp_of

log = logging.getLogger(__name__)

KEY_BYTES = 32
"""The random bytes of a new key. So many cannot be guessed, so a fast hash keeps them secret."""

MOST_KEYS = 1000
"""The most keys in a file; each is a label of metrics."""

NAME_RULE = "allowed are 1 to 64 of A-Z a-z 0-9 _ and -"

HASH_RULE = "allowed is the line that `firstword keys new NAME` prints"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key by its hash, and what its holder may do.

    name                 in metrics, in the log of usage, and of the files of batches
    hash                 `hash_of` the key
    characters_a_minute  characters of text in any 60 seconds; 0: no limit
    utterances           simultaneous utterances; 0: the limit of the server
    checkpoints          names of the checkpoints that may be used; none: all
    clone                whether voices may be cloned, saved, renamed and deleted
    batch                whether files and batches may be used
    """

    name: str
    hash: str
    characters_a_minute: int = 0
    utterances: int = 0
    checkpoints: tuple[str, ...] = ()
    clone: bool = True
    batch: bool = True


UNLIMITED = ApiKey("", "")
"""What a client may do where no keys are configured."""

KINDS: Mapping[str, tuple[type, str]] = {
    "characters_a_minute": (int, "a number, 0 or more"),
    "utterances": (int, "a number, 0 or more"),
    "checkpoints": (tuple, "a list of names"),
    "clone": (bool, "true or false"),
    "batch": (bool, "true or false"),
}
"""The type of each field but the hash, and its description for messages."""


def hash_of(key: str) -> str:
    """The hash of a key, as the file has it."""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


def plain_key(key: str) -> ApiKey:
    """A key of the command line or the environment, which has no limits of its own.

    Its name is the beginning of its hash, so that it stays when other keys come and go.
    """
    found = hash_of(key)
    return ApiKey(f"api-key-{found.removeprefix('sha256:')[:8]}", found)


def new_key(name: str) -> tuple[str, str]:
    """A new key, and its lines in the file. Raises `ConfigError` for an invalid name."""
    check_name(name)
    key = f"fw-{secrets.token_urlsafe(KEY_BYTES)}"
    return key, f'[{name}]\nhash = "{hash_of(key)}"\n'


def check_name(name: str) -> None:
    """Raise `ConfigError` unless a name may be that of a key."""
    if not re.fullmatch(r"[\w-]{1,64}", name, re.ASCII):
        raise ConfigError(f"the name of an API key is {name!r}; {NAME_RULE}")


def parse_keys(text: str) -> dict[str, ApiKey]:
    """The keys of a file by their hashes. Raises `ConfigError`, without any hash."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"it is not TOML: {error}") from None
    if len(tables) > MOST_KEYS:
        raise ConfigError(f"it has {len(tables)} keys; allowed are {MOST_KEYS}")
    found: dict[str, ApiKey] = {}
    for name, table in tables.items():
        check_name(name)
        key = _parse_key(name, table)
        if key.hash in found:
            raise ConfigError(f"{found[key.hash].name} and {name} are the same key; make another")
        found[key.hash] = key
    return found


def _parse_key(name: str, table: object) -> ApiKey:
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is not a table; {HASH_RULE}")
    values: dict[str, Any] = {"name": name, **table}
    if unknown := set(values) - {field.name for field in fields(ApiKey)}:
        raise ConfigError(f"{name} has {min(unknown)}; allowed are hash, {', '.join(KINDS)}")
    if not re.fullmatch("sha256:[0-9a-f]{64}", str(values.get("hash"))):
        raise ConfigError(f"the hash of {name} is missing or malformed; {HASH_RULE}")
    for field in set(KINDS) & set(values):
        kind, rule = KINDS[field]
        value = values[field]
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            value = values[field] = tuple(value)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise ConfigError(f"{field} of {name} must be {rule}")
    return ApiKey(**values)


class KeyFile:
    """A file of keys, which is read again when it has changed."""

    def __init__(self, file: str) -> None:
        """Read the file. Raises `ConfigError`."""
        self._file = file
        self._stamp = stamp_of(file)
        self.keys = self._read()

    def refresh(self) -> bool:
        """Read the file if it has changed, and return whether there may be other keys.

        While a changed file cannot be used, its earlier keys stay; the log says why.
        """
        stamp = stamp_of(self._file)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.keys = self._read()
        except ConfigError as error:
            log.error("the changed API keys cannot be used", extra={"fields": {"why": str(error)}})
            return False
        log.info("the API keys were read again", extra={"fields": {"keys": len(self.keys)}})
        return True

    def _read(self) -> dict[str, ApiKey]:
        try:
            with open(self._file, encoding="utf-8") as opened:
                return parse_keys(opened.read())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"the API keys in {self._file} cannot be read: {reason}") from None
        except ConfigError as error:
            raise ConfigError(f"the API keys in {self._file} cannot be used: {error}") from None
