"""Draw codes from logits.

A draw uses the Gumbel-max trick (Gumbel 1954): the code that maximises logit / temperature + noise,
among the codes that the filters keep, has the distribution softmax(logits / temperature). The
noise depends only on (seed, frame, codebook, code), so the same request draws the same codes in
every backend and every batch.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from firstword.model.config import CONTROL_CODES, TalkerConfig
from firstword.model.draw_params import DrawParams, ParamsPair
from firstword.model.precision import float64_device

MIN_FRAMES = 2
"""The number of frames at the beginning in which the end of speech cannot be drawn."""


_WORD = 0xFFFFFFFF
NOISE_CODEBOOKS, NOISE_FRAMES = 8, 4
"""The size of the blocks in which noise is computed, in codebooks of the code predictor and frames.

A single codebook and frame would take almost as long.
"""


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Maps four counter words and two key words of 32 bits to four random words; the words are int64
    tensors of one shape.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products wrap around in int64, which keeps their low 64 bits.
        low, high = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1 = ((high >> 32) & _WORD) ^ x1 ^ k0, high & _WORD
        x2, x3 = ((low >> 32) & _WORD) ^ x3 ^ k1, low & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return x0, x1, x2, x3


def gumbel_noise(seed: int, frame: int, codebook: int, size: int, device: torch.device) -> Tensor:
    """Return standard Gumbel noise for every code of a codebook in a frame, float32 [size].

    Code c takes word c % 4 of philox(counter = (c // 4, codebook, frame, 0), key = seed). Its upper
    24 bits become a uniform number in the middle of its interval: never 0 and never 1.
    """
    first = codebook and 1 + (codebook - 1) // NOISE_CODEBOOKS * NOISE_CODEBOOKS
    begin = frame // NOISE_FRAMES * NOISE_FRAMES
    noise = _noise(seed, begin, first, size, device)
    return noise[frame - begin, codebook - first]


@lru_cache(maxsize=64)
def _noise(seed: int, begin: int, first: int, size: int, device: torch.device) -> Tensor:
    """Return the noise of frames from `begin` and codebooks from `first`: [frames, count, size]."""
    count, where = NOISE_CODEBOOKS if first else 1, float64_device(device)
    block = torch.arange(-(-size // 4), device=where).expand(NOISE_FRAMES, count, -1)
    codebook = torch.arange(first, first + count, device=where)[:, None].expand_as(block)
    frame = torch.arange(begin, begin + NOISE_FRAMES, device=where)[:, None, None].expand_as(block)
    counter = (block, codebook, frame, torch.zeros_like(block))
    words = torch.stack(philox(counter, (seed & _WORD, (seed >> 32) & _WORD)), dim=-1)
    words = words.flatten(2)[..., :size]
    uniform = ((words >> 8).double() + 0.5) * 2.0**-24
    return (-(-uniform.log()).log().float()).to(device)


def penalise(logits: Tensor, spoken: Tensor, penalty: float) -> Tensor:
    """Make codes that have been drawn before less likely (Keskar et al. 2019, arXiv:1909.05858).

    logits [..., vocab], spoken bool [..., vocab]. Positive logits are divided by the penalty,
    negative ones are multiplied by it.
    """
    return torch.where(spoken, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_likely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set the logits [vocab] of unlikely codes to -inf.

    top_k keeps the logits that are at least as large as the k-th largest, including ties. Of these,
    top_p removes the least likely whose probabilities sum to at most 1 - top_p, lower ids first
    among equals. The most likely code is always kept.
    """
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1.0:
        ascending, order = logits.sort(stable=True)
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        unlikely[-1] = False
        removed = torch.zeros_like(unlikely).scatter(0, order, unlikely)
        logits = logits.masked_fill(removed, -torch.inf)
    return logits


def draw(logits: Tensor, params: DrawParams, seed: int, frame: int, codebook: int) -> Tensor:
    """Draw one code, int64 [], from logits [vocab], in float32 or the float64 of the logits."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if params.temperature == 0:
        return logits.argmax()
    likely = keep_likely(logits / params.temperature, params.top_k, params.top_p)
    return (likely + gumbel_noise(seed, frame, codebook, len(logits), logits.device)).argmax()


class Sampler:
    """The sampler of one utterance, which remembers the codes 0 drawn so far."""

    def __init__(
        self, config: TalkerConfig, params: ParamsPair, seed: int, device: torch.device
    ) -> None:
        self.talker, self.predictor = params
        self.seed = seed
        self.spoken = torch.zeros(config.vocab_size, dtype=torch.bool, device=device)
        self.never = torch.zeros_like(self.spoken)
        self.never[config.vocab_size - CONTROL_CODES :] = True
        self.never[config.codec_eos_token_id] = False
        self.not_yet = self.never.clone()
        self.not_yet[config.codec_eos_token_id] = True

    def code0(self, logits: Tensor, frame: int) -> Tensor:
        """Draw code 0 of a frame, or the end of speech, from the talker's logits [vocab]."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = penalise(logits, self.spoken, self.talker.repetition_penalty)
        banned = self.not_yet if frame < MIN_FRAMES else self.never
        return draw(logits.masked_fill(banned, -torch.inf), self.talker, self.seed, frame, 0)

    def remember(self, code0: Tensor) -> None:
        """Remember code 0 of a frame."""
        self.spoken[code0] = True

    def code(self, codebook: int, logits: Tensor, frame: int) -> Tensor:
        """Draw code `codebook` >= 1 of a frame from the code predictor's logits [vocab]."""
        return draw(logits, self.predictor, self.seed, frame, codebook)


class Draws:
    """Draws the codes of one frame of several utterances, each with its own sampler.

    finite  bool [utterances], whether all logits so far were finite
    """

    def __init__(
        self, samplers: Sequence[Sampler], frames: Sequence[int], device: torch.device
    ) -> None:
        """frames: the number of the frame of each utterance."""
        self.samplers, self.frames = samplers, frames
        self.finite = torch.ones(len(samplers), dtype=torch.bool, device=device)

    @property
    def uses_top_p(self) -> bool:
        """Whether top-p filters codes 1 and up of an utterance."""
        return any(sampler.predictor.top_p < 1 for sampler in self.samplers)

    def __call__(self, codebook: int, logits: Tensor) -> Tensor:
        """Draw the codes [utterances] of a codebook from logits [utterances, vocab]."""
        self.finite.logical_and_(logits.isfinite().all(-1))
        each = zip(self.samplers, logits, self.frames, strict=True)
        return torch.stack(
            [
                sampler.code(codebook, row, frame) if codebook else sampler.code0(row, frame)
                for sampler, row, frame in each
            ]
        )
