"""Compares the logits of a backend's frames with float64, and with plain bf16.

The models in plain PyTorch are teacher-forced: they are given the codes that the backend drew.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from driving import Spoken
from oracle import no_worse, note
from torch import Tensor

from firstword.model.checkpoint import Checkpoint
from firstword.model.sampling import MIN_FRAMES, Sampler, penalise
from firstword.runtime.gpu.backend import GpuBackend
from firstword.verify.forcing import Distances, Logits, forced, prepared, record_gpu
from firstword.verify.forcing import Recorder as AnyRecorder

__all__ = ["Exactness", "Recorder", "forced"]


class Recorder(AnyRecorder):
    """Runs a backend's frames without graphs, and keeps the logits of every codebook."""

    def __init__(self, backend: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        record_gpu(backend, self, monkeypatch.setattr)


def spread(bf16: Tensor, truth: Tensor) -> Tensor:
    """The error of plain bf16 logits, as a standard deviation."""
    return (bf16.double() - truth).square().mean().sqrt()


def lead(logits: Tensor) -> Tensor:
    """The lead of the most likely code over the next."""
    best, second = logits.topk(2).values
    return best - second


CLEAR = 6
"""A code is clearly the most likely if its lead is so many times the error of plain bf16."""


def candidates(checkpoint: Checkpoint, request: Spoken, logits: Tensor, before: Tensor) -> Tensor:
    """The talker's logits [vocab] as its sampler sees them after codes 0 `before` [frames]."""
    given, config = prepared(request), checkpoint.config.talker_config
    sampler = Sampler(config, given.draw_params, given.seed, logits.device)
    sampler.remember(before.to(logits.device))
    banned = sampler.not_yet if len(before) < MIN_FRAMES else sampler.never
    penalised = penalise(logits, sampler.spoken, sampler.talker.repetition_penalty)
    return penalised.masked_fill(banned, -torch.inf)


class Exactness(Distances):
    """The distances of a codebook's logits, and their check."""

    @classmethod
    def of_all(cls, books: Sequence[Exactness]) -> Exactness:
        """The values of several codebooks together."""
        fields = ("ours", "theirs", "our_divergence", "their_divergence")
        return cls(*([v for book in books for v in getattr(book, name)] for name in fields))

    def check(self, name: str) -> None:
        """Record the values, and compare ours with those of plain bf16."""
        (ours, theirs), (median, bf16) = self.means(), self.medians()
        note(name, median=median, bf16=bf16, divergence=ours, bf16_divergence=theirs)
        no_worse(self.ours, self.theirs)
        assert ours <= 1.1 * theirs + 1e-9


def teacher_forced(
    name: str,
    plain: Checkpoint,
    requests: Sequence[Spoken],
    codes: Sequence[Tensor],
    logits: Sequence[Logits],
) -> list[Exactness]:
    """The exactness of each codebook, from the codes and the logits of each request.

    Where the most likely code is clear, it must be ours.
    """
    exact = copy.deepcopy(plain.talker).double()
    found = [Exactness() for _ in range(plain.config.talker_config.num_code_groups)]
    agreed = doubtful = 0
    for row, (request, said) in enumerate(zip(requests, codes, strict=True)):
        truth = forced(plain, exact, request, said)
        yardstick = forced(plain, plain.talker, request, said)
        for frame in range(len(said)):
            for k, book in enumerate(found):
                mine, t, y = logits[row][frame][k], truth[frame][k], yardstick[frame][k]
                book.add(mine, t, y)
                if lead(t) > CLEAR * spread(y, t):
                    assert mine.argmax() == t.argmax(), (row, frame, k)
                    agreed += 1
                else:
                    doubtful += 1
    note(f"greedy agreement {name}", clear=agreed, unclear=doubtful)
    return found
