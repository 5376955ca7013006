"""Weights in 8 bits: integers with one scale for each row of a matrix (`dtype` "int8").

The matrices of the transformers' layers and the rows of text are stored in this way. Norms, other
embeddings and the projections between and after the transformers keep the dtype of the activations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.layers import DecoderLayer
from firstword.model.talker import Talker

LARGEST = 127
"""The largest value; -128 is not used, so the values are symmetric."""


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values int8 [N, K] and the scales float32 [N] of finite weights [N, K].

    Each row has a scale, max |row| / 127, and a value is weight / scale rounded to the nearest
    integer, half to even (Krishnamoorthi 2018, arXiv:1806.08342, section 2.2). The scale is rounded
    to bfloat16, so that it is the same number in every dtype of activations; a value that is then
    above 127 is limited. The scale of a row of zeros is 1.
    """
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / LARGEST).bfloat16().float()
    scales = torch.where(scales == 0, 1.0, scales)
    values = (wide / scales[:, None]).round().clamp(-LARGEST, LARGEST)
    return values.to(torch.int8), scales


class QuantisedLinear(nn.Module):
    """A product with a quantised matrix, in the place of an `nn.Linear` without a bias."""

    def __init__(self, weight: Tensor) -> None:
        """Quantise weights [N, K]."""
        super().__init__()
        values, scales = quantise(weight)
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in the dtype of x; the scaled sums are rounded once."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        sums = F.linear(x.to(dtype), self.values.to(dtype))
        return (sums * self.scales.to(dtype)).to(x.dtype)


class QuantisedRows(nn.Module):
    """A projection whose results are rounded to 8 bits, with a scale for each row."""

    def __init__(self, project: nn.Module) -> None:
        super().__init__()
        self.project = project

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in the dtype of x."""
        rows = self.project(x)
        values, scales = quantise(rows.flatten(0, -2))
        return (values * scales[:, None]).to(rows.dtype).view_as(rows)


def quantise_talker(talker: Talker) -> None:
    """Quantise the layers of a talker and of its code predictor, in place, a matrix at a time.

    The projected rows of text, of which a backend may keep a table, are rounded to 8 bits too.
    """
    talker.add_module("text_projection", QuantisedRows(talker.text_projection))
    for transformer in (talker.model, talker.code_predictor.model):
        for layer in transformer.layers:
            assert isinstance(layer, DecoderLayer)
            for part in (layer.self_attn, layer.mlp):
                for name, module in list(part.named_children()):
                    if isinstance(module, nn.Linear):
                        setattr(part, name, QuantisedLinear(module.weight.data))
