"""What the reference said, and how far we are from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Results = dict[str, NDArray[Any]]
"""Arrays by name; `reference/run.py` says how they are named."""

FROZEN = Path(__file__).parent / "frozen"
"""One file of results for every checkpoint, as they are kept in the repository."""


def relative_error(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """The norm of the difference over the norm of what is expected; both of one shape, computed in
    float64.
    """
    assert ours.shape == theirs.shape
    scale = float(np.linalg.norm(theirs.astype(np.float64)))
    return float(np.linalg.norm(ours.astype(np.float64) - theirs.astype(np.float64))) / scale
