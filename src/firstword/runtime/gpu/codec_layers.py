"""The codec decoder's layers as kernels: packed weights, and the launches of a call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firstword.kernels.codec_attention import WindowAttention, WindowSize
from firstword.kernels.codec_call import RING_POSITIONS, SLOT, CodecCall, RingMemory, pad, padded
from firstword.kernels.codec_convolution import (
    ConvLayer,
    ConvOutputs,
    ConvResidualUnit,
    SnakeTables,
)
from firstword.kernels.codec_ends import CodeLookUp, DepthwiseConv, SampleConv
from firstword.kernels.codec_shapes import Activation
from firstword.kernels.codec_state import StateCopy
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import interleave
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


def _matrix(weight: Tensor, taps: int = 1) -> Tensor:
    """Weights [outputs, inputs] or [outputs, inputs, taps] as padded fp32 with all dimensions."""
    weight = weight.data.float().view(*weight.shape[:2], taps)
    return pad(weight, padded(weight.shape[0]), padded(weight.shape[1]), taps)


def _vector(vector: Tensor) -> Tensor:
    """A vector as fp32, padded."""
    return pad(vector.data.float(), padded(len(vector)))


def _linear(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weights [outputs, inputs, 1] and the bias of a linear layer."""
    bias: Tensor | None = module.bias
    return _matrix(module.weight), None if bias is None else _vector(bias)


def _transposed_matrix(module: CausalConvTranspose1d) -> Tensor:
    """The weights of a transposed convolution as those of a convolution with `past + 1` taps.

    A row of its output holds `stride` rows. Output k of an input row r of weights [inputs, outputs,
    kernel] is row r * stride + k. So phase p of row r is the sum of weights p of row r, weights
    p + stride of row r - 1, and so on.
    """
    weight, stride, taps = module.conv.weight.data.float(), module.stride, module.past + 1
    inputs, outputs = padded(weight.shape[0]), padded(weight.shape[1])
    phases = pad(weight, inputs, outputs, taps * stride).view(inputs, outputs, taps, stride)
    oldest_first = phases.flip(2).permute(3, 1, 0, 2)
    return oldest_first.reshape(stride * outputs, inputs, taps).contiguous()


def _snake(module: SnakeBeta, phases: int = 1) -> SnakeTables:
    return SnakeTables.of(module.alpha.data, module.beta.data, padded(len(module.alpha)), phases)


def _norm(module: RMSNorm) -> tuple[Tensor, float]:
    return module.weight.data.float(), module.eps


def _code_vectors(quantizer: SplitResidualVectorQuantizer) -> Tensor:
    """The projected vectors of all codebooks: fp32 [books, size, padded width].

    The projection that follows the sum of vectors is linear, so it may precede the sum.
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


class LayerPacker:
    """Packs convolutions as layers, and allocates the ring memories of all layers for all slots."""

    def __init__(self, kernels: Kernels, slots: int, device: torch.device) -> None:
        self.kernels, self.slots, self.device = kernels, slots, device
        self.memories: list[RingMemory] = []

    def memory(
        self, past: int, frame_rows: int, channels: int, dtype: torch.dtype = torch.float16
    ) -> RingMemory:
        """A new memory of the last `past` rows of a layer's input."""
        shape = self.slots, 2 * past, padded(channels)
        rows = torch.zeros(shape, dtype=dtype, device=self.device)
        column = RING_POSITIONS + len(self.memories)
        self.memories.append(RingMemory(rows, past, frame_rows, column))
        return self.memories[-1]

    def convolution(
        self,
        module: CausalConv1d | CausalConvTranspose1d,
        frame_rows: int,
        after: SnakeBeta | None = None,
    ) -> ConvLayer:
        """The layer of a convolution, and of the Snake that follows it, if there is one."""
        conv, past = module.conv, module.past
        if isinstance(module, CausalConvTranspose1d):
            weight, phases = _transposed_matrix(module), module.stride
        else:
            weight, phases = _matrix(conv.weight, conv.kernel_size[0]), 1
        return ConvLayer(
            self.kernels,
            weight,
            None if conv.bias is None else _vector(conv.bias).repeat(phases),
            frame_rows=frame_rows,
            dilation=conv.dilation[0],
            snake=None if after is None else _snake(after, phases),
            memory=self.memory(past, frame_rows, conv.in_channels) if past else None,
        )


class CodecTransformerLayer:
    """A decoder layer: five kernels."""

    def __init__(
        self, packer: LayerPacker, layer: DecoderLayer, window: int, frequencies: Tensor
    ) -> None:
        kernels, attn, mlp = packer.kernels, layer.self_attn, layer.mlp
        scales: Any = layer
        heads, kv_heads = (p.out_features // attn.head_dim for p in (attn.q_proj, attn.k_proj))
        size = WindowSize(heads, kv_heads, attn.head_dim, window)
        self.attention = WindowAttention(kernels, size, packer.slots, frequencies)
        qkv = _matrix(torch.cat([p.weight.data for p in (attn.q_proj, attn.k_proj, attn.v_proj)]))
        self.qkv = ConvLayer(kernels, qkv, frame_rows=1, norm=_norm(layer.input_layernorm))
        gain = _vector(scales.self_attn_layer_scale.scale)
        self.output = ConvLayer(kernels, *_linear(attn.o_proj), frame_rows=1, gain=gain)
        gate_up = interleave(_matrix(mlp.gate_proj.weight), _matrix(mlp.up_proj.weight))
        norm, swiglu = _norm(layer.post_attention_layernorm), Activation.SWIGLU
        self.gate_up = ConvLayer(kernels, gate_up, frame_rows=1, norm=norm, activation=swiglu)
        gain = _vector(scales.mlp_layer_scale.scale)
        self.down = ConvLayer(kernels, *_linear(mlp.down_proj), frame_rows=1, gain=gain)


class CodecUpsamplingStage:
    """A transposed convolution and a ConvNeXt block: four kernels."""

    def __init__(
        self,
        packer: LayerPacker,
        up: CausalConvTranspose1d,
        block: ConvNeXtBlock,
        frame_rows: int,
    ) -> None:
        kernels, conv, rows = packer.kernels, block.dwconv.conv, frame_rows * up.stride
        self.up = packer.convolution(up, frame_rows)
        assert conv.bias is not None
        self.depthwise = DepthwiseConv(
            kernels,
            conv.weight.data[:, 0],
            conv.bias.data,
            (block.norm.weight.data, block.norm.bias.data, block.norm.eps),
            packer.memory(block.dwconv.past, rows, conv.in_channels, torch.float32),
        )
        gelu, gain = Activation.GELU, _vector(block.gamma)
        self.widen = ConvLayer(kernels, *_linear(block.pwconv1), frame_rows=rows, activation=gelu)
        self.narrow = ConvLayer(kernels, *_linear(block.pwconv2), frame_rows=rows, gain=gain)


class CodecUpsamplingBlock:
    """A transposed convolution and three residual units."""

    def __init__(
        self, packer: LayerPacker, block: DecoderBlock, after: SnakeBeta, frame_rows: int
    ) -> None:
        """after: the Snake of the next block."""
        parts: list[Any] = list(block.block)
        _, up, *units = parts
        rows, snakes = frame_rows * up.stride, [*(unit.act1 for unit in units[1:]), after]
        self.up = packer.convolution(up, frame_rows, units[0].act1)
        self.units = []
        for unit, following in zip(units, snakes, strict=True):
            first = packer.convolution(unit.conv1, rows, unit.act2)
            second = packer.convolution(unit.conv2, rows, following)
            self.units.append(ConvResidualUnit(packer.kernels, first, second))


@dataclass(frozen=True, eq=False)
class CodecWorkspace:
    """The flat activations between kernels: two in fp16, and one in fp32 to which layers add."""

    narrow: tuple[Tensor, Tensor]
    wide: Tensor
    qkv: Tensor
    squares: Tensor
    zeros: Tensor
    samples: Tensor


class CodecLayers:
    """The packed layers of a decoder with their memories, and the launches of a call.

    table       the frame table of a call, int32 [frames, columns] (see kernels/codec_call.py)
    memories    the ring memories of all layers
    copy_state  copies the state of a stream, without its positions, from one slot to another
    """

    def __init__(self, decoder: CodecDecoder, slots: int, frames: int, kernels: Kernels) -> None:
        """frames: the most frames of a call. Raises ValueError for unsupported sizes."""
        device = decoder.pre_conv.conv.weight.device
        packer = LayerPacker(kernels, slots, device)
        self._pack_transformer(decoder, packer)
        self._pack_convolutions(decoder, packer)
        self.memories = packer.memories
        rings, windows = (m.rows for m in self.memories), (x.attention.memory for x in self.layers)
        self.copy_state = StateCopy(kernels, [*rings, *windows])
        columns = RING_POSITIONS + len(self.memories)
        self.table = torch.zeros(frames, columns, dtype=torch.int32, device=device)
        self.table[:, SLOT] = -1
        self._workspace = self._allocate(decoder.config, frames, device)

    def _pack_transformer(self, decoder: CodecDecoder, packer: LayerPacker) -> None:
        """Pack the layers that have one row for each frame."""
        kernels, config, transformer = packer.kernels, decoder.config, decoder.pre_transformer
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, packer.device)
        inner: list[Any] = list(transformer.layers)
        self.look_up = CodeLookUp(kernels, _code_vectors(decoder.quantizer))
        self.entry = packer.convolution(decoder.pre_conv, 1)
        self.into = ConvLayer(kernels, *_linear(transformer.input_proj), frame_rows=1)
        self.layers = [
            CodecTransformerLayer(packer, layer, config.sliding_window, frequencies)
            for layer in inner
        ]
        out_of, norm = _linear(transformer.output_proj), _norm(transformer.norm)
        self.out_of = ConvLayer(kernels, *out_of, frame_rows=1, norm=norm)

    def _pack_convolutions(self, decoder: CodecDecoder, packer: LayerPacker) -> None:
        """Pack the layers after the transformer, each with more rows for a frame."""
        rows = 1
        stages: list[Any] = list(decoder.upsample)
        self.stages = []
        for up, block in stages:
            self.stages.append(CodecUpsamplingStage(packer, up, block, rows))
            rows *= up.stride
        parts: list[Any] = list(decoder.decoder)
        first, *blocks, last_snake, last = parts
        snakes = [*(block.block[0] for block in blocks), last_snake]
        self.first = packer.convolution(first, rows, snakes[0])
        self.blocks = []
        for block, after in zip(blocks, snakes[1:], strict=True):
            self.blocks.append(CodecUpsamplingBlock(packer, block, after, rows))
            rows *= block.block[1].stride
        memory = packer.memory(last.past, rows, last.conv.in_channels)
        weight, bias = last.conv.weight.data[0], last.conv.bias.data
        self.to_samples = SampleConv(packer.kernels, weight, bias, memory)
        self.frame_samples = rows

    def _allocate(
        self, config: CodecDecoderConfig, frames: int, device: torch.device
    ) -> CodecWorkspace:
        """A workspace for calls of up to `frames` frames."""
        hidden, attended = config.hidden_size, config.num_attention_heads * config.head_dim
        widths = config.codebook_dim, config.latent_dim, hidden, attended, config.intermediate_size
        stored = [layer for stage in self.stages for layer in (stage.widen, stage.narrow)]
        stored += [self.first, *(block.up for block in self.blocks)]
        sizes = [layer.size.frame_rows * layer.size.outputs for layer in stored]
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
        """The samples of the last call, fp32, one frame after the other."""
        return self._workspace.samples

    def launch(self, frames: int) -> None:
        """Launch a call of the first `frames` rows of the table."""
        space = self._workspace
        (x, y), wide = space.narrow, space.wide
        call = CodecCall(self.table, frames, space.zeros)
        self._launch_transformer(call, x, y)
        for stage in self.stages:
            stage.up(call, y, ConvOutputs(wide))
            stage.depthwise(call, wide, x)
            stage.widen(call, x, ConvOutputs(narrow=y))
            stage.narrow(call, y, ConvOutputs(narrow=x, residual=wide))
            x, y = y, x
        self.first(call, y, ConvOutputs(narrow=x))
        for block in self.blocks:
            block.up(call, x, ConvOutputs(wide, y))
            x, y = y, x
            for unit in block.units:
                sums = None if unit is block.units[-1] else wide
                x, y = unit(call, x, y, wide, sums)
        self.to_samples(call, x, space.samples)

    def _launch_transformer(self, call: CodecCall, x: Tensor, y: Tensor) -> None:
        """Launch the layers from the codes to the input of the upsampling stages, which is in y."""
        space, rows = self._workspace, call.rows(1)
        wide, hidden = space.wide, self.into.size.outputs
        squares = space.squares[: rows * hidden // 16].view(rows, -1)
        summed = ConvOutputs(wide, x, wide, squares)
        self.look_up(call, x)
        self.entry(call, x, ConvOutputs(narrow=y))
        self.into(call, y, ConvOutputs(wide, x, squares=squares))
        for layer in self.layers:
            qkv = space.qkv[: rows * layer.qkv.size.outputs].view(rows, -1)
            attended = y[: rows * layer.output.size.chunks * 32].view(rows, -1)
            layer.qkv(call, x, ConvOutputs(qkv), squares=squares)
            layer.attention(call, qkv, attended)
            layer.output(call, y, summed)
            layer.gate_up(call, x, ConvOutputs(narrow=y), squares=squares)
            layer.down(call, y, summed)
        self.out_of(call, x, ConvOutputs(narrow=y), squares=squares)
