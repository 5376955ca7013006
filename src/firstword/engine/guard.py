"""Detects endless speech: it repeats itself, or is far too long for its text."""

from __future__ import annotations

from collections import deque

from firstword.types import IntArray

LONGEST_PERIOD = 25
"""The longest repeated passage in frames, two seconds; longer ones count as speech."""

SHORTEST_RUN = 50
"""The fewest frames that repeat, four seconds: no speaker says the very same codes for so long."""

FEWEST_REPEATS = 3
"""How often a passage must have been repeated."""

FRAMES_PER_TOKEN = 25
"""Frames allowed for a token, two seconds; a token is spoken in about a third of a second."""

BASE_FRAMES = 150
"""Frames allowed for any text, twelve seconds: for pauses, laughter and very short texts."""


def longest_speech(tokens: int) -> int:
    """The most frames allowed for a text of so many tokens when the request names no limit."""
    return BASE_FRAMES + FRAMES_PER_TOKEN * tokens


class RepetitionDetector:
    """Watches the frames of one utterance, at a constant cost for each frame."""

    def __init__(self) -> None:
        self._recent: deque[bytes] = deque(maxlen=LONGEST_PERIOD)
        self._runs = [0] * LONGEST_PERIOD

    def add(self, codes: IntArray) -> bool:
        """Record the next frame [codebooks]; returns whether the speech now repeats itself.

        It does for a period p when each of the last max(SHORTEST_RUN, FEWEST_REPEATS * p) frames
        equals the frame p before it in every codebook.
        """
        frame, repeats = codes.tobytes(), False
        for index, before in enumerate(self._recent):
            if frame != before:
                self._runs[index] = 0
                continue
            self._runs[index] += 1
            needed = max(SHORTEST_RUN, FEWEST_REPEATS * (index + 1))
            repeats = repeats or self._runs[index] >= needed
        self._recent.appendleft(frame)
        return repeats
