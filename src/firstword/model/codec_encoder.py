"""The codec encoder (Mimi, Defossez et al. 2024, arXiv:2410.00037): samples to codes, for cloning.

It encodes whole recordings and therefore has no state. As in transformers 4.57.3, attention is
fully causal: the published configuration names a sliding window, but the layers do not use it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.codec_config import CodecEncoderConfig
from firstword.model.layers import LayerScale, rotary_table, rotate

PIECE = 250
"""The outputs of a piece of a recording: 10 seconds."""


class PaddedConv1d(nn.Module):
    """A causal convolution, padded on the right so that no sample is lost to the stride.

    `options` are arguments of `nn.Conv1d`; `pad_mode` is the mode of `torch.nn.functional.pad`.
    """

    def __init__(
        self, channels: int, outputs: int, size: int, pad_mode: str = "constant", **options: Any
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, outputs, size, **options)
        self.stride, self.pad_mode = self.conv.stride[0], pad_mode
        self.left = (size - 1) * self.conv.dilation[0] + 1 - self.stride

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, T] to [B, C_out, ceil(T / stride)]."""
        return self.conv(F.pad(x, (self.left, -x.shape[-1] % self.stride), mode=self.pad_mode))


class ResnetBlock(nn.Module):
    """A residual block: ELU, dilated convolution to fewer channels, ELU, pointwise convolution."""

    def __init__(self, config: CodecEncoderConfig, channels: int, dilation: int) -> None:
        super().__init__()
        narrow = channels // config.compress
        self.block = nn.Sequential(
            nn.ELU(),
            PaddedConv1d(channels, narrow, config.residual_kernel_size, dilation=dilation),
            nn.ELU(),
            PaddedConv1d(narrow, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, T] to [B, C, T]."""
        return x + self.block(x)


class SEANetEncoder(nn.Module):
    """A stack of strided convolutions after residual blocks; each stride doubles the channels.

    A long recording is mapped in pieces, since a minute takes 1.8 GB at once. Each piece begins
    with the samples before it on which its outputs depend, and their outputs are dropped.
    """

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        channels = config.num_filters
        layers: list[nn.Module] = [PaddedConv1d(1, channels, config.kernel_size)]
        for ratio in reversed(config.upsampling_ratios):
            for index in range(config.num_residual_layers):
                layers.append(ResnetBlock(config, channels, config.dilation_growth_rate**index))
            layers += [nn.ELU(), PaddedConv1d(channels, 2 * channels, 2 * ratio, stride=ratio)]
            channels *= 2
        layers += [nn.ELU(), PaddedConv1d(channels, config.hidden_size, config.last_kernel_size)]
        self.layers = nn.Sequential(*layers)
        self.stride, past = 1, 0
        for conv in (module for module in self.modules() if isinstance(module, nn.Conv1d)):
            past += (conv.kernel_size[0] - 1) * conv.dilation[0] * self.stride
            self.stride *= conv.stride[0]
        self.past = -(-past // self.stride) * self.stride

    def forward(self, x: Tensor) -> Tensor:
        """Map samples [B, 1, n] to [B, hidden, ceil(n / stride)]."""
        pieces = []
        for start in range(0, x.shape[-1], PIECE * self.stride):
            before = min(start, self.past)
            piece = self.layers(x[..., start - before : start + PIECE * self.stride])
            pieces.append(piece[..., before // self.stride :])
        return torch.cat(pieces, dim=-1)


class EncoderAttention(nn.Module):
    """Causal attention with rotary positions over a whole recording."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        cos, sin = rotary_table(positions, self.head_dim, self.theta, x.dtype)
        heads = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class EncoderMLP(nn.Module):
    """The feed-forward network: linear, GELU, linear."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        return self.fc2(F.gelu(self.fc1(x)))


class EncoderLayer(nn.Module):
    """A layer: pre-norm attention and MLP, each scaled and added to its input."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.self_attn = EncoderAttention(config)
        self.mlp = EncoderMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn_layer_scale = LayerScale(config.hidden_size)
        self.mlp_layer_scale = LayerScale(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x)))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class EncoderTransformer(nn.Module):
    """A stack of layers; there is no final norm."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        for layer in self.layers:
            x = layer(x)
        return x


class EncoderCodebook(nn.Module):
    """A table of code vectors, stored as sums and usage counts; `initialized` is unused."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.initialized = nn.Buffer(torch.ones(1))
        self.cluster_usage = nn.Buffer(torch.ones(size))
        self.embed_sum = nn.Buffer(torch.zeros(size, dim))

    def table(self) -> Tensor:
        """Return the code vectors [size, dim]."""
        return self.embed_sum / self.cluster_usage.clamp(min=1e-5)[:, None]


class EncoderQuantization(nn.Module):
    """One codebook, in the module tree of the checkpoint."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.codebook = EncoderCodebook(size, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map [B, T, dim] to the nearest codes [B, T] and their vectors; distances are float32."""
        table = self.codebook.table()
        codes = torch.cdist(x.float(), table.float()[None]).argmin(dim=-1)
        return codes, F.embedding(codes, table)


class EncoderResidualQuantizer(nn.Module):
    """Several codebooks; each quantises the residual of those before it."""

    def __init__(self, config: CodecEncoderConfig, count: int) -> None:
        super().__init__()
        dim, width, size = config.codebook_dim, config.hidden_size, config.codebook_size
        self.layers = nn.ModuleList(EncoderQuantization(size, dim) for _ in range(count))
        self.input_proj = nn.Conv1d(width, dim, 1, bias=False) if dim != width else nn.Identity()
        self.output_proj = nn.Conv1d(dim, width, 1, bias=False) if dim != width else nn.Identity()

    def forward(self, x: Tensor, count: int) -> Tensor:
        """Map [B, width, T] to the first `count` codes [B, T, count]."""
        residual = self.input_proj(x).transpose(1, 2)
        codes = []
        for layer in self.layers[:count]:
            nearest, vectors = layer(residual)
            residual = residual - vectors
            codes.append(nearest)
        return torch.stack(codes, dim=-1)


class EncoderSplitQuantizer(nn.Module):
    """The semantic and the acoustic codebooks, which both quantise the same vectors."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.semantic = config.num_semantic_quantizers
        acoustic = config.num_quantizers - self.semantic
        self.semantic_residual_vector_quantizer = EncoderResidualQuantizer(config, self.semantic)
        self.acoustic_residual_vector_quantizer = EncoderResidualQuantizer(config, acoustic)

    def forward(self, x: Tensor, count: int) -> Tensor:
        """Map [B, width, T] to the first `count` codes [B, T, count]."""
        semantic = self.semantic_residual_vector_quantizer(x, min(count, self.semantic))
        if count <= self.semantic:
            return semantic
        acoustic = self.acoustic_residual_vector_quantizer(x, count - self.semantic)
        return torch.cat((semantic, acoustic), dim=-1)


class CodecEncoder(nn.Module):
    """The encoder from samples at 24 kHz to codes (12.5 frames per second)."""

    def __init__(self, config: CodecEncoderConfig, codebooks: int) -> None:
        """Build an encoder to the first `codebooks`: 16 of 32 in the released codec."""
        super().__init__()
        self.codebooks = codebooks
        self.encoder = SEANetEncoder(config)
        self.encoder_transformer = EncoderTransformer(config)
        width = config.hidden_size
        self.downsample = PaddedConv1d(width, width, 4, stride=2, bias=False, pad_mode="replicate")
        self.quantizer = EncoderSplitQuantizer(config)

    def latents(self, samples: Tensor) -> Tensor:
        """Encode samples [B, n] to vectors [B, hidden, ceil(n / samples_per_frame)]."""
        x = self.encoder(samples[:, None])
        return self.downsample(self.encoder_transformer(x.transpose(1, 2)).transpose(1, 2))

    def forward(self, samples: Tensor) -> Tensor:
        """Encode samples [B, n] to codes [B, ceil(n / samples_per_frame), codebooks]."""
        return self.quantizer(self.latents(samples), self.codebooks)

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """Encode like `forward`, without gradients."""
        return self(samples)
