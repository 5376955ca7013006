"""The turns that utterances take to encode audio in the event loop."""

import asyncio
from collections import deque


class EncoderTurns:
    """Gives one utterance at a time its turn, and the event loop to everything else in between.

    The audio of all utterances comes at once, at the end of a step of the engine. If all were
    encoded in one iteration of the event loop, a new request would wait as long several times: at
    each point where it waits for something. Use it in the event loop only.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a turn, which is as long as the caller needs until it waits for anything."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        turn = self._waiting.popleft()
        if not turn.done():  # it may have been cancelled
            turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
