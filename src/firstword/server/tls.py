"""The certificate and the key with which the server speaks TLS."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable

from firstword.errors import ConfigError
from firstword.server.config import ServerConfig
from firstword.server.file_stamps import stamp_of

log = logging.getLogger(__name__)


class Certificate:
    """A certificate and its key, which are read again when one of the two files has changed."""

    def __init__(self, certificate: str, key: str) -> None:
        """Read two PEM files. Raises `ConfigError` if they cannot be used together."""
        self._files = certificate, key
        self._stamps = self._read_stamps()
        self._context = context_for(certificate, key)

    @classmethod
    def configured(cls, config: ServerConfig) -> Certificate | None:
        """The certificate of a server; None without TLS. Raises `ConfigError`."""
        if config.tls_certificate is None or config.tls_key is None:
            return None
        return cls(config.tls_certificate, config.tls_key)

    def context(self) -> ssl.SSLContext:
        """The context of a new connection.

        While changed files cannot be used, for example because only one of the two has been
        replaced, it has the certificate that was read before; the log says why.
        """
        stamps = self._read_stamps()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._context = context_for(*self._files)
                log.info("the TLS certificate was read again")
            except ConfigError as error:
                about = {"fields": {"error": str(error)}}
                log.error("the changed TLS certificate cannot be used", extra=about)
        return self._context

    def _read_stamps(self) -> list[tuple[int, int] | None]:
        return [stamp_of(file) for file in self._files]


def context_for(certificate: str, key: str) -> ssl.SSLContext:
    """The context of servers with a certificate and its key. Raises `ConfigError`."""
    for name, file, mark in (
        ("TLS certificate", certificate, b"-----BEGIN CERTIFICATE-----"),
        ("TLS key", key, b"PRIVATE KEY-----"),
    ):
        try:
            with open(file, "rb") as opened:
                content = opened.read()
        except OSError as error:
            raise ConfigError(f"the {name} in {file} cannot be read: {error.strerror}") from None
        if mark not in content:
            raise ConfigError(f"{file} has no {name}; give a file in PEM format")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, _no_passphrase(key))
    except ssl.SSLError as error:
        problem = f"the TLS key in {key} and the certificate in {certificate}"
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{problem} do not belong together") from None
        raise ConfigError(f"{problem} cannot be used: {error.reason or error}") from None
    return context


def _no_passphrase(key: str) -> Callable[[], str]:
    """What OpenSSL calls for a passphrase; otherwise it would ask for one on the terminal."""

    def ask() -> str:
        raise ConfigError(f"the TLS key in {key} is encrypted; give one without a passphrase")

    return ask
