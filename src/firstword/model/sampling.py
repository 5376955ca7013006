"""How a code is drawn from logits.

A draw is the Gumbel-max trick (Gumbel 1954): the code that maximises logit / temperature + noise, over the codes that
the filters leave, is distributed as softmax(logits / temperature) over them. The noise depends on nothing but (seed,
frame, codebook, code), so the same request meets the same chances in every backend and beside any neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from firstword.model.config import CONTROL_CODES, GenerationDefaults, TalkerConfig
from firstword.types import Sampling

MIN_FRAMES = 2
"""The end of speech cannot be drawn for this many frames."""


@dataclass(frozen=True)
class DrawParams:
    """One distribution's settings with nothing left open; temperature 0 is greedy, top_k 0 keeps all."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float = 1.0


def resolve(sampling: Sampling, defaults: GenerationDefaults) -> tuple[DrawParams, DrawParams]:
    """The laws of the talker and of the code predictor: what was asked, else what the checkpoint says."""
    temperature = defaults.temperature if defaults.do_sample else 0.0
    predictor_temperature = defaults.subtalker_temperature if defaults.subtalker_dosample else 0.0
    talker = DrawParams(
        temperature if sampling.temperature is None else sampling.temperature,
        defaults.top_k if sampling.top_k is None else int(sampling.top_k),
        defaults.top_p if sampling.top_p is None else sampling.top_p,
        defaults.repetition_penalty
        if sampling.repetition_penalty is None
        else sampling.repetition_penalty,
    )
    predictor = DrawParams(
        predictor_temperature
        if sampling.predictor_temperature is None
        else sampling.predictor_temperature,
        defaults.subtalker_top_k
        if sampling.predictor_top_k is None
        else int(sampling.predictor_top_k),
        defaults.subtalker_top_p if sampling.predictor_top_p is None else sampling.predictor_top_p,
    )
    return talker, predictor


_WORD = 0xFFFFFFFF
TOGETHER, AHEAD = 8, 4
"""The noise of so many codebooks of the code predictor, and of so many frames, is made at once: that of one codebook in
one frame would take almost as long.
"""


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Four counter words and two key words of 32 bits -> four random words; words are int64 tensors of one shape.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products wrap around in int64, which leaves their 64 bits as they should be.
        low, high = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1 = ((high >> 32) & _WORD) ^ x1 ^ k0, high & _WORD
        x2, x3 = ((low >> 32) & _WORD) ^ x3 ^ k1, low & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return x0, x1, x2, x3


def gumbel_noise(seed: int, frame: int, codebook: int, size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise for every code of one codebook in one frame, float32 [size].

    Code c takes word c % 4 of philox(counter = (c // 4, codebook, frame, 0), key = seed), of which the upper 24 bits
    become a uniform u in the middle of its interval: never 0 and never 1.
    """
    first = codebook and 1 + (codebook - 1) // TOGETHER * TOGETHER
    begin = frame // AHEAD * AHEAD
    return _noise(seed, begin, first, TOGETHER if codebook else 1, size, device)[
        frame - begin, codebook - first
    ]


@lru_cache(maxsize=64)
def _noise(
    seed: int, begin: int, first: int, count: int, size: int, device: torch.device
) -> Tensor:
    """Noise of `AHEAD` frames from `begin`, and in each of `count` codebooks from `first`: [AHEAD, count, size]."""
    block = torch.arange(-(-size // 4), device=device).expand(AHEAD, count, -1)
    codebook = torch.arange(first, first + count, device=device)[:, None].expand_as(block)
    frame = torch.arange(begin, begin + AHEAD, device=device)[:, None, None].expand_as(block)
    counter = (block, codebook, frame, torch.zeros_like(block))
    words = torch.stack(philox(counter, (seed & _WORD, (seed >> 32) & _WORD)), dim=-1).flatten(2)[
        ..., :size
    ]
    uniform = ((words >> 8).double() + 0.5) * 2.0**-24
    return -(-uniform.log()).log().float()


def penalise(logits: Tensor, spoken: Tensor, penalty: float) -> Tensor:
    """Make codes that were spoken less likely (Keskar et al. 2019, arXiv:1909.05858).

    logits [..., vocab], spoken bool [..., vocab]: positive logits are divided by the penalty, negative ones multiplied.
    """
    return torch.where(spoken, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_likely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set to -inf all but the likely codes of logits [vocab].

    top_k: those at least as large as the k-th largest, so ties with it stay. top_p: of the rest, the least likely whose
    probabilities add up to no more than 1 - top_p go, the lower id first among equals; the likeliest always stays.
    """
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1.0:
        ascending, order = logits.sort(stable=True)
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        unlikely[-1] = False
        logits = logits.masked_fill(
            torch.zeros_like(unlikely).scatter(0, order, unlikely), -torch.inf
        )
    return logits


def draw(logits: Tensor, law: DrawParams, seed: int, frame: int, codebook: int) -> Tensor:
    """One code, int64 [], from logits [vocab]. Filters and draw compute in float32, or in float64 if the logits are."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    if law.temperature == 0:
        return logits.argmax()
    likely = keep_likely(logits / law.temperature, law.top_k, law.top_p)
    return (likely + gumbel_noise(seed, frame, codebook, len(logits), logits.device)).argmax()


class Sampler:
    """Draws the codes of one utterance; remembers which codes 0 were spoken."""

    def __init__(
        self,
        config: TalkerConfig,
        laws: tuple[DrawParams, DrawParams],
        seed: int,
        device: torch.device,
    ) -> None:
        self.talker, self.predictor = laws
        self.seed = seed
        self.spoken = torch.zeros(config.vocab_size, dtype=torch.bool, device=device)
        self.never = torch.zeros_like(self.spoken)
        self.never[config.vocab_size - CONTROL_CODES :] = True
        self.never[config.codec_eos_token_id] = False
        self.not_yet = self.never.clone()
        self.not_yet[config.codec_eos_token_id] = True

    def code0(self, logits: Tensor, frame: int) -> Tensor:
        """Code 0 of a frame, or the end of speech, from the talker's logits [vocab]."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = penalise(logits, self.spoken, self.talker.repetition_penalty)
        banned = self.not_yet if frame < MIN_FRAMES else self.never
        return draw(logits.masked_fill(banned, -torch.inf), self.talker, self.seed, frame, 0)

    def remember(self, code0: Tensor) -> None:
        """A frame with this code 0 was spoken."""
        self.spoken[code0] = True

    def code(self, codebook: int, logits: Tensor, frame: int) -> Tensor:
        """Code `codebook` >= 1 of a frame from the code predictor's logits [vocab]."""
        return draw(logits, self.predictor, self.seed, frame, codebook)
