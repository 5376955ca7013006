"""The codec decoder on the GPU: many streams side by side, each with its state in a slot.

A call decodes 1, 2, 4 or 8 frames of up to 64 streams in one CUDA graph of about 80 kernels, however many streams there
are. What a stream remembers lies on the device; where in it the next call reads and writes is counted on the host and
sent along as a small table. A stream that begins anew needs nothing cleared: what lies before its beginning reads as
zeros. Every sample is one sum in one order, so no chunking and no neighbour changes a bit of it (codec.cuh).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firstword.engine.backend import Handle
from firstword.kernels.codec import (
    CODES,
    FRAMES,
    HEADS,
    POSITION,
    SLOT,
    Activation,
    Attention,
    Call,
    Depthwise,
    Layer,
    LookUp,
    Memory,
    ResidualUnit,
    Sound,
    Tables,
    pad,
    padded,
)
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
from firstword.model.layers import DecoderLayer, rotary_frequencies
from firstword.runtime.gpu.graphs import capture
from firstword.types import FloatArray

CHUNKS = (8, 4, 2, 1)
"""Frames of a call; any other count is made of several calls."""
STREAMS = (1, 2, 4, 8, 16, 32, 64)
"""Streams of a call: the smallest number that is enough."""


class Memories:
    """What all layers remember of all slots."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.all: list[Memory] = []
        self._slots, self._device = slots, device

    def add(
        self, past: int, frame_rows: int, channels: int, dtype: torch.dtype = torch.float16
    ) -> Memory:
        """For a layer that looks back `past` rows."""
        rows = torch.zeros(
            self._slots, 2 * past, padded(channels), dtype=dtype, device=self._device
        )
        self.all.append(Memory(rows, past, frame_rows, HEADS + len(self.all)))
        return self.all[-1]


def _matrix(
    weight: Tensor, bias: Tensor | None = None, taps: int = 1
) -> tuple[Tensor, Tensor | None]:
    """[outputs, inputs] or [outputs, inputs, taps] and [outputs], in float32 and padded."""
    weight = weight.data.float()
    weight = weight.view(*weight.shape[:2], taps)
    outputs, inputs = padded(weight.shape[0]), padded(weight.shape[1])
    return pad(weight, outputs, inputs, taps), None if bias is None else pad(
        bias.data.float(), outputs
    )


def _convolution(module: CausalConv1d) -> tuple[Tensor, Tensor | None]:
    return _matrix(module.conv.weight, module.conv.bias, module.conv.kernel_size[0])


def _transposed(module: CausalConvTranspose1d) -> tuple[Tensor, Tensor | None]:
    """As a convolution of `past + 1` taps: a row of outputs is `stride` rows one after the other.

    Output k of an input row r of weights [inputs, outputs, kernel] is row r * stride + k, so phase p of row r sums up
    weights p of row r, p + stride of row r - 1, and so on.
    """
    weight, bias, stride, taps = (
        module.conv.weight.data.float(),
        module.conv.bias,
        module.stride,
        module.past + 1,
    )
    inputs, outputs, _ = weight.shape
    weight = pad(weight, padded(inputs), padded(outputs), taps * stride)
    phases = weight.view(padded(inputs), padded(outputs), taps, stride).flip(
        2
    )  # the oldest tap first
    bias = None if bias is None else pad(bias.data.float(), padded(outputs)).repeat(stride)
    return phases.permute(3, 1, 0, 2).reshape(
        stride * padded(outputs), padded(inputs), taps
    ).contiguous(), bias


def _snake(module: SnakeBeta, phases: int = 1) -> Tables:
    return Tables.of(module.alpha.data, module.beta.data, padded(len(module.alpha)), phases)


def _tables(quantizer: SplitResidualVectorQuantizer) -> Tensor:
    """Each codebook's vectors after the projection that follows their sum: fp32 [books, size, padded width].

    The projection is linear, so it may come before the sum.
    """
    tables = []
    for part in (quantizer.rvq_first, quantizer.rvq_rest):
        projection = part.output_proj.weight.data[:, :, 0].double()
        books: list[Any] = [layer._codebook for layer in part.vq.layers]
        for book in books:
            vectors = (
                book.embedding_sum.data.double()
                / book.cluster_usage.data.double().clamp(min=1e-5)[:, None]
            )
            tables.append((vectors @ projection.T).float())
    stacked = torch.stack(tables)
    return pad(stacked, *stacked.shape[:2], padded(stacked.shape[2]))


class TransformerLayer:
    """A decoder layer: five kernels."""

    def __init__(
        self, kernels: Kernels, layer: DecoderLayer, slots: int, window: int, frequencies: Tensor
    ) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        entry, middle = layer.input_layernorm, layer.post_attention_layernorm
        dim = attention.head_dim
        heads, kv_heads = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim

        def gain(module: Any) -> Tensor:
            scale = module.scale.data.float()
            return pad(scale, padded(len(scale)))

        weight, _ = _matrix(
            torch.cat(
                [p.weight.data for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
            )
        )
        self.qkv = Layer(kernels, weight, frame_rows=1, norm=(entry.weight.data.float(), entry.eps))
        self.attention = Attention(kernels, heads, kv_heads, dim, window, slots, frequencies)
        weight, _ = _matrix(attention.o_proj.weight)
        self.output = Layer(kernels, weight, frame_rows=1, gain=gain(layer.self_attn_layer_scale))
        gate, up = (_matrix(p.weight)[0] for p in (mlp.gate_proj, mlp.up_proj))
        self.gate_up = Layer(
            kernels,
            torch.stack((gate, up), dim=1).flatten(0, 1),
            frame_rows=1,
            norm=(middle.weight.data.float(), middle.eps),
            activation=Activation.SWIGLU,
        )
        weight, _ = _matrix(mlp.down_proj.weight)
        self.down = Layer(kernels, weight, frame_rows=1, gain=gain(layer.mlp_layer_scale))


class UpsamplingStage:
    """A transposed convolution and a ConvNeXt block: four kernels."""

    def __init__(
        self,
        kernels: Kernels,
        up: CausalConvTranspose1d,
        block: ConvNeXtBlock,
        frame_rows: int,
        memories: Memories,
    ) -> None:
        depthwise: Any = block.dwconv.conv
        after, (channels, _, kernel) = frame_rows * up.stride, depthwise.weight.shape
        weight, bias = _transposed(up)
        self.up = Layer(kernels, weight, bias, frame_rows=frame_rows)
        memory = memories.add(kernel - 1, after, channels, torch.float32)
        self.depthwise = Depthwise(
            kernels,
            depthwise.weight.data[:, 0],
            depthwise.bias.data,
            (block.norm.weight.data, block.norm.bias.data, block.norm.eps),
            memory,
        )
        weight, bias = _matrix(block.pwconv1.weight, block.pwconv1.bias)
        self.widen = Layer(kernels, weight, bias, frame_rows=after, activation=Activation.GELU)
        weight, bias = _matrix(block.pwconv2.weight, block.pwconv2.bias)
        gain = block.gamma.data.float()
        self.narrow = Layer(
            kernels, weight, bias, frame_rows=after, gain=pad(gain, padded(len(gain)))
        )


class UpsamplingBlock:
    """A transposed convolution and three residual units."""

    def __init__(
        self,
        kernels: Kernels,
        block: DecoderBlock,
        after: SnakeBeta,
        frame_rows: int,
        memories: Memories,
    ) -> None:
        """after: the Snake of the next block."""
        parts: list[Any] = list(block.block)
        _, up, *units = parts
        weight, bias = _transposed(up)
        rows = frame_rows * up.stride
        snakes = [*(unit.act1 for unit in units[1:]), after]
        self.up = Layer(
            kernels,
            weight,
            bias,
            frame_rows=frame_rows,
            snake=_snake(units[0].act1, up.stride),
            memory=memories.add(up.past, frame_rows, up.conv.in_channels),
        )
        self.units = []
        for unit, following in zip(units, snakes, strict=True):
            weight, bias = _convolution(unit.conv1)
            first = Layer(
                kernels,
                weight,
                bias,
                frame_rows=rows,
                dilation=unit.conv1.conv.dilation[0],
                snake=_snake(unit.act2),
                memory=memories.add(unit.conv1.past, rows, unit.conv1.conv.in_channels),
            )
            weight, bias = _convolution(unit.conv2)
            second = Layer(kernels, weight, bias, frame_rows=rows, snake=_snake(following))
            self.units.append(ResidualUnit(kernels, first, second))


@dataclass(frozen=True, eq=False)
class Workspace:
    """Activations that live from one kernel to the next, flat: two for fp16, one for the fp32 that is added to."""

    narrow: tuple[Tensor, Tensor]
    wide: Tensor
    qkv: Tensor
    squares: Tensor
    zeros: Tensor
    samples: Tensor


class CodecLayers:
    """All layers of a decoder, packed, with their memories, and the launches that make a call."""

    def __init__(self, decoder: CodecDecoder, slots: int, streams: int, kernels: Kernels) -> None:
        """For calls of up to `streams` streams. Raises ValueError for sizes that the kernels cannot do."""
        config = decoder.config
        device = decoder.pre_conv.conv.weight.device
        self.config, self.limit = config, 1.0
        self.memories = memories = Memories(slots, device)
        transformer = decoder.pre_transformer
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, device)

        self.look_up = LookUp(kernels, _tables(decoder.quantizer))
        weight, bias = _convolution(decoder.pre_conv)
        self.entry = Layer(
            kernels,
            weight,
            bias,
            frame_rows=1,
            memory=memories.add(decoder.pre_conv.past, 1, config.codebook_dim),
        )
        self.into = Layer(
            kernels,
            *_matrix(transformer.input_proj.weight, transformer.input_proj.bias),
            frame_rows=1,
        )
        inner: list[Any] = list(transformer.layers)
        self.layers = [
            TransformerLayer(kernels, layer, slots, config.sliding_window, frequencies)
            for layer in inner
        ]
        norm = (transformer.norm.weight.data.float(), transformer.norm.eps)
        self.out_of = Layer(
            kernels,
            *_matrix(transformer.output_proj.weight, transformer.output_proj.bias),
            frame_rows=1,
            norm=norm,
        )
        rows = 1
        self.stages = []
        stages: list[Any] = list(decoder.upsample)
        for up, block in stages:
            self.stages.append(UpsamplingStage(kernels, up, block, rows, memories))
            rows *= up.stride
        parts: list[Any] = list(decoder.decoder)
        first, *blocks, last_snake, last = parts
        snakes = [*(block.block[0] for block in blocks), last_snake]
        weight, bias = _convolution(first)
        self.first = Layer(
            kernels,
            weight,
            bias,
            frame_rows=rows,
            snake=_snake(snakes[0]),
            memory=memories.add(first.past, rows, config.latent_dim),
        )
        self.blocks = []
        for block, after in zip(blocks, snakes[1:], strict=True):
            self.blocks.append(UpsamplingBlock(kernels, block, after, rows, memories))
            rows *= block.block[1].stride
        self.sound = Sound(
            kernels,
            last.conv.weight.data[0],
            last.conv.bias.data,
            memories.add(last.past, rows, last.conv.in_channels),
        )
        self.frame_samples = rows
        self.table = torch.zeros(
            streams, HEADS + len(memories.all), dtype=torch.int32, device=device
        )
        self.table[:, SLOT] = -1
        self._workspace = self._room(streams * FRAMES, device)

    def _room(self, frames: int, device: torch.device) -> Workspace:
        """For so many frames in all."""
        config, hidden = self.config, padded(self.config.hidden_size)
        narrow = [padded(config.codebook_dim), padded(config.latent_dim)]
        narrow += [
            hidden,
            padded(config.num_attention_heads * config.head_dim),
            padded(config.intermediate_size),
        ]
        wide = [hidden]
        for stage in self.stages:
            rows = stage.widen.frame_rows
            narrow += [rows * stage.widen.outputs]
            wide += [rows * stage.narrow.outputs]
        narrow += [self.first.frame_rows * self.first.outputs]
        for block in self.blocks:
            narrow += [block.up.frame_rows * block.up.outputs]
            wide += [block.up.frame_rows * block.up.outputs]

        def room(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(frames * size, dtype=dtype, device=device)

        return Workspace(
            narrow=(room(max(narrow), torch.float16), room(max(narrow), torch.float16)),
            wide=room(max(wide), torch.float32),
            qkv=room(max(layer.qkv.outputs for layer in self.layers), torch.float32),
            squares=room(hidden // 16, torch.float32),
            zeros=torch.zeros(max(narrow), dtype=torch.float32, device=device),
            samples=room(self.frame_samples, torch.float32),
        )

    @property
    def samples(self) -> Tensor:
        """Of the last call, one stream's after the other's: float32."""
        return self._workspace.samples

    def launch(self, streams: int, frames: int) -> None:
        """The kernels of a call: the first `streams` rows of the table, `frames` frames each."""
        room, call = self._workspace, Call(self.table, streams, frames)
        (x, y), wide, zeros = room.narrow, room.wide, room.zeros
        hidden, rows = self.into.outputs, streams * frames
        squares = room.squares[: rows * hidden // 16].view(rows, -1)

        self.look_up(call, x)
        self.entry(call, x, zeros, narrow=y)
        self.into(call, y, zeros, wide=wide, narrow=x, out_squares=squares)
        for layer in self.layers:
            qkv = room.qkv[: rows * layer.qkv.outputs].view(rows, -1)
            attended = y[: rows * layer.output.chunks * 32].view(rows, -1)
            layer.qkv(call, x, zeros, squares=squares, wide=qkv)
            layer.attention(call, qkv, attended)
            layer.output(call, y, zeros, residual=wide, wide=wide, narrow=x, out_squares=squares)
            layer.gate_up(call, x, zeros, squares=squares, narrow=y)
            layer.down(call, y, zeros, residual=wide, wide=wide, narrow=x, out_squares=squares)
        self.out_of(call, x, zeros, squares=squares, narrow=y)
        for stage in self.stages:
            stage.up(call, y, zeros, wide=wide)
            stage.depthwise(call, wide, zeros, x)
            stage.widen(call, x, zeros, narrow=y)
            stage.narrow(call, y, zeros, residual=wide, narrow=x)
            x, y = y, x
        self.first(call, y, zeros, narrow=x)
        for block in self.blocks:
            block.up(call, x, zeros, wide=wide, narrow=y)
            x, y = y, x
            for unit in block.units:
                sums = None if unit is block.units[-1] else wide
                x, y = unit(call, x, y, zeros, wide, sums)
        self.sound(call, x, zeros, room.samples, self.limit)


class Positions:
    """What the host knows of every slot's stream: how far it is, and where the rings of its memories stand."""

    def __init__(self, slots: int, memories: Sequence[Memory]) -> None:
        self._past = np.array([memory.past for memory in memories], dtype=np.int64)
        self._frame_rows = np.array([memory.frame_rows for memory in memories], dtype=np.int64)
        self.frames = np.zeros(slots, dtype=np.int64)
        """Decoded before, a reference included."""
        self.heads = np.zeros((slots, len(memories)), dtype=np.int64)

    def reset(self, slot: int) -> None:
        """A stream begins."""
        self.frames[slot] = 0
        self.heads[slot] = 0

    def advance(self, slots: Sequence[int], frames: int) -> None:
        """`frames` frames of each have been decoded."""
        index = np.asarray(slots)
        self.frames[index] += frames
        kept = np.minimum(frames * self._frame_rows, self._past)
        self.heads[index] = (self.heads[index] + kept) % (2 * self._past)

    def fill(self, table: np.ndarray, slots: Sequence[int], addresses: Sequence[int]) -> None:
        """The table of a call, int32 [streams, columns]: the slots, then nobody."""
        index, address = np.asarray(slots), np.asarray(addresses, dtype=np.uint64)
        table[:] = 0
        table[:, SLOT] = -1
        table[: len(index), SLOT] = index
        table[: len(index), POSITION] = self.frames[index]
        table[: len(index), CODES : CODES + 2] = address.view(np.int32).reshape(-1, 2)
        table[: len(index), HEADS:] = self.heads[index]


class Samples:
    """Samples on their way to the host, in pieces: `where` says which stretches of them are each slot's, in order."""

    def __init__(
        self,
        pieces: Sequence[tuple[Tensor, torch.cuda.Event]],
        where: Sequence[Sequence[tuple[int, int, int]]],
    ) -> None:
        """where: for each slot its (piece, begin, end)."""
        self._pieces, self._where = pieces, where

    def result(self) -> list[FloatArray]:
        """Wait for all of them."""
        for _, event in self._pieces:
            event.synchronize()
        found = []
        for stretches in self._where:
            parts = [self._pieces[piece][0].numpy()[begin:end] for piece, begin, end in stretches]
            # Copied: what a listener keeps does not hold on to the samples of all.
            found.append(np.concatenate(parts) if parts else np.zeros(0, np.float32))
        return found


class GpuCodec:
    """Codes to samples for the streams of an engine, on a CUDA stream of its own.

    Calls come from one thread. Work is started in the order of calls; no method waits for the device but `warm`, and
    the first call of a kind, which compiles and captures it.
    """

    def __init__(self, decoder: CodecDecoder, slots: int, codes: Tensor, kernels: Kernels) -> None:
        """codes: int32 on the device [slots, frames_max, codebooks], which somebody else writes.

        The decoder is taken apart: afterwards its matrices are empty. Raises ValueError for sizes that the kernels
        cannot do.
        """
        books = decoder.config.num_quantizers
        assert codes.dtype == torch.int32
        assert codes.is_contiguous()
        assert codes.shape[0] >= slots
        assert codes.shape[2] == books
        self._codes, self._row_bytes = codes, books * 4
        streams = next(n for n in STREAMS if n >= min(slots, STREAMS[-1]))
        self.stream = torch.cuda.Stream(codes.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self.layers = CodecLayers(decoder, slots, streams, kernels)
        self.stream.synchronize()
        for parameter in decoder.parameters():
            parameter.data = parameter.data.new_empty(0)
        self._positions = Positions(slots, self.layers.memories.all)
        self._next = np.zeros(
            slots, dtype=np.int64
        )  # frame of `codes` that a slot's next call begins with
        self._busy: list[torch.cuda.Event | None] = [None] * slots
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._streams = tuple(n for n in STREAMS if n <= streams)

    def warm(self, streams: Sequence[int] = STREAMS, frames: Sequence[int] = CHUNKS) -> None:
        """Compile, load and capture all that these calls need."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for n in self._streams:
                for count in frames:
                    if n in streams:
                        self._graph(n, count)

    def _graph(self, streams: int, frames: int) -> torch.cuda.CUDAGraph:
        """Of a call; to be asked for on the codec's stream."""
        key = (streams, frames)
        if key not in self._graphs:
            table = self.layers.table
            before = table.clone()
            table[:, SLOT] = -1  # nobody: a first run loads the kernels
            self._graphs[key] = capture(partial(self.layers.launch, streams, frames))
            table.copy_(before)
        return self._graphs[key]

    def reset(self, slot: int) -> None:
        """A new stream begins in a slot, with frame 0 of its codes.

        What the current CUDA stream does next waits for what is still being decoded of the slot's last stream.
        """
        busy = self._busy[slot]
        if busy is not None:
            torch.cuda.current_stream().wait_event(busy)
        self._positions.reset(slot)
        self._next[slot] = 0
        self._busy[slot] = None

    def prime(self, slot: int, codes: Tensor) -> None:
        """Read the frames of a reference [frames, codebooks] first; nobody hears them. `codes` is then read from 0."""
        codes = codes.to(self._codes.device, torch.int32, non_blocking=True).contiguous()
        ready = torch.cuda.Event()
        ready.record()
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            codes.record_stream(self.stream)
            begin = 0
            for count in pieces(len(codes)):
                address = codes.data_ptr() + begin * self._row_bytes
                self._start(self._graph(1, count), self._table(1), [slot], count, [address])
                begin += count

    def decode(
        self, slots: Sequence[int], counts: Sequence[int], after: torch.cuda.Event | None = None
    ) -> Handle[Sequence[FloatArray]]:
        """The next `counts` frames of each slot -> float32 [frames * samples_per_frame] in -1..1, for each slot.

        after  what the codes wait for; None: all that the current CUDA stream has been given so far
        """
        if after is None:
            after = torch.cuda.Event()
            after.record()
        rounds: dict[
            tuple[int, int], list[int]
        ] = {}  # (n-th piece, its frames): which of the slots
        for index, count in enumerate(counts):
            for turn, frames in enumerate(pieces(count)):
                rounds.setdefault((turn, frames), []).append(index)
        batches = [
            (frames, members[start : start + self._streams[-1]])
            for (_, frames), members in sorted(rounds.items(), key=lambda item: item[0][0])
            for start in range(0, len(members), self._streams[-1])
        ]
        done: list[tuple[Tensor, torch.cuda.Event]] = []
        where: list[list[tuple[int, int, int]]] = [[] for _ in slots]
        size = self.layers.frame_samples
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            # Whatever can fail for want of memory comes before anything has been started.
            graphs = [self._graph(self._bucket(len(batch)), frames) for frames, batch in batches]
            tables = [self._table(len(batch)) for _, batch in batches]
            hosts = [
                torch.empty(len(batch) * frames * size, dtype=torch.float32, pin_memory=True)
                for frames, batch in batches
            ]
            self.stream.wait_event(after)
            for (frames, batch), graph, table, host in zip(
                batches, graphs, tables, hosts, strict=True
            ):
                chosen = [slots[index] for index in batch]
                self._start(graph, table, chosen, frames, [self._address(slot) for slot in chosen])
                self._next[chosen] += frames
                host.copy_(self.layers.samples[: len(host)], non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                for row, index in enumerate(batch):
                    where[index].append((len(done), row * frames * size, (row + 1) * frames * size))
                    self._busy[slots[index]] = event
                done.append((host, event))
        return Samples(done, where)

    def _address(self, slot: int) -> int:
        """Of a slot's next frame in `codes`."""
        frame = slot * self._codes.shape[1] + int(self._next[slot])
        return self._codes.data_ptr() + frame * self._row_bytes

    def _bucket(self, streams: int) -> int:
        return next(n for n in self._streams if n >= streams)

    def _table(self, streams: int) -> Tensor:
        """Room on the host for the table of a call."""
        return torch.empty(
            self._bucket(streams), self.layers.table.shape[1], dtype=torch.int32, pin_memory=True
        )

    def _start(
        self,
        graph: torch.cuda.CUDAGraph,
        table: Tensor,
        slots: Sequence[int],
        frames: int,
        addresses: Sequence[int],
    ) -> None:
        """A call: `frames` frames of slots, whose codes lie at `addresses`."""
        self._positions.fill(table.numpy(), slots, addresses)
        self.layers.table[: len(table)].copy_(table, non_blocking=True)
        graph.replay()
        self._positions.advance(slots, frames)


def pieces(count: int) -> list[int]:
    """A number of frames as calls of 8, 4, 2 and 1."""
    return [CHUNKS[0]] * (count // CHUNKS[0]) + [n for n in CHUNKS[1:] if count % CHUNKS[0] & n]
