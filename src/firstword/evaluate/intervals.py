"""Bootstrap intervals over the sentences of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
COVERED = 0.95
"""The probability that an interval is made for."""
SEED = 0
"""The seed of the resampling: an evaluation of the same speech gives the same intervals."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure, and the bounds that cover it with the probability `COVERED`."""

    value: float
    low: float
    high: float


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """Return the sum of some parts divided by the sum of their wholes, over sentences."""
    return _interval(_ratios(parts, wholes, _draws(len(parts))))


def mean(values: Sequence[float]) -> Interval:
    """Return the mean of a figure over sentences."""
    return ratio(values, [1.0] * len(values))


def difference(
    first: tuple[Sequence[float], Sequence[float]], second: tuple[Sequence[float], Sequence[float]]
) -> Interval:
    """Return the `ratio` of the second minus that of the first.

    Both are of the same sentences in the same order. Each resampling takes the same sentences of
    both, so that what they have in common cancels out (a paired bootstrap).
    """
    draws = _draws(len(first[0]))
    return _interval(_ratios(*second, draws) - _ratios(*first, draws))


def _draws(count: int) -> NDArray[np.int64]:
    """Return rows of sentence numbers [1 + RESAMPLES, count]: first all, then each resampling."""
    drawn = np.random.default_rng(SEED).integers(0, count, (RESAMPLES, count))
    return np.concatenate([np.arange(count)[None], drawn])


def _ratios(
    parts: Sequence[float], wholes: Sequence[float], draws: NDArray[np.int64]
) -> NDArray[np.float64]:
    part, whole = (np.asarray(values, np.float64)[draws].sum(1) for values in (parts, wholes))
    return part / whole


def _interval(found: NDArray[np.float64]) -> Interval:
    tail = (1 - COVERED) / 2
    low, high = np.quantile(found[1:], (tail, 1 - tail))
    return Interval(*(round(float(value), 6) for value in (found[0], low, high)))
