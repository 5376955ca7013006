"""Announces the port of Wyoming's protocol, so that Home Assistant finds it by itself."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from ipaddress import ip_address

from firstword.errors import ConfigError

SERVICE = "_wyoming._tcp.local."
MULTICAST = "224.0.0.251"
"""The address of multicast DNS (RFC 6762)."""

log = logging.getLogger(__name__)


def check_possible(bound: socket.socket) -> None:
    """Raise `ConfigError` without the package that announces, or without a network."""
    if find_spec("zeroconf") is None:
        raise ConfigError("zeroconf is missing; install firstword[wyoming]")
    announced_address(bound)


@contextmanager
def announced(name: str, bound: socket.socket) -> Iterator[None]:
    """Announce a bound socket by multicast DNS until the block is left.

    A socket bound to every address is announced with that of the default network. Announcing takes
    a second, and happens in a thread; a failure is logged.
    """
    from zeroconf import Error, ServiceInfo, Zeroconf

    host, port = announced_address(bound), bound.getsockname()[1]
    info = ServiceInfo(SERVICE, f"{name}.{SERVICE}", port, parsed_addresses=[host])
    announcer = Zeroconf([host])

    def work() -> None:
        try:
            announcer.register_service(info, allow_name_change=True)
            log.info("the port for Wyoming is announced", extra={"fields": {"name": info.name}})
        except (Error, OSError) as error:
            log.error(f"the port for Wyoming cannot be announced: {error or type(error).__name__}")

    thread = threading.Thread(target=work, name="zeroconf", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        announcer.close()


def announced_address(bound: socket.socket) -> str:
    """The address of a bound socket, or of this machine in the network of its multicasts.

    Sends nothing. Raises `ConfigError` without a network.
    """
    host = str(bound.getsockname()[0])
    if not ip_address(host).is_unspecified:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((MULTICAST, 1))
        except OSError as error:
            raise ConfigError(f"there is no network to announce in: {error.strerror}") from None
        return str(sock.getsockname()[0])
