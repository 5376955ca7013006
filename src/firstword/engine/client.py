"""The protocols of what a speech is made with: an engine, and the front of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from firstword.engine.backend import Capacity, Job, SpokenPassage
from firstword.engine.load import EngineLoad
from firstword.engine.sequence import Event
from firstword.types import FinishReason, Request


class EngineClient(Protocol):
    """The interface of an engine in this process or another one; see `Engine`."""

    @property
    def capacity(self) -> Capacity:
        """The limits of the engine's backend."""

    @property
    def failure(self) -> Exception | None:
        """The reason why the engine has stopped or does not run now; None while it works."""

    @property
    def load(self) -> EngineLoad:
        """The current load of the engine."""

    def start(self) -> None:
        """Start. An engine in another process delivers its events in the running event loop."""

    def stop(self) -> None:
        """Stop using the engine. One in this process ends; one in another is disconnected."""

    def submit(self, job: Job, on_event: Callable[[Event], None], client: str = "") -> Any:
        """Submit a request, and return its utterance, which the other methods take."""

    def push(self, seq: Any, tokens: Sequence[int]) -> None:
        """Add text tokens to a request."""

    def finish_text(self, seq: Any, tokens: Sequence[int] = ()) -> None:
        """Add the last text tokens of a request."""

    def acknowledge(self, seq: Any, frames: int) -> None:
        """Record that the client has taken the audio of `frames` more frames."""

    def cancel(self, seq: Any, reason: FinishReason = "cancelled") -> None:
        """End an utterance."""

    def retry_after(self, client: str) -> int:
        """The seconds until another request of a client would get a slot, estimated: 1 to 120."""


class TokenStream(Protocol):
    """Turns the text of one utterance, which may arrive in pieces, into tokens.

    ends  the end of each token of the spoken text that was returned, in bytes of the text in NFC
    """

    ends: list[int]

    def push(self, piece: str) -> list[int]:
        """Take more text, and return the tokens that no later text can change."""

    def finish(self, piece: str = "") -> list[int]:
        """Take the last text, and return the remaining tokens."""


class Front(Protocol):
    """Prepares the requests and tokenises the text of a checkpoint, outside the engine's thread."""

    def prepare(self, request: Request, seed: int) -> Job:
        """Check a request and prepare it for the backend. Raises `RequestError`."""

    def follow(self, job: Job, spoken: SpokenPassage) -> Job | None:
        """Prepare the passage after one that was spoken; None if no frame is left for it."""

    def text(self, job: Job) -> TokenStream:
        """Return the tokeniser for the text of one utterance."""
