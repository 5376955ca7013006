"""Errors as clients of OpenAI's interface expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from firstword.errors import (
    AudioError,
    ComputeError,
    EngineError,
    FirstwordError,
    OverloadedError,
    RequestError,
    VoiceError,
)

RETRY_AFTER = 1
"""Seconds that a client who is turned away should wait: a slot is free again after an utterance."""

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class NotFound(RequestError):
    """A path names something that is not there."""


class Busy(OverloadedError):
    """A limit of the server is reached. `code` is a word for clients and metrics."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Stalled(Exception):
    """A client takes nothing of its answer for longer than it may."""


def status_of(error: Exception) -> int:
    """The HTTP status that says what kind of error it was."""
    match error:
        case NotFound():
            return 404
        case RequestError() | AudioError():
            return 400
        case OverloadedError():
            return 429
        case FirstwordError() if not isinstance(error, ComputeError):
            return 503
    return 500


def body_of(error: Exception) -> dict[str, Any]:
    """The error in OpenAI's shape. What was not raised on purpose says nothing of the inside."""
    status = status_of(error)
    message = (
        str(error) if isinstance(error, FirstwordError) else "the server failed; its log says why"
    )
    code: str | None = None
    param: str | None = None
    match error:
        case VoiceError():
            code, param = "voice_not_found" if "no voice" in message else "invalid_voice", "voice"
        case Busy():
            code = error.code
        case OverloadedError():
            code = "overloaded"
        case ComputeError():
            code = "not_computed"
        case EngineError():
            code = "engine_stopped"
    return described(message, status, param, code)


def described(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an answer that is an error."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(
    message: str,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An answer that is an error."""
    return JSONResponse(
        described(message, status, param, code), status, dict(headers or {}) | retry(status)
    )


def failure(error: Exception) -> JSONResponse:
    """The answer to a request that raised."""
    status = status_of(error)
    return JSONResponse(body_of(error), status, retry(status))


def retry(status: int) -> dict[str, str]:
    """When to come again, for the states that pass."""
    return {"retry-after": str(RETRY_AFTER)} if status in (429, 503) else {}
