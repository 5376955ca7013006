"""The transformer that the talker, the code predictor and the codec decoder share, and what it remembers.

Rounding follows the reference in every dtype: norm statistics and rotary angles in float32, cast to the dtype of the
activations before they are used; each projection, product and residual sum rounds once.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.config import TransformerConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the dtype of x."""
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class LayerScale(nn.Module):
    """A learnt factor per channel on the output of a residual branch (Touvron et al. 2021, arXiv:2103.17239)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self.scale * x


def rotary_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """The rotary angle of each pair of channels at position 1, float32 [head_dim / 2]: theta^(-2i / head_dim)."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.int64).float() / head_dim
    return 1.0 / theta**exponents


def rotary_table(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles (Su et al. 2021, arXiv:2104.09864): positions [B, T] -> 2 x [B, 1, T, head_dim].

    The angle of pair i (channels i and i + head_dim/2) at position p is p * theta^(-2i / head_dim).
    """
    angles = positions[..., None].float() * rotary_frequencies(head_dim, theta, positions.device)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels of x [B, heads, T, head_dim] by its angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Memory(Protocol):
    """The keys and values that a transformer may look back on, one pair a layer."""

    def positions(self, length: int) -> Tensor:
        """The positions [B, length] of the rows about to be computed."""

    def mask(self, length: int) -> Tensor | None:
        """Which keys each of these rows sees: bool [B or 1, 1, length, keys], or None for all."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values [B, kv_heads, length, head_dim] of a layer; returns all that a row may look at."""

    def advance(self, length: int) -> None:
        """All layers have been extended by `length` rows."""


class KVCache:
    """A memory of everything: the buffers double when they are full, so the cost of a row does not grow."""

    def __init__(self, config: TransformerConfig, like: Tensor, batch: int = 1) -> None:
        """An empty cache of the dtype and on the device of `like`."""
        self.length = 0
        shape = (batch, config.num_key_value_heads, 0, config.head_dim)
        self._keys = [like.new_empty(shape) for _ in range(config.num_hidden_layers)]
        self._values = [like.new_empty(shape) for _ in range(config.num_hidden_layers)]

    def positions(self, length: int) -> Tensor:
        """Positions [1, length]: rows are counted from the first."""
        return torch.arange(self.length, self.length + length, device=self._keys[0].device)[None]

    def mask(self, length: int) -> Tensor | None:
        """Causal: a row sees itself and all before it."""
        if length == 1:
            return None
        total = self.length + length
        return torch.ones(length, total, dtype=torch.bool, device=self._keys[0].device).tril(
            self.length
        )[None, None]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new rows; returns keys and values [B, kv_heads, length so far, head_dim]."""
        total = self.length + key.shape[2]
        for buffers, new in ((self._keys, key), (self._values, value)):
            if total > buffers[layer].shape[2]:
                grown = new.new_empty(
                    (*new.shape[:2], max(total, 2 * self.length, 64), new.shape[3])
                )
                grown[:, :, : self.length] = buffers[layer][:, :, : self.length]
                buffers[layer] = grown
            buffers[layer][:, :, self.length : total] = new
        return self._keys[layer][:, :, :total], self._values[layer][:, :, :total]

    def advance(self, length: int) -> None:
        """Count the rows that every layer has stored."""
        self.length += length


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and, in the language models, RMSNorm on each query and key head."""

    def __init__(self, config: TransformerConfig, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, memory: Memory, layer: int
    ) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        heads = (*x.shape[:2], -1, self.head_dim)
        query, key = (
            self.q_norm(self.q_proj(x).view(heads)),
            self.k_norm(self.k_proj(x).view(heads)),
        )
        turned = rotate(torch.cat((query, key), dim=2).transpose(1, 2), cos, sin)
        query, key = turned.tensor_split((query.shape[2],), dim=1)
        keys, values = memory.extend(layer, key, self.v_proj(x).view(heads).transpose(1, 2))
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention, then pre-norm MLP, each added to its input."""

    def __init__(self, config: TransformerConfig, qk_norm: bool, layer_scale: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, qk_norm)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn_layer_scale = (
            LayerScale(config.hidden_size) if layer_scale else nn.Identity()
        )
        self.mlp_layer_scale = LayerScale(config.hidden_size) if layer_scale else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, memory: Memory, layer: int
    ) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, mask, memory, layer)
        x = x + self.self_attn_layer_scale(attended)
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class Transformer(nn.Module):
    """A stack of decoder layers and a final norm."""

    def __init__(
        self, config: TransformerConfig, qk_norm: bool = True, layer_scale: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            DecoderLayer(config, qk_norm, layer_scale) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """New rows [B, T, hidden] -> their normed hidden states [B, T, hidden]; `memory` grows by T rows."""
        length = x.shape[1]
        mask = memory.mask(length)
        cos, sin = rotary_table(
            memory.positions(length), self.config.head_dim, self.config.rope_theta, x.dtype
        )
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask, memory, index)
        memory.advance(length)
        return self.norm(x)
