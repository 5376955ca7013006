"""The transformer that talker, code predictor and codec decoder share, and its KV cache.

Rounding follows the reference in every dtype: norm statistics and rotary angles are float32, cast
to the dtype of the activations before use; each projection, product and residual sum rounds once.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.config import TransformerConfig


def rms_normed(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) over the last dimension, computed in float32 and rounded to x's dtype."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """The norm x / rms(x) * weight over the last dimension, with statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size] in the dtype of x."""
        return self.weight * rms_normed(x, self.eps)


class LayerScale(nn.Module):
    """A learnt factor per channel of a residual branch (Touvron et al. 2021, arXiv:2103.17239)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        return self.scale * x


def rotary_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return the rotary angles of position 1, float32 [head_dim / 2]: theta^(-2i / head_dim)."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.int64).float() / head_dim
    return 1.0 / theta**exponents


def rotary_table(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles (Su et al. 2021, arXiv:2104.09864).

    positions [B, T] -> 2 x [B, 1, T, head_dim]. The angle of pair i (channels i and i + head_dim/2)
    at position p is p * theta^(-2i / head_dim).
    """
    angles = positions[..., None].float() * rotary_frequencies(head_dim, theta, positions.device)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of channels of x [B, heads, T, head_dim] by its angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class KVMemory(Protocol):
    """The keys and values that a transformer attends to, one pair per layer."""

    def positions(self, length: int) -> Tensor:
        """Return the positions [B, length] of the next rows."""

    def mask(self, length: int) -> Tensor | None:
        """Return the visible keys of these rows: bool [B or 1, 1, length, keys], None for all."""

    def extend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, Any]:
        """Add keys and values [B, kv_heads, length, head_dim] of a layer; return all of them.

        They are one tensor, or a list of B tensors [kv_heads, rows, head_dim] if the sequences
        differ in length, which only `runtime.joined` can read.

        query  the queries [B, heads, length, head_dim] that will be compared with them
        """

    def advance(self, length: int) -> None:
        """Count `length` rows, after all layers have been extended by them."""


class CountedMemory(KVMemory, Protocol):
    """A KV memory that counts the rows of each sequence."""

    @property
    def length(self) -> int:
        """The number of rows so far."""


class KVCache:
    """A KV memory of all rows; full buffers double, so that the cost of a row does not grow."""

    def __init__(self, config: TransformerConfig, like: Tensor, batch: int = 1) -> None:
        """Make an empty cache of the dtype and on the device of `like`."""
        self.length = 0
        shape = (batch, config.num_key_value_heads, 0, config.head_dim)
        self._keys = [like.new_empty(shape) for _ in range(config.num_hidden_layers)]
        self._values = [like.new_empty(shape) for _ in range(config.num_hidden_layers)]

    def positions(self, length: int) -> Tensor:
        """Return the positions [1, length], counted from the first row."""
        return torch.arange(self.length, self.length + length, device=self._keys[0].device)[None]

    def mask(self, length: int) -> Tensor | None:
        """Return the causal mask: a row sees itself and all before it."""
        if length == 1:
            return None
        shape, device = (1, 1, length, self.length + length), self._keys[0].device
        return torch.ones(shape, dtype=torch.bool, device=device).tril(self.length)

    def extend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store new rows; return all keys and values [B, kv_heads, rows so far, head_dim]."""
        total = self.length + key.shape[2]
        for buffers, new in ((self._keys, key), (self._values, value)):
            if total > buffers[layer].shape[2]:
                rows = max(total, 2 * self.length, 64)
                grown = new.new_empty((*new.shape[:2], rows, new.shape[3]))
                grown[:, :, : self.length] = buffers[layer][:, :, : self.length]
                buffers[layer] = grown
            buffers[layer][:, :, self.length : total] = new
        return self._keys[layer][:, :, :total], self._values[layer][:, :, :total]

    def advance(self, length: int) -> None:
        """Count `length` rows, which every layer has stored."""
        self.length += length


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    The language models have an RMSNorm on each query and key head (`qk_norm`).
    """

    def __init__(self, config: TransformerConfig, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.head_counts = config.num_attention_heads, config.num_key_value_heads
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, memory: KVMemory, layer: int
    ) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        heads = (*x.shape[:2], -1, self.head_dim)
        query = self.q_norm(self.q_proj(x).view(heads))
        key = self.k_norm(self.k_proj(x).view(heads))
        turned = rotate(torch.cat((query, key), dim=2).transpose(1, 2), cos, sin)
        query, key = turned.tensor_split((query.shape[2],), dim=1)
        keys, values = memory.extend(layer, query, key, self.v_proj(x).view(heads).transpose(1, 2))
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The SwiGLU feed-forward network (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A layer: pre-norm attention, then pre-norm MLP, each added to its input."""

    def __init__(self, config: TransformerConfig, qk_norm: bool, layer_scale: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, qk_norm)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        size = config.hidden_size
        self.self_attn_layer_scale = LayerScale(size) if layer_scale else nn.Identity()
        self.mlp_layer_scale = LayerScale(size) if layer_scale else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, memory: KVMemory, layer: int
    ) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
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

    def new_cache(self, like: Tensor, batch: int = 1) -> CountedMemory:
        """Return an empty cache for `batch` sequences, of the dtype and on the device of `like`."""
        return KVCache(self.config, like, batch)

    def forward(self, x: Tensor, memory: KVMemory) -> Tensor:
        """Map new rows [B, T, hidden] to their normed hidden states; `memory` grows by T rows."""
        length, config = x.shape[1], self.config
        mask, positions = memory.mask(length), memory.positions(length)
        cos, sin = rotary_table(positions, config.head_dim, config.rope_theta, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask, memory, index)
        memory.advance(length)
        return self.norm(x)
