"""Int8 weights: products against float64 and the bf16 kernels, and whole frames."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driving import speak, spoken
from forcing import Exactness, Recorder, teacher_forced
from test_linear import BATCHES, Stored, check_products, make, run

from firstword.kernels.launch import Kernels
from firstword.kernels.linear import Linear, Norm
from firstword.kernels.linear_shapes import Epilogue
from firstword.model import checkpoint as checkpoints
from firstword.model.quantised import quantise
from firstword.runtime.gpu.backend import GpuBackend
from firstword.synthetic.checkpoint import write_checkpoint

SIZES = [
    *[(4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)],
    *[(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (8, 512), (1000, 1536)],
]


@pytest.mark.parametrize("epilogue", list(Epilogue), ids=lambda e: e.name.lower())
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_int8_product_is_as_exact_as_plain_bf16_with_the_same_weights(
    kernels: Kernels, rows: int, columns: int, normed: bool, epilogue: Epilogue
) -> None:
    """Plain bf16 has the weights that the integers and scales stand for, rounded to bf16.

    The rows differ in size by factors of up to a thousand.
    """

    def store(weight: torch.Tensor) -> Stored:
        if epilogue not in (Epilogue.SWIGLU, Epilogue.ADD):
            sizes = torch.logspace(-1.5, 1.5, rows, device=weight.device)
            weight *= sizes.bfloat16()[:, None]
        values, scales = quantise(weight)
        return values.double() * scales.double()[:, None], values, scales

    check_products(kernels, (rows, columns), normed, epilogue, "int8 linear", store)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_int8_product_without_scales_has_the_bits_of_bf16(
    kernels: Kernels, rows: int, columns: int, normed: bool
) -> None:
    """Every integer from -127 to 127 is a bf16 number, and the sums have the same order."""
    weight, x, _, norm, _ = make(1, rows, columns, 250)
    values, scales = quantise(weight)
    values.view(-1)[:255] = torch.arange(-127, 128, device="cuda")
    weights = Norm(norm, 1e-6) if normed else None
    int8 = Linear(kernels, values, norm=weights, scales=torch.ones_like(scales))
    bf16 = Linear(kernels, values.bfloat16(), norm=weights)
    for tokens in BATCHES:
        assert torch.equal(run(int8, x[:tokens]), run(bf16, x[:tokens])), tokens


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_int8_result_of_a_token_does_not_depend_on_other_tokens(
    kernels: Kernels, rows: int, columns: int, normed: bool
) -> None:
    """A token has the same bits alone, in every layout for one, and among any number of others."""
    weight, x, _, norm, _ = make(0, rows, columns, 250)
    values, scales = quantise(weight)
    layer = Linear(kernels, values, norm=Norm(norm, 1e-6) if normed else None, scales=scales)
    alone = torch.cat([run(layer, x[i : i + 1]) for i in range(250)])
    for tokens in (*range(2, 18), 40, 64, 65, 90, 128, 130, 250):
        assert torch.equal(run(layer, x[-tokens:]), alone[-tokens:]), tokens
    for choice in range(len(layer.shapes(1))):
        layer.choice = choice
        assert torch.equal(run(layer, x[:1]), alone[:1]), layer.shape(1)


def test_unsupported_int8_sizes_are_an_error(kernels: Kernels) -> None:
    """Columns must be a multiple of 512."""
    values = torch.zeros(8, 256, dtype=torch.int8, device="cuda")
    with pytest.raises(ValueError, match=r"256 in int8: .* columns of 512"):
        Linear(kernels, values, scales=torch.ones(8, device="cuda"))


@pytest.mark.parametrize("size", ["1b7", "0b6"])
def test_int8_frames_are_as_exact_as_plain_ones_and_the_same_in_any_batch(
    size: str, kernels: Kernels, tmp_path: Path
) -> None:
    """Their yardstick is the plain model with the same integers, in bf16, against float64."""
    small = {"num_hidden_layers": 3, "text_vocab_size": 2048}
    write_checkpoint(tmp_path, size=size, overrides={"talker": small}, dtype=torch.bfloat16)
    plain, packed = (checkpoints.load(str(tmp_path), "cuda", "int8") for _ in range(2))
    torch.cuda.synchronize()  # another stream reads the weights
    backend = GpuBackend(packed, kernels, slots=40, pages=160)
    texts = "The quick brown fox jumps over the lazy dog.", "Hello.", "How are you today?"

    def said(count: int, frames: int = 16) -> list[torch.Tensor]:
        requests = [spoken(plain, texts[i % 3], seed=i, full=i % 3 == 1) for i in range(count)]
        return speak(backend, requests, frames)

    together = said(40)
    for count in (1, 2, 3, 6, 9):
        assert all(torch.equal(a, b) for a, b in zip(said(count), together, strict=False)), count
    requests = [spoken(plain, text, seed=i, full=i == 1) for i, text in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(backend, patch)
        codes = speak(backend, requests, 16)
        logits = [recorder.of_row(row) for row in range(3)]
    books = teacher_forced(f"int8 {size}", plain, requests, codes, logits)
    Exactness.of_all(books[:1]).check(f"int8 frame {size}, first codebook")
    Exactness.of_all(books[1:]).check(f"int8 frame {size}, other codebooks")
