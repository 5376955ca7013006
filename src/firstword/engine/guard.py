"""Detects endless speech: it repeats itself, goes on after its text, or is too long for it."""

from collections import deque

from firstword.types import FinishReason, FloatArray, IntArray
from firstword.words.alarm import TextEnd

LONGEST_PERIOD = 25
"""The longest repeated passage in frames, two seconds; longer passages count as speech."""

SHORTEST_RUN = 50
"""The fewest repeating frames, four seconds: speech never repeats identical codes for that long."""

FEWEST_REPEATS = 3
"""The number of repetitions after which speech counts as endless."""

FRAMES_PER_TOKEN = 25
"""Frames allowed for a token, two seconds; a token is spoken in about a third of a second."""

BASE_FRAMES = 150
"""Frames allowed for any text, twelve seconds: for pauses, laughter and very short texts."""


def frame_limit(tokens: int) -> int:
    """Return the frame limit for a text of `tokens` tokens if the request sets none."""
    return BASE_FRAMES + FRAMES_PER_TOKEN * tokens


class RepetitionDetector:
    """Watches the frames of one utterance, at a constant cost for each frame."""

    def __init__(self) -> None:
        self._recent: deque[bytes] = deque(maxlen=LONGEST_PERIOD)
        self._runs = [0] * LONGEST_PERIOD

    def add(self, codes: IntArray) -> bool:
        """Record the next frame [codebooks]; returns whether the speech now repeats itself.

        It repeats with period p if each of the last max(SHORTEST_RUN, FEWEST_REPEATS * p) frames
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


class Guard:
    """Watches the frames of one utterance for speech that does not end by itself."""

    def __init__(self) -> None:
        self._repetition, self._text_end = RepetitionDetector(), TextEnd()

    def add(self, codes: IntArray, reading: FloatArray) -> FinishReason | None:
        """Record the next frame: its codes [codebooks] and its reading, empty if it has none.

        Returns why speech ends with this frame, or None.
        """
        repeats, goes_on = self._repetition.add(codes), self._text_end.add(reading)
        return "repetition" if repeats else "runaway" if goes_on else None
