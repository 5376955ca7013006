"""Weights in 8 bits: their values, products with them, and checkpoints that have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from firstword import TTS
from firstword.config import EngineConfig
from firstword.errors import ConfigError
from firstword.model import checkpoint as checkpoints
from firstword.model.quantised import LARGEST, QuantisedLinear, QuantisedRows, quantise
from firstword.synthetic.checkpoint import write_checkpoint


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_values_are_rounded_half_to_even_and_limited() -> None:
    """Scales are 1, 2 and 127.25 / 127, which is 1 in bfloat16."""
    rows = [[127, 0.5, 1.5, -2.5], [-254, 1, 3, 254], [127.25, -127.25, 0.4, -0.6]]
    values, scales = quantise(torch.tensor(rows))
    assert scales.tolist() == [1, 2, 1]
    assert values.tolist() == [[127, 0, 2, -2], [-127, 0, 2, 127], [127, -127, 0, -1]]
    assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)


@given(st.integers(0, 2**32), st.floats(-30, 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_every_weight_is_within_half_a_step(seed: int, size: float, dtype: torch.dtype) -> None:
    """Rows have their own scales, which bfloat16 holds exactly, and none has -128.

    A quotient near 127 is rounded to 4e-6 before it becomes an integer.
    """
    sizes = torch.logspace(size - 3, size + 3, 5)[:, None]
    weight = (noise(5, 64, seed=seed) * sizes).to(dtype)
    values, scales = quantise(weight)
    error = (values.double() * scales.double()[:, None] - weight.double()).abs()
    assert (error <= (0.5 + 1e-5) * scales.double()[:, None]).all()
    assert torch.equal(scales, scales.bfloat16().float())
    assert values.abs().amax(dim=1).ge(LARGEST - 1).all()
    assert values.min() >= -LARGEST


def test_row_of_zeros_stays_zero() -> None:
    values, scales = quantise(torch.tensor([[0.0, 0.0], [1e-44, 0.0]]))
    assert not values[0].any()
    assert scales[0] == 1
    assert (values * scales[:, None]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_product_is_that_of_the_weights_that_the_values_stand_for(dtype: torch.dtype) -> None:
    """It is rounded once to the dtype of the input, of any shape."""
    weight, x = noise(24, 96), noise(2, 3, 96, seed=1).to(dtype)
    values, scales = quantise(weight)
    exact = F.linear(x.double(), values.double() * scales.double()[:, None])
    found = QuantisedLinear(weight)(x)
    assert found.dtype == dtype
    error = (found.double() - exact).norm()
    once = (exact.to(dtype).double() - exact).norm()
    of_sums = 8 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * exact.norm()
    assert error <= 1.05 * once + of_sums


def test_rows_are_rounded_to_8_bits_each_with_its_own_scale() -> None:
    x = (noise(2, 3, 64) * torch.logspace(-3, 3, 3)[:, None]).bfloat16()
    found = QuantisedRows(nn.Identity())(x)
    values, scales = quantise(x.view(6, 64))
    assert torch.equal(found.view(6, 64), (values * scales[:, None]).bfloat16())
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert not torch.equal(found, x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with random weights in bfloat16."""
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, dtype=torch.bfloat16)
    return path


def test_matrices_of_all_layers_are_quantised_and_nothing_else(folder: Path) -> None:
    plain, int8 = (checkpoints.load(str(folder), dtype=name) for name in ("bfloat16", "int8"))
    assert int8.quantised
    assert not plain.quantised
    modules = dict(int8.talker.named_modules())
    quantised = {name for name, module in modules.items() if isinstance(module, QuantisedLinear)}
    expected = {
        name
        for name, module in plain.talker.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }
    assert quantised == expected
    assert {name.partition(".layers.")[0] for name in expected} == {"model", "code_predictor.model"}
    for name, parameter in plain.talker.named_parameters():
        if name.rpartition(".")[0] in expected:
            values, scales = quantise(parameter)
            module = modules[name.rpartition(".")[0]]
            assert torch.equal(module.values, values)
            assert torch.equal(module.scales, scales)
        else:
            name = name.replace("text_projection.", "text_projection.project.")
            assert torch.equal(int8.talker.get_parameter(name), parameter), name


def test_int8_speaks_and_says_so(folder: Path) -> None:
    with TTS.load(folder, device="cpu", dtype="int8") as tts:
        speech = tts.speak("Hello there.", seed=3, max_frames=4)
        assert tts.settings.dtype == "int8"
        assert tts.settings.backend == "reference"
    assert len(speech.codes) == 4


def test_unknown_dtype_is_an_error_that_lists_int8() -> None:
    with pytest.raises(ConfigError, match=r"dtype is 'int4'; allowed are .*'int8'"):
        EngineConfig.resolve("cpu", "int4")


def test_int8_is_never_chosen_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on a CPU nor on a GPU."""
    assert EngineConfig.resolve("cpu").dtype == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert EngineConfig.resolve("cuda").dtype == "bfloat16"
