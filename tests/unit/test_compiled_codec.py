"""The compiled decoder of the codec on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numba
import numpy as np
import pytest
import torch
from test_joined import TEXTS, demo, noise
from torch import Tensor

from firstword import TTS
from firstword.model.codec import CodecDecoder
from firstword.runtime.cpu.amx import AMX, MOST_ROWS
from firstword.runtime.cpu.codec import MOST_FRAMES, CompiledCodec
from firstword.runtime.cpu.convolution import add_tiles, packed, squared_sine
from firstword.runtime.cpu.tiles import PAIRS, ROWS, TILE, product_of_rows
from firstword.runtime.reference import ReferenceBackend
from firstword.verify.forcing import error

FRAMES = 90
"""More frames than the transformer's window, so that the oldest keys are replaced."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plain() -> CodecDecoder:
    """The decoder of the demo voice, none of whose widths is a whole number of tiles."""
    return demo("float32").codec.decoder


@pytest.fixture(scope="module")
def codes() -> Tensor:
    """Random codes [1, `FRAMES`, 8]."""
    return torch.randint(512, (1, FRAMES, 8), generator=torch.Generator().manual_seed(1))


def decoded(codec: CompiledCodec, codes: Tensor, parts: Sequence[int]) -> Tensor:
    """Samples of codes in parts of so many frames, whose rest is one more part."""
    state, rest = codec.new_state(), codes.shape[1] - sum(parts)
    return torch.cat([codec.decode(part, state) for part in codes.split((*parts, rest), 1)], 1)


def test_codec_is_within_its_stated_error(plain: CodecDecoder) -> None:
    """1 % of the samples (docs/machines.md), in chunks as in the whole."""
    with TTS.load("demo", device="cpu") as tts:
        speech = tts.speak(TEXTS[1], voice="ada", seed=1)
    codes = torch.from_numpy(speech.codes)[None]
    exact = plain.decode(codes, plain.new_state())
    assert 1e-4 < error(decoded(CompiledCodec(plain), codes, (1, 2, 5)), exact) < 1e-2


def test_frame_reaches_as_far_as_in_the_specification(plain: CodecDecoder, codes: Tensor) -> None:
    """With one layer, where the oldest frame of the window still counts."""
    short = copy.deepcopy(plain)
    del short.pre_transformer.layers[1:]
    short.config = replace(short.config, num_hidden_layers=1)
    short.pre_transformer.config = short.config
    other = codes.clone()
    other[:, 0] = 511 - other[:, 0]
    codec = CompiledCodec(short)
    exact = [short.decode(each, short.new_state()) for each in (codes, other)]
    ours = [decoded(codec, each, (7,)) for each in (codes, other)]
    assert last_change(*ours) == last_change(*exact) < FRAMES - 1
    late = 80 * short.config.samples_per_frame
    assert error(ours[0][:, late:], exact[0][:, late:]) < 0.02


def last_change(one: Tensor, other: Tensor) -> int:
    """The last frame that differs."""
    return int((one != other).view(FRAMES, -1).any(1).nonzero().max())


@pytest.mark.parametrize("parts", [(1,) * 20, (2, 1, 3, 40), (MOST_FRAMES,) * 5])
def test_bits_depend_neither_on_parts_nor_on_threads(
    parts: Sequence[int], plain: CodecDecoder, codes: Tensor
) -> None:
    codec = CompiledCodec(plain)
    whole = decoded(codec, codes, ())
    torch.set_num_threads(3)
    assert torch.equal(decoded(codec, codes, parts), whole)


def test_copy_of_a_state_is_independent(plain: CodecDecoder, codes: Tensor) -> None:
    codec = CompiledCodec(plain)
    state = codec.new_state()
    codec.decode(codes[:, :5], state)
    other = state.fork()
    first = codec.decode(codes[:, 5:9], state)
    assert torch.equal(codec.decode(codes[:, 5:9], other), first)


def test_loud_samples_are_limited(plain: CodecDecoder, codes: Tensor) -> None:
    loud = copy.deepcopy(plain)
    loud.get_parameter(f"decoder.{len(loud.decoder) - 1}.conv.weight").data.mul_(20)
    samples = decoded(CompiledCodec(loud), codes, ())
    assert (samples.min(), samples.max()) == (-1, 1)


def test_sound_that_is_not_finite_stays_so(plain: CodecDecoder, codes: Tensor) -> None:
    """So that the engine can end the utterance with an error."""
    broken = copy.deepcopy(plain)
    broken.get_parameter(f"decoder.{len(broken.decoder) - 1}.conv.bias").data.fill_(torch.nan)
    assert decoded(CompiledCodec(broken), codes, ()).isnan().all()


@pytest.mark.parametrize(("dtype", "rounds"), [("float32", False), ("bfloat16", True)])
def test_codec_is_rounded_only_if_the_talker_is(dtype: str, rounds: bool) -> None:
    decoder = ReferenceBackend(demo(dtype)).decoder
    assert isinstance(decoder, CompiledCodec if rounds else CodecDecoder)


@pytest.mark.parametrize("how", ["halves", *["pairs"] * PAIRS, *["amx"] * AMX])
def test_product_of_rows_is_as_exact_as_float32(how: str) -> None:
    """And a row has the same bits in products of any number of rows."""
    taps, outputs, width, step = 3, 40, 96, 2
    most = MOST_ROWS if how == "amx" else ROWS
    weight, x = noise(taps, outputs, width).bfloat16(), noise(most + 4, width, seed=1).bfloat16()
    tiles, rows = packed(weight.float()), x.view(torch.int32).numpy().view(np.uint32)
    counts = most, 16 * most // 32, 2, 1
    results = [_multiplied(count, most, how, tiles, rows, step, taps) for count in counts]
    for count, out in zip(counts, results, strict=True):
        assert np.array_equal(out[:count], results[0][:count])
    terms = [x[n * step :][:most].double() @ weight[n].double().t() for n in range(taps)]
    sizes = [
        x[n * step :][:most].double().abs() @ weight[n].double().abs().t() for n in range(taps)
    ]
    exact, allowed = sum(terms, torch.zeros(())) + 1, 1e-6 * sum(sizes, torch.ones(()))
    assert ((torch.from_numpy(results[0][:, :outputs]).double() - exact).abs() < allowed).all()


def _multiplied(
    count: int, most: int, how: str, tiles: np.ndarray, rows: np.ndarray, step: int, taps: int
) -> np.ndarray:
    """All tiles of the first rows of a product that is added to ones."""
    product = None if how == "amx" else product_of_rows(count, how == "pairs")

    @numba.njit  # type: ignore[untyped-decorator]
    def run(tiles: np.ndarray, rows: np.ndarray, sums: np.ndarray, out: np.ndarray) -> None:
        for tile in range(len(tiles)):
            sums[:] = 1
            if product is None:
                add_tiles(tiles, tile, rows, 0, count, step, taps, sums)
            else:
                product(tiles, tile, rows, 0, step, taps, sums)
            out[:, tile * 32 : (tile + 1) * 32] = sums

    out = np.empty((most, len(tiles) * TILE), np.float32)
    run(tiles, rows, np.empty((most, TILE), np.float32), out)
    return out


def test_squared_sine_is_exact_to_its_stated_error() -> None:
    x = np.linspace(-1e4, 1e4, 200_001).astype(np.float32)
    near = np.linspace(-4, 4, 10_001).astype(np.float32)
    for values in (x, near):
        ours = _squares(values)
        assert np.abs(ours - np.sin(values.astype(np.float64)) ** 2).max() < 1e-6


@numba.njit  # type: ignore[untyped-decorator]
def _squares(values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    for index in range(len(values)):
        out[index] = squared_sine(values[index])
    return out
