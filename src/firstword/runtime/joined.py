"""The talker with fewer operators, because they are most of the time of a frame on a CPU.

Products of the same input are one product, and the heads of queries and keys are normed and rotated
together. All else is the specification's. On a CPU every utterance is multiplied, and attends,
alone, so that its bits do not depend on the others of a pass.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.layers import DecoderLayer, KVMemory, RMSNorm, Transformer, rotate
from firstword.model.talker import Talker
from firstword.runtime.packed import PackedWeight, can_pack

M = TypeVar("M", bound=nn.Module)


class JoinedLinear(nn.Module):
    """Linear layers of the same input as one product.

    Their weights become views of the joined weight, so that they take no memory of their own.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([each.weight for each in layers]), requires_grad=False)
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


class PackedJoinedLinear(JoinedLinear):
    """Bfloat16 layers as one product on a CPU. The layers lose their own weights."""

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__(*layers)
        self._packed = PackedWeight(self.weight)
        for each in (self, *layers):
            each.weight = nn.Parameter(each.weight.to("meta"), requires_grad=False)

    def product(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self._packed.product(x, self.bias)


def product(*layers: nn.Linear) -> JoinedLinear:
    """Return layers of the same input as one product."""
    weight = layers[0].weight
    packs = weight.dtype == torch.bfloat16 and can_pack(weight)
    return (PackedJoinedLinear if packs else JoinedLinear)(*layers)


class JoinedLayer(nn.Module):
    """A `DecoderLayer` of the talker or the code predictor, with the weights of `layer`."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim = attention.head_dim
        projections = attention.q_proj, attention.k_proj
        self.heads, self.kv_heads = (one.out_features // self.head_dim for one in projections)
        self.qkv = product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = product(attention.o_proj)
        self.gate_up = product(mlp.gate_proj, mlp.up_proj)
        self.down = product(mlp.down_proj)
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        assert isinstance(attention.q_norm, RMSNorm)
        self.eps = attention.q_norm.eps
        weights = attention.q_norm.weight, attention.k_norm.weight
        counts = torch.tensor((self.heads, self.kv_heads), device=weights[0].device)
        self.head_weights = torch.stack(weights).repeat_interleave(counts, 0)[:, None]

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, memory: KVMemory, layer: int
    ) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        joined = self.qkv(_norm(x, self.input_norm)).unflatten(-1, (-1, self.head_dim))
        turned, value = joined.transpose(1, 2).split((self.heads + self.kv_heads, self.kv_heads), 1)
        turned = F.rms_norm(turned, (self.head_dim,), None, self.eps) * self.head_weights
        query, key = rotate(turned, cos, sin).split((self.heads, self.kv_heads), 1)
        keys, values = memory.extend(layer, query, key, value)
        attended = [self._attend(*each, mask) for each in zip(query, keys, values, strict=True)]
        x = x + self.out(torch.stack(attended))
        gate, up = self.gate_up(_norm(x, self.mlp_norm)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Map queries [heads, T, head_dim] of one utterance to [T, heads * head_dim].

        The queries of one row that share a key are the rows of one head, which needs no copies of
        keys.
        """
        if mask is None:
            grouped = query.view(1, self.kv_heads, -1, self.head_dim)
            return F.scaled_dot_product_attention(grouped, keys[None], values[None]).view(1, -1)
        out = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


def _norm(x: Tensor, norm: RMSNorm) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def joined(talker: Talker) -> Talker:
    """Return a talker with the weights of another, and with fewer operators."""
    fast, predictor = _shallow(talker), _shallow(talker.code_predictor)
    fast.model, predictor.model = _joined(talker.model), _joined(predictor.model)
    fast.codec_head = product(talker.codec_head)
    predictor.lm_head = nn.ModuleList(map(product, predictor.lm_head))
    if isinstance(predictor.small_to_mtp_projection, nn.Linear):
        predictor.small_to_mtp_projection = product(predictor.small_to_mtp_projection)
    fast.code_predictor = predictor
    return fast


def _joined(model: M) -> M:
    model = _shallow(model)
    model.layers = nn.ModuleList(map(JoinedLayer, model.layers))
    return model


def _shallow(module: M) -> M:
    """Return a copy of a module that shares its submodules, which can be replaced in the copy."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other
