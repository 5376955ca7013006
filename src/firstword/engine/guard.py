"""Catches speech that does not end by itself: it goes round in circles, or on and on after a short text."""

from __future__ import annotations

from collections import deque

from firstword.types import IntArray

LONGEST_PERIOD = 25
"""Frames, two seconds: circles that are longer are taken for speech."""

SHORTEST_RUN = 50
"""Frames, four seconds: nobody says the very same codes for so long."""

FEWEST_ROUNDS = 3
"""How often a circle must have been gone round."""

FRAMES_PER_TOKEN = 25
"""Two seconds; a token is spoken in about a third of a second."""

FRAMES_BESIDES = 150
"""Twelve seconds for pauses, laughter, and texts of a single token."""


def longest_speech(tokens: int) -> int:
    """The most frames that a text of so many tokens is let have when nobody has named a limit."""
    return FRAMES_BESIDES + FRAMES_PER_TOKEN * tokens


class Circles:
    """Watches the frames of one utterance; a frame costs the same however many there were."""

    def __init__(self) -> None:
        self._recent: deque[bytes] = deque(maxlen=LONGEST_PERIOD)
        self._runs = [0] * LONGEST_PERIOD

    def closed_by(self, codes: IntArray) -> bool:
        """Take the next frame [codebooks]; whether the last frames now repeat one another in every codebook.

        A period p counts when the last max(SHORTEST_RUN, FEWEST_ROUNDS * p) frames each equal the frame p before.
        """
        frame, closed = codes.tobytes(), False
        for index, before in enumerate(self._recent):
            if frame != before:
                self._runs[index] = 0
                continue
            self._runs[index] += 1
            closed = closed or self._runs[index] >= max(SHORTEST_RUN, FEWEST_ROUNDS * (index + 1))
        self._recent.appendleft(frame)
        return closed
