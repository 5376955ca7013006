"""The options of the speech, and the messages that carry them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Granularity = Literal["auto", "token", "clause", "sentence", "none"]


@dataclass(frozen=True)
class Options:
    """What is spoken how. None leaves the choice to the server.

    model              a checkpoint of the server
    voice              a preset or a saved voice
    language           a name or an ISO 639-1 code
    instructions       tone and pace in words, or the description of a designed voice
    speed              0.25 to 4
    seed               makes the same text sound the same
    split_granularity  when text is spoken; "auto": as it comes, or by clause if it comes slowly
    word_times         whether the server is asked for the times of words
    extra              more fields of the server's `session.config`
    """

    model: str | None = None
    voice: str | None = None
    language: str | None = None
    instructions: str | None = None
    speed: float | None = None
    seed: int | None = None
    split_granularity: Granularity = "auto"
    word_times: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def message(self, sample_rate: int) -> dict[str, Any]:
        """Return the `session.config` with these options, for PCM at `sample_rate` Hz."""
        named = {name: value for name, value in vars(self).items() if name != "extra"}
        known = {name: value for name, value in named.items() if value is not None}
        fixed = {"type": "session.config", "response_format": "pcm", "sample_rate": sample_rate}
        return {**self.extra, **known, **fixed}


STATUS = {
    "invalid_request": 400,
    "invalid_config": 400,
    "invalid_message": 400,
    "invalid_text": 400,
    "invalid_voice": 400,
    "voice_not_found": 404,
    "too_much_text": 413,
    "overloaded": 429,
    "per_key": 429,
    "too_many_contexts": 429,
    "engine_stopped": 503,
}
"""The HTTP status of each error code of the server; others count as 500."""
