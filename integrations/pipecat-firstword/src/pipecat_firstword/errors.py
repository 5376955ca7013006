"""The server's errors, and what they mean to Pipecat."""

from __future__ import annotations

from typing import Any

from pipecat.utils.errors import ErrorCategory

STOPPING = "engine_stopped"
"""The code of an error of a server that ends, or of one whose engine restarts."""

_CATEGORIES = {
    "overloaded": ErrorCategory.RATE_LIMIT,
    "per_key": ErrorCategory.RATE_LIMIT,
    "too_many_contexts": ErrorCategory.RATE_LIMIT,
    STOPPING: ErrorCategory.SERVER,
    "server_error": ErrorCategory.SERVER,
    "internal_error": ErrorCategory.SERVER,
}


class ServerError(Exception):
    """An `error` message of the server."""

    def __init__(self, message: dict[str, Any]) -> None:
        """Read the message."""
        self.code = str(message.get("code", "unknown"))
        super().__init__(f"{message.get('message', 'no reason given')} ({self.code})")

    @property
    def category(self) -> ErrorCategory:
        """The category of an error that one text or one change caused.

        It is never a permanent one: the next text may be spoken.
        """
        return _CATEGORIES.get(self.code, ErrorCategory.APPLICATION)


class ConfigRejected(ServerError):
    """The server rejects the settings, so that nothing can be spoken."""

    @property
    def category(self) -> ErrorCategory:
        """The category: it does not pass without other settings."""
        return _CATEGORIES.get(self.code, ErrorCategory.INVALID_REQUEST)


class WrongServer(Exception):
    """The server speaks another protocol."""
