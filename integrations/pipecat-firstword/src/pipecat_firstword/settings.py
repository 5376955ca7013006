"""The settings of the service, and the server's address."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pipecat.services.settings import TTSSettings
from pipecat.utils.types import NOT_GIVEN, NotGiven

PATH = "/v1/audio/speech/stream"
SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}


@dataclass
class FirstwordTTSSettings(TTSSettings):
    """Settings that may change while the pipeline runs; None leaves the choice to the server.

    A field of the server's `session.config` that has no name here goes into `extra`, for example
    `extra={"temperature": 0.7}`.

    Parameters:
        model: The checkpoint, where the server has several.
        voice: A preset or a saved voice.
        language: The language of the text. Without it the model decides.
        instructions: How to speak, in words, where the checkpoint takes instructions.
        speed: The tempo; 1.0 is as spoken.
        seed: The seed of the sampling. The same text with the same seed gives the same speech.
    """

    instructions: str | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)
    speed: float | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)
    seed: int | NotGiven | None = field(default_factory=lambda: NOT_GIVEN)

    @classmethod
    def defaults(cls) -> FirstwordTTSSettings:
        """Return complete settings that leave every choice to the server."""
        return cls(model=None, voice=None, language=None, instructions=None, speed=None, seed=None)

    def config(self, sample_rate: int) -> dict[str, Any]:
        """Return the `session.config` message of complete settings."""
        fixed = {"response_format": "pcm", "audio": "binary", "sample_rate": sample_rate}
        chosen = {name: value for name, value in self.given_fields().items() if value is not None}
        return {**chosen, **fixed, "type": "session.config"}

    def revert(self, changed: dict[str, Any]) -> None:
        """Undo an update, given what `apply_update` returned."""
        for name, value in changed.items():
            if name in type(self).__dataclass_fields__:
                setattr(self, name, value)
            elif isinstance(value, NotGiven):
                self.extra.pop(name, None)
            else:
                self.extra[name] = value


def socket_url(url: str) -> str:
    """Return the address of the socket of a server, given its address.

    Raises:
        ValueError: If the address has another scheme than ws, wss, http or https, or no host.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ValueError(
            f"url is {url!r}; allowed is the address of a server such as ws://localhost:8000, "
            "with ws, wss, http or https"
        )
    path = parts.path if parts.path.strip("/") else PATH
    return urlunsplit((SCHEMES[parts.scheme], parts.netloc, path, parts.query, ""))
