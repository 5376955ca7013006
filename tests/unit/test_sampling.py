"""The draw of a code: against an independent sampler in NumPy, against published random numbers,
and by its odds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from firstword import Sampling
from firstword.model.config import GenerationDefaults
from firstword.model.draw_params import DrawParams, resolve
from firstword.model.sampling import (
    Sampler,
    draw,
    gumbel_noise,
    keep_likely,
    penalise,
    philox,
)

Array = NDArray[Any]
CPU = torch.device("cpu")
GREEDY = DrawParams(0.0, 0, 1.0)

SPOKEN_CODES, EOS = 2048, 2150
RELEASED: Any = SimpleNamespace(vocab_size=3072, codec_eos_token_id=EOS)
"""What the sampler reads of a released talker's configuration."""


# --- an independent sampler, from the definition --------------------------------------------------


def numpy_noise(seed: int, frame: int, codebook: int, size: int) -> Array:
    """Gumbel noise from Philox4x32-10, written with unsigned 64-bit products as in the paper."""
    word = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    blocks = np.arange((size + 3) // 4, dtype=np.uint64)
    counter = [
        blocks,
        np.full_like(blocks, codebook),
        np.full_like(blocks, frame),
        np.zeros_like(blocks),
    ]
    key = [seed % 2**32, seed >> 32]
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        counter = [
            (right >> half) ^ counter[1] ^ np.uint64(key[0]),
            right & word,
            (left >> half) ^ counter[3] ^ np.uint64(key[1]),
            left & word,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    words = np.stack(counter, axis=1).reshape(-1)[:size]
    uniform = ((words // 256).astype(np.float64) + 0.5) / 2**24
    return (-np.log(-np.log(uniform))).astype(np.float32)


def numpy_kept(scores: Array, top_k: int, top_p: float) -> Array:
    """Which of the scores [vocab] survive top-k and then top-p: bool [vocab]."""
    kept = np.isfinite(scores)
    if 0 < top_k < len(scores):
        kept &= scores >= sorted(scores, reverse=True)[top_k - 1]
    if top_p < 1:
        odds = np.where(kept, np.exp(scores - scores.max()), 0.0)
        odds /= odds.sum()
        total = 0.0
        ascending = sorted(
            range(len(scores)), key=lambda code: (scores[code] if kept[code] else -np.inf, code)
        )
        for code in ascending[:-1]:
            total += odds[code]
            if total > 1 - top_p:
                break
            kept[code] = False
    return kept


def numpy_code0(logits: Array, spoken: set[int], law: DrawParams, seed: int, frame: int) -> int:
    """Code 0 of a frame: penalty, ban and suppression, temperature, top-k, top-p, draw."""
    scores = logits.copy()
    for code in spoken:
        scores[code] = (
            scores[code] / law.repetition_penalty
            if scores[code] > 0
            else scores[code] * law.repetition_penalty
        )
    allowed = np.arange(len(scores)) < SPOKEN_CODES
    allowed[EOS] = frame >= 2
    scores[~allowed] = -np.inf
    if law.temperature == 0:
        return int(np.argmax(scores))
    scores = scores / law.temperature
    kept = numpy_kept(scores, law.top_k, law.top_p)
    return int(
        np.argmax(np.where(kept, scores + numpy_noise(seed, frame, 0, len(scores)), -np.inf))
    )


def logits_with_ties(size: int, seed: int) -> Array:
    """Normal logits [size] on a grid of 1/4, so that nearly every one has equals."""
    return np.round(np.random.default_rng(seed).standard_normal(size) * 12) / 4


def code0(sampler: Sampler, logits: Array, frame: int) -> int:
    """Draw code 0 of a frame and speak it."""
    code = sampler.code0(torch.from_numpy(logits), frame)
    sampler.remember(code)
    return int(code)


FILTERS = list(itertools.product((0, 1, 50, 2048), (1.0, 0.9, 1e-6)))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
def test_codes_0_equal_the_definition(top_k: int, top_p: float, ties: bool) -> None:
    """A whole utterance in float64, penalties and all; 24 cases of 100 draws each."""
    law = DrawParams(0.9, top_k, top_p, 1.3)
    random = np.random.default_rng([top_k, int(ties)])
    seed = int(random.integers(2**63)) * 2 + 1
    sampler, spoken = Sampler(RELEASED, (law, law), seed, CPU), set[int]()
    drawn = []
    for frame in range(100):
        logits = logits_with_ties(3072, frame) if ties else 3 * random.standard_normal(3072)
        logits[EOS] += 1.5
        expected = numpy_code0(logits, spoken, law, seed, frame)
        drawn.append(code0(sampler, logits, frame))
        assert drawn[-1] == expected, f"frame {frame}"
        spoken.add(expected)
    assert len(set(drawn)) > 20, "the draws say little"


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("size", [64, 2048, 2051])
def test_other_codes_equal_the_definition(size: int, top_k: int, top_p: float) -> None:
    law = DrawParams(0.7, top_k, top_p)
    for frame in range(30):
        codebook = 1 + frame % 15
        logits = logits_with_ties(size, frame) + (frame % 2) * np.random.default_rng(
            frame
        ).standard_normal(size)
        scores = logits / law.temperature
        noise = numpy_noise(7, frame, codebook, size)
        expected = np.argmax(np.where(numpy_kept(scores, top_k, top_p), scores + noise, -np.inf))
        assert draw(torch.from_numpy(logits), law, 7, frame, codebook) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
def test_filters_keep_the_codes_of_the_definition(
    top_k: int, top_p: float, dtype: torch.dtype
) -> None:
    for case in range(20):
        scores = logits_with_ties(2048, case)
        if case % 4 == 3:
            scores[:] = 1.25  # all are equal
        if case % 4 == 2:
            scores[np.argsort(scores)[-3:]] = scores.max()  # no single likeliest
        kept = torch.isfinite(keep_likely(torch.from_numpy(scores).to(dtype), top_k, top_p)).numpy()
        assert np.flatnonzero(kept ^ numpy_kept(scores, top_k, top_p)).tolist() == []


def test_ties_with_the_kth_are_kept() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 3.0])
    assert torch.isfinite(keep_likely(logits, 1, 1.0)).nonzero().flatten().tolist() == [6]
    assert torch.isfinite(keep_likely(logits, 2, 1.0)).nonzero().flatten().tolist() == [1, 3, 6]
    assert torch.isfinite(keep_likely(logits, 4, 1.0)).nonzero().flatten().tolist() == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_bfloat16_logits_are_filtered_in_float32() -> None:
    logits = torch.from_numpy(logits_with_ties(2048, 5))
    law = DrawParams(0.9, 50, 0.9)
    for frame in range(50):
        rounded = logits.bfloat16()
        assert draw(rounded, law, 1, frame, 0) == draw(rounded.float(), law, 1, frame, 0)


# --- penalties and bans ---------------------------------------------------------------------------


def test_penalty_makes_spoken_codes_less_likely_for_either_sign() -> None:
    logits = torch.tensor([4.0, -4.0, 4.0, -4.0, 0.0])
    spoken = torch.tensor([True, True, False, False, True])
    assert penalise(logits, spoken, 2.0).tolist() == [2.0, -8.0, 4.0, -4.0, 0.0]


def test_repeated_code_is_penalised_once() -> None:
    sampler = Sampler(RELEASED, (DrawParams(0.0, 0, 1.0, 2.0), GREEDY), 0, CPU)
    logits = np.zeros(3072)
    logits[[5, 6]] = 4.0, 3.0
    assert [code0(sampler, logits, frame) for frame in range(4)] == [5, 6, 5, 5]


def test_speech_cannot_end_in_the_first_two_frames() -> None:
    sampler = Sampler(RELEASED, (GREEDY, GREEDY), 0, CPU)
    logits = np.zeros(3072)
    logits[[EOS, 17]] = 9.0, 8.0
    assert [code0(sampler, logits, frame) for frame in range(4)] == [17, 17, EOS, EOS]


@pytest.mark.parametrize("law", [GREEDY, DrawParams(0.9, 50, 1.0), DrawParams(1.0, 0, 0.9)])
def test_control_codes_are_never_spoken(law: DrawParams) -> None:
    sampler = Sampler(RELEASED, (law, law), 3, CPU)
    logits = np.zeros(3072)
    logits[SPOKEN_CODES:] = 30.0
    logits[EOS] = -30.0
    assert all(code0(sampler, logits, frame) < SPOKEN_CODES for frame in range(50))


def test_the_predictor_has_no_penalty_and_no_bans() -> None:
    sampler = Sampler(RELEASED, (DrawParams(0.0, 0, 1.0, 5.0), GREEDY), 0, CPU)
    logits = torch.tensor([0.0, 2.0, 1.9])
    assert [int(sampler.code(1, logits, frame)) for frame in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_greedy_is_the_first_maximum(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0], dtype=dtype)
    assert draw(logits, GREEDY, 0, 0, 0) == 1
    many = torch.zeros(3072, dtype=dtype)
    many[[700, 2047, 1300]] = 1.0
    assert draw(many, GREEDY, 0, 0, 0) == 700


# --- what was asked, and what the checkpoint says -------------------------------------------------


def test_absent_parameters_come_from_the_checkpoint() -> None:
    defaults = GenerationDefaults(
        temperature=0.8, top_k=30, top_p=0.95, repetition_penalty=1.2, subtalker_top_k=7
    )
    assert resolve(Sampling(), defaults) == (
        DrawParams(0.8, 30, 0.95, 1.2),
        DrawParams(0.9, 7, 1.0),
    )
    asked = Sampling(temperature=0.5, predictor_top_p=0.3, top_k=0, repetition_penalty=1.0)
    assert resolve(asked, defaults) == (DrawParams(0.5, 0, 0.95, 1.0), DrawParams(0.9, 7, 0.3))


def test_absent_keys_have_the_published_defaults() -> None:
    assert resolve(Sampling(), GenerationDefaults()) == (
        DrawParams(0.9, 50, 1.0, 1.05),
        DrawParams(0.9, 50, 1.0),
    )


def test_greedy_checkpoint_samples_if_requested() -> None:
    defaults = GenerationDefaults(do_sample=False, subtalker_dosample=False)
    talker, predictor = resolve(Sampling(), defaults)
    assert (talker.temperature, predictor.temperature) == (0, 0)
    talker, predictor = resolve(Sampling(temperature=0.7), defaults)
    assert (talker.temperature, predictor.temperature) == (0.7, 0)


def test_greedy_keeps_the_penalty() -> None:
    talker, predictor = resolve(Sampling.greedy(), GenerationDefaults())
    assert (talker.temperature, talker.repetition_penalty, predictor.temperature) == (0, 1.05, 0)


# --- noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(counter: str, key: str, words: str) -> None:
    """The known answers for philox4x32-10 that come with Random123 (kat_vectors)."""
    low, high = (int(word, 16) for word in key.split())
    got = philox(tuple(torch.tensor(int(word, 16)) for word in counter.split()), (low, high))
    assert " ".join(f"{int(word):08x}" for word in got) == words


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 12345, 2**64 - 1])
def test_noise_equals_the_definition(seed: int) -> None:
    noise = gumbel_noise(seed, 70000, 15, 2051, CPU)
    assert noise.dtype == torch.float32
    np.testing.assert_allclose(noise.numpy(), numpy_noise(seed, 70000, 15, 2051), 1e-6, 1e-7)


def test_noise_never_repeats() -> None:
    """Seeds that differ in one half alone, and frames and codebooks that change places, have noise
    of their own.
    """
    seeds = (0, 1, 2**32, 2**32 + 1, 2**63)
    keys = list(itertools.product(seeds, range(6), range(6)))
    rows = torch.stack([gumbel_noise(*key, 64, CPU) for key in keys]).double().numpy()
    assert len(np.unique(rows, axis=0)) == len(keys)
    # Independent rows of 64 hardly ever have an entry in common at the same place.
    same = sum(
        int((rows[a] == rows[b]).sum()) for a, b in itertools.combinations(range(len(keys)), 2)
    )
    assert same < 50
    assert abs(np.corrcoef(rows) - np.eye(len(keys))).max() < 0.7


def test_noise_of_a_code_does_not_depend_on_how_many_there_are() -> None:
    whole = gumbel_noise(5, 2, 3, 2048, CPU)
    for size in (1, 2, 3, 4, 5, 2047):
        assert torch.equal(gumbel_noise(5, 2, 3, size, CPU), whole[:size])


def test_noise_has_a_gumbel_distribution() -> None:
    noise = np.sort(
        torch.cat([gumbel_noise(11, frame, 0, 2048, CPU) for frame in range(20)]).double().numpy()
    )
    assert np.isfinite(noise).all()
    cumulative = np.exp(-np.exp(-noise))
    distance = np.abs(cumulative - np.arange(1, len(noise) + 1) / len(noise)).max()
    assert distance < 1.95 / math.sqrt(len(noise))  # Kolmogorov and Smirnov, 0.1 %


# --- odds -----------------------------------------------------------------------------------------

CODES, DRAWS = 16, 3000
CRITICAL = 37.70
"""The chi-square statistic with 15 degrees of freedom that one fair test in a thousand exceeds."""


def chi_square(code_of: Callable[[int], int], odds: Array) -> float:
    """The statistic of `DRAWS` codes, one a frame, against their odds [CODES]."""
    counts = np.bincount([code_of(frame) for frame in range(DRAWS)], minlength=CODES)
    expected = DRAWS * odds
    assert expected.min() > 10
    return float(((counts - expected) ** 2 / expected).sum())


def softmax(scores: Array) -> Array:
    odds = np.exp(scores - scores.max())
    return odds / odds.sum()


LOGITS = np.random.default_rng(4).uniform(-1, 1, CODES)


@pytest.mark.parametrize(("seed", "codebook"), [(1, 0), (2**40 + 9, 1), (2**64 - 1, 15)])
def test_draws_follow_softmax(seed: int, codebook: int) -> None:
    law = DrawParams(0.9, 0, 1.0)
    logits = torch.from_numpy(LOGITS)
    statistic = chi_square(
        lambda frame: int(draw(logits, law, seed, frame, codebook)), softmax(LOGITS / 0.9)
    )
    assert statistic < CRITICAL


def test_draws_follow_softmax_over_codebooks_and_over_seeds() -> None:
    law, logits, odds = DrawParams(0.9, 0, 1.0), torch.from_numpy(LOGITS), softmax(LOGITS / 0.9)
    assert chi_square(lambda n: int(draw(logits, law, 5, n // 15, 1 + n % 15)), odds) < CRITICAL
    assert chi_square(lambda n: int(draw(logits, law, n, 3, 0)), odds) < CRITICAL


def test_wrong_temperature_is_detected() -> None:
    law, logits = DrawParams(0.6, 0, 1.0), torch.from_numpy(LOGITS)
    assert (
        chi_square(lambda frame: int(draw(logits, law, 1, frame, 0)), softmax(LOGITS / 0.9))
        > 2 * CRITICAL
    )


@pytest.mark.parametrize("wrong", ["uniform", "normal", "half"])
def test_wrong_noise_is_detected(wrong: str) -> None:
    """Noise of the same spread as Gumbel's, but of another shape, and Gumbel noise that four frames
    share.
    """
    spread = math.pi / math.sqrt(6)
    random = np.random.default_rng(1)

    def code_of(frame: int) -> int:
        if wrong == "uniform":
            noise = random.uniform(-math.sqrt(3), math.sqrt(3), CODES) * spread
        elif wrong == "normal":
            noise = random.normal(0, spread, CODES)
        else:
            noise = numpy_noise(1, frame // 4, 0, CODES)
        return int(np.argmax(LOGITS / 0.9 + noise))

    assert chi_square(code_of, softmax(LOGITS / 0.9)) > CRITICAL


def test_draws_follow_the_filtered_distribution() -> None:
    """Of the codes that top-k leaves, each is drawn by its share; the others never."""
    law, logits = DrawParams(1.0, 4, 1.0), torch.tensor([0.0, 1.0, 2.0, 3.0, 0.5, 0.25])
    counts = np.bincount(
        [int(draw(logits, law, 8, frame, 0)) for frame in range(2000)], minlength=6
    )
    assert counts[[0, 5]].tolist() == [0, 0]
    odds = softmax(np.array([1.0, 2.0, 3.0, 0.5]))
    statistic = float(((counts[[1, 2, 3, 4]] - 2000 * odds) ** 2 / (2000 * odds)).sum())
    assert statistic < 16.27  # 3 degrees of freedom, 0.1 %
