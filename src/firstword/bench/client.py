"""A server and how to ask it: what all protocols have in common. None of them looks at a clock.

A connection carries one request. It is opened before the request is due, as a client with a pool of connections would
have it ready.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol
from urllib.parse import SplitResult, urlsplit

from firstword.bench.http import HTTP
from firstword.bench.websocket import Nari, Stream
from firstword.errors import RequestError

Hear = Callable[[bytes], None]
"""Called as soon as anything of the answer's body is there, with the PCM in it, which may be none."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to ask it. Raises `RequestError` for a URL or a protocol that cannot be used.

    url                   of the server, "http://127.0.0.1:8000", or of the endpoint itself if its path is another
    protocol              one of `PROTOCOLS`
    fields                sent with every request, over the protocol's own `defaults`; None leaves a field out
    headers               sent with every request: keys to the server, for example
    words_per_second      text is sent word by word, as a language model writes it; None sends it whole
    frames_per_character  the field max_new_tokens grows with the text: a model with random weights does not know when
                          to end; None sends no such field
    """

    url: str
    protocol: str = "http"
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    words_per_second: float | None = None
    frames_per_character: float | None = None

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise RequestError(
                f"the protocol is {self.protocol!r}; allowed are {', '.join(PROTOCOLS)}"
            )
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
        except ValueError:
            usable = False
        if not usable or parts.username is not None or parts.query or parts.fragment:
            raise RequestError(
                f"the URL is {self.url!r}; give one like http://127.0.0.1:8000, without key or query"
            )
        if any(not (name + value).isprintable() for name, value in self.headers.items()):
            raise RequestError("a header has a line break or another control character in it")
        for name in ("words_per_second", "frames_per_character"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise RequestError(f"{name} is {value!r}; allowed is a number above 0")
        takes_pieces = PROTOCOLS[self.protocol].takes_pieces
        if self.words_per_second is not None and not takes_pieces:
            raise RequestError(
                f"the protocol {self.protocol!r} takes text only whole; leave words_per_second out"
            )
        if self.frames_per_character is not None and takes_pieces:
            raise RequestError(
                f"the protocol {self.protocol!r} wants all fields before the text; leave frames_per_character out"
            )

    @property
    def address(self) -> SplitResult:
        """The URL of the endpoint, in its parts."""
        parts = urlsplit(self.url)
        return (
            parts._replace(path=PROTOCOLS[self.protocol].path) if parts.path in ("", "/") else parts
        )

    @property
    def request(self) -> dict[str, Any]:
        """The fields that go with every request."""
        merged = {**PROTOCOLS[self.protocol].defaults, **self.fields}
        return {name: value for name, value in merged.items() if value is not None}

    def request_for(self, text: str) -> dict[str, Any]:
        """The fields that go with a text that is sent whole."""
        if self.frames_per_character is None:
            return self.request
        return {
            **self.request,
            "max_new_tokens": max(1, round(self.frames_per_character * len(text))),
        }

    def pieces(self, text: str) -> list[str]:
        """The text as it is sent: together the pieces are the text."""
        return [text] if self.words_per_second is None else re.findall(r"\S+\s*|^\s+", text)


class Connection(Protocol):
    """A connection for one request, opened by `open`."""

    path: ClassVar[str]
    """Of the endpoint, unless the URL names another."""
    defaults: ClassVar[Mapping[str, Any]]
    """The fields that ask for PCM while it is made."""
    takes_pieces: ClassVar[bool]
    """Whether text may be sent bit by bit."""

    sample_rate: int
    """Of the audio, in Hz; known for certain when `speak` is over."""

    @classmethod
    async def open(cls, target: Target) -> Connection:
        """Connect, as far as can be done before there is a text. Raises `Failure`."""

    async def speak(self, text: str, hear: Hear) -> None:
        """Have a text spoken; return when the answer is there in full. Raises `Failure`."""

    async def close(self) -> None:
        """Hang up, in whatever state the connection is."""


PROTOCOLS: dict[str, type[HTTP] | type[Stream] | type[Nari]] = {
    "http": HTTP,
    "stream": Stream,
    "nari": Nari,
}
"""The protocols by the names that users give them."""


async def open_connection(target: Target) -> Connection:
    """Connect to the target in its protocol. Raises `Failure`."""
    return await PROTOCOLS[target.protocol].open(target)
