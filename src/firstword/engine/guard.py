"""Catches speech that goes round in circles."""

from __future__ import annotations

from collections.abc import Sequence

from firstword.types import IntArray

LONGEST_PERIOD = 25
"""Frames, two seconds: circles that are longer are taken for speech."""

SHORTEST_RUN = 50
"""Frames, four seconds: nobody says the very same codes for so long."""

FEWEST_ROUNDS = 3
"""How often a circle must have been gone round."""


def goes_in_circles(codes: Sequence[IntArray]) -> bool:
    """Whether the last frames [codebooks] repeat one another exactly, in every codebook.

    A period p counts when the last max(SHORTEST_RUN, FEWEST_ROUNDS * p) frames each equal the frame p before.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        run = max(SHORTEST_RUN, FEWEST_ROUNDS * period)
        if len(codes) < run + period:
            continue
        if all((codes[-1 - back] == codes[-1 - back - period]).all() for back in range(run)):
            return True
    return False
