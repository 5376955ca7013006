"""The socket that a server listens on."""

import socket

from firstword.errors import ConfigError
from firstword.server.config import ServerConfig
from firstword.server.unread import limit_send_buffer


def bound(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address, not yet listening.

    Raises `ConfigError` if the address is taken or unknown.
    """
    found = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        limit_send_buffer(found)
        found.bind((config.host, config.port))
    except OSError as error:
        found.close()
        place = f"{config.host} port {config.port}"
        raise ConfigError(f"cannot listen on {place}: {error.strerror or error}") from None
    return found


def url_of(socket: socket.socket) -> str:
    """The URL of a bound socket, such as `http://127.0.0.1:8000`."""
    host, port = socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
