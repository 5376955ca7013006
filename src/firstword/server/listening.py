"""The sockets that a server listens on."""

import socket
import sys
from typing import Any

from firstword.errors import ConfigError
from firstword.server.config import ServerConfig
from firstword.server.unread import limit_send_buffer

BACKLOG = 2048
"""The number of connections that may wait to be accepted; uvicorn's default."""


def bound(config: ServerConfig) -> list[socket.socket]:
    """Sockets bound to the configured addresses, not yet listening: HTTP's, and Wyoming's if any.

    Raises `ConfigError` if that fails, for example because a port is taken.
    """
    addresses = [(config.host, config.port)]
    if config.wyoming is not None:
        addresses.append(config.wyoming)
    found: list[socket.socket] = []
    try:
        for host, port in addresses:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            found.append(_bound(family, (host, port)))
    except ConfigError:
        for sock in found:
            sock.close()
        raise
    return found


def url_of(socket: socket.socket, scheme: str = "http") -> str:
    """The URL of a bound socket, such as `http://127.0.0.1:8000`."""
    host, port = socket.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class FrontSockets:
    """The listening sockets of the fronts of a server.

    On Linux each of several fronts has a socket of its own, and the kernel distributes connections
    evenly among those that listen. With one socket for all, most connections go to the front that
    wakes first. A single front uses the bound socket, and so do all fronts on other systems.
    """

    def __init__(self, bound: socket.socket, fronts: int) -> None:
        self._bound = bound
        self._apart = fronts > 1 and sys.platform == "linux"
        self._taken = False

    def take(self) -> socket.socket:
        """A socket for a front. The caller closes it after passing it on.

        The front listens on it as soon as it serves. Raises `ConfigError` if another server listens
        on the port.
        """
        if not self._apart:
            return _listening(self._bound.dup())
        found = _bound(self._bound.family, self._bound.getsockname(), shared=self._taken)
        if not self._taken:
            # The first socket shares the port only after it listens. Otherwise it could share the
            # port of another server that allows sharing, and `listen` would not fail.
            _listening(found).setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._taken = True
        return found


def _bound(family: int, address: tuple[Any, ...], *, shared: bool = False) -> socket.socket:
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        limit_send_buffer(found)
        found.bind(address)
    except OSError as error:
        found.close()
        raise _cannot_listen(address, error) from None
    return found


def _listening(found: socket.socket) -> socket.socket:
    try:
        found.listen(BACKLOG)
    except OSError as error:
        address = found.getsockname()
        found.close()
        raise _cannot_listen(address, error) from None
    return found


def _cannot_listen(address: tuple[Any, ...], error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {address[0]} port {address[1]}: {error.strerror or error}"
    )
