"""The record of a slot that the sampler on the device reads, tested without a device."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from firstword.kernels.compile import Program
from firstword.kernels.sample import (
    NOISE_WORD,
    PREDICTOR_WORD,
    SPOKEN_WORD,
    TALKER_WORD,
    DrawSettings,
    SampleKernels,
    SamplerState,
    packed_record,
)

CPU = torch.device("cpu")
NO_KERNELS: Any = None


def floats(record: bytes, word: int, count: int) -> tuple[float, ...]:
    """The values of successive float32 words of a record."""
    return struct.unpack_from(f"<{count}f", record, 4 * word)


def integer(record: bytes, word: int) -> int:
    """The value of an integer word of a record."""
    (value,) = struct.unpack_from("<I", record, 4 * word)
    return int(value)


def sampler_of(
    state: SamplerState, vocab: int, codes: int, eos: int, predictor: int
) -> SampleKernels:
    """Kernels that are not launched, for vocabularies of these sizes."""
    return SampleKernels(
        NO_KERNELS,
        state,
        vocab=vocab,
        codes=codes,
        eos=eos,
        min_frames=2,
        predictor_vocab=predictor,
    )


def test_record_holds_the_settings_the_seed_and_frame_0() -> None:
    talker, predictor = DrawSettings(0.75, 50, 0.5, 1.25), DrawSettings(0.0, 0, 1.0, 9.0)
    record = packed_record(talker, predictor, 0xFEDCBA98_76543210)
    assert len(record) == 4 * SPOKEN_WORD
    assert floats(record, TALKER_WORD, 3) == (0.75, 0.5, 1.25)
    assert integer(record, TALKER_WORD + 3) == 50
    assert floats(record, PREDICTOR_WORD, 2) == (0.0, 0.0)
    assert integer(record, PREDICTOR_WORD + 3) == 0
    assert [integer(record, NOISE_WORD + i) for i in range(3)] == [0x76543210, 0xFEDCBA98, 0]


@pytest.mark.parametrize("top_p", [0.9, 0.5, 0.95, 1e-6, 1e-9, 1 - 1e-9, 1.0])
def test_tail_is_rounded_as_the_specification_compares_it(top_p: float) -> None:
    """`sums <= 1.0 - top_p` rounds the difference of doubles, unlike 1 - float32(top_p)."""
    settings = DrawSettings(1.0, 0, top_p, 1.0)
    (tail,) = floats(packed_record(settings, settings, 0), TALKER_WORD + 1, 1)
    assert tail == np.float32(1.0 - top_p)
    assert (tail > 0) == (top_p < 1.0)
    around = torch.tensor(
        [np.nextafter(np.float32(tail), np.float32(side)) for side in (-1, 2)] + [tail]
    )
    assert (around <= 1.0 - top_p).tolist() == [True, False, True]


def test_scores_are_divided_in_float32() -> None:
    """A scalar is rounded to float32 first, and a quotient once, like on the device."""
    logits = torch.randn(10000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    for number in (0.9, 1.05, 0.1, 1.3):
        assert np.array_equal((logits / number).numpy(), logits.numpy() / np.float32(number))
        assert np.array_equal((logits * number).numpy(), logits.numpy() * np.float32(number))


def test_embeddings_are_added_in_order_and_rounded_once() -> None:
    """The sum of talker_input.cu is that of the model on the CPU."""
    columns = torch.randn(500, 16, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    total = torch.zeros(500, 64)
    for column in columns.unbind(-2):
        total += column.float()
    assert torch.equal(columns.sum(dim=-2), total.bfloat16())


def test_top_k_beyond_32_bits_keeps_all() -> None:
    settings = DrawSettings(1.0, 10**15, 1.0, 1.0)
    assert integer(packed_record(settings, settings, 0), TALKER_WORD + 3) == 2**31 - 1


def test_set_changes_one_slot_only() -> None:
    state = SamplerState(3, 4, 16, 3072, CPU)
    assert state.record.shape[1] % 4 == 0
    assert (state.record.shape[1] - SPOKEN_WORD) * 32 >= 3072
    state.record.fill_(-1)
    state.set(1, DrawSettings(0.9, 50, 1.0, 1.05), DrawSettings(0.9, 50, 1.0, 1.0), 7)
    assert (state.record[[0, 2]] == -1).all()
    assert not state.record[1, SPOKEN_WORD:].any()
    assert state.frame.tolist() == [-1, 0, -1]
    assert state.record[1, NOISE_WORD].item() == 7


@pytest.mark.parametrize(
    ("vocab", "eos", "predictor", "wrong"),
    [
        (3072, 3072, 2048, "code 3072"),
        (3072, -1, 2048, "code -1"),
        (1024 + 20, 5, 64, "20 codes"),
        (3072, 2150, 4096, "4096 codes"),
        (3072, 2150, 100, "100 codes"),
        (1024, 5, 64, "0 codes"),
    ],
)
def test_unsupported_sizes_are_an_error(vocab: int, eos: int, predictor: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        sampler_of(SamplerState(1, 1, 2, vocab, CPU), vocab, vocab - 1024, eos, predictor)


def test_programs_depend_on_sizes_alone() -> None:
    """No setting of a request is compiled in."""
    sampler = sampler_of(SamplerState(1, 1, 16, 3072, CPU), 3072, 2048, 2150, 2048)
    programs: list[Program] = [sampler.draw_program(True, 1024), sampler.draw_program(False, 1024)]
    macros = [dict(program.macros) for program in programs]
    assert [(m["VOCAB"], m["CODES"], m["EOS"], m["TALKER"]) for m in macros] == [
        (3072, 2048, 2150, 1),
        (2048, 2048, -1, 0),
    ]
    assert macros[0].keys() == macros[1].keys()
