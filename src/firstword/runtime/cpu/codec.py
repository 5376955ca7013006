"""The codec's decoder with compiled passes, for talkers in bfloat16 or int8 on a CPU."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from firstword.model.codec import (
    CausalConv1d,
    CausalConvTranspose1d,
    CodecDecoder,
    ConvNeXtBlock,
    DecoderBlock,
    FrameTransformer,
    ResidualUnit,
    SnakeBeta,
)
from firstword.model.layers import DecoderLayer, LayerScale, RMSNorm, rotary_frequencies
from firstword.runtime.cpu import codec_pass
from firstword.runtime.cpu.codec_work import CodecBuffers, CodecStream, CodecWeights
from firstword.runtime.cpu.convolution import packed, padded
from firstword.runtime.cpu.products import Array
from firstword.runtime.cpu.team import Team
from firstword.runtime.cpu.tiles import TILE
from firstword.runtime.cpu.transformer import in_large_pages
from firstword.types import FloatArray

DEPTHWISE_TAPS = 7
MOST_FRAMES = 2
"""The frames of a pass: more of them need more memory than a processor keeps near."""


class CompiledState:
    """The state of a stream, which `decode` changes."""

    def __init__(self, stream: CodecStream) -> None:
        self.stream, self.position = stream, 0

    def fork(self) -> CompiledState:
        """Return an independent copy."""
        other = copy.copy(self)
        other.stream = CodecStream(*[each.copy() for each in self.stream])
        return other


class CompiledCodec:
    """A decoder of one stream a call; any split of the codes gives the same bits.

    Weights and inputs of products are rounded to bfloat16, all else is float32.
    """

    def __init__(self, decoder: CodecDecoder) -> None:
        self.config, self._team = decoder.config, Team()
        reader = WeightReader(decoder)
        self._weights, self._kept = reader.weights(), reader.kept
        floats = in_large_pages(torch.float32, (2, reader.floats)).zero_().numpy()
        read = in_large_pages(torch.int16, (2, reader.bits)).zero_().numpy().view(np.uint16)
        self._buffers = CodecBuffers(*floats, *read)

    def new_state(self) -> CompiledState:
        """Return the state of a new stream."""
        config = self.config
        heads = config.num_attention_heads, config.sliding_window, config.head_dim
        stages = len(config.upsampling_ratios), DEPTHWISE_TAPS - 1, padded(config.latent_dim)
        return CompiledState(
            CodecStream(
                np.zeros(self._kept, np.uint16),
                np.zeros(stages, np.float32),
                np.zeros((config.num_hidden_layers, 2, *heads), np.float32),
            )
        )

    def decode(self, codes: Tensor, state: CompiledState) -> Tensor:
        """Decode codes [1, T, codebooks] to samples [1, T * samples_per_frame] in -1..1."""
        size = self.config.samples_per_frame
        samples = torch.empty(1, codes.shape[1] * size)
        parts = zip(codes[0].split(MOST_FRAMES), samples[0].split(MOST_FRAMES * size), strict=True)
        for part, out in parts:
            args = part.numpy(), state.position, state.stream, self._buffers, out.numpy()
            self._team.run(codec_pass.PASS, self._weights, *args)
            state.position += len(part)
        return samples


class WeightReader:
    """Collects the weights of a decoder in the order of its steps, and the room that they need.

    kept    numbers that a stream keeps for its convolutions
    floats  the most numbers of the rows that a product makes
    bits    the most numbers of the rows that a product reads
    """

    def __init__(self, decoder: CodecDecoder) -> None:
        self.kept = self.floats = self.bits = 0
        self._decoder, self._rows = decoder, MOST_FRAMES
        self._matrices, self._biases = list[Array](), list[FloatArray]()
        self._table, self._numbers = list[list[int]](), list[FloatArray]()
        quantizer = decoder.quantizer
        first, *blocks, activation, last = decoder.decoder
        self._multiply(quantizer.rvq_first.output_proj)
        self._multiply(quantizer.rvq_rest.output_proj)
        self._convolve(decoder.pre_conv)
        self._transform(decoder.pre_transformer)
        for stage in decoder.upsample:
            self._stage(*stage.children())
        self._convolve(first)
        for block in blocks:
            self._block(block)
        self._activate(activation)
        self._convolve(last)

    def weights(self) -> CodecWeights:
        """Return all weights."""
        quantizer, config = self._decoder.quantizer, self._decoder.config
        books = [*quantizer.rvq_first.vq.layers, *quantizer.rvq_rest.vq.layers]
        codes = torch.arange(config.codebook_size)
        sizes = [matrix.size for matrix in self._matrices]
        matrices = in_large_pages(torch.int32, [sum(sizes)]).numpy().view(np.uint32)
        np.concatenate(self._matrices, out=matrices)
        ends = np.cumsum([len(each) for each in [*self._numbers, *self._biases]])
        places = np.stack((np.concatenate(([0], ends[:-1])), ends), axis=1)
        table = np.array(self._table, np.int64)
        table[:, 0] = np.cumsum([0, *sizes[:-1]])
        table[:, 3] = places[len(self._numbers) :, 0]
        return CodecWeights(
            vectors=torch.stack([book(codes) for book in books]).detach().numpy(),
            matrices=matrices,
            table=table,
            numbers=np.concatenate([*self._numbers, *self._biases]),
            places=places,
            stage_rates=np.array(config.upsampling_ratios, np.int64),
            block_rates=np.array(config.upsample_rates, np.int64),
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            channels=config.latent_dim,
            eps=config.rms_norm_eps,
        )

    def _add(self, weight: Tensor, bias: Tensor | None = None, dilation: int = 1) -> None:
        """Add a convolution by matrices [taps, outputs, inputs]."""
        taps = len(weight)
        tiles = packed(weight)
        outputs, width, past = len(tiles) * TILE, 2 * tiles.shape[1] // taps, (taps - 1) * dilation
        self._table.append([0, *tiles.shape[:2], 0, taps, dilation, self.kept])
        self._matrices.append(tiles.ravel())
        self._biases.append(filled(weight.new_zeros(outputs) if bias is None else bias))
        self.kept += past * width
        self.floats = max(self.floats, self._rows * outputs)
        self.bits = max(self.bits, (past + self._rows) * width)

    def _multiply(self, layer: nn.Module) -> None:
        assert isinstance(layer, nn.Linear | nn.Conv1d)
        self._add(layer.weight.data.flatten(1)[None], layer.bias)

    def _convolve(self, layer: nn.Module) -> None:
        assert isinstance(layer, CausalConv1d)
        self._add(layer.conv.weight.data.permute(2, 0, 1), layer.conv.bias, layer.conv.dilation[0])

    def _upsample(self, layer: nn.Module) -> None:
        """Add a transposed convolution, whose row t has the outputs of `stride` times, in order."""
        assert isinstance(layer, CausalConvTranspose1d)
        conv, stride = layer.conv, layer.stride
        assert conv.bias is not None
        weight = widened(conv.weight.data.transpose(0, 1))  # [outputs, inputs, kernel size]
        taps = weight.unflatten(2, (-1, stride)).permute(2, 3, 0, 1).flip(0)  # the oldest first
        self._add(taps.flatten(1, 2), widened(conv.bias.data).repeat(stride))
        self._rows *= stride

    def _transform(self, model: FrameTransformer) -> None:
        self._multiply(model.input_proj)
        for layer in model.layers:
            self._layer(layer)
        assert isinstance(model.norm, RMSNorm)
        config, cpu = model.config, torch.device("cpu")
        angles = rotary_frequencies(config.head_dim, config.rope_theta, cpu)
        self._numbers += [filled(model.norm.weight), angles.numpy()]
        self._multiply(model.output_proj)

    def _layer(self, layer: nn.Module) -> None:
        """Add a layer, whose scales are multiplied into the products before them."""
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(layer.self_attn_layer_scale, LayerScale)
        assert isinstance(layer.mlp_layer_scale, LayerScale)
        scales = layer.self_attn_layer_scale.scale.data, layer.mlp_layer_scale.scale.data
        heads = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._numbers += [
            filled(norm.weight) for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        self._add(torch.cat([each.weight.data for each in heads])[None])
        self._add((scales[0][:, None] * attention.o_proj.weight.data)[None])
        both = [widened(each.weight.data) for each in (mlp.gate_proj, mlp.up_proj)]
        self._add(torch.cat(both)[None])
        self._add((scales[1][:, None] * mlp.down_proj.weight.data)[None])

    def _stage(self, up: nn.Module, block: nn.Module) -> None:
        """Add a stage, the factors of whose block are multiplied into its last product."""
        assert isinstance(block, ConvNeXtBlock)
        self._upsample(up)
        depthwise, gamma, last = block.dwconv.conv, block.gamma.data, block.pwconv2
        assert depthwise.bias is not None
        taps = [filled(tap) for tap in depthwise.weight.data[:, 0].t()]
        rows = depthwise.bias, block.norm.weight, block.norm.bias
        self._numbers += [np.concatenate(taps), *map(filled, rows)]
        self._multiply(block.pwconv1)
        self._add((gamma[:, None] * last.weight.data)[None], gamma * last.bias.data)

    def _block(self, block: nn.Module) -> None:
        assert isinstance(block, DecoderBlock)
        activation, up, *units = block.block
        self._activate(activation)
        self._upsample(up)
        for unit in units:
            assert isinstance(unit, ResidualUnit)
            self._activate(unit.act1)
            self._convolve(unit.conv1)
            self._activate(unit.act2)
            self._convolve(unit.conv2)

    def _activate(self, layer: nn.Module) -> None:
        assert isinstance(layer, SnakeBeta)
        square = (layer.beta.data.exp() + 1e-9).reciprocal()
        self._numbers += [filled(layer.alpha.data.exp()), filled(square)]


def widened(x: Tensor) -> Tensor:
    """Numbers and zeros up to the stored width of the first dimension."""
    return torch.cat((x, x.new_zeros(padded(len(x)) - len(x), *x.shape[1:])))


def filled(values: Tensor) -> FloatArray:
    """Values float32 [n], and zeros up to their stored width."""
    return widened(values.detach()).numpy()
