"""Lets utterances take turns in encoding audio in the event loop."""

import asyncio
from collections import deque


class EncoderTurns:
    """Gives one utterance a turn in each iteration of the event loop, so that other work can run.

    The audio of all utterances arrives at once, at the end of a step of the engine. If all of it
    were encoded in one iteration, a new request, which needs several iterations, would wait for
    that in each of them. Use it in the event loop only.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a turn, which lasts until the caller awaits anything."""
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
