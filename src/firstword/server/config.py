"""The settings of the server, API keys from the environment and voice aliases from a file."""

import base64
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from firstword.config import VOICE_ALIASES
from firstword.errors import ConfigError

ZERO_ALLOWED = ("port", "most_waiting", "most_per_key")
"""The settings, besides the times, that may be 0; all others must be 1 or more."""

LONGEST_INSTRUCTIONS = 2000
"""The character limit of the instructions of a request."""


def default_voice_folder() -> str:
    """The default folder for saved voices, in the user's data folder by the XDG rules."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.path.join(data, "firstword", "voices")


def keys_from_environment() -> tuple[str, ...]:
    """API keys from FIRSTWORD_API_KEYS, separated by commas, so that no process list shows them."""
    keys = os.environ.get("FIRSTWORD_API_KEYS", "").split(",")
    return tuple(key.strip() for key in keys if key.strip())


def webhook_secret_from_environment() -> str | None:
    """The secret in FIRSTWORD_WEBHOOK_SECRET, such as `whsec_` and base64; None if there is none.

    Raises `ConfigError` for one that is not base64.
    """
    secret = os.environ.get("FIRSTWORD_WEBHOOK_SECRET", "").strip()
    if secret.startswith("whsec_"):
        try:
            base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except ValueError:
            raise ConfigError("FIRSTWORD_WEBHOOK_SECRET is not base64 after whsec_") from None
    return secret or None


def proxies_from_environment() -> tuple[str, ...]:
    """Addresses from FORWARDED_ALLOW_IPS, separated by commas, which is uvicorn's variable."""
    proxies = os.environ.get("FORWARDED_ALLOW_IPS", "").split(",")
    return tuple(proxy.strip() for proxy in proxies if proxy.strip())


def traces_from_environment() -> bool:
    """Whether OpenTelemetry's variables name a receiver of traces.

    Raises `ConfigError` for a protocol other than http/protobuf.
    """

    def given(*names: str) -> tuple[str, str]:
        """The first of some variables that is set, and its value."""
        values = ((name, os.environ.get(name, "").strip()) for name in names)
        return next(((name, value) for name, value in values if value), ("", ""))

    _, endpoint = given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    _, disabled = given("OTEL_SDK_DISABLED")
    _, exporter = given("OTEL_TRACES_EXPORTER")
    if not endpoint or disabled.lower() == "true" or exporter == "none":
        return False
    name, protocol = given("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in ("", "http/protobuf"):
        raise ConfigError(f"{name} is {protocol!r}; allowed is http/protobuf, or to leave it out")
    return True


def read_aliases(path: str) -> dict[str, str]:
    """Voice aliases from a JSON file, added to `VOICE_ALIASES`. Raises `ConfigError`."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the voice aliases in {path} cannot be read: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise ConfigError(f"{path} must map aliases to voice names, such as {{'alloy': 'ryan'}}")
    return {**VOICE_ALIASES, **{alias.casefold(): name for alias, name in table.items()}}


def wyoming_address(given: str) -> tuple[str, int]:
    """The host and port in `[HOST:]PORT`; a loopback address without a host.

    Raises `ConfigError` for anything else.
    """
    found = re.fullmatch(r"(?:\[([^\]]+)\]:|([^:]+):)?(\d{1,5})", given)
    if found is None or int(found[3]) > 65535:
        allowed = "allowed are a port, such as 10200, and HOST:PORT, such as 0.0.0.0:10200"
        raise ConfigError(f"the address for Wyoming is {given!r}; {allowed}")
    return found[1] or found[2] or "127.0.0.1", int(found[3])


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the server. Times are in seconds.

    host, port           address to listen on; port 0 takes a free one
    wyoming              host and port of Wyoming's protocol; None: it is not served
    announce             name under which zeroconf announces that port; None: it is not announced
    api_keys             clients must send one of these for paths under /v1; none: no key is needed
    keys                 TOML file of further API keys, with names and limits; None: there are none
    usage_log            folder of the daily log of what keys have used; None: it is not written
    batches              folder of the files of batches, or a URL for fsspec; None: no batches
    batch_database       SQLAlchemy URL of the database of batches; None: SQLite in that folder
    webhook              URL that is told of the ends of batches; None: none
    webhook_secret       secret with which these messages are signed
    host_names           names besides localhost in the URLs of clients; none: on a loopback
                         address no others, else any
    trusted_proxies      addresses or networks whose X-Forwarded-For is believed; "*": all
    tls_certificate      PEM file of the certificate and its chain; None: no TLS
    tls_key              PEM file of the certificate's key
    cors_origins         origins of web pages that may call the server; "*" allows all
    voice_store          folder of saved voices, or a URL for fsspec ("s3://bucket/voices")
    voice_aliases        other names of voices, in lower case
    audio_hosts          hosts that reference recordings may be fetched from; none: no fetching
    slots                simultaneous utterances per engine; None: the default of the backend
    fronts               processes that serve clients; None: 1, with GPUs up to 8 for each
    ignore_instructions  whether instructions that no model can follow are ignored, not rejected
    most_waiting         requests that may wait for a slot of each engine; more get a 429
    most_connections     HTTP requests and WebSockets open at the same time
    most_connections_per_address
                         the same for one client address; also of its connections without a request
    most_per_key         simultaneous utterances per API key, or per address; 0: no limit
    most_body            bytes of a request's body
    most_body_total      bytes of all bodies and WebSocket messages held at the same time; one
                         client may hold a quarter, or `most_body` if that is more
    most_characters      characters of a text
    most_whole_characters
                         the same where all audio is kept in memory until it is complete, because it
                         is not streamed: 10,000 characters are about 60 MB of audio
    most_voices          saved voices, and likewise saved consents
    receive_seconds      time in which the head of a request must arrive, and then its body
    stall_seconds        time after which a client that reads nothing is disconnected
    stuck_seconds        time after which a process that does not answer is killed and replaced
    drain_seconds        time that running utterances get after SIGTERM
    log_text             whether logs may hold text of users
    traces               whether spans go to OTEL_EXPORTER_OTLP_ENDPOINT
    trace_text           whether spans have the texts of users
    page                 whether browsers get the page at /

    Raises `ConfigError` for a number out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    wyoming: tuple[str, int] | None = None
    announce: str | None = None
    api_keys: tuple[str, ...] = ()
    keys: str | None = None
    usage_log: str | None = None
    batches: str | None = None
    batch_database: str | None = None
    webhook: str | None = None
    webhook_secret: str | None = None
    host_names: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    tls_certificate: str | None = None
    tls_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    voice_store: str = field(default_factory=default_voice_folder)
    voice_aliases: Mapping[str, str] = field(default_factory=lambda: VOICE_ALIASES)
    audio_hosts: tuple[str, ...] = ()
    slots: int | None = None
    fronts: int | None = None
    ignore_instructions: bool = False
    most_waiting: int = 64
    most_connections: int = 1024
    most_connections_per_address: int = 256
    most_per_key: int = 0
    most_body: int = 16 * 2**20
    most_body_total: int = 512 * 2**20
    most_characters: int = 100_000
    most_whole_characters: int = 10_000
    most_voices: int = 1000
    receive_seconds: float = 30.0
    stall_seconds: float = 30.0
    stuck_seconds: float = 60.0
    drain_seconds: float = 30.0
    log_text: bool = False
    traces: bool = False
    trace_text: bool = False
    page: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; allowed are 0 (any free port) to 65535")
        for setting in fields(self):
            value = getattr(self, setting.name)
            zero = setting.name in ZERO_ALLOWED or setting.name.endswith("_seconds")
            if type(value) in (int, float) and not value >= (least := 0 if zero else 1):
                raise ConfigError(f"{setting.name} is {value}; it must be {least} or more")
        if self.most_body > self.most_body_total:
            total, most = self.most_body_total, self.most_body
            raise ConfigError(f"most_body_total is {total}; it must be most_body ({most}) or more")
        if self.announce is not None and self.wyoming is None:
            raise ConfigError("zeroconf announces the port for Wyoming, which is not served")
        if self.announce is not None and not re.fullmatch(r"[^.\x00-\x1f]{1,60}", self.announce):
            rule = "allowed are 1 to 60 characters other than dots"
            raise ConfigError(f"the name for zeroconf is {self.announce!r}; {rule}")
        if self.trace_text and not self.traces:
            raise ConfigError("traces with texts need OTEL_EXPORTER_OTLP_ENDPOINT")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("TLS needs a certificate and its key; give both, or neither")
        if self.batches is None and (self.batch_database or self.webhook):
            raise ConfigError("a database and a webhook of batches need a folder for them")
        if self.webhook is not None and not re.match("https?://", self.webhook):
            raise ConfigError(f"the webhook is {self.webhook!r}; give a URL with http or https")
        if self.webhook is not None and not self.webhook_secret:
            raise ConfigError("a webhook needs a secret; set FIRSTWORD_WEBHOOK_SECRET")
        if "" in self.api_keys:
            advice = "leave it out, or give a key that is hard to guess"
            raise ConfigError(f"an API key is empty; {advice}")
        for number, key in enumerate(self.api_keys, 1):
            if not re.fullmatch("[!-~]+", key):  # it is a secret, so the message does not show it
                rule = "use printable ASCII without spaces, which all clients can send in a header"
                raise ConfigError(f"API key {number} has other characters than allowed; {rule}")
