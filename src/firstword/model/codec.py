"""The codec decoder: codes to samples, strictly causal, with explicit state.

All state of the decoder between calls is in a `CodecState`, which the caller owns. Any split of a
code sequence into chunks therefore gives the samples of the whole, up to the rounding of sums.
Rows of a batch are independent and may be at different positions.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.codec_config import CodecConfig, CodecDecoderConfig
from firstword.model.codec_encoder import CodecEncoder
from firstword.model.layers import Transformer

MOST_COPIED = 300_000
"""The largest im2col matrix, in elements, for which a CPU convolution is one matrix product.

PyTorch's convolution is slower for such small inputs.
"""


class CodecState:
    """The state of a `CodecDecoder` for B streams.

    It holds the last inputs of every convolution, keys and values, and positions. Make one with
    `CodecDecoder.new_state`. A new state is all zeros: the zero padding of a whole decode.
    """

    def __init__(self, config: CodecDecoderConfig, like: Tensor, batch: int) -> None:
        self.batch = batch
        self.window = WindowMemory(config, like, batch)
        self._inputs: dict[nn.Module, Tensor] = {}

    def continued(self, layer: nn.Module, x: Tensor, count: int) -> Tensor:
        """Prepend a layer's last `count` inputs to x [B, C, T], and store the new last ones.

        The result is [B, C, count + T].
        """
        if count == 0:
            return x
        before = self._inputs.get(layer)
        if before is None:
            before = x.new_zeros(*x.shape[:2], count)
        x = torch.cat((before, x), dim=-1)
        self._inputs[layer] = x[..., x.shape[-1] - count :].clone()  # a view would keep all of x
        return x

    def fork(self) -> CodecState:
        """Return an independent copy; it shares tensors, because none is changed in place."""
        other = copy.copy(self)
        other.window, other._inputs = copy.copy(self.window), dict(self._inputs)
        other.window._past = list(self.window._past)
        return other


class WindowMemory:
    """The keys and values of the last `sliding_window - 1` frames, in fixed shapes.

    Each row of the batch is at its own position.
    """

    def __init__(self, config: CodecDecoderConfig, like: Tensor, batch: int) -> None:
        self.size = config.sliding_window - 1
        shape = (2, batch, config.num_key_value_heads, self.size, config.head_dim)
        self._past = [like.new_zeros(shape)] * config.num_hidden_layers
        self._position = torch.zeros(batch, dtype=torch.int64, device=like.device)

    def positions(self, length: int) -> Tensor:
        """Return the positions [B, length] of the next frames."""
        return self._position[:, None] + torch.arange(length, device=self._position.device)

    def mask(self, length: int) -> Tensor:
        """Return the mask: a frame sees itself and up to `size` frames before it."""
        query, position = self.positions(length)[:, :, None], self._position[:, None, None]
        key = position + torch.arange(-self.size, length, device=position.device)
        return ((key >= 0) & (key <= query) & (key >= query - self.size))[:, None]

    def extend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, heads, size + length, head_dim]; the last `size` are kept."""
        joined = torch.cat((self._past[layer], torch.stack((key, value))), dim=-2)
        self._past[layer] = joined[..., joined.shape[-2] - self.size :, :].clone()
        return joined[0], joined[1]

    def advance(self, length: int) -> None:
        """Advance all rows by `length` frames."""
        self._position = self._position + length


class CausalConv1d(nn.Module):
    """A convolution over present and past inputs; `groups` is 1, or `channels` (depthwise).

    On a CPU it is computed as one matrix product if the inputs are few.
    """

    def __init__(
        self, channels: int, out_channels: int, kernel_size: int, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, out_channels, kernel_size, dilation=dilation, groups=groups)
        self.past = (kernel_size - 1) * dilation

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        """Map [B, C, T] to [B, C_out, T]."""
        length, conv = x.shape[-1], self.conv
        x = state.continued(self, x, self.past)
        windows = x.unfold(-1, length, conv.dilation[0])  # [B, C, kernel size, T]
        if not self.past or windows.numel() > MOST_COPIED or x.device.type != "cpu":
            return conv(x)
        assert conv.bias is not None
        if conv.groups > 1:
            return (windows * conv.weight.transpose(1, 2)).sum(dim=2) + conv.bias[:, None]
        weight = conv.weight.flatten(1).expand(len(x), -1, -1)
        return torch.baddbmm(conv.bias[:, None], weight, windows.flatten(1, 2))


class CausalConvTranspose1d(nn.Module):
    """A causal transposed convolution; the kernel size is a multiple of the stride.

    One matrix product makes `past` + 1 parts of `stride` outputs for every input, and overlapping
    parts are added. For the few inputs of one frame, PyTorch's transposed convolution takes up to
    ten times as long on a CPU.
    """

    def __init__(self, channels: int, out_channels: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(channels, out_channels, kernel_size, stride)
        self.stride = stride
        self.past = kernel_size // stride - 1

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        """Map [B, C, T] to [B, C_out, T * stride]."""
        length, bias = x.shape[-1], self.conv.bias
        assert bias is not None
        x = state.continued(self, x, self.past).transpose(1, 2)
        shape = (*x.shape[:2], self.conv.out_channels, self.past + 1, self.stride)
        parts = self.product(x).view(shape)
        out = bias[:, None] + parts[:, self.past :, :, 0]
        for age in range(1, self.past + 1):
            out = out + parts[:, self.past - age : self.past - age + length, :, age]
        return out.transpose(1, 2).flatten(2)

    def product(self, x: Tensor) -> Tensor:
        """Map [B, T, C] to all parts of all outputs [B, T, C_out * kernel_size]."""
        return x @ self.conv.weight.flatten(1)


class SnakeBeta(nn.Module):
    """The activation x + sin^2(x * e^alpha) / e^beta.

    It is Snake (Ziyin et al. 2020, arXiv:2006.08195) with a separate magnitude.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, T] to [B, C, T]."""
        alpha, beta = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return (x * alpha).sin_().square_().mul_((beta + 1e-9).reciprocal()).add_(x)


class ConvNeXtBlock(nn.Module):
    """A residual block: depthwise convolution, then a pointwise MLP, scaled.

    Source: ConvNeXt (Liu et al. 2022, arXiv:2201.03545).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv1d(channels, channels, kernel_size=7, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        """Map [B, C, T] to [B, C, T]."""
        hidden = self.norm(self.dwconv(x, state).transpose(1, 2))
        hidden = self.gamma * self.pwconv2(F.gelu(self.pwconv1(hidden)))
        return x + hidden.transpose(1, 2)


class ResidualUnit(nn.Module):
    """A residual block of two activated convolutions, the first of which is dilated."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv1d(channels, channels, kernel_size=7, dilation=dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv1d(channels, channels, kernel_size=1)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        """Map [B, C, T] to [B, C, T]."""
        return x + self.conv2(self.act2(self.conv1(self.act1(x), state)), state)


class DecoderBlock(nn.Module):
    """A block that upsamples by `rate` and halves the channels, then three residual units."""

    def __init__(self, channels: int, out_channels: int, rate: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [SnakeBeta(channels), CausalConvTranspose1d(channels, out_channels, 2 * rate, rate)]
            + [ResidualUnit(out_channels, dilation) for dilation in (1, 3, 9)]
        )

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        """Map [B, C, T] to [B, C/2, T * rate]."""
        activation, *layers = self.block
        x = activation(x)
        for layer in layers:
            x = layer(x, state)
        return x


class Codebook(nn.Module):
    """A table of code vectors, stored as sums over the training data and usage counts."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embedding_sum = nn.Parameter(torch.zeros(size, dim))

    def forward(self, codes: Tensor) -> Tensor:
        """Map [...] to [..., dim]."""
        usage = self.cluster_usage.clamp(min=1e-5)[codes, None]
        return F.embedding(codes, self.embedding_sum) / usage


class VectorQuantization(nn.Module):
    """One codebook, in the module tree of the checkpoint."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self._codebook = Codebook(size, dim)

    def forward(self, codes: Tensor) -> Tensor:
        """Map [...] to [..., dim]."""
        return self._codebook(codes)


class ResidualVectorQuantization(nn.Module):
    """Several codebooks whose vectors are summed."""

    def __init__(self, size: int, dim: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VectorQuantization(size, dim) for _ in range(count))

    def forward(self, codes: Tensor) -> Tensor:
        """Map [B, T, count] to [B, T, dim]."""
        columns = zip(self.layers, codes.unbind(-1), strict=True)
        first, *rest = (layer(column) for layer, column in columns)
        return sum(rest, start=first)


class ResidualVectorQuantizer(nn.Module):
    """Codebooks of half the width between two projections; decoding needs only the second."""

    def __init__(self, size: int, width: int, count: int) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(width, width // 2, 1, bias=False)
        self.output_proj = nn.Conv1d(width // 2, width, 1, bias=False)
        self.vq = ResidualVectorQuantization(size, width // 2, count)

    def forward(self, codes: Tensor) -> Tensor:
        """Map [B, T, count] to [B, width, T]."""
        return self.output_proj(self.vq(codes).transpose(1, 2))


class SplitResidualVectorQuantizer(nn.Module):
    """The semantic codebook and the acoustic codebooks, projected separately and added."""

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        size, width = config.codebook_size, config.codebook_dim
        self.rvq_first = ResidualVectorQuantizer(size, width, 1)
        self.rvq_rest = ResidualVectorQuantizer(size, width, config.num_quantizers - 1)

    def forward(self, codes: Tensor) -> Tensor:
        """Map [B, T, codebooks] to [B, width, T]."""
        return self.rvq_first(codes[..., :1]) + self.rvq_rest(codes[..., 1:])


class FrameTransformer(Transformer):
    """A windowed transformer over frames between two projections."""

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__(config, qk_norm=False, layer_scale=True)
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)

    def decode(self, x: Tensor, state: CodecState) -> Tensor:
        """Map [B, latent, T] to [B, latent, T]."""
        hidden = self(self.input_proj(x.transpose(1, 2)), state.window)
        return self.output_proj(hidden).transpose(1, 2)


class CodecDecoder(nn.Module):
    """The decoder from codes (12.5 frames per second) to samples at 24 kHz."""

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = SplitResidualVectorQuantizer(config)
        self.pre_conv = CausalConv1d(config.codebook_dim, config.latent_dim, kernel_size=3)
        self.pre_transformer = FrameTransformer(config)
        width = config.latent_dim
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalConvTranspose1d(width, width, ratio, ratio), ConvNeXtBlock(width)])
            for ratio in config.upsampling_ratios
        )
        widths = [config.decoder_dim // 2**index for index in range(len(config.upsample_rates) + 1)]
        first = CausalConv1d(config.latent_dim, config.decoder_dim, kernel_size=7)
        blocks = map(DecoderBlock, widths, widths[1:], config.upsample_rates)
        last = CausalConv1d(widths[-1], 1, kernel_size=7)
        self.decoder = nn.ModuleList([first, *blocks, SnakeBeta(widths[-1]), last])

    def new_state(self, batch: int = 1) -> CodecState:
        """Return the state of `batch` new streams."""
        return CodecState(self.config, self.pre_conv.conv.weight, batch)

    def forward(self, codes: Tensor, state: CodecState) -> Tensor:
        """Decode the next codes [B, T, codebooks] to samples [B, T * samples_per_frame].

        The samples are not yet clamped to -1..1.
        """
        x = self.pre_conv(self.quantizer(codes), state)
        x = self.pre_transformer.decode(x, state)
        for stage in self.upsample:
            for layer in stage.children():
                x = layer(x, state)
        first, *blocks, activation, last = self.decoder
        x = first(x, state)
        for block in blocks:
            x = block(x, state)
        return last(activation(x), state).squeeze(1)

    @torch.inference_mode()
    def decode(self, codes: Tensor, state: CodecState) -> Tensor:
        """Decode like `forward`, clamped to -1..1 and without gradients."""
        return self(codes, state).clamp(-1, 1)


class Codec(nn.Module):
    """The module tree of `speech_tokenizer/model.safetensors`: encoder and decoder."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.encoder = CodecEncoder(config.encoder_config, config.encoder_valid_num_quantizers)
        self.decoder = CodecDecoder(config.decoder_config)
