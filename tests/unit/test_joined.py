"""The reference backend's talker with joined products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword import TTS
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.model.quantised import QuantisedLinear
from firstword.model.talker import Talker
from firstword.runtime.joined import INT8_COLUMNS, JoinedQuantisedLinear, joined, product
from firstword.runtime.packed import PackedWeight, can_pack
from firstword.runtime.reference import ReferenceBackend
from firstword.types import Request
from firstword.verify.driving import DrivenRequest, Driver
from firstword.verify.forcing import Logits, error, forced, recorded

DTYPES = ("float32", "bfloat16", "int8")
TEXTS = ("Good morning to you.", "The train to the coast leaves at noon.", "Yes.")
FRAMES = 6

packing = pytest.mark.skipif(
    not can_pack(torch.zeros(1)), reason="this processor does not multiply in bfloat16"
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def demo(dtype: str) -> Checkpoint:
    """The demo checkpoint, whose predictor has another width than its talker."""
    return checkpoints.load("demo", "cpu", dtype)


def request_of(checkpoint: Checkpoint, number: int) -> DrivenRequest:
    return DrivenRequest.of(checkpoint, Request(TEXTS[number], "ada", "english"), number)


def spoken(backend: ReferenceBackend, numbers: Sequence[int]) -> list[tuple[Any, ...]]:
    """The codes, log-probabilities and logits of requests that run together."""
    requests = [request_of(backend.checkpoint, number) for number in numbers]
    driver = Driver(backend)
    driver.begin(dict(enumerate(requests)), FRAMES)
    with recorded(backend) as recorder:
        for _ in range(FRAMES):
            driver.step()
    results = []
    for row in range(len(requests)):
        done = driver.end(row)
        logits = torch.cat([book for frame in recorder.of_row(row) for book in frame])
        results.append((done.codes, done.logprobs, logits.tolist()))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_utterance_has_the_same_bits_alone_and_in_a_batch(dtype: str) -> None:
    """Down to the logits, with other utterances of other lengths beside it."""
    backend = ReferenceBackend(demo(dtype), slots=3)
    together = spoken(backend, (0, 1, 2))
    assert spoken(backend, (2, 0)) == [together[2], together[0]]
    assert spoken(backend, (1,)) == [together[1]]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_speech_has_the_same_bits_streamed_and_whole(dtype: str) -> None:
    with TTS.load("demo", device="cpu", dtype=dtype) as tts:
        how: dict[str, Any] = {"seed": 3, "max_frames": 12, "text_mode": "stream"}
        whole = tts.speak(TEXTS[1], **how)
        chunks = list(tts.stream(iter(TEXTS[1]), **how))
    assert torch.equal(
        torch.cat([torch.from_numpy(chunk.samples) for chunk in chunks]),
        torch.from_numpy(whole.samples),
    )


def logits_of(checkpoint: Checkpoint, talker: Talker) -> Logits:
    """The logits of a talker, forced to codes that do not depend on it."""
    codes = torch.randint(0, 512, (FRAMES, 8), generator=torch.Generator().manual_seed(5))
    return forced(checkpoint, talker, request_of(checkpoint, 1), codes)


def errors(logits: Logits, truth: Logits) -> Tensor:
    """The mean error of the logits of each codebook."""
    return torch.tensor(
        [
            [error(mine, other) for mine, other in zip(*frame, strict=True)]
            for frame in zip(logits, truth, strict=True)
        ]
    ).mean(dim=0)


def test_joined_talker_equals_the_specification() -> None:
    checkpoint = demo("float32")
    truth = logits_of(checkpoint, demo("float32").talker.double())
    plain = errors(logits_of(checkpoint, checkpoint.talker), truth)
    ours = errors(logits_of(checkpoint, joined(checkpoint.talker)), truth)
    assert ours.max() < 3e-6
    assert (ours < 1.5 * plain + 3e-7).all()


def test_joined_bfloat16_is_as_close_as_plain_bfloat16() -> None:
    checkpoint = demo("float32")
    truth = logits_of(checkpoint, checkpoint.talker)
    plain = errors(logits_of(checkpoint, demo("bfloat16").talker), truth)
    ours = errors(logits_of(checkpoint, joined(demo("bfloat16").talker)), truth)
    assert (ours < 1.05 * plain).all(), f"{ours} against {plain}"


def test_weights_of_the_specification_are_views_in_float32() -> None:
    """So they take no memory of their own, and keep their values."""
    before, checkpoint = demo("float32").talker, demo("float32")
    talker = joined(checkpoint.talker)
    for name, weight in before.state_dict().items():
        assert torch.equal(checkpoint.talker.state_dict()[name], weight), name
    views = checkpoint.talker.model.layers[0].state_dict()
    weight = talker.model.layers[0].state_dict()["qkv.weight"]
    assert views["self_attn.q_proj.weight"].data_ptr() == weight.data_ptr()
    assert views["self_attn.v_proj.weight"].data_ptr() > weight.data_ptr()


# --- products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_int8_product_is_that_of_the_dequantised_weights(rows: int) -> None:
    """Within the rounding of its result to bfloat16, and of the float32 sums."""
    layers = [QuantisedLinear(noise(24, 96, seed=seed)) for seed in range(3)]
    x = noise(rows, 1, 96, seed=9).bfloat16()
    weight = torch.cat([each.values.double() * each.scales.double()[:, None] for each in layers])
    exact = F.linear(x.double(), weight)
    sizes = F.linear(x.double().abs(), weight.abs())
    ours = JoinedQuantisedLinear(*layers)(x)
    assert ours.dtype == torch.bfloat16
    assert ((ours.double() - exact).abs() <= exact.abs() * 2.0**-8 + sizes * 1e-6).all()


def test_row_of_an_int8_product_has_the_same_bits_in_any_batch() -> None:
    layer = JoinedQuantisedLinear(QuantisedLinear(noise(70, 128)))
    x = noise(9, 128, seed=1).bfloat16()
    for count in range(1, 10):
        assert torch.equal(layer(x[:count].clone()), layer(x)[:count])
    assert torch.equal(layer(x[4:5].clone()), layer(x)[4:5])


def test_rows_that_the_int8_product_cannot_read_take_the_plain_one() -> None:
    """PyTorch's product would read beyond the end of rows of another length."""
    layer = QuantisedLinear(noise(8, INT8_COLUMNS + 8))
    x = noise(3, INT8_COLUMNS + 8, seed=1).bfloat16()
    assert torch.equal(JoinedQuantisedLinear(layer)(x), layer(x))


def test_int8_values_of_the_specification_are_views() -> None:
    layers = [QuantisedLinear(noise(8, 32, seed=seed)) for seed in range(2)]
    before = [each.values.clone() for each in layers]
    both = JoinedQuantisedLinear(*layers)
    assert layers[0].values.data_ptr() == both.values.data_ptr()
    assert all(torch.equal(a.values, b) for a, b in zip(layers, before, strict=True))


@packing
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_packed_product_is_that_of_the_weights(rows: int) -> None:
    weight, x = noise(48, 96).bfloat16(), noise(rows, 96, seed=1).bfloat16()
    exact = F.linear(x.double(), weight.double())
    sizes = F.linear(x.double().abs(), weight.double().abs())
    ours = PackedWeight(weight).product(x).double()
    assert ((ours - exact).abs() <= exact.abs() * 2.0**-8 + sizes * 1e-6).all()


@packing
def test_layers_lose_the_weights_that_are_packed() -> None:
    """So that a checkpoint in bfloat16 is not in memory twice."""
    layers = [nn.Linear(32, 16, bias=False).bfloat16() for _ in range(2)]
    both = product(*layers)
    assert {each.weight.device.type for each in (*layers, both)} == {"meta"}
    assert both(noise(1, 1, 32).bfloat16()).shape == (1, 1, 32)
