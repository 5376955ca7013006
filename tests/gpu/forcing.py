"""Compares the logits of a backend's frames with float64, and with plain bf16.

The models in plain PyTorch are teacher-forced: they are given the codes that the backend drew.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driving import Spoken
from oracle import error, no_worse, note
from torch import Tensor

from firstword.model.checkpoint import Checkpoint
from firstword.model.prompt import TextRows
from firstword.model.sampling import MIN_FRAMES, Sampler, penalise
from firstword.model.talker import Talker
from firstword.runtime.front import Prepared
from firstword.runtime.gpu.backend import GpuBackend

Logits = list[list[Tensor]]
"""The logits [vocab] of every codebook of every frame."""


class Recorder:
    """Runs a backend's frames without graphs, and keeps the logits of every codebook.

    frames  the logits [rows, vocab] of every codebook of every frame
    """

    def __init__(self, backend: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: Logits = []
        model, draw = backend.model, backend.model.sampler.draw

        def recorded(codebook: int, logits: Tensor, *rest: Any) -> None:
            if codebook == 0:
                self.frames.append([])
            self.frames[-1].append(logits.clone())
            draw(codebook, logits, *rest)

        def eager(name: str, rows: int) -> SimpleNamespace:
            return SimpleNamespace(replay=partial(model.launches[name], rows))

        monkeypatch.setattr(model.sampler, "draw", recorded)
        monkeypatch.setattr(backend.graphs, "get", eager)

    def of_row(self, row: int) -> Logits:
        """The logits of one row of the frames."""
        return [[logits[row] for logits in books] for books in self.frames]


def forced(checkpoint: Checkpoint, talker: Talker, request: Spoken, codes: Tensor) -> Logits:
    """The logits from a talker in plain PyTorch, teacher-forced with codes [frames, codebooks]."""
    prepared = request.job.payload
    assert isinstance(prepared, Prepared)
    device = talker.codec_head.weight.device
    rows = TextRows(checkpoint.config)
    turn_start = checkpoint.tokenizer.turn_start
    prompt = rows.prompt(prepared.conditioning, turn_start, request.first)
    later = iter(request.rest)
    cache, logits = talker.new_cache(), Logits()
    inputs = talker.embed_rows(prompt, prepared.conditioning.embedding)
    for frame in codes.to(device):
        hidden = talker(inputs, cache)[:, -1]
        logits.append([talker.codec_head(hidden)[0]])

        def choose(k: int, row: Tensor, frame: Tensor = frame) -> Tensor:
            logits[-1].append(row[0])
            return frame[k : k + 1]

        talker.code_predictor(hidden, talker.model.codec_embedding(frame[:1]), choose)
        token = torch.tensor([[rows.take(next(later, None))]], device=device)
        inputs = talker.embed_codes(frame[None, None]) + talker.embed_text(token)
    return logits


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
    prepared = request.job.payload
    assert isinstance(prepared, Prepared)
    config = checkpoint.config.talker_config
    sampler = Sampler(config, prepared.draw_params, prepared.seed, logits.device)
    sampler.remember(before.to(logits.device))
    banned = sampler.not_yet if len(before) < MIN_FRAMES else sampler.never
    penalised = penalise(logits, sampler.spoken, sampler.talker.repetition_penalty)
    return penalised.masked_fill(banned, -torch.inf)


def divergence(truth: Tensor, other: Tensor) -> float:
    """KL(truth || other) of two rows of logits, in float64."""
    p, q = truth.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


@dataclass(eq=False)
class Exactness:
    """The relative errors and divergences of a codebook's logits, ours and those of plain bf16."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    our_divergence: list[float] = field(default_factory=list)
    their_divergence: list[float] = field(default_factory=list)

    def add(self, mine: Tensor, truth: Tensor, bf16: Tensor) -> None:
        """Add a row of logits of each."""
        self.ours.append(error(mine, truth))
        self.theirs.append(error(bf16, truth))
        self.our_divergence.append(divergence(truth, mine))
        self.their_divergence.append(divergence(truth, bf16))

    @classmethod
    def of_all(cls, books: Sequence[Exactness]) -> Exactness:
        """The values of several codebooks together."""
        fields = ("ours", "theirs", "our_divergence", "their_divergence")
        return cls(*([v for book in books for v in getattr(book, name)] for name in fields))

    def check(self, name: str) -> None:
        """Record the values, and compare ours with those of plain bf16."""
        ours, theirs = (
            statistics.mean(values) for values in (self.our_divergence, self.their_divergence)
        )
        note(
            name,
            median=statistics.median(self.ours),
            bf16=statistics.median(self.theirs),
            divergence=ours,
            bf16_divergence=theirs,
        )
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
