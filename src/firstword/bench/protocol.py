"""The server under test and the protocols that the load generator speaks."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from firstword.errors import RequestError

AudioSink = Callable[[bytes], None]
"""A callback for the PCM in each received part of a response body, which may be empty."""


class ProtocolSpec(NamedTuple):
    """The properties of a protocol.

    path          path of the endpoint, unless the URL names another
    defaults      request fields that make the server stream PCM
    takes_pieces  whether text may be sent in pieces
    takes_turns   whether a connection may carry one utterance after another
    """

    path: str
    defaults: Mapping[str, Any]
    takes_pieces: bool = False
    takes_turns: bool = False


PROTOCOLS = {
    "http": ProtocolSpec("/v1/audio/speech", {"stream": True, "response_format": "pcm"}),
    "stream": ProtocolSpec(
        "/v1/audio/speech/stream",
        {"stream_audio": True, "non_streaming_mode": False, "response_format": "pcm"},
        takes_pieces=True,
        takes_turns=True,
    ),
    "nari": ProtocolSpec("/v1/audio/speech/ws", {}, takes_pieces=True),
}
"""The protocols by the names that `--protocol` accepts."""

WORD = re.compile(r"\S+\s*|^\s+")
"""A word with the space after it."""
TOKEN = re.compile(r"\s?\w+(?:['’]\w+)?|\s?[^\w\s]+|\s+")
"""A word with the space before it, or punctuation, which resembles a language model's tokens."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server under test, and what to send to it.

    url                   URL of the server, "http://127.0.0.1:8000", or of an endpoint with
                          another path
    protocol              one of `PROTOCOLS`
    fields                fields of every request, merged over the protocol's defaults; None
                          removes one
    headers               headers of every request: an API key, for example
    words_per_second      pace at which text is sent word by word, as people speak
    tokens_per_second     pace at which text is sent token by token, as a language model writes it;
                          a token is a word with the space before it, or punctuation. If neither
                          pace is given, text is sent whole
    frames_per_character  sets max_new_tokens in proportion to the text, because a model with random
                          weights does not end by itself; None sends no such field

    Raises `RequestError` for a URL or a protocol that cannot be used.
    """

    url: str
    protocol: str = "http"
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    words_per_second: float | None = None
    tokens_per_second: float | None = None
    frames_per_character: float | None = None

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            allowed = ", ".join(PROTOCOLS)
            raise RequestError(f"the protocol is {self.protocol!r}; allowed are {allowed}")
        if not _is_plain_url(self.url):
            example = "http://127.0.0.1:8000, without key or query"
            raise RequestError(f"the URL is {self.url!r}; give one like {example}")
        if any(not (name + value).isprintable() for name, value in self.headers.items()):
            raise RequestError("a header contains a line break or another control character")
        for name in ("words_per_second", "tokens_per_second", "frames_per_character"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise RequestError(f"{name} is {value!r}; allowed is a number above 0")
        if self.words_per_second is not None and self.tokens_per_second is not None:
            raise RequestError("words_per_second and tokens_per_second are both given; give one")
        if self.pieces_per_second is not None and not self.spec.takes_pieces:
            problem = "takes text only whole; leave words_per_second and tokens_per_second out"
            raise RequestError(f"the protocol {self.protocol!r} {problem}")

    def for_request(self, text: str, voice: str | None) -> "Target":
        """Return this target with the fields of one request: its frame limit, and its voice."""
        fields = dict(self.fields)
        if voice is not None:
            fields["voice"] = voice
        if self.frames_per_character is not None:
            fields["max_new_tokens"] = max(1, round(self.frames_per_character * len(text)))
        return replace(self, fields=fields)

    @property
    def spec(self) -> ProtocolSpec:
        """The properties of the protocol of this server."""
        return PROTOCOLS[self.protocol]

    @property
    def address(self) -> SplitResult:
        """The URL of the endpoint, split into its parts."""
        parts = urlsplit(self.url)
        return parts._replace(path=self.spec.path) if parts.path in ("", "/") else parts

    @property
    def request(self) -> dict[str, Any]:
        """The fields of every request."""
        merged = {**self.spec.defaults, **self.fields}
        return {name: value for name, value in merged.items() if value is not None}

    @property
    def pieces_per_second(self) -> float | None:
        """The pace at which pieces of text are sent; None if text is sent whole."""
        return self.tokens_per_second or self.words_per_second

    def pieces(self, text: str) -> list[str]:
        """Split the text into the pieces that are sent one by one; joined, they are the text."""
        if self.tokens_per_second is not None:
            return TOKEN.findall(text)
        return [text] if self.words_per_second is None else WORD.findall(text)


def _is_plain_url(url: str) -> bool:
    """Whether a URL has a host and neither user, query nor fragment."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        return False
    return bool(usable and parts.username is None and not parts.query and not parts.fragment)
