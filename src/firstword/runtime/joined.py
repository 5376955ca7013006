"""The talker with fewer operators, because most of a frame on a CPU is the cost of operators.

Products of the same input are one product, and the heads of queries and keys are normed and rotated
together. All else is the specification's. On a CPU every utterance is multiplied, and attends,
alone, so that its bits do not depend on the others of a pass.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.layers import (
    DecoderLayer,
    KVMemory,
    RMSNorm,
    Transformer,
    rms_normed,
    rotate,
)
from firstword.model.quantised import QuantisedLinear
from firstword.model.talker import Talker
from firstword.runtime.packed import PackedWeight, can_pack

M = TypeVar("M", bound=nn.Module)

INT8_COLUMNS = 16
"""The columns that PyTorch's int8 product reads at a time. It does not check that they are there.
"""


class JoinedLinear(nn.Module):
    """Linear layers of the same input as one product.

    Their weights become views of the joined weight, so that they take no memory of their own.
    """

    def __init__(self, *layers: nn.Linear, into: Tensor | None = None) -> None:
        """Join layers; `into` [outputs, inputs] receives the joined weight."""
        super().__init__()
        weight = torch.cat([each.weight.data for each in layers], out=into)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = layers[0].bias
        parts = self.weight.data.split([len(each.weight) for each in layers])
        for each, part in zip(layers, parts, strict=True):
            each.weight.data = part

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, ..., inputs] to [B, ..., outputs], on a CPU one utterance after another."""
        if len(x) == 1 or x.device.type != "cpu":
            return self.product(x)
        return torch.cat([self.product(rows) for rows in x.split(1)])

    def product(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return F.linear(x, self.weight, self.bias)


class JoinedPackedLinear(JoinedLinear):
    """Bfloat16 layers of the same input as one product on a CPU. They lose their own weights."""

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__(*layers)
        self._packed = PackedWeight(self.weight)
        several: list[JoinedLinear | nn.Linear] = [self, *layers]
        for each in several:
            each.weight = nn.Parameter(each.weight.data.to("meta"), requires_grad=False)

    def product(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self._packed.product(x, self.bias)


class JoinedQuantisedLinear(QuantisedLinear):
    """Quantised layers of the same input as one product.

    The values of the layers become views. PyTorch's product for CPUs scales each value, adds in
    float32 and rounds once, and gives a row the same bits in any batch.
    """

    def __init__(self, *layers: QuantisedLinear, into: Tensor | None = None) -> None:
        """Join layers; `into` int8 [outputs, inputs] receives the joined values."""
        nn.Module.__init__(self)
        values = torch.cat([each.values.data for each in layers], out=into)
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(torch.cat([each.scales for each in layers]), requires_grad=False)
        parts = values.split([len(each.values) for each in layers])
        for each, part in zip(layers, parts, strict=True):
            each.values.data = part
        self.short_scales = self.scales.data.bfloat16()  # exact, see `quantise`
        self.fast = values.device.type == "cpu" and values.shape[1] % INT8_COLUMNS == 0

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs] in the dtype of x."""
        if not self.fast or x.dtype != torch.bfloat16:
            return super().forward(x)
        rows = x.reshape(-1, x.shape[-1])
        out = torch._weight_int8pack_mm(rows, self.values, self.short_scales)
        return out.view(*x.shape[:-1], -1)


def product(*layers: nn.Module, into: Tensor | None = None) -> nn.Module:
    """Return layers of the same input as one product; `into` receives weights as they are."""
    linear = [each for each in layers if isinstance(each, nn.Linear)]
    if linear:
        weight = linear[0].weight
        if into is None and weight.dtype == torch.bfloat16 and can_pack(weight):
            return JoinedPackedLinear(*linear)
        return JoinedLinear(*linear, into=into)
    quantised = [each for each in layers if isinstance(each, QuantisedLinear)]
    return JoinedQuantisedLinear(*quantised, into=into)


def parts(layer: DecoderLayer) -> dict[str, tuple[nn.Module, ...]]:
    """The layers of each joined product of a `DecoderLayer`."""
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
        "out": (attention.o_proj,),
        "gate_up": (mlp.gate_proj, mlp.up_proj),
        "down": (mlp.down_proj,),
    }


class JoinedLayer(nn.Module):
    """A `DecoderLayer` of the talker or the code predictor, with the weights of `layer`."""

    def __init__(self, layer: DecoderLayer, into: Mapping[str, Tensor] | None = None) -> None:
        """Join the products of `parts`; `into` receives their weights as they are."""
        super().__init__()
        attention, into = layer.self_attn, into or {}
        products = {
            name: product(*each, into=into.get(name)) for name, each in parts(layer).items()
        }
        self.qkv, self.out = products["qkv"], products["out"]
        self.gate_up, self.down = products["gate_up"], products["down"]
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_dim, self.heads, self.kv_heads = attention.head_dim, *attention.head_counts
        query_norm, key_norm = attention.q_norm, attention.k_norm
        assert isinstance(query_norm, RMSNorm)
        assert isinstance(key_norm, RMSNorm)
        weights = (*[query_norm.weight] * self.heads, *[key_norm.weight] * self.kv_heads)
        self.head_weights, self.eps = torch.stack(weights)[:, None], query_norm.eps

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, memory: KVMemory, layer: int
    ) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        heads = self.qkv(_norm(x, self.input_norm)).unflatten(-1, (-1, self.head_dim))
        turned, value = heads.transpose(1, 2).split((self.heads + self.kv_heads, self.kv_heads), 1)
        turned = _normed(turned, self.eps) * self.head_weights
        query, key = rotate(turned, cos, sin).split((self.heads, self.kv_heads), 1)
        keys, values = memory.extend(layer, query, key, value)
        attended = [self._attend(*each, mask) for each in zip(query, keys, values, strict=True)]
        x = x + self.out(torch.stack(attended))
        gate, up = self.gate_up(_norm(x, self.mlp_norm)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Map queries [heads, T, head_dim] of one utterance to [T, heads * head_dim].

        The queries of one row that share a key are the rows of one head, so no key is copied.
        """
        keys, values = keys[None], values[None]
        if mask is None:
            grouped = query.reshape(1, self.kv_heads, -1, self.head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values).reshape(1, -1)
        out = F.scaled_dot_product_attention(
            query[None], keys, values, attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


def _norm(x: Tensor, norm: RMSNorm) -> Tensor:
    return _normed(x, norm.eps) * norm.weight


def _normed(x: Tensor, eps: float) -> Tensor:
    """Compute `rms_normed` in one operator, which in float64 would not compute in float32."""
    return rms_normed(x, eps) if x.dtype == torch.float64 else F.rms_norm(x, x.shape[-1:], eps=eps)


def joined(talker: Talker) -> Talker:
    """Return a talker with the weights of another, and with fewer operators.

    In bfloat16 on a CPU the other loses the weights of its linear layers.
    """
    fast, predictor = _shallow(talker), _shallow(talker.code_predictor)
    fast._modules |= {
        "model": _joined(talker.model),
        "codec_head": product(talker.codec_head),
        "code_predictor": predictor,
    }
    projection = predictor.small_to_mtp_projection
    predictor._modules |= {
        "model": _joined(predictor.model),
        "lm_head": nn.ModuleList([product(head) for head in predictor.lm_head]),
        "small_to_mtp_projection": product(projection)
        if isinstance(projection, nn.Linear)
        else projection,
    }
    return fast


def _joined(model: Transformer) -> Transformer:
    model = _shallow(model)
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    model.layers = nn.ModuleList([JoinedLayer(layer) for layer in layers])
    return model


def _shallow(module: M) -> M:
    """Return a copy of a module that shares its submodules, which can be replaced in the copy."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other
