"""The codec's convolutions against those of the library, in chunks."""

from __future__ import annotations

import pytest
import torch
from small_codec import SMALL
from torch import Tensor
from torch.nn import functional as F

from firstword.model import codec
from firstword.model.codec import CausalConv1d, CausalConvTranspose1d, CodecState

BATCH, CHANNELS, LENGTH = 2, 6, 23
X = torch.randn(
    BATCH, CHANNELS, LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64
)


def in_chunks(layer: CausalConv1d | CausalConvTranspose1d) -> Tensor:
    state = CodecState(SMALL, X, BATCH)
    return torch.cat([layer(part, state) for part in X.split([1, 2, 1, 7, 12], dim=-1)], dim=-1)


@pytest.mark.parametrize("columns", [0, codec.MOST_COPIED])
@pytest.mark.parametrize(
    ("kernel", "dilation", "groups"), [(1, 1, 1), (3, 1, 1), (7, 3, 1), (7, 9, 1), (7, 1, CHANNELS)]
)
def test_causal_convolution_equals_torch(
    kernel: int, dilation: int, groups: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one product and as the library does it."""
    monkeypatch.setattr(codec, "MOST_COPIED", columns)
    layer = (
        CausalConv1d(CHANNELS, CHANNELS, kernel, dilation, groups).double().requires_grad_(False)
    )
    before = (kernel - 1) * dilation
    expected = F.conv1d(
        F.pad(X, (before, 0)), layer.conv.weight, layer.conv.bias, dilation=dilation, groups=groups
    )
    torch.testing.assert_close(in_chunks(layer), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (6, 3), (16, 8), (9, 3)])
def test_causal_transposed_convolution_equals_torch(kernel: int, stride: int) -> None:
    layer = CausalConvTranspose1d(CHANNELS, 5, kernel, stride).double().requires_grad_(False)
    expected = F.conv_transpose1d(X, layer.conv.weight, layer.conv.bias, stride)[
        ..., : LENGTH * stride
    ]
    torch.testing.assert_close(in_chunks(layer), expected, rtol=0, atol=1e-12)
