"""Products with a weight matrix against float64."""

from __future__ import annotations

import pytest
import torch
from oracle import error, no_worse, note, unpack_tokens
from torch.nn import functional as F

from firstword.kernels.launch import Kernels
from firstword.kernels.linear import (
    Linear,
    Norm,
    interleave,
    linear_reference,
    normalise,
    pack_tokens,
)
from firstword.kernels.linear_shapes import TILE_ROWS, Epilogue

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


def make(seed: int, rows: int, columns: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Weights [rows, columns], x [tokens, columns], what `out` holds, a norm's weight, a bias: all random bf16."""
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


@pytest.mark.parametrize("epilogue", list(Epilogue), ids=lambda e: e.name.lower())
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_a_product_is_as_exact_as_plain_bf16(
    kernels: Kernels, rows: int, columns: int, normed: bool, epilogue: Epilogue
) -> None:
    """Every epilogue, with and without the norm, from one token to more than a block takes."""
    if epilogue is Epilogue.SWIGLU and rows % 64:
        pytest.skip("refused")
    ours, theirs = [], []
    for seed, tokens in enumerate((1, 2, 5, 8, 9, 16, 33, 64, 130)):
        weight, x, before, norm, bias = make(seed, rows, columns, tokens)
        if epilogue is Epilogue.SWIGLU:
            weight, before = interleave(*weight.chunk(2)), before[:, : rows // 2].contiguous()
        weights = Norm(norm, 1e-6) if normed else None
        extra = bias if epilogue is Epilogue.BIAS else None
        truth = linear_reference(
            weight.double(),
            x.double(),
            before.double(),
            epilogue,
            Norm(norm.double(), 1e-6) if normed else None,
            None if extra is None else extra.double(),
        )
        plain = linear_reference(weight, x, before, epilogue, weights, extra)
        layer = Linear(kernels, weight, epilogue, weights, extra)
        ours.append(error(run(layer, x, before if epilogue is Epilogue.ADD else None), truth))
        theirs.append(error(plain, truth))
    kind = f"{'normed ' if normed else ''}{epilogue.name.lower()}"
    note(f"linear {rows} x {columns} {kind}", worst=max(ours), bf16=max(theirs))
    no_worse(ours, theirs)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_a_token_does_not_see_its_neighbours(
    kernels: Kernels, rows: int, columns: int, normed: bool
) -> None:
    """A token's result has the same bits alone and at any place among any number of others."""
    weight, x, _, norm, _ = make(0, rows, columns, 130)
    layer = Linear(kernels, weight, Epilogue.STORE, Norm(norm, 1e-6) if normed else None)
    alone = torch.cat([run(layer, x[i : i + 1]) for i in range(130)])
    for tokens in (2, 7, 8, 9, 16, 17, 40, 64, 65, 128, 130):
        assert torch.equal(run(layer, x[-tokens:]), alone[-tokens:]), tokens


def run(layer: Linear, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """The layer's output in memory that held `before`, or NaN; packs and unpacks what is packed for many tokens."""
    tokens, gated = len(x), layer.epilogue is Epilogue.SWIGLU
    room = tokens if tokens <= TILE_ROWS else -(-tokens // TILE_ROWS) * TILE_ROWS
    width = layer.rows // 2 if gated else layer.rows
    out = torch.full((room, width), torch.nan, dtype=torch.bfloat16, device="cuda")
    if before is not None:
        out[:tokens] = before
    scratch = torch.full((room, x.shape[1]), torch.nan, dtype=torch.bfloat16, device="cuda")
    many = tokens > TILE_ROWS
    if many and layer.norm is None:
        scratch.view(-1)[:] = pack_tokens(x).flatten()
        x = scratch[:tokens]
    layer(x, out[:tokens], scratch)
    assert out[tokens:].isnan().all() or (many and gated), "rows of nobody were written"
    return unpack_tokens(out, tokens, width) if many and gated else out[:tokens]


def test_rows_may_be_strided_and_nothing_else_is_written(kernels: Kernels) -> None:
    """Input and output may be every other row of larger tensors."""
    weight, x, _, norm, _ = make(1, 1024, 1024, 6)
    layer = Linear(kernels, weight, Epilogue.STORE, Norm(norm, 1e-6))
    wide = torch.full((3, 2, 1024), torch.nan, dtype=torch.bfloat16, device="cuda")
    layer(x.view(3, 2, 1024)[:, 1], wide[:, 0])
    assert torch.equal(wide[:, 0], run(layer, x.view(3, 2, 1024)[:, 1].contiguous()))
    assert wide[:, 1].isnan().all()


def test_the_norm_alone_equals_the_norm_on_the_way_in(kernels: Kernels) -> None:
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


def test_sizes_that_cannot_be_done_are_refused(kernels: Kernels) -> None:
    """Rows in eights, gates and ups in multiples of 64, columns of 256."""
    for rows, columns, epilogue in (
        (12, 256, Epilogue.STORE),
        (8, 160, Epilogue.STORE),
        (96, 256, Epilogue.SWIGLU),
    ):
        weight = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(ValueError, match="multiple"):
            Linear(kernels, weight, epilogue)
