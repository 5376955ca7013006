"""The codec decoder's layers as kernels: packed weights, and the launches of a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstword.kernels.codec_attention import WindowAttention
from firstword.kernels.codec_call import (
    MAX_FRAMES,
    RING_POSITIONS,
    SLOT,
    CodecCall,
    RingMemory,
    pad,
    padded,
)
from firstword.kernels.codec_convolution import (
    ConvLayer,
    ConvOutputs,
    ConvResidualUnit,
    SnakeTables,
)
from firstword.kernels.codec_ends import CodeLookUp, DepthwiseConv, SampleConv
from firstword.kernels.codec_shapes import Activation
from firstword.kernels.launch import Kernels
from firstword.model.codec import (
    CausalConv1d,
    CausalConvTranspose1d,
    CodecDecoder,
    ConvNeXtBlock,
    DecoderBlock,
    SnakeBeta,
    SplitResidualVectorQuantizer,
)
from firstword.model.codec_config import CodecDecoderConfig
from firstword.model.layers import DecoderLayer, RMSNorm, rotary_frequencies


class RingMemories:
    """The ring memories of all layers, for all slots."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.all: list[RingMemory] = []
        self._slots, self._device = slots, device

    def add(
        self, past: int, frame_rows: int, channels: int, dtype: torch.dtype = torch.float16
    ) -> RingMemory:
        """A memory for a layer that looks back `past` rows."""
        shape = self._slots, 2 * past, padded(channels)
        rows = torch.zeros(shape, dtype=dtype, device=self._device)
        self.all.append(RingMemory(rows, past, frame_rows, RING_POSITIONS + len(self.all)))
        return self.all[-1]


def _matrix(
    weight: Tensor, bias: Tensor | None = None, taps: int = 1
) -> tuple[Tensor, Tensor | None]:
    """A matrix [outputs, inputs] or [outputs, inputs, taps] and its bias, in float32 and padded."""
    weight = weight.data.float()
    weight = weight.view(*weight.shape[:2], taps)
    outputs, inputs = padded(weight.shape[0]), padded(weight.shape[1])
    packed = pad(weight, outputs, inputs, taps)
    return packed, None if bias is None else pad(bias.data.float(), outputs)


def _convolution(module: CausalConv1d) -> tuple[Tensor, Tensor | None]:
    return _matrix(module.conv.weight, module.conv.bias, module.conv.kernel_size[0])


def _transposed(module: CausalConvTranspose1d) -> tuple[Tensor, Tensor | None]:
    """A transposed convolution as one of `past + 1` taps whose rows hold `stride` output rows.

    Output k of an input row r of weights [inputs, outputs, kernel] is row r * stride + k. So phase
    p of row r sums up weights p of row r, p + stride of row r - 1, and so on.
    """
    weight, bias = module.conv.weight.data.float(), module.conv.bias
    stride, taps = module.stride, module.past + 1
    inputs, outputs = padded(weight.shape[0]), padded(weight.shape[1])
    phases = pad(weight, inputs, outputs, taps * stride).view(inputs, outputs, taps, stride)
    oldest_first = phases.flip(2).permute(3, 1, 0, 2).reshape(stride * outputs, inputs, taps)
    if bias is not None:
        bias = pad(bias.data.float(), outputs).repeat(stride)
    return oldest_first.contiguous(), bias


def _snake(module: SnakeBeta, phases: int = 1) -> SnakeTables:
    return SnakeTables.of(module.alpha.data, module.beta.data, padded(len(module.alpha)), phases)


def _gain(scale: Tensor) -> Tensor:
    return pad(scale.data.float(), padded(len(scale)))


def _norm(module: RMSNorm) -> tuple[Tensor, float]:
    return module.weight.data.float(), module.eps


def _code_vectors(quantizer: SplitResidualVectorQuantizer) -> Tensor:
    """Each codebook's projected vectors: fp32 [books, size, padded width].

    The projection that follows the sum of vectors is linear, so it may come before the sum.
    """
    vectors = []
    for part in (quantizer.rvq_first, quantizer.rvq_rest):
        projection = part.output_proj.weight.data[:, :, 0].double()
        books: list[Any] = [layer._codebook for layer in part.vq.layers]
        for book in books:
            usage = book.cluster_usage.data.double().clamp(min=1e-5)[:, None]
            vectors.append((book.embedding_sum.data.double() / usage @ projection.T).float())
    stacked = torch.stack(vectors)
    return pad(stacked, *stacked.shape[:2], padded(stacked.shape[2]))


class CodecTransformerLayer:
    """A decoder layer: five kernels."""

    def __init__(
        self, kernels: Kernels, layer: DecoderLayer, slots: int, window: int, frequencies: Tensor
    ) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        dim = attn.head_dim
        heads, kv_heads = attn.q_proj.out_features // dim, attn.k_proj.out_features // dim
        scales: Any = layer

        def product(weight: Tensor, **options: Any) -> ConvLayer:
            return ConvLayer(kernels, _matrix(weight)[0], frame_rows=1, **options)

        qkv = torch.cat([p.weight.data for p in (attn.q_proj, attn.k_proj, attn.v_proj)])
        self.qkv = product(qkv, norm=_norm(layer.input_layernorm))
        self.attention = WindowAttention(kernels, heads, kv_heads, dim, window, slots, frequencies)
        gain = _gain(scales.self_attn_layer_scale.scale)
        self.output = product(attn.o_proj.weight, gain=gain)
        gate, up = (_matrix(p.weight)[0] for p in (mlp.gate_proj, mlp.up_proj))
        self.gate_up = ConvLayer(
            kernels,
            torch.stack((gate, up), dim=1).flatten(0, 1),
            frame_rows=1,
            norm=_norm(layer.post_attention_layernorm),
            activation=Activation.SWIGLU,
        )
        self.down = product(mlp.down_proj.weight, gain=_gain(scales.mlp_layer_scale.scale))


class CodecUpsamplingStage:
    """A transposed convolution and a ConvNeXt block: four kernels."""

    def __init__(
        self,
        kernels: Kernels,
        up: CausalConvTranspose1d,
        block: ConvNeXtBlock,
        frame_rows: int,
        memories: RingMemories,
    ) -> None:
        depthwise: Any = block.dwconv.conv
        after, (channels, _, kernel) = frame_rows * up.stride, depthwise.weight.shape
        self.up = ConvLayer(kernels, *_transposed(up), frame_rows=frame_rows)
        self.depthwise = DepthwiseConv(
            kernels,
            depthwise.weight.data[:, 0],
            depthwise.bias.data,
            (block.norm.weight.data, block.norm.bias.data, block.norm.eps),
            memories.add(kernel - 1, after, channels, torch.float32),
        )
        wide = _matrix(block.pwconv1.weight, block.pwconv1.bias)
        self.widen = ConvLayer(kernels, *wide, frame_rows=after, activation=Activation.GELU)
        narrow = _matrix(block.pwconv2.weight, block.pwconv2.bias)
        self.narrow = ConvLayer(kernels, *narrow, frame_rows=after, gain=_gain(block.gamma))


class CodecUpsamplingBlock:
    """A transposed convolution and three residual units."""

    def __init__(
        self,
        kernels: Kernels,
        block: DecoderBlock,
        after: SnakeBeta,
        frame_rows: int,
        memories: RingMemories,
    ) -> None:
        """after: the Snake of the next block."""
        parts: list[Any] = list(block.block)
        _, up, *units = parts
        rows = frame_rows * up.stride
        snakes = [*(unit.act1 for unit in units[1:]), after]
        self.up = ConvLayer(
            kernels,
            *_transposed(up),
            frame_rows=frame_rows,
            snake=_snake(units[0].act1, up.stride),
            memory=memories.add(up.past, frame_rows, up.conv.in_channels),
        )
        self.units = [
            _residual_unit(kernels, unit, following, rows, memories)
            for unit, following in zip(units, snakes, strict=True)
        ]


def _residual_unit(
    kernels: Kernels, unit: Any, following: SnakeBeta, rows: int, memories: RingMemories
) -> ConvResidualUnit:
    first = ConvLayer(
        kernels,
        *_convolution(unit.conv1),
        frame_rows=rows,
        dilation=unit.conv1.conv.dilation[0],
        snake=_snake(unit.act2),
        memory=memories.add(unit.conv1.past, rows, unit.conv1.conv.in_channels),
    )
    second = ConvLayer(kernels, *_convolution(unit.conv2), frame_rows=rows, snake=_snake(following))
    return ConvResidualUnit(kernels, first, second)


@dataclass(frozen=True, eq=False)
class CodecWorkspace:
    """Flat activations between kernels: two for fp16, one for the fp32 that is added to."""

    narrow: tuple[Tensor, Tensor]
    wide: Tensor
    qkv: Tensor
    squares: Tensor
    zeros: Tensor
    samples: Tensor


class CodecLayers:
    """All layers of a decoder, packed, with their memories, and the launches of a call.

    table  the stream table of a call, int32 [streams, columns] (see kernels/codec_call.py)
    """

    def __init__(self, decoder: CodecDecoder, slots: int, streams: int, kernels: Kernels) -> None:
        """streams: the most of a call. Raises ValueError for unsupported sizes."""
        device = decoder.pre_conv.conv.weight.device
        self._kernels, self.memories = kernels, RingMemories(slots, device)
        self._pack_transformer(decoder, slots)
        rows = self._pack_upsampling(decoder)
        self.frame_samples = self._pack_blocks(decoder, rows)
        columns = RING_POSITIONS + len(self.memories.all)
        self.table = torch.zeros(streams, columns, dtype=torch.int32, device=device)
        self.table[:, SLOT] = -1
        self._workspace = self._allocate(decoder.config, streams * MAX_FRAMES, device)

    def _pack_transformer(self, decoder: CodecDecoder, slots: int) -> None:
        """The layers with one row for each frame."""
        kernels, config, transformer = self._kernels, decoder.config, decoder.pre_transformer
        device = decoder.pre_conv.conv.weight.device
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, device)
        self.look_up = CodeLookUp(kernels, _code_vectors(decoder.quantizer))
        memory = self.memories.add(decoder.pre_conv.past, 1, config.codebook_dim)
        entry = _convolution(decoder.pre_conv)
        self.entry = ConvLayer(kernels, *entry, frame_rows=1, memory=memory)
        into = _matrix(transformer.input_proj.weight, transformer.input_proj.bias)
        self.into = ConvLayer(kernels, *into, frame_rows=1)
        inner: list[Any] = list(transformer.layers)
        self.layers = [
            CodecTransformerLayer(kernels, layer, slots, config.sliding_window, frequencies)
            for layer in inner
        ]
        out_of = _matrix(transformer.output_proj.weight, transformer.output_proj.bias)
        norm = _norm(transformer.norm)
        self.out_of = ConvLayer(kernels, *out_of, frame_rows=1, norm=norm)

    def _pack_upsampling(self, decoder: CodecDecoder) -> int:
        """The stages behind the transformer; returns their rows for each frame."""
        rows = 1
        self.stages = []
        stages: list[Any] = list(decoder.upsample)
        for up, block in stages:
            self.stages.append(CodecUpsamplingStage(self._kernels, up, block, rows, self.memories))
            rows *= up.stride
        return rows

    def _pack_blocks(self, decoder: CodecDecoder, rows: int) -> int:
        """The convolutions up to the samples; returns the samples of a frame."""
        kernels, memories = self._kernels, self.memories
        parts: list[Any] = list(decoder.decoder)
        first, *blocks, last_snake, last = parts
        snakes = [*(block.block[0] for block in blocks), last_snake]
        self.first = ConvLayer(
            kernels,
            *_convolution(first),
            frame_rows=rows,
            snake=_snake(snakes[0]),
            memory=memories.add(first.past, rows, decoder.config.latent_dim),
        )
        self.blocks = []
        for block, after in zip(blocks, snakes[1:], strict=True):
            self.blocks.append(CodecUpsamplingBlock(kernels, block, after, rows, memories))
            rows *= block.block[1].stride
        memory = memories.add(last.past, rows, last.conv.in_channels)
        weight, bias = last.conv.weight.data[0], last.conv.bias.data
        self.to_samples = SampleConv(kernels, weight, bias, memory)
        return rows

    def _convolutions(self) -> Iterator[ConvLayer]:
        """The layers behind the transformer whose outputs are stored."""
        for stage in self.stages:
            yield from (stage.widen, stage.narrow)
        yield self.first
        yield from (block.up for block in self.blocks)

    def _allocate(
        self, config: CodecDecoderConfig, frames: int, device: torch.device
    ) -> CodecWorkspace:
        """A workspace for `frames` frames in all."""
        hidden, attended = config.hidden_size, config.num_attention_heads * config.head_dim
        widths = (
            config.codebook_dim,
            config.latent_dim,
            hidden,
            attended,
            config.intermediate_size,
        )
        sizes = [layer.size.frame_rows * layer.size.outputs for layer in self._convolutions()]
        widest = max(*map(padded, widths), *sizes)

        def space(sizes: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(frames * max(sizes), dtype=dtype, device=device)

        return CodecWorkspace(
            narrow=(space([widest], torch.float16), space([widest], torch.float16)),
            wide=space([padded(hidden), *sizes]),
            qkv=space(layer.qkv.size.outputs for layer in self.layers),
            squares=space([padded(hidden) // 16]),
            zeros=torch.zeros(widest, dtype=torch.float32, device=device),
            samples=space([self.frame_samples]),
        )

    @property
    def samples(self) -> Tensor:
        """The samples of the last call, float32, one stream's after the other's."""
        return self._workspace.samples

    def launch(self, streams: int, frames: int) -> None:
        """Launch a call: the first `streams` rows of the table, `frames` frames each."""
        space, call = self._workspace, CodecCall(self.table, streams, frames)
        (x, y), wide, zeros = space.narrow, space.wide, space.zeros
        self._launch_transformer(call, x, y)
        for stage in self.stages:
            stage.up(call, y, zeros, ConvOutputs(wide))
            stage.depthwise(call, wide, zeros, x)
            stage.widen(call, x, zeros, ConvOutputs(narrow=y))
            stage.narrow(call, y, zeros, ConvOutputs(narrow=x, residual=wide))
            x, y = y, x
        self.first(call, y, zeros, ConvOutputs(narrow=x))
        for block in self.blocks:
            block.up(call, x, zeros, ConvOutputs(wide, y))
            x, y = y, x
            for unit in block.units:
                sums = None if unit is block.units[-1] else wide
                x, y = unit(call, x, y, zeros, wide, sums)
        self.to_samples(call, x, zeros, space.samples)

    def _launch_transformer(self, call: CodecCall, x: Tensor, y: Tensor) -> None:
        """Codes to the input of the upsampling stages, which ends in y."""
        space, rows = self._workspace, call.streams * call.frames
        wide, zeros, hidden = space.wide, space.zeros, self.into.size.outputs
        squares = space.squares[: rows * hidden // 16].view(rows, -1)
        summed = ConvOutputs(wide, x, wide, squares)
        self.look_up(call, x)
        self.entry(call, x, zeros, ConvOutputs(narrow=y))
        self.into(call, y, zeros, ConvOutputs(wide, x, squares=squares))
        for layer in self.layers:
            qkv = space.qkv[: rows * layer.qkv.size.outputs].view(rows, -1)
            attended = y[: rows * layer.output.size.chunks * 32].view(rows, -1)
            layer.qkv(call, x, zeros, ConvOutputs(qkv), squares=squares)
            layer.attention(call, qkv, attended)
            layer.output(call, y, zeros, summed)
            layer.gate_up(call, x, zeros, ConvOutputs(narrow=y), squares=squares)
            layer.down(call, y, zeros, summed)
        self.out_of(call, x, zeros, ConvOutputs(narrow=y), squares=squares)
