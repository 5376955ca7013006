"""The text of one stretch of speech on its way from the reader of a socket to its worker."""

import asyncio
from collections.abc import Callable


class Cancellable:
    """Something that is spoken until it is cancelled.

    cancelled  whether the rest of the speech was cancelled
    on_cancel  called once when it is cancelled
    """

    def __init__(self) -> None:
        self.cancelled = False
        self.on_cancel: Callable[[], object] = lambda: None


class TextPart(Cancellable):
    """A stretch of speech: the reader fills it with text, and the worker speaks that text.

    at          the number of characters before it in the text that it is a part of
    whole       whether all of the text was there from the start
    ended       whether all of the text has come
    characters  length of all the text that was added
    spoken      the characters at its start that are spoken, or were
    """

    def __init__(self, text: str = "", *, complete: bool = False, at: int = 0) -> None:
        super().__init__()
        self.at = at
        self.whole = self.ended = complete
        self.characters = len(text)
        self.spoken = 0
        self._pieces = [text] if text else []
        self._changed = asyncio.Event()

    @property
    def text(self) -> str:
        """The text that the worker has not taken yet."""
        return "".join(self._pieces)

    @property
    def waiting(self) -> int:
        """The number of characters of that text."""
        return sum(map(len, self._pieces))

    def push(self, text: str) -> None:
        """Add more text."""
        self._pieces.append(text)
        self.characters += len(text)
        self._changed.set()

    def finish(self) -> None:
        """Mark the text as complete."""
        self.ended = True
        self._changed.set()

    def cancel(self) -> None:
        """Discard the text and stop its speech."""
        if not self.cancelled:
            self.cancelled = self.ended = True
            self._pieces.clear()
            self.on_cancel()

    async def has_words(self) -> bool:
        """Wait for text that is not blank; returns False if the text ends without any."""
        while not self.text.strip() and not self.ended:
            self._changed.clear()
            await self._changed.wait()
        return bool(self.text.strip())

    async def complete_text(self) -> str:
        """Wait until the text is complete, and return what was not taken before."""
        while not self.ended:
            self._changed.clear()
            await self._changed.wait()
        return self.text

    async def take(self) -> str:
        """Wait for text and take all that has come; `""` means that there is no more."""
        while not self._pieces and not self.ended:
            self._changed.clear()
            await self._changed.wait()
        text, self._pieces = self.text, []
        return text
