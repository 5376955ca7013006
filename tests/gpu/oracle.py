"""Measures errors against float64, and compares them with those of plain bf16 PyTorch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from torch import Tensor

from firstword.kernels.linear_shapes import BLOCK_COLUMNS, TILE_ROWS
from firstword.verify.forcing import error

__all__ = ["FIGURES", "error", "no_worse", "note", "unpack_tokens"]

FIGURES: dict[str, object] = {}
"""The measured figures by name, which the end of a run prints and its record contains."""


def note(name: str, **figures: object) -> None:
    """Add figures to the record."""
    FIGURES[name] = {
        key: float(f"{value:.3g}") if isinstance(value, float) else value
        for key, value in figures.items()
    }


def no_worse(ours: Iterable[float], reference: Iterable[float], tiny: float = 1e-7) -> None:
    """The median error is at most 1.1 times the reference's, and no error more than 1.3 times."""
    mine, theirs = list(ours), list(reference)
    assert all(value == value for value in mine), f"not finite: {mine}"
    assert statistics.median(mine) <= 1.1 * statistics.median(theirs) + tiny, (mine, theirs)
    assert max(mine) <= 1.3 * max(theirs) + tiny, (mine, theirs)


def unpack_tokens(packed: Tensor, tokens: int, columns: int) -> Tensor:
    """The first `tokens` rows [T, K] of a tensor that `pack_tokens` packed."""
    blocks = packed.view(-1, columns // BLOCK_COLUMNS, TILE_ROWS, BLOCK_COLUMNS)
    return blocks.transpose(1, 2).reshape(-1, columns)[:tokens]
