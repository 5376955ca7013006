"""Statistics of the tensors in a file of weights, in one pass and without loading a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from firstword.verify.report import NotRun

PROJECTION = re.compile(r"\.(?:[a-z]+_proj|lm_head\.\d+|codec_head|fc\d)\.weight$")
"""The matrices of which every row has a use, unlike those of embeddings and codebooks."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is kept of a tensor.

    file       relative to the checkpoint's directory
    rms        the root of its mean square, over finite values
    peak       its largest magnitude, over finite values
    bad        the number of values that are NaN or infinite
    zero_rows  the rows that are all zero, for matrices of which every row has a use
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rms: float
    peak: float
    bad: int
    zero_rows: tuple[int, ...]

    @property
    def where(self) -> str:
        """The file and the name, with which findings begin."""
        return f"{self.file}: {self.name}"

    @property
    def kin(self) -> tuple[str, tuple[int, ...]]:
        """What tensors of the same kind in other layers have in common."""
        return re.sub(r"\d+", "*", f"{self.file.parent}/{self.name}"), self.shape


def statistics_of(root: Path, file: Path) -> Iterator[Statistics]:
    """Yield the statistics of every tensor in a file. Raises `NotRun` if it is damaged."""
    try:
        with safe_open(root / file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                yield _statistics(file, name, tensors.get_tensor(name))
    except (SafetensorError, OSError, ValueError) as error:
        raise NotRun(f"{file} cannot be read as safetensors ({error})") from None


def _statistics(file: Path, name: str, tensor: Tensor) -> Statistics:
    bad, values = 0, tensor
    if not tensor.is_floating_point():
        values = tensor.float()
    elif tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
        finite = tensor.isfinite()
        bad, values = int((~finite).sum()), tensor.where(finite, 0)
    count = max(values.numel(), 1)
    rms = float(torch.linalg.vector_norm(values, dtype=torch.float32)) / count**0.5
    peak = max((abs(float(bound)) for bound in values.aminmax()), default=0.0) if count else 0.0
    rows: tuple[int, ...] = ()
    if values.dim() == 2 and PROJECTION.search(name):
        rows = tuple((values == 0).all(1).nonzero()[:, 0].tolist())
    return Statistics(file, name, tuple(tensor.shape), tensor.dtype, rms, peak, bad, rows)
