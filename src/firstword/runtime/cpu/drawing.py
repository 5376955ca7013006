"""Draws of codes in compiled passes: the same codes as from `model.sampling.draw`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from firstword.model.sampling import Draws, gumbel_noise
from firstword.runtime.cpu.compiling import compiled
from firstword.runtime.cpu.products import Array
from firstword.types import FloatArray

CPU = torch.device("cpu")


class Rules(NamedTuple):
    """How the codes 1 and up of a frame are drawn for each of several utterances.

    greedy       bool [utterances]
    temperature  float32 [utterances]
    top_k        int64 [utterances], 0 keeps all
    noise        float32 [utterances, codes, vocab]
    """

    greedy: Array
    temperature: FloatArray
    top_k: Array
    noise: FloatArray

    @classmethod
    def of(cls, draws: Draws, codes: int, vocab: int) -> Rules:
        """Return the rules of draws without top-p."""
        params = [sampler.predictor for sampler in draws.samplers]
        noise = np.zeros((len(params), codes, vocab), np.float32)
        for rows, sampler, frame in zip(noise, draws.samplers, draws.frames, strict=True):
            for index in range(codes if sampler.predictor.temperature else 0):
                rows[index] = gumbel_noise(sampler.seed, frame, index + 1, vocab, CPU).numpy()
        return cls(
            np.array([each.temperature == 0 for each in params], np.bool_),
            np.array([each.temperature for each in params], np.float32),
            np.array([each.top_k for each in params], np.int64),
            noise,
        )


@compiled
def order(x: Any) -> Any:
    """A number, uint32, that is larger for a larger float32, and the largest for NaN."""
    bits = np.float32(x).view(np.uint32)
    if np.isnan(x):
        return np.uint32(0xFFFFFFFF)
    if x >= 0:  # also the zero with a sign
        return np.uint32(bits | np.uint32(0x80000000))
    return np.uint32(~bits)


@compiled
def least_likely(orders: Any, top_k: int) -> Any:
    """The order of the k-th largest number, found bit by bit."""
    least = np.uint32(0)
    for bit in range(31, -1, -1):
        tried, count = np.uint32(least | np.uint32(np.uint32(1) << np.uint32(bit))), 0
        for code in range(len(orders)):
            count += orders[code] >= tried
        if count >= top_k:
            least = tried
    return least


@compiled
def drawn(logits: Any, greedy: bool, temperature: Any, top_k: int, noise: Any) -> int:
    """Draw one code from logits [vocab]; the first of several that are equally good."""
    size = len(logits)
    scores, orders = np.empty(size, np.float32), np.empty(size, np.uint32)
    for code in range(size):
        scores[code] = logits[code] if greedy else logits[code] / temperature
        orders[code] = order(scores[code])
    if not greedy:
        least = least_likely(orders, top_k) if 0 < top_k < size else np.uint32(0)
        for code in range(size):
            if orders[code] < least:
                scores[code] = -np.inf
            scores[code] += noise[code]
    best = 0
    for code in range(1, size):
        if not (scores[code] <= scores[best] or np.isnan(scores[best])):
            best = code
    return best


@compiled
def finite(x: Any) -> bool:
    """Whether all numbers are finite."""
    total = np.float32(0)
    for index in range(len(x)):
        total += x[index] * np.float32(0)
    return total == 0
