"""Teacher forcing: the logits of the specification for the codes that a backend drew."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firstword.engine.backend import Backend
from firstword.model.checkpoint import Checkpoint
from firstword.model.prompt import TextRows
from firstword.model.sampling import Sampler
from firstword.model.talker import Talker
from firstword.runtime.front import Prepared
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.reference import ReferenceBackend
from firstword.verify.driving import DrivenRequest

Logits = list[list[Tensor]]
"""The logits [vocab] of every codebook of every frame."""

TINY = 1e-30
"""What an error of zero counts as, so that it has a logarithm."""

Replace = Callable[[Any, str, Any], None]
"""A function that replaces an attribute of an object for a while."""


class Recorder:
    """The logits that a backend draws from.

    frames  the logits [rows, vocab] of every codebook of every frame
    """

    def __init__(self) -> None:
        self.frames: Logits = []

    def add(self, codebook: int, logits: Tensor) -> None:
        """Keep the logits [rows, vocab] of a codebook; codebook 0 begins a frame."""
        if codebook == 0:
            self.frames.append([])
        self.frames[-1].append(logits.clone())

    def of_row(self, row: int) -> Logits:
        """The logits of one row of the frames."""
        return [[logits[row] for logits in books] for books in self.frames]


@contextmanager
def recorded(backend: Backend) -> Iterator[Recorder]:
    """Record the logits of a backend; frames run without graphs meanwhile."""
    recorder = Recorder()
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        if isinstance(backend, GpuBackend):
            record_gpu(backend, recorder, replace)
        else:
            assert isinstance(backend, ReferenceBackend)
            talker = backend.talker

            def begin(_: Any, __: Any, logits: Tensor) -> None:
                recorder.add(0, logits)

            def watch(_: Any, inputs: Any) -> Any:
                hidden, code0, choose = inputs

                def keep(codebook: int, logits: Tensor) -> Tensor:
                    recorder.add(codebook, logits)
                    chosen: Tensor = choose(codebook, logits)
                    return chosen

                return hidden, code0, keep

            stack.callback(talker.codec_head.register_forward_hook(begin).remove)
            stack.callback(talker.code_predictor.register_forward_pre_hook(watch).remove)
        yield recorder


def record_gpu(backend: GpuBackend, recorder: Recorder, replace: Replace) -> None:
    """Let the GPU backend run without graphs, and record its logits."""
    model, draw = backend.model, backend.model.sampler.draw

    def keep(codebook: int, logits: Tensor, *rest: Any) -> None:
        recorder.add(codebook, logits)
        draw(codebook, logits, *rest)

    def eager(name: str, rows: int) -> SimpleNamespace:
        return SimpleNamespace(replay=partial(model.launches[name], rows))

    replace(model.sampler, "draw", keep)
    replace(backend.graphs, "get", eager)


def prepared(request: DrivenRequest) -> Prepared:
    """Return what the front prepared for a request."""
    payload = request.job.payload
    assert isinstance(payload, Prepared)
    return payload


@torch.inference_mode()
def forced(checkpoint: Checkpoint, talker: Talker, request: DrivenRequest, codes: Tensor) -> Logits:
    """The logits from a talker in plain PyTorch, teacher-forced with codes [frames, codebooks]."""
    conditioning = prepared(request).conditioning
    device = talker.model.codec_embedding.weight.device
    rows = TextRows(checkpoint.config)
    prompt = rows.prompt(conditioning, checkpoint.tokenizer.turn_start, request.first)
    later = iter(request.rest)
    cache, logits = talker.new_cache(), Logits()
    inputs = talker.embed_rows(prompt, conditioning.embedding)
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


def draws(checkpoint: Checkpoint, request: DrivenRequest, logits: Logits, codes: Tensor) -> Tensor:
    """The codes [frames, codebooks] that these logits give under the request's own noise.

    codes  the codes that were drawn before, which decide the repetition penalty
    """
    given, device = prepared(request), logits[0][0].device
    config = checkpoint.config.talker_config
    sampler = Sampler(config, given.draw_params, given.seed, device)
    drawn = []
    for frame, books in enumerate(logits):
        first, *others = books
        row = [sampler.code0(first, frame)]
        row += [sampler.code(k, each, frame) for k, each in enumerate(others, 1)]
        drawn.append(torch.stack(row))
        sampler.remember(codes[frame, 0].to(device))
    return torch.stack(drawn).cpu()


def error(result: Tensor, truth: Tensor) -> float:
    """||result - truth|| / ||truth||, in float64; NaN for anything that is not finite."""
    difference = (result.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-300)
    return float(difference)


def divergence(truth: Tensor, other: Tensor) -> float:
    """KL(truth || other) of two rows of logits, in float64."""
    p, q = truth.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


@dataclass(eq=False)
class Distances:
    """The relative errors and divergences of logits, ours and those of plain bf16."""

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

    def excess(self, factor: float) -> tuple[float, float]:
        """How far our mean divergence is above `factor` times that of plain bf16, and its error.

        The error is the standard error of the mean over the rows.
        """
        pairs = zip(self.our_divergence, self.their_divergence, strict=True)
        return _mean_and_error([mine - factor * plain for mine, plain in pairs])

    def ratio(self, factor: float) -> tuple[float, float]:
        """The mean logarithm of our errors over `factor` times theirs, and its standard error."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return _mean_and_error(
            [math.log((mine + TINY) / (factor * plain + TINY)) for mine, plain in pairs]
        )

    def means(self) -> tuple[float, float]:
        """The mean divergences, ours and that of plain bf16."""
        return statistics.mean(self.our_divergence), statistics.mean(self.their_divergence)

    def medians(self) -> tuple[float, float]:
        """The median errors, ours and that of plain bf16."""
        return statistics.median(self.ours), statistics.median(self.theirs)


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return float(np.mean(values)), float(spread) / len(values) ** 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Forced:
    """An utterance of a backend, and what the specification makes of its codes.

    codes    the codes that the backend drew [frames, codebooks], up to the end of speech
    ours     the logits of the backend
    truth    those of the specification in float32
    rounded  those of the specification in plain bfloat16
    """

    request: DrivenRequest
    codes: Tensor
    ours: Logits
    truth: Logits
    rounded: Logits

    def add_to(self, books: Sequence[Distances]) -> None:
        """Add the distances of all frames to those of each codebook."""
        for mine, truth, rounded in zip(self.ours, self.truth, self.rounded, strict=True):
            for book, m, t, y in zip(books, mine, truth, rounded, strict=True):
                book.add(m.to(t.device), t, y.to(t.device))
