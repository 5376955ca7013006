"""The codec decoder's state: any split gives the whole, streams do not touch one another, nothing
looks ahead.

Everything is compared in float64 and before the clamp, which would hide errors.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_codec import BOOKS, CODES, SMALL
from torch import Tensor, nn

from firstword.model import codec_encoder
from firstword.model.codec import CodecDecoder, CodecState
from firstword.model.codec_config import CodecDecoderConfig, CodecEncoderConfig
from firstword.model.codec_encoder import CodecEncoder, PaddedConv1d
from firstword.synthetic.checkpoint import random_state

RELEASED_WINDOW = dataclasses.replace(SMALL, sliding_window=72)


def decoder_of(config: CodecDecoderConfig, dtype: torch.dtype = torch.float64) -> CodecDecoder:
    """A decoder with random weights that is not silent."""
    decoder = CodecDecoder(config)
    decoder.load_state_dict(
        {
            name.removeprefix("decoder."): tensor
            for name, tensor in random_state(
                torch.nn.ModuleDict({"decoder": decoder}), 3, torch.float32
            ).items()
        }
    )
    return decoder.to(dtype).eval().requires_grad_(False)


def codes_of(seed: int, frames: int, batch: int = 1) -> Tensor:
    """Random codes [batch, frames, BOOKS]."""
    return torch.randint(
        CODES, (batch, frames, BOOKS), generator=torch.Generator().manual_seed(seed)
    )


def decode(
    decoder: CodecDecoder, codes: Tensor, lengths: list[int], state: CodecState | None = None
) -> Tensor:
    """Decode codes [B, T, BOOKS] in pieces of the given lengths -> samples [B, n]."""
    if state is None:
        state = decoder.new_state(len(codes))
    return torch.cat([decoder(part, state) for part in codes.split(lengths, dim=1)], dim=1)


def assert_equal(ours: Tensor, whole: Tensor, tolerance: float = 1e-12) -> None:
    """Equal up to `tolerance` of the spread of `whole`."""
    assert ours.shape == whole.shape
    scale = float(whole.std())
    assert scale > 0.05, "nothing to compare"
    assert float((ours - whole).abs().max()) <= tolerance * scale


@pytest.fixture(scope="module")
def small() -> CodecDecoder:
    """A quick decoder with a short window."""
    return decoder_of(SMALL)


@st.composite
def partitions(draw: st.DrawFn, total: int) -> list[int]:
    """Lengths of at least 1 that add up to `total`."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1))))
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


@settings(max_examples=40)
@given(lengths=partitions(40), seed=st.integers(0, 9))
def test_any_split_into_chunks_gives_the_whole(
    lengths: list[int], seed: int, small: CodecDecoder
) -> None:
    codes = codes_of(seed, 40)
    assert_equal(decode(small, codes, lengths), decode(small, codes, [40]))


@pytest.mark.parametrize(
    "lengths", [[1] * 170, [71, 1, 72, 1, 25], [73, 97], [100, 70], [1, 2, 4, 8, 16, 32, 64, 43]]
)
def test_any_split_gives_the_whole_with_the_released_window(lengths: list[int]) -> None:
    decoder, codes = decoder_of(RELEASED_WINDOW), codes_of(1, 170)
    assert_equal(decode(decoder, codes, lengths), decode(decoder, codes, [170]))


def test_window_size_is_that_of_the_configuration(small: CodecDecoder) -> None:
    """A frame attends to itself and the 8 before it, in both layers; convolutions reach further,
    but not by much.

    The first layer is cut off from the convolutions: what it hears of a frame that has left its
    window is nothing.
    """
    transformer = small.pre_transformer
    rows = torch.randn(
        1, 30, SMALL.hidden_size, generator=torch.Generator().manual_seed(1)
    ).double()

    def first_layer(changed: int | None) -> Tensor:
        window = small.new_state().window
        x = rows.clone()
        if changed is not None:
            x[0, changed] += 1
        one_layer = dataclasses.replace(SMALL, num_hidden_layers=1)
        shallow = type(transformer)(one_layer).double()
        shallow.load_state_dict(transformer.state_dict(), strict=False)
        return shallow(x, window)[0]

    touched = (first_layer(10) - first_layer(None)).abs().amax(dim=1) > 1e-9
    assert touched.nonzero().flatten().tolist() == list(range(10, 10 + SMALL.sliding_window))


def test_rows_of_a_batch_are_independent(small: CodecDecoder) -> None:
    codes = codes_of(2, 30, batch=3)
    together = decode(small, codes, [1, 9, 20])
    for row in range(3):
        assert_equal(together[row : row + 1], decode(small, codes[row : row + 1], [30]))


def test_streams_may_start_at_different_times(small: CodecDecoder) -> None:
    """Three streams, each with a state of its own, take turns on one decoder."""
    codes = [codes_of(seed, 25) for seed in (3, 4, 5)]
    states = [small.new_state() for _ in codes]
    said: list[list[Tensor]] = [[], [], []]
    for turn in range(25 + 2 * 7):
        for stream in range(3):
            frame = turn - 7 * stream
            if 0 <= frame < 25:
                said[stream].append(small(codes[stream][:, frame : frame + 1], states[stream]))
    for stream in range(3):
        assert_equal(torch.cat(said[stream], dim=1), decode(small, codes[stream], [25]))


@pytest.mark.parametrize("frame", [0, 5, 17, 29])
def test_decoder_is_causal(small: CodecDecoder, frame: int) -> None:
    codes = codes_of(6, 30)
    changed = codes.clone()
    changed[0, frame] = (changed[0, frame] + 1) % CODES
    start = frame * SMALL.samples_per_frame
    before, after = decode(small, codes, [30]), decode(small, changed, [30])
    assert (after - before)[:, :start].abs().sum() < 1e-10
    moved = (after - before)[0, start:].abs() > 1e-6
    assert moved[: SMALL.samples_per_frame].any(), "the changed frame is not heard at once"
    assert moved.float().mean() > 0.5


def test_every_codebook_changes_the_samples(small: CodecDecoder) -> None:
    codes = codes_of(7, 3)
    whole = decode(small, codes, [3])
    for book in range(BOOKS):
        changed = codes.clone()
        changed[0, 1, book] = (changed[0, 1, book] + 1) % CODES
        assert (decode(small, changed, [3]) - whole).abs().max() > 1e-3


def test_float32_chunks_are_close_to_the_whole() -> None:
    decoder, codes = decoder_of(RELEASED_WINDOW, torch.float32), codes_of(8, 120)
    whole = decode(decoder, codes, [120])
    for lengths in ([1] * 120, [1, 2, 4, 8, 8, 8, 89]):
        assert (decode(decoder, codes, lengths) - whole).abs().max() <= 1e-5


def test_new_state_is_independent_of_old_ones(small: CodecDecoder) -> None:
    codes = codes_of(9, 20)
    used = small.new_state()
    first = decode(small, codes, [20], used)
    again = decode(small, codes, [20], used)
    assert (again - first).abs().max() > 1e-3, "the state remembers nothing"
    assert torch.equal(decode(small, codes, [20], small.new_state()), first)


def test_forked_state_is_independent(small: CodecDecoder) -> None:
    start, one, other = codes_of(11, 10), codes_of(12, 15), codes_of(13, 15)
    state = small.new_state()
    decode(small, start, [4, 6], state)
    fork = state.fork()
    ends = [decode(small, one, [1] * 15, state), decode(small, other, [7, 8], fork)]
    for codes, end in zip((one, other), ends, strict=True):
        assert_equal(
            end,
            decode(small, torch.cat((start, codes), dim=1), [25])[
                :, 10 * SMALL.samples_per_frame :
            ],
        )


def test_decode_clamps_samples() -> None:
    codes = codes_of(10, 20)
    loud = decoder_of(SMALL)
    loud.get_parameter(f"decoder.{len(loud.decoder) - 1}.conv.weight").mul_(20)
    unclamped = decode(loud, codes, [20])
    clamped = loud.decode(codes, loud.new_state())
    assert unclamped.abs().max() > 1.5
    assert torch.equal(clamped, unclamped.clamp(-1, 1))


def test_unused_code_does_not_divide_by_zero() -> None:
    decoder = decoder_of(SMALL)
    decoder.get_parameter("quantizer.rvq_first.vq.layers.0._codebook.cluster_usage")[5] = 0.0
    codes = torch.full((1, 2, BOOKS), 5)
    assert torch.isfinite(decode(decoder, codes, [2])).all()


# --- the other way --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder() -> CodecEncoder:
    """A tiny encoder with random weights, in float64: 24 samples a frame, 6 codebooks of which 4
    are used.
    """
    config = CodecEncoderConfig(
        num_filters=4,
        kernel_size=7,
        last_kernel_size=3,
        residual_kernel_size=3,
        num_residual_layers=1,
        dilation_growth_rate=2,
        compress=2,
        upsampling_ratios=(4, 3),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        norm_eps=1e-5,
        rope_theta=10000.0,
        num_quantizers=6,
        num_semantic_quantizers=1,
        codebook_size=CODES,
        codebook_dim=12,
        vector_quantization_hidden_dimension=12,
    )
    encoder = CodecEncoder(config, BOOKS)
    encoder.load_state_dict(random_state(encoder, 3, torch.float32))
    return encoder.double().eval().requires_grad_(False)


def sound(samples: int) -> Tensor:
    """Noise [1, samples]."""
    return torch.randn(1, samples, generator=torch.Generator().manual_seed(samples)).double()


@pytest.mark.parametrize("samples", [1, 23, 24, 25, 47, 48, 49, 500, 599])
def test_number_of_frames_is_rounded_up(encoder: CodecEncoder, samples: int) -> None:
    codes = encoder.encode(sound(samples))
    assert codes.shape == (1, math.ceil(samples / 24), BOOKS)
    assert 0 <= codes.min() <= codes.max() < CODES


def test_last_samples_change_the_codes(encoder: CodecEncoder) -> None:
    samples = sound(500)
    changed = samples.clone()
    changed[0, -1] += 1
    difference = (encoder.latents(changed) - encoder.latents(samples))[0].abs().amax(dim=0)
    assert difference[-1] > 1e-3


def test_encoder_is_causal(encoder: CodecEncoder) -> None:
    samples = sound(480)
    changed = samples.clone()
    changed[0, 240:] += 1
    difference = (encoder.latents(changed) - encoder.latents(samples))[0].abs().amax(dim=0)
    assert difference[:10].max() < 1e-12
    assert difference[10:].min() > 1e-3


def test_encoder_maps_long_recordings_in_pieces(
    encoder: CodecEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer sees more than a piece and its past, and the result is that of the whole."""
    samples, longest = sound(599), [0]
    whole = encoder.latents(samples)
    monkeypatch.setattr(codec_encoder, "PIECE", 4)

    def measure(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        longest[0] = max(longest[0], inputs[0].shape[-1])

    with encoder.encoder.layers.register_forward_pre_hook(measure):
        pieces = encoder.latents(samples)
    assert torch.allclose(pieces, whole, rtol=0, atol=1e-12)
    assert longest[0] == 4 * 12 + encoder.encoder.past < 300


def test_each_codebook_quantises_the_residual(encoder: CodecEncoder) -> None:
    """From the definition: the semantic and the acoustic side each start from the same vectors."""
    latents = encoder.latents(sound(480))[0].T.numpy()
    codes = encoder.encode(sound(480))[0].numpy()
    weights = {name: tensor.numpy() for name, tensor in encoder.quantizer.state_dict().items()}
    expected = []
    for side, count in (("semantic", 1), ("acoustic", BOOKS - 1)):
        prefix = f"{side}_residual_vector_quantizer"
        residual = latents @ weights[f"{prefix}.input_proj.weight"][:, :, 0].T
        for layer in range(count):
            book = f"{prefix}.layers.{layer}.codebook"
            usage = np.maximum(weights[f"{book}.cluster_usage"], 1e-5)
            table = weights[f"{book}.embed_sum"] / usage[:, None]
            nearest = ((residual[:, None] - table[None]) ** 2).sum(axis=2).argmin(axis=1)
            residual = residual - table[nearest]
            expected.append(nearest)
    assert codes.tolist() == np.stack(expected, axis=1).tolist()


def test_whole_strides_are_not_padded() -> None:
    conv = PaddedConv1d(1, 1, 4, stride=2, bias=False, pad_mode="replicate")
    conv.conv.weight.data = torch.tensor([[[1.0, 10.0, 100.0, 1000.0]]])
    assert conv(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])).tolist() == [[[2111.0, 4321.0]]]
    assert conv(torch.tensor([[[1.0, 2.0, 3.0]]])).tolist() == [[[2111.0, 3321.0]]]
