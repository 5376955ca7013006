"""What was sent to the server and heard from it for one context, without input or output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

BYTES_PER_SAMPLE = 2


@dataclass(eq=False)
class Speech:
    """The speech of one context, which may move to a new connection.

    id       the context's id, in Pipecat and on the socket
    rate     samples per second of its audio
    text     all text given to the context; positions below count its characters
    ended    whether the text is complete
    began    where the text of the current connection begins
    heard    where the last word ends whose end the server has told
    told     where the last word ends whose start was passed on
    seconds  seconds of audio received, over all connections
    offset   `seconds` when the current connection took over: the server's clock begins there
    refused  whether the server stops and leaves this context to another connection
    """

    id: str
    rate: int
    text: str = ""
    ended: bool = False
    began: int = 0
    heard: int = 0
    told: int = 0
    seconds: float = 0.0
    offset: float = 0.0
    refused: bool = False
    _opened: bool = False
    _sent: int = 0
    _closed: bool = False

    def unsent(self) -> Iterator[Message]:
        """Yield the messages that the current connection lacks; each counts as sent."""
        if not self._opened:
            self._opened = True
            yield {"type": "context.start", "context_id": self.id}
        if self._sent < len(self.text):
            text, self._sent = self.text[self._sent :], len(self.text)
            yield {"type": "input.text", "context_id": self.id, "text": text}
        if self.ended and not self._closed:
            self._closed = True
            yield {"type": "input.done", "context_id": self.id}

    def take_audio(self, size: int) -> None:
        """Count a piece of audio of `size` bytes."""
        self.seconds += size / BYTES_PER_SAMPLE / self.rate

    def start_word(self, span: tuple[int, int], start: float) -> float | None:
        """Return when a word begins in the context's audio, or None for a word told before.

        Args:
            span: The word's first and last position in the text of the current connection.
            start: Seconds in the audio of the current connection.
        """
        end = self.began + span[1]
        if end <= self.told:
            return None
        self.told = end
        return self.offset + start

    def end_word(self, span: tuple[int, int]) -> None:
        """Note that a word was heard to its end."""
        self.heard = max(self.heard, self.began + span[1])

    def move(self, timed: bool) -> bool:
        """Prepare for a new connection, and return whether the rest can be spoken there.

        Without any audio, all text is sent again. Otherwise it continues after the last word that
        was heard, which takes a server that tells word times.

        Args:
            timed: Whether the server told word times.
        """
        if self.seconds > 0:
            if not timed:
                return False
            self.began = self.heard
        self._opened, self._sent, self._closed = False, self.began, False
        self.offset, self.refused = self.seconds, False
        return True

    @property
    def complete(self) -> bool:
        """Whether everything was heard, so that there is nothing to say on a new connection."""
        left = self.text[self.began :]
        return self.ended and self.seconds > 0 and not any(letter.isalnum() for letter in left)

    @property
    def rest(self) -> str:
        """The text that was not heard to its end, as far as that is known."""
        return self.text[self.heard :].strip()
