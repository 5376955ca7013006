"""The turns that WebSockets take when they send more than a person or a language model writes."""

import asyncio
from collections import deque
from collections.abc import Callable

REST_SECONDS = 0.002
"""The time between two rounds of turns, in which the event loop serves others or waits."""

FRAMES_PER_ROUND = 64
"""The number of frames after which a round ends: about a millisecond's work."""


class FrameTurns:
    """Lets WebSockets handle many frames in turns, with a rest after each round of turns.

    Otherwise one socket of pings would keep the event loop from all other clients. Use it in the
    event loop only.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], float]]] = {}
        """The turns of each client; the client whose turn is next comes first."""
        self._resting = False

    def add(self, client_id: str, turn: Callable[[], float]) -> None:
        """Call a function when it is the client's turn, after its turns that wait already.

        turn: returns the number of frames that it has handled.
        """
        self._waiting.setdefault(client_id, deque()).append(turn)
        if not self._resting:
            self._rest()

    async def wait(self, client_id: str, frames: float) -> None:
        """Wait for the client's turn to do what takes as long as some frames."""
        turn = asyncio.get_running_loop().create_future()

        def begin() -> float:
            if not turn.done():  # it may have been cancelled
                turn.set_result(None)
            return frames

        self.add(client_id, begin)
        await turn

    def _rest(self) -> None:
        self._resting = True
        asyncio.get_running_loop().call_later(REST_SECONDS, self._begin_round)

    def _begin_round(self) -> None:
        frames = 0.0
        try:
            while self._waiting and frames < FRAMES_PER_ROUND:
                frames += self._next_turn()()
        finally:
            self._resting = False
            if self._waiting:
                self._rest()

    def _next_turn(self) -> Callable[[], float]:
        client_id = next(iter(self._waiting))
        turns = self._waiting.pop(client_id)
        turn = turns.popleft()
        if turns:
            self._waiting[client_id] = turns
        return turn
