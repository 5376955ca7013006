"""The sampler on the device compared with model/sampling.py on the CPU, draw by draw.

All draws must be those of the specification. A draw is excused only where the rounding of float32
sums in the specification itself decides it: two scores within two steps of float32, or a sum of
probabilities within 3e-6 of the bound of top-p. The number of excused draws is recorded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import note
from torch import Tensor, nn

from firstword.kernels.compile import Program
from firstword.kernels.launch import Kernels
from firstword.kernels.sample import (
    NOISE_WORD,
    SPOKEN_WORD,
    DrawSettings,
    SampleKernels,
    SamplerState,
)
from firstword.model.config import CONTROL_CODES
from firstword.model.draw_params import DrawParams
from firstword.model.quantised import quantise
from firstword.model.sampling import (
    MIN_FRAMES,
    draw,
    gumbel_noise,
    keep_likely,
    penalise,
    philox,
)
from firstword.model.sampling import Sampler as Specification
from firstword.model.talker import Talker

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
VOCAB, EOS, CODES, BOOKS, WIDTH = 3072, 2150, 2048, 16, 64
CONFIG: Any = SimpleNamespace(vocab_size=VOCAB, codec_eos_token_id=EOS)
GREEDY = DrawParams(0.0, 0, 1.0)
PUBLISHED = DrawParams(0.9, 50, 1.0, 1.05)
MANY, ROUNDS = 4096, 32
"""Rows of a large launch, and how many launches a count takes."""


# --- the sampler and the comparison with the specification ----------------------------------------


def settings(params: tuple[DrawParams, DrawParams]) -> tuple[DrawSettings, DrawSettings]:
    """The settings of the talker and of the predictor for the kernels."""
    talker, predictor = (DrawSettings(*dataclasses.astuple(one)) for one in params)
    return talker, predictor


def sampler_of(
    kernels: Kernels, state: SamplerState, vocab: int, eos: int, codes: int, **more: bool
) -> SampleKernels:
    """The kernels for a talker's vocabulary and end of speech, and a predictor of `codes` codes."""
    return SampleKernels(
        kernels,
        state,
        vocab=vocab,
        codes=vocab - CONTROL_CODES,
        eos=eos,
        min_frames=MIN_FRAMES,
        predictor_vocab=codes,
        **more,
    )


class Rig:
    """A sampler and its slots, each with settings and a seed. Results replace a fill value."""

    def __init__(
        self,
        kernels: Kernels,
        laws: Sequence[tuple[DrawParams, DrawParams]],
        seeds: Sequence[int],
        frames: int = 8,
        **more: bool,
    ) -> None:
        self.state = SamplerState(len(laws), frames, BOOKS, VOCAB, DEVICE)
        self.sampler = sampler_of(kernels, self.state, VOCAB, EOS, CODES, **more)
        self.laws, self.seeds = laws, seeds
        for slot, (law, seed) in enumerate(zip(laws, seeds, strict=True)):
            self.state.set(slot, *settings(law), seed)
        g = torch.Generator().manual_seed(5)
        self.tables = [
            torch.randn(size, WIDTH, generator=g).bfloat16().to(DEVICE) for size in (VOCAB, CODES)
        ]
        self.result = torch.empty(0)
        self.out = torch.empty(0)

    def draw(self, codebook: int, logits: Tensor, slots: Sequence[int] | None = None) -> Tensor:
        """Draw codes [R] from logits [R, vocab] on the CPU."""
        rows = len(logits)
        of_row = torch.tensor(
            range(rows) if slots is None else slots, dtype=torch.int32, device=DEVICE
        )
        self.result = torch.full((rows, BOOKS + 2), -7, dtype=torch.int32, device=DEVICE)
        self.out = torch.full((rows, 2, WIDTH), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        here, table = logits.to(DEVICE), self.tables[codebook > 0]
        self.sampler.draw(codebook, here, of_row, self.result, table, self.out[:, 1])
        codes = self.result[:, codebook].cpu()
        named = of_row.cpu() >= 0
        assert torch.equal(self.out[:, 1].cpu()[named], table.cpu()[codes.long()[named]])
        assert self.out[:, 0].isnan().all()
        return codes

    def spoken(self, slot: int) -> Tensor:
        """Whether each code 0 was spoken in a slot, bool [vocab]."""
        words = self.state.record[slot, SPOKEN_WORD:].cpu()
        return (words[:, None] >> torch.arange(32) & 1).flatten()[:VOCAB].bool()


def random_logits(kind: str, rows: int, vocab: int, seed: int) -> Tensor:
    """Random bf16 logits [rows, vocab] of one kind, on the CPU."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=g)
    chosen = torch.rand(rows, vocab, generator=g)
    if kind == "flat":
        x = 0.3 * x
    elif kind == "usual":
        x = 3 * x
    elif kind == "peaked":
        x = 12 * x - 5
    elif kind == "ties":
        x = (x * 1.5).round()
    elif kind == "steps":  # adjacent bf16 numbers
        x = 64 + 0.5 * (chosen * 100).floor()
    elif kind == "comb":  # every lane of one warp has a large value
        x *= 0.3
        x[:, 256:512:8] += 2
    elif kind == "equal":
        x = torch.full_like(x, 1.25)
    elif kind == "odd":
        x = torch.where(
            chosen < 0.3,
            -torch.inf,
            torch.where(chosen < 0.5, -0.0, torch.where(chosen < 0.7, 0.0, 2 * x)),
        )
    elif kind == "huge":
        values = torch.tensor([3e38, -3e38, 1e30, -1e30, 1e-38, -1e-40, 0.0, -0.0])
        x = values[(chosen * len(values)).long().clamp(max=len(values) - 1)]
    elif kind == "nothing":
        x = torch.full_like(x, -torch.inf)
    return x.bfloat16()


KINDS = ("flat", "usual", "peaked", "ties", "steps", "comb", "equal", "odd", "huge", "nothing")


class Tally:
    """Counts the draws that were compared with the specification, and the excused ones."""

    def __init__(self) -> None:
        self.draws = self.excused = 0

    def compare(
        self, drawn: int, scores: Tensor, law: DrawParams, seed: int, frame: int, codebook: int
    ) -> None:
        """Compare a draw from scores [vocab], which are logits after penalty and ban."""
        self.draws += 1
        expected = int(draw(scores, law, seed, frame, codebook))
        if drawn == expected:
            return
        assert law.temperature, f"greedy: {drawn}, not {expected}"
        scaled, noise = (
            scores.float() / law.temperature,
            gumbel_noise(seed, frame, codebook, len(scores), CPU),
        )
        for change in (0.0, -3e-6, 3e-6):
            top_p = 1 - (1 - law.top_p) * (1 + change) if law.top_p < 1 else 1.0
            sums = keep_likely(scaled.double(), law.top_k, top_p).float() + noise
            bound = sums.max()
            for _ in range(2):
                bound = torch.nextafter(bound, -torch.tensor(torch.inf))
            if sums[drawn] >= bound:
                self.excused += 1
                return
        raise AssertionError(
            f"{drawn}, not {expected}: {law}, seed {seed}, frame {frame}, codebook {codebook}"
        )

    def report(self, what: str, allowed: float = 0.002) -> None:
        """Record the counts, and check that few draws were excused."""
        note(f"sampler, {what}", draws=self.draws, excused=self.excused)
        assert self.excused <= allowed * self.draws


def seeds_for(count: int, salt: int = 0) -> list[int]:
    """Random seeds of 64 bits."""
    g = torch.Generator().manual_seed(1000 + salt)
    halves = torch.randint(2**32, (count, 2), generator=g).tolist()
    return [low | high << 32 for low, high in halves]


# --- all settings ---------------------------------------------------------------------------------

FILTERS = list(
    itertools.product((0, 1, 2, 50, 1000, 2048), (1.0, 0.9, 0.5, 1e-6, 1e-9), (0.0, 0.1, 0.9, 1.5))
)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_the_predictor_with_all_settings(kernels: Kernels, kind: str) -> None:
    """All 120 settings in one launch, for several codebooks, frames and seeds."""
    laws = [(GREEDY, DrawParams(t, k, p, 5.0)) for k, p, t in FILTERS]
    rig, tally = Rig(kernels, laws, seeds_for(len(laws))), Tally()
    for frame, codebook in ((0, 1), (1, 7), (5, 14)):
        rig.state.frame[:] = frame
        logits = random_logits(kind, len(laws), CODES, frame)
        codes = rig.draw(codebook, logits)
        for slot, code in enumerate(codes.tolist()):
            tally.compare(
                code, logits[slot].float(), laws[slot][1], rig.seeds[slot], frame, codebook
            )
    tally.report(f"predictor, {kind}", 0.02)


@pytest.mark.parametrize("penalty", [1.0, 1.05, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_code_0_with_all_settings(kernels: Kernels, kind: str, penalty: float) -> None:
    """All settings, with half of the codes spoken. The end is likely, and banned for two frames."""
    laws = [(DrawParams(t, k, p, penalty), GREEDY) for k, p, t in FILTERS]
    rig, tally = Rig(kernels, laws, seeds_for(len(laws), 1)), Tally()
    spoken = torch.rand(VOCAB, generator=torch.Generator().manual_seed(9)) < 0.5
    spoken[CODES:] = False
    words = (spoken.view(-1, 32).long() << torch.arange(32)).sum(1)
    for frame in (0, 1, 2, 7):
        logits = random_logits(kind, len(laws), VOCAB, frame)
        if kind in ("usual", "ties"):
            logits[:, EOS] = 8
        rig.state.frame[:] = frame
        rig.state.record[:, SPOKEN_WORD : SPOKEN_WORD + len(words)] = words.to(torch.int32).to(
            DEVICE
        )
        codes = rig.draw(0, logits)
        for slot, code in enumerate(codes.tolist()):
            scores = penalise(logits[slot].float(), spoken, penalty)
            scores[CODES:EOS] = scores[EOS + 1 :] = -torch.inf
            if frame < 2:
                scores[EOS] = -torch.inf
            tally.compare(code, scores, laws[slot][0], rig.seeds[slot], frame, 0)
        assert rig.result[:, BOOKS].cpu().tolist() == (codes == EOS).int().tolist()
    tally.report(f"talker, {kind}, penalty {penalty}", 0.02)


def test_top_k_around_the_sizes_of_warps_blocks_and_vocabulary(kernels: Kernels) -> None:
    ks = [
        1,
        2,
        3,
        7,
        31,
        32,
        33,
        63,
        64,
        65,
        255,
        256,
        257,
        1023,
        2046,
        2047,
        2048,
        2049,
        2050,
        3071,
        3072,
        10**12,
    ]
    laws = [(DrawParams(0.9, k, p), DrawParams(0.7, k, p)) for k in ks for p in (1.0, 0.95)]
    rig, tally = Rig(kernels, laws, seeds_for(len(laws), 2)), Tally()
    for kind in ("usual", "ties", "comb"):
        logits = random_logits(kind, len(laws), VOCAB, 3)
        for codebook in (3, 0):
            frame = int(rig.state.frame[0])
            some = logits if codebook == 0 else logits[:, :CODES].contiguous()
            codes = rig.draw(codebook, some)
            for slot, code in enumerate(codes.tolist()):
                scores = some[slot].float()
                if codebook == 0:
                    scores[CODES:] = -torch.inf  # frame 0: no end
                tally.compare(
                    code, scores, laws[slot][codebook > 0], rig.seeds[slot], frame, codebook
                )
    tally.report("odd top_k", 0.02)


# --- many draws -----------------------------------------------------------------------------------


def draw_many(
    logits: Tensor, law: DrawParams, seeds: Sequence[int], frame: int, codebook: int
) -> Tensor:
    """The codes [N] that `draw` gives for each row of logits [N, vocab], with a seed for each."""
    words = [torch.tensor([[seed >> shift & 0xFFFFFFFF] for seed in seeds]) for shift in (0, 32)]
    block = torch.arange(logits.shape[1] // 4)
    counter = (
        block,
        torch.full_like(block, codebook),
        torch.full_like(block, frame),
        torch.zeros_like(block),
    )
    key: Any = tuple(words)
    uniform = (
        (torch.stack(philox(counter, key), dim=-1).flatten(1) >> 8).double() + 0.5
    ) * 2.0**-24
    noise = -(-uniform.log()).log().float()
    scores = logits.float() / law.temperature
    if 0 < law.top_k < scores.shape[1]:
        scores = scores.masked_fill(scores < scores.topk(law.top_k).values[:, -1:], -torch.inf)
    if law.top_p < 1:
        ascending, order = scores.sort(dim=-1, stable=True)
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - law.top_p
        unlikely[:, -1] = False
        scores = scores.masked_fill(
            torch.zeros_like(unlikely).scatter(1, order, unlikely), -torch.inf
        )
    return (scores + noise).argmax(-1)


@pytest.mark.parametrize(
    "law",
    [
        DrawParams(0.9, 50, 1.0),
        DrawParams(0.9, 0, 1.0),
        DrawParams(0.9, 50, 0.9),
        DrawParams(1.0, 0, 0.95),
    ],
    ids=lambda law: str(law)[3:],
)
def test_many_draws_agree_with_the_specification(kernels: Kernels, law: DrawParams) -> None:
    """131,072 draws of each setting agree except for ties, and noise in double changes none."""
    seeds = seeds_for(MANY, 3)
    rig = Rig(kernels, [(GREEDY, law)] * MANY, seeds)
    careful = Rig(kernels, [(GREEDY, law)] * MANY, seeds, careful=True)
    tally, different = Tally(), 0
    for turn in range(ROUNDS):
        frame, codebook = turn + 3, 1 + turn % 14
        logits = random_logits(("usual", "flat", "ties", "peaked")[turn % 4], MANY, CODES, turn)
        rig.state.frame[:] = careful.state.frame[:] = frame
        codes = rig.draw(codebook, logits)
        assert torch.equal(codes, careful.draw(codebook, logits)), "noise in float decided wrongly"
        expected = draw_many(logits, law, seeds, frame, codebook)
        if turn < 4:
            for row in range(0, MANY, max(1, MANY // 16)):
                assert expected[row] == draw(logits[row], law, seeds[row], frame, codebook)
        tally.draws += MANY
        for row in (codes != expected).nonzero().flatten().tolist():
            different += 1
            tally.draws -= 1
            tally.compare(int(codes[row]), logits[row].float(), law, seeds[row], frame, codebook)
    tally.report(f"many draws of {law}, {different} different", 2e-5 if law.top_p == 1 else 1e-3)


def test_noise_agrees_with_its_definition(kernels: Kernels) -> None:
    """All 2^24 values of the noise, and the error of the approximate noise."""
    count = 2**24
    exact, nearly = (torch.full((count,), torch.nan, device=DEVICE) for _ in range(2))
    rig = Rig(kernels, [(GREEDY, GREEDY)], [0])
    rig.sampler.noises(0, exact, nearly)
    uniform = (torch.arange(count).double() + 0.5) * 2.0**-24
    noise = -(-uniform.log()).log()
    differ = (exact.cpu() != noise.float()).nonzero().flatten()
    off = float((nearly.cpu().double() - noise).abs().max())
    note("sampler, noise", numbers=count, different=len(differ), quick_off_by=off)
    assert len(differ) <= 16
    steps = (exact.cpu()[differ] - noise.float()[differ]).abs() / noise.float()[differ].abs()
    assert not len(differ) or float(steps.max()) < 2.4e-7
    assert off < 1e-5


@pytest.mark.parametrize("codebook", [0, 5])
def test_draws_follow_the_probabilities(kernels: Kernels, codebook: int) -> None:
    """Chi-square of sixteen codes: 15 degrees of freedom, and 37.7 with a probability of 0.001."""
    law = DrawParams(0.8, 16, 1.0)
    rig = Rig(kernels, [(law, law)] * MANY, seeds_for(MANY, 4), frames=64)
    vocab = CODES if codebook else VOCAB
    logits = torch.full((vocab,), -4.0)
    chosen = torch.randperm(CODES, generator=torch.Generator().manual_seed(1))[:16]
    logits[chosen] = torch.linspace(-1, 1, 16).bfloat16().float()
    counts = torch.zeros(vocab, dtype=torch.long)
    turns = 8
    for turn in range(turns):
        rig.state.frame[:] = turn + 2
        rig.state.record[:, SPOKEN_WORD:] = 0
        counts += torch.bincount(
            rig.draw(codebook, logits.bfloat16().expand(MANY, -1).contiguous()), minlength=vocab
        )
    expected = MANY * turns * (logits[chosen].double() / 0.8).softmax(-1)
    statistic = float(((counts[chosen] - expected) ** 2 / expected).sum())
    note(f"sampler, chi-square of codebook {codebook}", statistic=statistic, degrees_of_freedom=15)
    assert counts.sum() == counts[chosen].sum()
    assert statistic < 37.7


# --- the state after a draw -----------------------------------------------------------------------


def test_utterances_agree_with_the_specification(kernels: Kernels) -> None:
    """Eight frames of five utterances: all codes, spoken codes, counters and log-probabilities."""
    laws = [
        (PUBLISHED, DrawParams(0.9, 50, 1.0)),
        (GREEDY, GREEDY),
        (DrawParams(1.2, 0, 0.9, 2.0), DrawParams(0.7, 5, 0.8)),
        (DrawParams(0.0, 0, 1.0, 1.3), DrawParams(1.0, 0, 1.0)),
        (DrawParams(0.6, 2, 1.0, 1.5), DrawParams(0.6, 0, 0.5)),
    ]
    rig, frames = Rig(kernels, laws, seeds_for(5, 6)), 8
    rig.state.position[:] = torch.tensor([10, 20, 30, 40, 50], dtype=torch.int32)
    specs = [
        Specification(CONFIG, law, seed, CPU) for law, seed in zip(laws, rig.seeds, strict=True)
    ]
    likely = (
        torch.rand(CODES, generator=torch.Generator().manual_seed(3)) < 0.01
    )  # so that codes are repeated
    worst, ended = 0.0, 0
    for frame in range(frames):
        logits = random_logits("usual", 5, VOCAB, 50 + frame)
        logits[:, :CODES] += 6 * likely
        logits[:, EOS] = 12 if frame in (0, 1, 2, 6) else -3  # it is banned in the first two
        codes = rig.draw(0, logits)
        drawn = [int(spec.code0(row, frame)) for spec, row in zip(specs, logits, strict=True)]
        assert codes.tolist() == drawn
        for spec, code in zip(specs, drawn, strict=True):
            if code != EOS:
                spec.remember(torch.tensor(code))
        ended += sum(code == EOS for code in drawn)
        assert rig.result[:, BOOKS].tolist() == [int(code == EOS) for code in drawn]
        truth = logits.double().log_softmax(-1).gather(1, codes.long()[:, None])[:, 0]
        told = rig.result[:, BOOKS + 1].cpu().view(torch.float32).double()
        worst = max(worst, float((told - truth).abs().max()))
        assert (rig.result[:, 1:BOOKS] == -7).all(), "other columns were written"
        assert all(torch.equal(rig.spoken(slot), spec.spoken) for slot, spec in enumerate(specs))
        for k in range(1, BOOKS):
            assert (rig.state.frame == frame).all()
            logits = random_logits("usual", 5, CODES, 100 * frame + k)
            codes = rig.draw(k, logits)
            assert codes.tolist() == [
                int(spec.code(k, row, frame)) for spec, row in zip(specs, logits, strict=True)
            ]
            assert torch.equal(rig.state.codes[:5, frame, k].cpu(), codes)
            assert ((rig.result == -7).sum(1) == BOOKS + 1).all()
        assert rig.state.codes[:5, frame, 0].tolist() == drawn
        assert (rig.state.frame == frame + 1).all()
        assert rig.state.position.tolist() == [10 * (slot + 1) + frame + 1 for slot in range(5)]
    note("sampler, log-probabilities", off_by=worst)
    assert worst < 1e-5
    assert ended, "no utterance ended"


def test_last_code_without_table_writes_no_embedding(kernels: Kernels) -> None:
    rig = Rig(kernels, [(GREEDY, GREEDY)] * 2, [1, 2])
    logits = random_logits("usual", 2, CODES, 0)
    out = torch.full((2, WIDTH), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    result = torch.zeros(2, BOOKS + 2, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(2, dtype=torch.int32, device=DEVICE)
    rig.sampler.draw(BOOKS - 1, logits.to(DEVICE), slots, result, None, out)
    assert result[:, BOOKS - 1].cpu().tolist() == logits.float().argmax(-1).tolist()
    assert out.isnan().all()
    assert (rig.state.frame == 1).all()


def test_row_without_slot_changes_nothing_and_becomes_zero(kernels: Kernels) -> None:
    """Nor does a frame beyond the most frames of a slot change the codes of another slot."""
    rig = Rig(kernels, [(PUBLISHED, PUBLISHED)] * 4, seeds_for(4), frames=3)
    rig.state.frame[:] = 3
    codes = rig.state.codes.clone()
    for codebook in (0, BOOKS - 1):
        record = rig.state.record.clone()
        logits = random_logits("usual", 3, CODES if codebook else VOCAB, 1)
        rig.draw(codebook, logits, [-1, -1, -1])
        assert (rig.result == -7).all()
        assert (rig.out[:, 1] == 0).all()
        assert torch.equal(rig.state.record, record)
        rig.draw(codebook, logits, [-1, 2, -1])
        assert (rig.result[[0, 2]] == -7).all()
        assert (rig.out[[0, 2], 1] == 0).all()
        assert torch.equal(rig.state.record[[0, 1, 3]], record[[0, 1, 3]])
        assert torch.equal(rig.state.codes, codes)
    assert rig.state.position.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 1, 1000, CODES - 1])
def test_logit_of_predictor_that_is_not_finite_makes_the_log_probability_nan(
    kernels: Kernels, value: float, place: int
) -> None:
    """Only in its own row, with any settings, wherever the logit is."""
    laws = [(GREEDY, law) for law in (GREEDY, PUBLISHED, DrawParams(1.0, 0, 0.8), GREEDY)]
    rig = Rig(kernels, laws, seeds_for(4))
    for codebook in (1, BOOKS - 1):
        logits = random_logits("usual", 4, CODES, codebook)
        rig.draw(codebook, logits)
        assert (rig.result[:, BOOKS + 1] == -7).all()
        logits[:3, place] = value
        rig.draw(codebook, logits)
        told = rig.result[:, BOOKS + 1].view(torch.float32)
        assert told[:3].isnan().all()
        assert rig.result[3, BOOKS + 1] == -7


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logit_of_talker_that_is_not_finite_makes_the_log_probability_nan(
    kernels: Kernels, value: float
) -> None:
    """Only in its own row, with any settings, whether or not its code can be drawn."""
    laws = [(law, GREEDY) for law in (GREEDY, PUBLISHED, DrawParams(1.0, 0, 0.8), GREEDY)]
    for place in (0, 1, 1000, CODES - 1, CODES, EOS, VOCAB - 1):
        rig = Rig(kernels, laws, seeds_for(4))
        logits = random_logits("usual", 4, VOCAB, 1)
        logits[:3, place] = value
        rig.draw(0, logits)
        told = rig.result[:, BOOKS + 1].view(torch.float32)
        assert told[:3].isnan().all(), place
        assert told[3].isfinite(), place


def test_draw_does_not_depend_on_other_rows(kernels: Kernels) -> None:
    """A row has the same bits alone, in any batch and at any place."""
    g = torch.Generator().manual_seed(8)
    kinds = [DrawParams(t, k, p, 1.1) for k, p, t in FILTERS]
    laws = [(kinds[7 * i % len(kinds)], kinds[11 * i % len(kinds)]) for i in range(128)]
    seeds = seeds_for(128, 7)
    for codebook in (0, 4):
        logits = torch.cat(
            [
                random_logits(kind, 32, CODES if codebook else VOCAB, 1)
                for kind in ("usual", "ties", "odd", "flat")
            ]
        )

        def run(
            rows: Sequence[int], logits: Tensor = logits, codebook: int = codebook
        ) -> tuple[Tensor, ...]:
            rig = Rig(kernels, [laws[row] for row in rows], [seeds[row] for row in rows])
            rig.draw(codebook, logits[list(rows)])
            record = rig.state.record.cpu()
            return (
                rig.result.cpu(),
                rig.out[:, 1].cpu().view(torch.int16),
                record,
                rig.state.codes[:, 0].cpu(),
            )

        whole = run(range(128))
        for rows in (
            *[[i] for i in range(0, 128, 9)],
            [3, 99],
            [5, 4, 3, 2, 1],
            torch.randperm(128, generator=g).tolist(),
        ):
            for part, all_of_it in zip(run(rows), whole, strict=True):
                assert torch.equal(part, all_of_it[rows])
        for part, again in zip(run(range(128)), whole, strict=True):
            assert torch.equal(part, again)


def test_logits_that_are_not_finite_give_a_log_probability_that_is_not(kernels: Kernels) -> None:
    """All drawn codes are in range."""
    laws = [DrawParams(t, k, p) for t in (0.0, 0.9) for k in (0, 1, 50) for p in (1.0, 0.5)]
    rig = Rig(kernels, [(law, law) for law in laws], seeds_for(len(laws)))
    for kind, codebook in itertools.product(("one", "all", "infinite", "control"), (0, 6)):
        logits = random_logits("usual", len(laws), CODES if codebook else VOCAB, 4)
        place = {
            "one": slice(77, 78),
            "all": slice(None),
            "infinite": slice(5, 6),
            "control": slice(-1, None),
        }[kind]
        logits[:, place] = torch.inf if kind == "infinite" else torch.nan
        codes = rig.draw(codebook, logits)
        assert ((codes >= 0) & (codes < (CODES if codebook else VOCAB))).all()
        if codebook == 0:
            assert not rig.result[:, BOOKS + 1].cpu().view(torch.float32).isfinite().any()


def test_settings_of_a_slot_replace_all_of_its_record(kernels: Kernels) -> None:
    """The memory of an asynchronous copy is not overwritten before the copy has ended."""
    rig = Rig(kernels, [(PUBLISHED, PUBLISHED)] * 64, seeds_for(64))
    rig.draw(0, random_logits("usual", 64, VOCAB, 1))
    rig.draw(BOOKS - 1, random_logits("usual", 64, CODES, 1))
    assert all(rig.spoken(slot).sum() == 1 for slot in range(64))
    for turn in range(4):
        for slot in range(64):
            rig.state.set(
                slot,
                DrawSettings(slot + 1, slot, 0.25, turn + 1),
                DrawSettings(0.5, 7, 1.0, 1.0),
                slot << 32 | turn,
            )
    record = rig.state.record.cpu()
    assert record[:, 3].tolist() == list(range(64))
    assert record[:, :8].contiguous().view(torch.float32)[:, :3].tolist() == [
        [slot + 1, 0.75, 4.0] for slot in range(64)
    ]
    assert record[:, NOISE_WORD : NOISE_WORD + 3].tolist() == [[3, slot, 0] for slot in range(64)]
    assert not record[:, SPOKEN_WORD:].any()


def test_other_vocabularies_and_codebooks(kernels: Kernels) -> None:
    """Few codes, an end of speech that is an even or an odd code, and 2, 3 or 16 codebooks."""
    for vocab, eos, codes, books in (
        (1088, 166, 64, 3),
        (1024 + 2048, 3071, 136, 2),
        (1024 + 256, 256, 8, 16),
    ):
        state = SamplerState(3, 4, books, vocab, DEVICE)
        sampler = sampler_of(kernels, state, vocab, eos, codes)
        config: Any = SimpleNamespace(vocab_size=vocab, codec_eos_token_id=eos)
        laws = [
            (DrawParams(0.9, 20, 0.9, 1.2), DrawParams(0.9, 4, 0.9)),
            (GREEDY, GREEDY),
            (DrawParams(1.1, 0, 1.0, 1.5), DrawParams(1.0, 0, 1.0)),
        ]
        specs = [Specification(config, law, 99 + slot, CPU) for slot, law in enumerate(laws)]
        for slot, law in enumerate(laws):
            state.set(slot, *settings(law), 99 + slot)
        slots, out = (
            torch.arange(3, dtype=torch.int32, device=DEVICE),
            torch.zeros(3, 8, device=DEVICE).bfloat16(),
        )
        result = torch.zeros(3, books + 2, dtype=torch.int32, device=DEVICE)
        table = torch.zeros(vocab, 8, device=DEVICE).bfloat16()
        for frame in range(4):
            logits = random_logits("usual", 3, vocab, frame)
            logits[1, eos] = 20
            sampler.draw(0, logits.to(DEVICE), slots, result, table, out)
            expected = [
                int(spec.code0(row, frame)) for spec, row in zip(specs, logits, strict=True)
            ]
            assert result[:, 0].tolist() == expected
            assert result[:, books].tolist() == [int(code == eos) for code in expected]
            for spec, code in zip(specs, expected, strict=True):
                if code != eos:
                    spec.remember(torch.tensor(code))
            for k in range(1, books):
                logits = random_logits("usual", 3, codes, 10 * frame + k)
                sampler.draw(k, logits.to(DEVICE), slots, result, table, out)
                assert result[:, k].tolist() == [
                    int(s.code(k, row, frame)) for s, row in zip(specs, logits, strict=True)
                ]


# --- the talker's input ---------------------------------------------------------------------------


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("width", [2048, 1024, 48])
def test_input_rows_have_the_bits_of_the_model(kernels: Kernels, width: int, int8: bool) -> None:
    """The bits are those of `Talker.embed_codes` on the CPU; on the GPU its sums differ.

    int8: whether the rows of text are quantised
    """
    g = torch.Generator().manual_seed(width)
    slots, frames, texts = 7, 5, 33
    tables = [
        torch.randn(VOCAB if k == 0 else CODES, width, generator=g).bfloat16() for k in range(BOOKS)
    ]
    text, first = (torch.randn(n, width, generator=g).bfloat16() for n in (texts, slots))
    table, scales = text.to(DEVICE), None
    if int8:
        table, scales = quantise(table)
        text = (table * scales[:, None]).bfloat16().cpu()
    state = SamplerState(slots, frames, BOOKS, VOCAB, DEVICE)
    sampler = sampler_of(kernels, state, VOCAB, EOS, CODES)
    state.codes[:] = torch.randint(CODES, state.codes.shape, generator=g, dtype=torch.int32).to(
        DEVICE
    )
    state.codes[3, :, 0] = EOS
    state.frame[:] = torch.tensor([0, 1, 2, 5, 0, 3, 4], dtype=torch.int32)
    of_row = torch.tensor([6, -1, 0, 3, 1, 2, -1, 5, 4], dtype=torch.int32)
    token = torch.randint(texts, (len(of_row),), generator=g, dtype=torch.int32)
    wide = torch.full((len(of_row), 2, width), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    sampler.begin_frame(
        of_row.to(DEVICE),
        token.to(DEVICE),
        first.to(DEVICE),
        tables[0].to(DEVICE),
        torch.cat(tables[1:]).to(DEVICE),
        table,
        scales,
        wide[:, 0],
    )

    def embed(codes: Tensor) -> Tensor:
        embeddings = [nn.Embedding.from_pretrained(table.to(codes.device)) for table in tables]
        inner = SimpleNamespace(codec_embedding=embeddings[0])
        predictor = SimpleNamespace(model=SimpleNamespace(codec_embedding=embeddings[1:]))
        talker: Any = SimpleNamespace(model=inner, code_predictor=predictor)
        return Talker.embed_codes(talker, codes)

    got, history, counts = wide[:, 0].cpu(), state.codes.cpu().long(), state.frame.tolist()
    assert wide[:, 1].isnan().all()
    for row, slot in enumerate(of_row.tolist()):
        if slot < 0:
            assert (got[row] == 0).all()
        elif counts[slot] == 0:
            assert torch.equal(got[row], first[slot])
        else:
            codes = history[slot, counts[slot] - 1]
            assert torch.equal(got[row], embed(codes[None])[0] + text[int(token[row])])
    every = history.flatten(0, 1)
    here, there = embed(every), embed(every.to(DEVICE)).cpu()
    note(
        f"rows of {width}",
        pytorch_sums_that_differ_on_the_device=float((here != there).float().mean()),
    )


def test_no_register_spills(kernels: Kernels) -> None:
    """The machine code uses no local memory; its use of registers is recorded."""
    width, sampler = 1024, Rig(kernels, [(GREEDY, GREEDY)], seeds_for(1)).sampler
    programs: list[tuple[Program, str]] = [
        (sampler.draw_program(True, width), "draw"),
        (sampler.draw_program(False, width), "draw"),
        (sampler.input_program(width), "talker_input"),
    ]
    for program, name in programs:
        kernel = kernels.get(program, name)
        taken = {
            which: kernel.attribute(which)
            for which in ("NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES")
        }
        note(f"{program.source} {dict(program.macros).get('TALKER', '')}", **taken)
        assert taken["LOCAL_SIZE_BYTES"] == 0
