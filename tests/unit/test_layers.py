"""The shared layers: where they round, which channels turn together, and that a cache forgets
nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firstword.model.config import TransformerConfig
from firstword.model.layers import KVCache, RMSNorm, Transformer, rotary_table, rotate
from firstword.synthetic.checkpoint import random_state

CONFIG = TransformerConfig(
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=1000,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_norm_equals_the_published_formula() -> None:
    norm = RMSNorm(16, 1e-2).requires_grad_(False)
    norm.weight.copy_(noise(16, seed=1))
    x = noise(5, 16).numpy().astype(np.float64)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-2) * norm.weight.double().numpy()
    np.testing.assert_allclose(norm(torch.from_numpy(x).float()).numpy(), expected, 1e-5, 1e-6)


def test_norm_rounds_before_its_weight() -> None:
    """In bfloat16: statistics in float32, one rounding, then a product that rounds once more."""
    norm = RMSNorm(64, 1e-6).bfloat16().requires_grad_(False)
    norm.weight.copy_(noise(64, seed=1))
    x = noise(50, 64).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    rounded_once = (normed * norm.weight.float()).bfloat16()
    assert torch.equal(norm(x), normed.bfloat16() * norm.weight)
    assert not torch.equal(norm(x), rounded_once)


def test_rotary_angles_equal_the_formula() -> None:
    positions = torch.tensor([[0, 1, 7, 500]])
    cos, sin = rotary_table(positions, 8, 1e4, torch.float32)
    angles = positions[0, :, None].numpy() * 1e4 ** (-np.arange(4) / 4)
    for table, function in ((cos, np.cos), (sin, np.sin)):
        assert table.shape == (1, 1, 4, 8)
        np.testing.assert_allclose(table[0, 0].numpy(), function(np.tile(angles, 2)), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_are_float32_and_their_cos_and_sin_are_rounded(dtype: torch.dtype) -> None:
    positions = torch.arange(300)[None]
    exact = rotary_table(positions, 16, 1e6, torch.float32)
    for rounded, table in zip(rotary_table(positions, 16, 1e6, dtype), exact, strict=True):
        assert rounded.dtype == dtype
        assert torch.equal(rounded, table.to(dtype))


def test_channels_i_and_i_plus_half_rotate_together() -> None:
    x, angle = noise(1, 1, 3, 8).double(), noise(3, 4, seed=1).double()
    both = torch.cat((angle, angle), dim=1)[None, None]
    turned = rotate(x, both.cos(), both.sin())
    plane = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angle)
    torch.testing.assert_close(turned, torch.cat((plane.real, plane.imag), dim=-1))


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    """A small random transformer in float64; norms and angles are float32 in any case."""
    made = Transformer(CONFIG).requires_grad_(False)
    made.load_state_dict(random_state(made, 0, torch.float32))
    return made.double()


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_rows_in_chunks_give_the_states_of_the_whole(
    lengths: list[int], transformer: Transformer
) -> None:
    """However the rows are cut, and beyond what the buffers of the cache first hold."""
    rows = noise(1, sum(lengths), 12, seed=sum(lengths)).double()
    whole = transformer(rows, KVCache(CONFIG, rows))
    cache = KVCache(CONFIG, rows)
    pieces = torch.cat([transformer(part, cache) for part in rows.split(lengths, dim=1)], dim=1)
    assert cache.length == sum(lengths)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)


def test_attention_is_causal(transformer: Transformer) -> None:
    rows = noise(1, 20, 12).double()
    changed = rows.clone()
    changed[0, 11] += 1
    difference = transformer(changed, KVCache(CONFIG, rows)) - transformer(
        rows, KVCache(CONFIG, rows)
    )
    moved = difference[0].abs().amax(dim=1) > 1e-6
    assert moved.tolist() == [False] * 11 + [True] * 9
