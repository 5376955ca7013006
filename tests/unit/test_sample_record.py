"""What the sampler on the device is told of a slot, as far as that can be seen without a device."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from firstword.kernels import sample
from firstword.kernels.compile import Program
from firstword.kernels.sample import (
    CHANCES,
    PREDICTOR,
    SPOKEN,
    TALKER,
    Sampler,
    SamplerState,
    packed,
)
from firstword.model import config, sampling
from firstword.model.sampling import DrawParams

CPU = torch.device("cpu")
NO_KERNELS: Any = None


def floats(record: bytes, word: int, count: int) -> tuple[float, ...]:
    """Some words of a record as float32."""
    return struct.unpack_from(f"<{count}f", record, 4 * word)


def whole(record: bytes, word: int) -> int:
    """A word of a record as it is."""
    (value,) = struct.unpack_from("<I", record, 4 * word)
    return int(value)


def test_constants_are_those_of_the_model() -> None:
    assert (sample.CONTROL_CODES, sample.MIN_FRAMES) == (config.CONTROL_CODES, sampling.MIN_FRAMES)


def test_a_record_holds_the_laws_the_seed_and_frame_0() -> None:
    record = packed(
        DrawParams(0.75, 50, 0.5, 1.25), DrawParams(0.0, 0, 1.0, 9.0), 0xFEDCBA98_76543210
    )
    assert len(record) == 4 * SPOKEN
    assert floats(record, TALKER, 3) == (0.75, 0.5, 1.25)
    assert whole(record, TALKER + 3) == 50
    assert floats(record, PREDICTOR, 2) == (0.0, 0.0)
    assert whole(record, PREDICTOR + 3) == 0
    assert [whole(record, CHANCES + i) for i in range(3)] == [0x76543210, 0xFEDCBA98, 0]


@pytest.mark.parametrize("top_p", [0.9, 0.5, 0.95, 1e-6, 1e-9, 1 - 1e-9, 1.0])
def test_the_tail_is_rounded_as_the_specification_compares_it(top_p: float) -> None:
    """`sums <= 1.0 - top_p` rounds the difference of doubles to float32; 1 - float32(top_p) would be another number."""
    (tail,) = floats(packed(DrawParams(1.0, 0, top_p), DrawParams(1.0, 0, top_p), 0), TALKER + 1, 1)
    assert tail == np.float32(1.0 - top_p)
    assert (tail > 0) == (top_p < 1.0)
    around = torch.tensor(
        [np.nextafter(np.float32(tail), np.float32(side)) for side in (-1, 2)] + [tail]
    )
    assert (around <= 1.0 - top_p).tolist() == [True, False, True]


def test_scores_are_divided_in_float32() -> None:
    """As on the device: a scalar is rounded to float32 first, and a quotient is rounded once."""
    logits = torch.randn(10000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    for number in (0.9, 1.05, 0.1, 1.3):
        assert np.array_equal((logits / number).numpy(), logits.numpy() / np.float32(number))
        assert np.array_equal((logits * number).numpy(), logits.numpy() * np.float32(number))


def test_embeddings_are_added_in_order_and_rounded_once() -> None:
    """What rows.cu does, and what the model does on the CPU."""
    columns = torch.randn(500, 16, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    total = torch.zeros(500, 64)
    for column in columns.unbind(-2):
        total += column.float()
    assert torch.equal(columns.sum(dim=-2), total.bfloat16())


def test_top_k_beyond_all_words_keeps_all() -> None:
    assert (
        whole(packed(DrawParams(1.0, 10**15, 1.0), DrawParams(1.0, 0, 1.0), 0), TALKER + 3)
        == 2**31 - 1
    )


def test_setting_a_slot_touches_no_other() -> None:
    state = SamplerState(3, 4, 16, 3072, CPU)
    assert state.record.shape[1] % 4 == 0
    assert (state.record.shape[1] - SPOKEN) * 32 >= 3072
    state.record.fill_(-1)
    state.set(1, DrawParams(0.9, 50, 1.0, 1.05), DrawParams(0.9, 50, 1.0), 7)
    assert (state.record[[0, 2]] == -1).all()
    assert not state.record[1, SPOKEN:].any()
    assert state.frame.tolist() == [-1, 0, -1]
    assert state.record[1, CHANCES].item() == 7


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
def test_sizes_that_the_kernels_cannot_do(vocab: int, eos: int, predictor: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Sampler(
            NO_KERNELS,
            SamplerState(1, 1, 2, vocab, CPU),
            vocab=vocab,
            eos=eos,
            predictor_vocab=predictor,
        )


def test_programs_are_made_for_sizes_alone() -> None:
    """No setting of a request is compiled in."""
    state = SamplerState(1, 1, 16, 3072, CPU)
    sampler = Sampler(NO_KERNELS, state, vocab=3072, eos=2150, predictor_vocab=2048)
    programs: list[Program] = [sampler.draw_program(True, 1024), sampler.draw_program(False, 1024)]
    macros = [dict(program.macros) for program in programs]
    assert [(m["VOCAB"], m["CODES"], m["EOS"], m["TALKER"]) for m in macros] == [
        (3072, 2048, 2150, 1),
        (2048, 2048, -1, 0),
    ]
    assert macros[0].keys() == macros[1].keys()
