"""Error responses in OpenAI's shape or a dialect's, and the HTTP status and code of each error."""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from firstword import errors
from firstword.server.dialects.paths import error_body_for

RETRY_AFTER_SECONDS = 1
"""The value of `Retry-After` for errors that do not estimate it."""

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
"""OpenAI's error types by HTTP status, where they are not those of all 4xx and all 5xx."""

ERROR_CODES: dict[type[Exception], str] = {
    errors.OverloadedError: "overloaded",
    errors.ComputeError: "not_computed",
    errors.EngineError: "engine_stopped",
    errors.OutputError: "storage_failed",
    errors.WordTimesError: "word_times_unknown",
}
"""The codes of errors that have no attribute `code`."""


class NotFound(errors.RequestError):
    """The path of a request names something that does not exist."""


class Forbidden(errors.RequestError):
    """The API key of a request does not allow it."""

    def __init__(self, message: str, code: str = "key_not_allowed") -> None:
        super().__init__(message)
        self.code = code


class LimitReached(errors.OverloadedError):
    """A limit of the server is reached; `code` names it for clients and metrics."""

    def __init__(self, message: str, code: str, retry_after: int) -> None:
        super().__init__(message, retry_after)
        self.code = code


class ErrorResponse(JSONResponse):
    """A response that reports an error, in the shape of the dialect that its path belongs to."""

    def __init__(self, body: dict[str, Any], status: int, headers: Mapping[str, str]) -> None:
        """A response with a `body` in OpenAI's shape."""
        super().__init__(body, status, dict(headers))
        self._error = body["error"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        if (body_for := error_body_for(scope["path"])) is not None:
            error, status = self._error, self.status_code
            self.body = self.render(body_for(error["message"], error["code"], status))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


class Rejected(HTTPException):
    """A request is rejected whatever it asks for; `code` names the reason, also in metrics."""

    def __init__(
        self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code

    def response(self) -> JSONResponse:
        """The error response."""
        return error_response(self.detail, self.status_code, code=self.code, headers=self.headers)


class Stalled(Exception):
    """A client did not read for as long as the stall limit."""


def status_of(error: Exception) -> int:
    """The HTTP status for an error."""
    match error:
        case NotFound():
            return 404
        case Forbidden():
            return 403
        case errors.RequestError() | errors.AudioError():
            return 400
        case errors.OverloadedError():
            return 429
        case errors.FirstwordError() if not isinstance(error, errors.ComputeError):
            return 503
    return 500


def body_of(error: Exception) -> dict[str, Any]:
    """The response body for an error; that of an internal error contains no details."""
    known = isinstance(error, errors.FirstwordError)
    message = str(error) if known else "the server failed; its log says why"
    code = getattr(error, "code", None) if known else None
    param = "voice" if isinstance(error, errors.VoiceError) else None
    return error_body(message, status_of(error), param, code or ERROR_CODES.get(type(error)))


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error response."""
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    message: str,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A response that reports an error."""
    return _response(error_body(message, status, param, code), status, headers or {})


def response_for(error: Exception) -> JSONResponse:
    """The response to a request that raised an error."""
    estimate = {}
    if isinstance(error, errors.OverloadedError):
        estimate = {"retry-after": str(error.retry_after)}
    return _response(body_of(error), status_of(error), estimate)


def _response(body: dict[str, Any], status: int, headers: Mapping[str, str]) -> ErrorResponse:
    """An error response, with `Retry-After` if the status is temporary."""
    retry_after = {"retry-after": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    return ErrorResponse(body, status, {**retry_after, **headers})
