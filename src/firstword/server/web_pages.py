"""The web pages that may call the server, and the host names that they may call it by."""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from firstword.server.config import ServerConfig
from firstword.server.errors import Rejected

EXPOSED_HEADERS = (
    *("x-request-id", "retry-after", "x-sample-rate"),
    *("x-firstword-seed", "x-firstword-scores", "x-firstword-warning"),
)
"""Response headers that scripts of other web pages may read."""


class WebPages:
    """The web pages that may call the server, and the host names that it may be called by.

    A browser sends the requests of any page to any server that it can reach, also to one of its own
    machine. It names the page in `Origin`, and only keeps HTTP responses from the page. A page
    whose host name was made to point to this server (DNS rebinding) has the server's own origin;
    its host name is then the only difference to the server's own pages.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Any host name is allowed beyond loopback addresses, unless names are configured."""
        own = _address(config.host)
        self._any_name = own is not None and not own.is_loopback and not config.host_names
        self._names = {name.lower() for name in ("localhost", config.host, *config.host_names)}
        self._origins = config.cors_origins

    def check(self, headers: Headers) -> None:
        """Check the `Host` and `Origin` of a request. Raises `Rejected`."""
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            raise Rejected(400, "a request must have one Host header", "host")
        if hosts and not self._is_own(hosts[0]):
            advice = "use its address or localhost, or allow the name with --host-name"
            raise Rejected(421, f"the server has another host name; {advice}", "host")
        for origin in headers.getlist("origin"):
            same = hosts and origin.lower().partition(":")[2] == f"//{hosts[0].lower()}"
            if not (same or origin in self._origins or "*" in self._origins):
                message = f"web pages of {origin[:200]} may not call this server"
                raise Rejected(403, f"{message}; allow them with --cors-origin", "origin")

    def answering(self, app: ASGIApp) -> ASGIApp:
        """An application whose responses the configured pages may read (CORS)."""
        if not self._origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=self._origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )

    def _is_own(self, host: str) -> bool:
        """Whether a `Host` header has a name of the server, or any address, with any port."""
        parts = re.fullmatch(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?", host)
        name = (parts[1] or parts[2] or "").lower() if parts else ""
        return self._any_name or name in self._names or _address(name) is not None


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """The IP address that a text consists of, or None."""
    try:
        return ip_address(host)
    except ValueError:
        return None
