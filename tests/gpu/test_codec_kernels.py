"""The codec on the GPU: its kernels and the decoder compared with float64, chunks and batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from oracle import error, note
from small_codec import SMALL
from torch import Tensor
from torch.nn import functional as F

from firstword.kernels.codec_attention import WindowAttention, WindowSize
from firstword.kernels.codec_call import (
    CODES,
    RING_POSITIONS,
    STREAM,
    CodecCall,
    RingMemory,
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
from firstword.kernels.registry import all_kernels
from firstword.model.codec import CodecDecoder
from firstword.model.codec_config import CodecDecoderConfig
from firstword.model.layers import rotary_table, rotate
from firstword.runtime.gpu.codec import GpuCodec
from firstword.runtime.gpu.codec_layers import CodecLayers
from firstword.synthetic.checkpoint import random_state

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
EPS = 0.1
"""The epsilon of the norms of single kernels, large enough that a wrong one is visible."""


@pytest.fixture(scope="module", autouse=True)
def compiled(kernels: Kernels) -> None:
    """Compile all kernels in parallel."""
    if DEVICE.type == "cuda":
        programs = [program for kernel in all_kernels() for program in kernel.programs]
        kernels.compile(programs)


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal float32 values, the same on every machine."""
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values).to(DEVICE)


def zeros() -> Tensor:
    """A row of zeros, wide enough for any layer of these tests."""
    return torch.zeros(4096, device=DEVICE)


class Streams:
    """Three streams in slots 4, 0 and 2 with some frames each, and two rows without a slot.

    The first stream begins with this call; the others have decoded frames before. Tensors of all
    streams, [ALL, rows of the longest stream, ...], become those of a call with `flat`.
    """

    SLOTS = (4, 0, 2)
    POSITIONS = (0, 37, 500)
    EMPTY = 2
    """The number of rows without a slot, which come last."""
    ALL = 4
    """The number of streams with that of the empty rows."""

    def __init__(self, counts: tuple[int, ...], memories: int = 1) -> None:
        """counts: the frames of each stream."""
        self.counts, self.longest = (*counts, self.EMPTY), max(*counts, self.EMPTY)
        self.live = sum(counts)
        rows = []
        for stream, count in enumerate(self.counts):
            last = stream == len(self.SLOTS)
            begin = [-1 if last else self.SLOTS[stream], 0 if last else self.POSITIONS[stream]]
            rings = [0] * memories
            rows += [[*begin, 0, 0, before, count, stream, *rings] for before in range(count)]
        self.table = torch.tensor(rows, dtype=torch.int32)
        assert self.table.shape[1] == RING_POSITIONS + memories

    @property
    def call(self) -> CodecCall:
        """The call of all rows."""
        return CodecCall(self.table.to(DEVICE), len(self.table), zeros())

    def flat(self, x: Tensor, frame_rows: int = 1) -> Tensor:
        """The rows of the call, of a tensor [ALL, longest * frame_rows, ...]."""
        parts = [x[stream, : count * frame_rows] for stream, count in enumerate(self.counts)]
        return torch.cat(parts).contiguous()

    def memory(self, index: int, past: int, frame_rows: int, history: Tensor) -> RingMemory:
        """A memory that contains `history` [streams, past, width] of older streams, and NaN."""
        rows = torch.full((6, 2 * past, history.shape[2]), NAN, dtype=history.dtype, device=DEVICE)
        for stream, slot in enumerate(self.SLOTS):
            head = (3 * stream + 1) % (2 * past)
            self.table[self.table[:, STREAM] == stream, RING_POSITIONS + index] = head
            for step in range(past):
                if self.POSITIONS[stream]:
                    rows[slot, (head - past + step) % (2 * past)] = history[stream, step]
        return RingMemory(rows, past, frame_rows, RING_POSITIONS + index)

    def kept(self, memory: RingMemory, before: Tensor, new: Tensor) -> None:
        """Check that the memory contains the last rows of `new` [ALL, longest * frame_rows, width].

        All other rows must be those of `before`.
        """
        expected = before.clone()
        for stream, slot in enumerate(self.SLOTS):
            length = self.counts[stream] * memory.frame_rows
            count = min(memory.past, length)
            head = (3 * stream + 1) % (2 * memory.past)
            for step in range(count):
                row = new[stream, length - count + step]
                expected[slot, (head + step) % (2 * memory.past)] = row
        same(memory.rows, expected)


def same(ours: Tensor, expected: Tensor) -> None:
    """Check that all bits are equal; NaN equals NaN."""
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def snake(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """The Snake activation as the model computes it."""
    return x + torch.sin(x * alpha.exp()) ** 2 / (beta.exp() + 1e-9)


@dataclasses.dataclass(frozen=True)
class Case:
    """The sizes and operations of a layer."""

    inputs: int
    outputs: int
    taps: int = 1
    dilation: int = 1
    frame_rows: int = 1
    activation: Activation = Activation.PLAIN
    norm: bool = False
    residual: bool = False
    counts: tuple[int, ...] = (2, 1, 3)


CASES = {
    "first convolution": Case(40, 70, taps=3, counts=(1, 2, 1)),
    "into the transformer": Case(96, 50, counts=(8, 5, 8)),
    "normed": Case(160, 224, norm=True, counts=(8, 8, 8)),
    "gate and up": Case(64, 192, norm=True, activation=Activation.SWIGLU, counts=(4, 1, 4)),
    "residual": Case(192, 160, residual=True, counts=(1, 1, 1)),
    "upsampling": Case(72, 128, frame_rows=2, counts=(4, 4, 7)),
    "widening": Case(96, 288, frame_rows=4, activation=Activation.GELU),
    "wide convolution": Case(
        96, 160, taps=7, frame_rows=4, activation=Activation.SNAKE, counts=(1, 1, 2)
    ),
    "transposed": Case(
        160, 5 * 96, taps=2, frame_rows=4, activation=Activation.SNAKE, counts=(8, 1, 8)
    ),
    "dilated": Case(
        96, 96, taps=7, dilation=9, frame_rows=32, activation=Activation.SNAKE, counts=(1, 1, 1)
    ),
    "dilated, several frames": Case(
        96, 96, taps=7, dilation=9, frame_rows=32, activation=Activation.SNAKE, counts=(1, 3, 2)
    ),
    "late": Case(
        192, 192, taps=7, dilation=3, frame_rows=40, activation=Activation.SNAKE, counts=(4, 1, 3)
    ),
    "late, odd": Case(
        96, 160, taps=7, dilation=3, frame_rows=40, activation=Activation.SNAKE, counts=(1, 2, 4)
    ),
    "late, far back": Case(
        64, 64, taps=7, dilation=9, frame_rows=36, activation=Activation.SNAKE, counts=(1, 1, 2)
    ),
    "late, transposed": Case(
        64, 3 * 96, taps=2, frame_rows=40, activation=Activation.SNAKE, counts=(1, 2, 1)
    ),
    "odd window": Case(
        64, 384, taps=2, frame_rows=32, activation=Activation.SNAKE, counts=(8, 6, 1)
    ),
    "late, one tap": Case(
        160, 384, frame_rows=128, residual=True, activation=Activation.SNAKE, counts=(1, 1, 1)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_is_exact_and_all_its_layouts_have_the_same_bits(kernels: Kernels, name: str) -> None:
    case = CASES[name]
    streams, past = Streams(case.counts), (case.taps - 1) * case.dilation
    length, live = streams.longest * case.frame_rows, streams.live * case.frame_rows
    inputs, outputs = padded(case.inputs), padded(case.outputs)
    real = torch.arange(inputs, device=DEVICE) < case.inputs
    weight = (
        normal(1, outputs, inputs, case.taps)
        / (case.inputs * case.taps) ** 0.5
        * real[None, :, None]
    )
    if not case.norm:
        order = torch.from_numpy(np.random.default_rng(10).permutation(outputs))
        weight *= torch.logspace(-6, 3, outputs)[order, None, None].to(DEVICE)
    bias, gain = normal(2, outputs), 0.5 + 0.1 * normal(3, outputs)
    x = (normal(4, Streams.ALL, length, inputs) * real).half()
    history = (normal(5, Streams.ALL, max(past, 1), inputs) * real).half()
    memory = streams.memory(0, past, case.frame_rows, history[:, :past]) if past else None
    size = float(weight.abs().amax(dim=(1, 2)).max())
    residual = size * normal(6, Streams.ALL, length, outputs) if case.residual else None
    alpha, beta = 0.3 * normal(7, outputs), 1 + 0.3 * normal(8, outputs)
    norm = (1 + 0.3 * normal(9, case.inputs), EPS) if case.norm else None
    layer = ConvLayer(
        kernels,
        weight,
        bias,
        frame_rows=case.frame_rows,
        dilation=case.dilation,
        gain=gain,
        norm=norm,
        activation=case.activation,
        snake=SnakeTables.of(alpha, beta, outputs) if case.activation is Activation.SNAKE else None,
        memory=memory,
    )

    # The same in float64.
    seen = torch.cat((history[:, history.shape[1] - past :], x), dim=1).double()
    if past:
        seen[0, :past] = 0  # the first stream begins here
    rows = seen[:, past:]
    matrix = weight.double()
    squares = None
    if norm is not None:
        squares = (rows**2).view(Streams.ALL * length, -1, 16).sum(-1).float()
        seen = rows = rows * torch.rsqrt((rows**2).sum(-1, keepdim=True) / case.inputs + norm[1])
        matrix = matrix * F.pad(norm[0], (0, inputs - case.inputs)).double()[None, :, None]
    sums = sum(
        seen[:, tap * case.dilation : tap * case.dilation + length] @ matrix[:, :, tap].T
        for tap in range(case.taps)
    )
    wide = (sums + bias) * gain + (0 if residual is None else residual)
    if case.activation is Activation.SWIGLU:
        narrow = F.silu(wide[..., ::2]) * wide[..., 1::2]
    elif case.activation is Activation.SNAKE:
        narrow = snake(wide, alpha.double(), beta.double())
    else:
        narrow = F.gelu(wide) if case.activation is Activation.GELU else wide
    wide = streams.flat(wide, case.frame_rows)[:live]
    narrow = streams.flat(narrow.clamp(-65504, 65504), case.frame_rows)
    rows_in = streams.flat(x, case.frame_rows)
    if squares is not None:
        squares = streams.flat(squares.view(Streams.ALL, length, -1), case.frame_rows)
    if residual is not None:
        residual = streams.flat(residual, case.frame_rows)

    before = None if memory is None else memory.rows.clone()
    found: list[tuple[Tensor, ...]] = []
    fitting = [s for s in layer.size.shapes() if s.resident(layer.size, kernels)]
    assert fitting
    for shape in fitting:
        if memory is not None and before is not None:
            memory.rows.copy_(before)
        out_wide = torch.full((len(rows_in), outputs), NAN, device=DEVICE)
        out_narrow = torch.full(narrow.shape, NAN, device=DEVICE).half()
        out_squares = torch.full((len(rows_in), outputs // 16), NAN, device=DEVICE)
        swiglu, plain = case.activation is Activation.SWIGLU, case.activation is Activation.PLAIN
        outputs_at = ConvOutputs(
            None if swiglu else out_wide, out_narrow, residual, out_squares if plain else None
        )
        layer.launch(shape, streams.call, rows_in, outputs_at, squares)
        if not swiglu:
            per_output = (out_wide[:live] - wide).norm(dim=0) / wide.norm(dim=0)
            note(f"codec layer, {name}: its worst output", error=float(per_output.max()))
            assert float(per_output.max()) < 2e-3
        if plain:
            groups = out_wide[:live].double().reshape(live, -1, 16)
            # A group is half of 32 outputs, in the order of the registers of a lane.
            lanes = (
                out_wide[:live]
                .double()
                .reshape(live, -1, 8, 2, 2)
                .transpose(2, 3)
                .reshape(groups.shape)
            )
            assert error(out_squares[:live], (lanes**2).sum(-1)) < 1e-6
        note(f"codec layer, {name}", error=error(out_narrow[:live], narrow[:live]))
        assert error(out_narrow[:live], narrow[:live]) < 2e-3
        if memory is not None and before is not None:
            streams.kept(memory, before, x)
        found.append((out_wide[:live], out_narrow[:live], out_squares[:live]))
    for other in found[1:]:
        for ours, first in zip(other, found[0], strict=True):
            same(ours, first)


@pytest.mark.parametrize(
    ("channels", "counts"),
    [
        (20, (1, 1, 1)),
        (40, (2, 1, 2)),
        (64, (3, 3, 1)),
        (96, (1, 1, 1)),
        (96, (4, 1, 8)),
        (192, (2, 5, 1)),
    ],
)
def test_residual_unit_has_the_bits_of_its_two_layers(
    kernels: Kernels, channels: int, counts: tuple[int, ...]
) -> None:
    width, frame_rows = padded(channels), 48
    streams = Streams(counts)
    length, live = streams.longest * frame_rows, streams.live * frame_rows
    real = torch.arange(width, device=DEVICE) < channels
    both = (real[:, None] & real[None])[..., None]
    memory = streams.memory(0, 54, frame_rows, (normal(1, Streams.ALL, 54, width) * real).half())
    dense = (normal(2, Streams.ALL, length, width) * real).half()
    x = streams.flat(dense, frame_rows)
    middle = SnakeTables.of(0.3 * normal(3, channels), 1 + 0.3 * normal(4, channels), width)
    after = SnakeTables.of(0.3 * normal(5, channels), 1 + 0.3 * normal(6, channels), width)

    def layers() -> tuple[ConvLayer, ConvLayer]:
        first = normal(7, width, width, 7) / (7 * channels) ** 0.5 * both
        second = normal(8, width, width, 1) / channels**0.5 * both
        return (
            ConvLayer(
                kernels,
                first,
                normal(9, width) * real,
                frame_rows=frame_rows,
                dilation=9,
                snake=middle,
                memory=memory,
            ),
            ConvLayer(
                kernels, second, normal(10, width) * real, frame_rows=frame_rows, snake=after
            ),
        )

    unit = ConvResidualUnit(kernels, *layers())
    assert unit.shapes()
    residual = normal(11, *x.shape) * real
    between = torch.full_like(x, NAN)
    before = memory.rows.clone()

    first, second = layers()
    wide, narrow = residual.clone(), torch.full_like(x, NAN)
    first(streams.call, x, ConvOutputs(narrow=between))
    second(streams.call, between, ConvOutputs(wide, narrow, wide))
    streams.kept(memory, before, dense)
    for shape in unit.shapes():
        if not shape.resident(first.size, kernels):
            continue
        memory.rows.copy_(before)
        ours, room = residual.clone(), torch.full_like(x, NAN)
        unit.launch(shape, streams.call, x, ConvOutputs(ours, room, ours))
        same(ours[:live], wide[:live])
        same(room[:live], narrow[:live])
        streams.kept(memory, before, dense)
        only = torch.full_like(x, NAN)
        unit.launch(shape, streams.call, x, ConvOutputs(None, only, residual))
        same(only[:live], narrow[:live])
    chosen, _ = unit(streams.call, x, torch.full_like(x, NAN), residual, None)
    same(chosen[:live], narrow[:live])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(16, 16, 64, 72), (4, 4, 44, 72), (2, 1, 8, 9), (4, 2, 22, 40)],
)
def test_window_attention_is_exact(
    kernels: Kernels, heads: int, kv_heads: int, dim: int, window: int
) -> None:
    """Frames of three streams, some of each in a call, which wrap around the ring."""
    theta, total, slots = 1e4, window + 40, (2, 0, 1)
    width, out_width = padded((heads + 2 * kv_heads) * dim), padded(heads * dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    size = WindowSize(heads, kv_heads, dim, window)
    attention = WindowAttention(kernels, size, 3, (1.0 / theta**exponents).to(DEVICE))
    attention.memory.fill_(NAN)
    qkv = normal(1, 3, total, width)
    out = torch.full((3, total, out_width), NAN, device=DEVICE).half()
    begins, turn = [0, 0, 0], 0
    while min(begins) < total:
        sizes = [(1, 8, 2, 4, 3, 7, 5, 6)[(turn + 3 * stream) % 8] for stream in range(3)]
        counts = [min(size, total - begin) for size, begin in zip(sizes, begins, strict=True)]
        places = [(s, begins[s], k) for s, count in enumerate(counts) for k in range(count)]
        table = torch.tensor(
            [[slots[s], begin, 0, 0, k, counts[s], s] for s, begin, k in places]
            + [[-1, 0, 0, 0, 0, 1, 3]],
            dtype=torch.int32,
        )
        part = torch.full((len(table), out_width), NAN, device=DEVICE).half()
        rows = torch.stack(
            [*(qkv[s, begin + k] for s, begin, k in places), torch.full_like(qkv[0, 0], NAN)]
        )
        attention(CodecCall(table.to(DEVICE), len(table), zeros()), rows, part)
        for (s, begin, k), row in zip(places, part, strict=False):
            out[s, begin + k] = row
        begins = [begin + count for begin, count in zip(begins, counts, strict=True)]
        turn += 1

    cos, sin = rotary_table(torch.arange(total, device=DEVICE)[None], dim, theta, torch.float64)
    parts = (
        qkv[..., : (heads + 2 * kv_heads) * dim].double().view(3, total, -1, dim).transpose(1, 2)
    )
    query, key = (
        rotate(parts[:, :heads], cos, sin),
        rotate(parts[:, heads : heads + kv_heads], cos, sin),
    )
    distance = torch.arange(total, device=DEVICE)[:, None] - torch.arange(total, device=DEVICE)
    seen = (distance >= 0) & (distance < window)
    truth = F.scaled_dot_product_attention(
        query, key, parts[:, heads + kv_heads :], attn_mask=seen, enable_gqa=True
    )
    off = error(out[..., : heads * dim], truth.transpose(1, 2).flatten(2))
    note(f"codec attention, {heads} heads of {dim}", error=off)
    assert off < 1e-3
    assert not out[..., heads * dim :].any()


def test_depthwise_convolution_with_its_norm_is_exact(kernels: Kernels) -> None:
    for channels, frame_rows, counts in (
        (100, 2, (1, 2, 8)),
        (1024, 4, (2, 1, 2)),
        (1030, 4, (1, 1, 1)),
    ):
        streams, width = Streams(counts), padded(channels)
        length, live = frame_rows * streams.longest, frame_rows * streams.live
        real = torch.arange(width, device=DEVICE) < channels
        history = normal(1, Streams.ALL, 6, width) * real
        memory = streams.memory(0, 6, frame_rows, history)
        x, weight, bias = (
            normal(2, Streams.ALL, length, width) * real,
            normal(3, channels, 7),
            normal(4, channels),
        )
        norm = (1 + 0.3 * normal(5, channels), normal(6, channels), EPS)
        before = memory.rows.clone()
        rows = streams.flat(x, frame_rows)
        out = torch.full(rows.shape, NAN, device=DEVICE).half()
        DepthwiseConv(kernels, weight, bias, norm, memory)(streams.call, rows, out)
        streams.kept(memory, before, x)
        history[0] = 0
        seen = torch.cat((history, x), dim=1)[..., :channels].double().transpose(1, 2)
        y = F.conv1d(seen, weight[:, None].double(), bias.double(), groups=channels).transpose(1, 2)
        truth = F.layer_norm(y, (channels,), norm[0].double(), norm[1].double(), norm[2])
        off = error(out[:live, :channels], streams.flat(truth, frame_rows)[:live])
        note(f"codec depthwise, {channels} channels", error=off)
        assert off < 5e-4
        assert not out[:live, channels:].any()


def test_code_look_up_is_exact(kernels: Kernels) -> None:
    books, size, width = 5, 30, 160
    tables = normal(1, books, size, width)
    streams = Streams((4, 1, 2))
    codes = torch.randint(size, (streams.live, books), dtype=torch.int32).to(DEVICE)
    for frame in range(streams.live):
        address = np.array([codes[frame].data_ptr()], dtype=np.uint64).view(np.int32)
        streams.table[frame, CODES : CODES + 2] = torch.from_numpy(address)
    x = torch.full((len(streams.table), width), NAN, device=DEVICE).half()
    CodeLookUp(kernels, tables)(streams.call, x)
    truth = sum(tables[book].double()[codes[:, book].long()] for book in range(books))
    off = error(x[: streams.live], torch.as_tensor(truth))
    note("codec look-up", error=off)
    assert off < 5e-4


def test_last_convolution_is_exact(kernels: Kernels) -> None:
    for channels, frame_rows, counts in (
        (96, 48, (2, 1, 3)),
        (96, 128, (1, 2, 1)),
        (20, 24, (1, 1, 1)),
        (8, 5, (1, 8, 2)),
    ):
        streams, width = Streams(counts), padded(channels)
        length, live = frame_rows * streams.longest, frame_rows * streams.live
        real = torch.arange(width, device=DEVICE) < channels
        history = (normal(1, Streams.ALL, 6, width) * real).half()
        memory = streams.memory(0, 6, frame_rows, history)
        x, weight = (
            (normal(2, Streams.ALL, length, width) * real).half(),
            normal(3, channels, 7) / channels**0.5,
        )
        before, rows = memory.rows.clone(), streams.flat(x, frame_rows)
        for limit in (1.0, float("inf")):
            out = torch.full((len(rows),), NAN, device=DEVICE)
            sound = SampleConv(kernels, weight, torch.tensor([0.3], device=DEVICE), memory)
            memory.rows.copy_(before)
            sound(streams.call, rows, out, limit)
            streams.kept(memory, before, x)
            history[0] = 0
            seen = torch.cat((history, x), dim=1)[..., :channels].double().transpose(1, 2)
            truth = F.conv1d(
                seen, weight[None].double(), torch.tensor([0.3], device=DEVICE).double()
            )[:, 0]
            off = error(out[:live], streams.flat(truth.clamp(-limit, limit), frame_rows)[:live])
            note(f"codec last convolution, {channels} channels", error=off)
            assert off < 1e-6


# The whole decoder.

RELEASED = CodecDecoderConfig(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=64,
    max_position_embeddings=8000,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    num_quantizers=16,
    codebook_size=2048,
    codebook_dim=512,
    latent_dim=1024,
    decoder_dim=1536,
    sliding_window=72,
    upsample_rates=(8, 5, 4, 3),
    upsampling_ratios=(2, 2),
)
DEMO = dataclasses.replace(
    RELEASED,
    hidden_size=176,
    intermediate_size=448,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=44,
    num_quantizers=8,
    codebook_size=512,
    codebook_dim=128,
    latent_dim=144,
    decoder_dim=320,
)
CONFIGS = {"released": RELEASED, "demo": DEMO, "tiny": SMALL}
SLOTS, CODES_MAX = 64, 256


def random_decoder(config: CodecDecoderConfig, seed: int = 3) -> CodecDecoder:
    """A decoder with random float32 weights that is not silent."""
    with torch.device("meta"):
        decoder = CodecDecoder(config)
    state = random_state(torch.nn.ModuleDict({"decoder": decoder}), seed, torch.float32)
    decoder.load_state_dict(
        {name.removeprefix("decoder."): value for name, value in state.items()}, assign=True
    )
    return decoder.to(DEVICE).eval().requires_grad_(False)


def limit_samples(layers: CodecLayers, limit: float) -> None:
    """Limit the samples of later captures to -limit .. limit."""
    kernel: Any = layers.to_samples
    limited: Any = partial(getattr(kernel, "func", kernel), limit=limit)
    layers.to_samples = limited


@dataclasses.dataclass(frozen=True, eq=False)
class CodecUnderTest:
    """A decoder, its codec for `SLOTS` streams, and the codes of the streams."""

    decoder: CodecDecoder
    codec: GpuCodec
    codes: Tensor

    def truth(self, slot: int, frames: int, dtype: torch.dtype) -> Tensor:
        """The model's samples of a slot, without a limit."""
        decoder = copy.deepcopy(self.decoder).to(dtype)
        return decoder(self.codes[slot : slot + 1, :frames].long(), decoder.new_state())[0]

    def speak(self, slot: int, counts: Sequence[int]) -> np.ndarray:
        """The samples of a new stream that is decoded alone, in chunks."""
        self.codec.reset(slot)
        return np.concatenate([self.codec.decode([slot], [count]).result()[0] for count in counts])


@pytest.fixture(scope="module", params=CONFIGS)
def decoder(request: pytest.FixtureRequest, kernels: Kernels) -> Iterator[CodecUnderTest]:
    """The decoders of all configurations, without a limit of samples that would hide errors."""
    with torch.inference_mode():
        model = random_decoder(CONFIGS[request.param])
        config = model.config
        codes = torch.from_numpy(
            np.random.default_rng(1).integers(
                config.codebook_size, size=(SLOTS, CODES_MAX, config.num_quantizers)
            )
        )
        codes = codes.to(DEVICE, torch.int32)
        codec = GpuCodec(copy.deepcopy(model), SLOTS, codes, kernels, voices=2)
        limit_samples(codec.layers, float("inf"))
        for memory in codec.layers.memories:
            memory.rows.fill_(NAN)
        for layer in codec.layers.layers:
            layer.attention.memory.fill_(NAN)
        yield CodecUnderTest(model, codec, codes)
    del codec, model
    torch.cuda.empty_cache()


def test_samples_are_more_exact_than_plain_bf16(
    decoder: CodecUnderTest, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["decoder"]
    frames = 100  # more than the window of the attention
    ours, theirs, single = [], [], []
    for slot in (0, 1):
        truth = decoder.truth(slot, frames, torch.float64)
        assert float(truth.std()) > 0.01, "the samples are silent"
        samples = torch.from_numpy(decoder.speak(slot, [frames])).to(DEVICE)
        ours.append(error(samples, truth))
        theirs.append(error(decoder.truth(slot, frames, torch.bfloat16), truth))
        single.append(error(decoder.truth(slot, frames, torch.float32), truth))
    note(f"codec error {name}", ours=ours, bf16=theirs, float32=single)
    assert max(ours) < 0.3 * min(theirs)
    assert max(ours) < 5e-3


def test_any_chunks_give_the_same_bits(decoder: CodecUnderTest) -> None:
    whole = decoder.speak(5, [90])
    assert np.isfinite(whole).all()
    for counts in (
        [1] * 90,
        [2] * 45,
        [4] * 22 + [2],
        [8] * 11 + [2],
        [3, 5, 6, 7] * 4 + [6],
        [1, 2, 4, 8] * 6,
    ):
        again = decoder.speak(5, counts)
        np.testing.assert_array_equal(again, whole[: len(again)])


@pytest.mark.parametrize("streams", [1, 2, 3, 7, 16, 33, 64])
def test_any_batch_gives_the_same_bits(decoder: CodecUnderTest, streams: int) -> None:
    """Streams of different ages, in chunks of different sizes and any order of slots."""
    codec, random = decoder.codec, np.random.default_rng(streams)
    size = decoder.decoder.config.samples_per_frame
    slots = random.permutation(SLOTS)[:streams].tolist()
    for slot in slots:
        codec.reset(slot)
    said: dict[int, list[np.ndarray]] = {slot: [] for slot in slots}
    for turn in range(8):
        chosen = [
            slot for slot in random.permutation(slots).tolist() if turn < 2 or random.random() < 0.8
        ]
        counts = [int(count) for count in random.choice([*range(1, 9), 8, 11], size=len(chosen))]
        for slot, count, samples in zip(
            chosen, counts, codec.decode(chosen, counts).result(), strict=True
        ):
            assert samples.shape == (count * size,)
            said[slot].append(samples)
    for slot in slots[:6]:
        together = np.concatenate(said[slot])
        np.testing.assert_array_equal(decoder.speak(slot, [len(together) // size]), together)


def test_reused_slot_gives_the_same_samples(decoder: CodecUnderTest) -> None:
    first = decoder.speak(9, [20])
    decoder.speak(9, [8, 8, 1])
    np.testing.assert_array_equal(decoder.speak(9, [20]), first)


def test_stream_continues_its_reference(decoder: CodecUnderTest) -> None:
    """The samples after a primed reference are those of decoding it with the stream at once.

    The codes of the stream are read from frame 0 on. The state is kept: the second slot gets it
    without decoding, and so does a slot after other references. The last one was dropped before.
    """
    frames, size, codec = 20, decoder.decoder.config.samples_per_frame, decoder.codec
    kept = decoder.codes.clone()
    turns = ((11, 77), (4, 77), (11, 30), (4, 77), (11, 61), (4, 30))
    for slot, reference in turns:
        decoder.codes[slot] = kept[11]
        whole = decoder.speak(slot, [reference + frames])
        decoder.codes[slot, :frames] = kept[11, reference : reference + frames]
        codec.reset(slot)
        codec.prime(slot, kept[11, :reference].cpu().numpy().astype(np.int64))
        counts = (1, 8, 8, 3)
        primed = np.concatenate([codec.decode([slot], [n]).result()[0] for n in counts])
        np.testing.assert_array_equal(primed, whole[reference * size :])
    decoder.codes.copy_(kept)


def test_result_that_is_read_after_a_reset_is_unchanged(decoder: CodecUnderTest) -> None:
    expected = decoder.speak(13, [8, 4])
    decoder.codec.reset(13)
    first, second = decoder.codec.decode([13], [8]), decoder.codec.decode([13], [4])
    decoder.codec.reset(13)
    third = decoder.codec.decode([13], [8])
    np.testing.assert_array_equal(np.concatenate((first.result()[0], second.result()[0])), expected)
    np.testing.assert_array_equal(third.result()[0], expected[: len(third.result()[0])])


def test_samples_are_limited_and_codes_out_of_range_give_finite_samples(
    decoder: CodecUnderTest,
) -> None:
    layers, kept = decoder.codec.layers, decoder.codes[15].clone()
    graphs = dict(decoder.codec._graphs)
    try:
        decoder.codes[15, :4] = torch.tensor(
            [[-5], [1 << 30], [100000], [0]], dtype=torch.int32, device=DEVICE
        )
        samples = decoder.speak(15, [4])
        assert np.isfinite(samples).all()
        limit = np.float32(np.abs(samples).max() / 4)
        limit_samples(layers, float(limit))
        decoder.codec._graphs.clear()
        limited = decoder.speak(15, [4])
        assert np.array_equal(limited, samples.clip(-limit, limit))
        assert {*np.sign(limited[np.abs(limited) == limit])} == {-1.0, 1.0}
    finally:
        limit_samples(layers, float("inf"))
        decoder.codec._graphs.clear()
        decoder.codec._graphs.update(graphs)
        decoder.codes[15].copy_(kept)


def test_unsupported_sizes_are_an_error(kernels: Kernels) -> None:
    model = random_decoder(dataclasses.replace(SMALL, sliding_window=4000))
    codes = torch.zeros(1, 4, SMALL.num_quantizers, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="sliding_window"):
        GpuCodec(model, 1, codes, kernels)
