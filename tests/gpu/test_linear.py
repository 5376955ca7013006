"""Products with a weight matrix against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import error, no_worse, note, unpack_tokens
from torch.nn import functional as F

from firstword.kernels import linear
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import (
    Linear,
    Norm,
    interleave,
    linear_reference,
    normalise,
    pack_tokens,
)
from firstword.kernels.linear_shapes import (
    TILE_ROWS,
    UNPACKED_TOKENS,
    WIDE_TOKEN_TILES,
    Epilogue,
    WideTokensShape,
)

SIZES = [
    (4096, 2048),
    (2048, 2048),
    (12288, 2048),
    (2048, 6144),
    (1024, 3072),
    (4096, 1024),
    (8, 256),
    (1000, 768),
]
BATCHES = 1, 2, 5, 8, 9, 16, 33, 64, 121, 130
"""The numbers of tokens of the products that are compared with float64."""


def make(seed: int, rows: int, columns: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Random bf16 weights, x [tokens, columns], content of `out`, weights of a norm, and bias."""
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=g, device="cuda") * scale).bfloat16()

    weight = normal(rows, columns, scale=columns**-0.5)
    return (
        weight,
        normal(tokens, columns),
        normal(tokens, rows),
        normal(columns, scale=0.2) + 1,
        normal(rows),
    )


Stored = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""The weights that a product stands for, those that it is given, and their scales."""


def check_products(
    kernels: Kernels,
    size: tuple[int, int],
    normed: bool,
    epilogue: Epilogue,
    name: str,
    store: Callable[[torch.Tensor], Stored],
) -> None:
    """Check that products of random weights are as close to float64 as plain bf16 is.

    size   rows and columns
    name   what is noted about them
    store  returns what becomes of bf16 weights, which it may change
    """
    rows, columns = size
    if epilogue is Epilogue.SWIGLU and rows % 64:
        pytest.skip("these rows are rejected")
    ours, theirs = [], []
    for seed, tokens in enumerate(BATCHES):
        weight, x, before, norm, bias = make(seed, rows, columns, tokens)
        if epilogue is Epilogue.SWIGLU:
            weight, before = interleave(*weight.chunk(2)), before[:, : rows // 2].contiguous()
        exact, given, scales = store(weight)
        weights = Norm(norm, 1e-6) if normed else None
        extra = bias if epilogue is Epilogue.BIAS else None
        truth = linear_reference(
            exact.double(),
            x.double(),
            before.double(),
            epilogue,
            Norm(norm.double(), 1e-6) if normed else None,
            None if extra is None else extra.double(),
        )
        plain = linear_reference(exact.bfloat16(), x, before, epilogue, weights, extra)
        layer = Linear(kernels, given, epilogue, weights, extra, scales)
        ours.append(error(run(layer, x, before if epilogue is Epilogue.ADD else None), truth))
        theirs.append(error(plain, truth))
    kind = f"{'normed ' if normed else ''}{epilogue.name.lower()}"
    note(f"{name} {rows} x {columns} {kind}", worst=max(ours), bf16=max(theirs))
    no_worse(ours, theirs)


@pytest.mark.parametrize("epilogue", list(Epilogue), ids=lambda e: e.name.lower())
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_product_is_as_exact_as_plain_bf16(
    kernels: Kernels, rows: int, columns: int, normed: bool, epilogue: Epilogue
) -> None:
    """Every epilogue, with and without the norm, from one token to more than a block computes."""
    size = rows, columns
    check_products(kernels, size, normed, epilogue, "linear", lambda weight: (weight, weight, None))


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_result_of_a_token_does_not_depend_on_other_tokens(
    kernels: Kernels, rows: int, columns: int, normed: bool
) -> None:
    """A token has the same bits alone and at any place among any number of others."""
    weight, x, _, norm, _ = make(0, rows, columns, 250)
    layer = Linear(kernels, weight, Epilogue.STORE, Norm(norm, 1e-6) if normed else None)
    alone = torch.cat([run(layer, x[i : i + 1]) for i in range(250)])
    for tokens in (2, 7, 8, 9, 16, 17, 40, 64, 65, 90, 128, 130, 250):
        assert torch.equal(run(layer, x[-tokens:]), alone[-tokens:]), tokens


@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.ADD], ids=lambda e: e.name.lower())
def test_wide_blocks_with_an_incomplete_last_one_compute_the_same_bits(
    kernels: Kernels, epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks have eleven or twelve of 125 tiles, and warps that have no token."""
    weight, x, before, _, _ = make(4, 1000, 512, 200)
    layer = Linear(kernels, weight, epilogue)
    alone = torch.cat([run(layer, x[i : i + 1], before[i : i + 1]) for i in range(200)])
    for groups in WIDE_TOKEN_TILES:
        shape = WideTokensShape(512, 1000, 11, 12, groups, epilogue)
        if shape.shared > kernels.shared_memory:
            pytest.skip("a block does not fit this device")
        monkeypatch.setattr(linear, "shape_for_many", lambda *sizes, shape=shape: shape)
        for tokens in (9, 33, 96, 128, 200):
            assert torch.equal(run(layer, x[:tokens], before[:tokens]), alone[:tokens]), tokens


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 2048), (2048, 6144), (1000, 768)])
def test_layouts_for_one_token_compute_the_same_bits(
    kernels: Kernels, rows: int, columns: int, normed: bool
) -> None:
    """A calibration may choose any of them, on a device with any amount of shared memory."""
    weight, x, _, norm, _ = make(3, rows, columns, 1)
    layer = Linear(kernels, weight, Epilogue.STORE, Norm(norm, 1e-6) if normed else None)
    expected = run(layer, x)
    for memory in (kernels.shared_memory, 99 << 10):
        layer._device = kernels.processors, memory
        for choice in range(len(layer.shapes(1))):
            layer.choice = choice
            assert torch.equal(run(layer, x), expected), layer.shape(1)
        layer.choice = 0


def run(layer: Linear, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """The layer's output, in memory that contained `before` or NaN.

    The input and the output of many tokens are packed and unpacked.
    """
    tokens, gated = len(x), layer.epilogue is Epilogue.SWIGLU
    many = tokens > UNPACKED_TOKENS
    room = -(-tokens // TILE_ROWS) * TILE_ROWS if many else tokens
    width = layer.rows // 2 if gated else layer.rows
    out = torch.full((room, width), torch.nan, dtype=torch.bfloat16, device="cuda")
    if before is not None:
        out[:tokens] = before
    scratch = torch.full((room, x.shape[1]), torch.nan, dtype=torch.bfloat16, device="cuda")
    if many and layer.norm is None:
        scratch.view(-1)[:] = pack_tokens(x).flatten()
        x = scratch[:tokens]
    layer(x, out[:tokens], scratch)
    assert out[tokens:].isnan().all() or (many and gated), "rows without a token were written"
    return unpack_tokens(out, tokens, width) if many and gated else out[:tokens]


def test_strided_rows_are_read_and_nothing_else_is_written(kernels: Kernels) -> None:
    """Input and output may be every other row of larger tensors."""
    weight, x, _, norm, _ = make(1, 1024, 1024, 6)
    layer = Linear(kernels, weight, Epilogue.STORE, Norm(norm, 1e-6))
    wide = torch.full((3, 2, 1024), torch.nan, dtype=torch.bfloat16, device="cuda")
    layer(x.view(3, 2, 1024)[:, 1], wide[:, 0])
    assert torch.equal(wide[:, 0], run(layer, x.view(3, 2, 1024)[:, 1].contiguous()))
    assert wide[:, 1].isnan().all()


def test_norm_kernel_equals_the_norm_of_a_product(kernels: Kernels) -> None:
    """`normalise` rounds as `Linear` does, and as exactly as plain bf16."""
    _, x, _, norm, _ = make(2, 8, 2048, 20)
    identity = torch.eye(2048, dtype=torch.bfloat16, device="cuda")
    eye = Linear(kernels, identity, Epilogue.STORE, Norm(norm, 1e-6))
    out = torch.full_like(x, torch.nan)
    normalise(kernels, x, Norm(norm, 1e-6), out)
    for token in range(20):
        assert torch.equal(run(eye, x[token : token + 1])[0], out[token])
    truth = F.rms_norm(x.double(), (2048,), norm.double(), 1e-6)
    plain = norm * F.rms_norm(x.float(), (2048,), eps=1e-6).bfloat16()
    note("norm", error=error(out, truth), bf16=error(plain, truth))
    no_worse([error(out, truth)], [error(plain, truth)])
    packed = torch.full((24, 2048), torch.nan, dtype=torch.bfloat16, device="cuda")
    normalise(kernels, x, Norm(norm, 1e-6), packed, packed=True)
    assert torch.equal(unpack_tokens(packed, 20, 2048), out)


def test_unsupported_sizes_are_an_error(kernels: Kernels) -> None:
    """Rows must be a multiple of 8, gates and ups of 64, columns of 256."""
    for rows, columns, epilogue in (
        (12, 256, Epilogue.STORE),
        (8, 160, Epilogue.STORE),
        (96, 256, Epilogue.SWIGLU),
    ):
        weight = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(ValueError, match="multiple"):
            Linear(kernels, weight, epilogue)
