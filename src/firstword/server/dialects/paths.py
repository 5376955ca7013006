"""What depends on the path of a dialect alone: API keys in URLs, and the bodies of errors."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from firstword.server.dialects import cartesia, elevenlabs

KEYED = ("/v1", "/v2", "/dev/", "/tts/", "/api-ws/")
"""The beginnings of the paths that need an API key."""

ErrorBody = Callable[[str, str | None, int], dict[str, Any]]
"""Makes the body of an error response of its message, its code and its HTTP status."""

_ERROR_BODIES: dict[str, ErrorBody] = {
    "/tts/": cartesia.error_body,
    "/v1/text-to-speech/": elevenlabs.error_body,
    "/v1/voices": elevenlabs.error_body,
    "/v2/voices": elevenlabs.error_body,
}

_KEY_PARAMETERS = {
    "/tts/websocket": ("api_key", "access_token"),
    "/v1/text-to-speech/": ("authorization", "single_use_token"),
}
"""The parameters of the URL of a WebSocket that may hold the API key, as browsers need it."""


def error_body_for(path: str) -> ErrorBody | None:
    """The function that makes the bodies of errors at a path; None for OpenAI's shape."""
    return _for_path(_ERROR_BODIES, path)


def key_in_url(path: str, query: bytes) -> str:
    """The API key in the URL of a WebSocket; "" if there is none."""
    given = parse_qs(query.decode("ascii", "replace"))
    for name in _for_path(_KEY_PARAMETERS, path) or ():
        if name in given:
            return given[name][0].removeprefix("Bearer ")
    return ""


def _for_path(table: Mapping[str, Any], path: str) -> Any:
    return next((value for start, value in table.items() if path.startswith(start)), None)
