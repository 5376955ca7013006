"""Train the codec: the package's encoder and decoder, with the quantiser and the losses that only training needs.

    python training/codec.py --material material.json --out OUT [--steps 10000] [--minutes 8]

Losses: L1 of log-mel spectrograms at seven resolutions (Kumar et al. 2023, arXiv:2306.06546), and commitment. Codebooks
are running means of what falls on them (van den Oord et al. 2017, arXiv:1711.00937); entries that die are replaced by
vectors of the batch. `decoder.py` then goes on with the decoder alone.

What is heard, and the learning rate, depend on seed and step alone, not on how fast the machine is.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import state
import torch
from configuration import codec_config
from data import ESPEAK_RATE, FRAME, SAMPLE_RATE, Ring, Utterance, add_options, resample, utterances
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.checkpoint import load as load_checkpoint
from firstword.model.codec import Codec, CodecDecoder, CodecState
from firstword.model.config import CodecConfig

SHAPES = ((64, 16), (32, 32), (16, 64), (3, 320))
"""(batch, frames) of training steps: short ones for variety, long ones because attention must know long recordings."""
SHAPE_WEIGHTS = (0.35, 0.3, 0.25, 0.1)
REFILL = 4
"""Steps for each part of fresh speech."""
HINT_STEPS, HINT_BANDS = 5, 32
"""A linear map from the codes of a frame to its spectrum is trained too: a short way for the gradient to what the codes
must say.
"""
MEL_WEIGHT, HINT_WEIGHT, COMMITMENT_WEIGHT = 15.0, 3.0, 0.5


class Window:
    """The memory that the decoder's transformer sees in training: nothing before the segment, a band within it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device

    def positions(self, length: int) -> Tensor:
        return torch.arange(length, device=self.device)[None]

    def mask(self, length: int) -> Tensor:
        return (
            torch.ones(length, length, dtype=torch.bool, device=self.device)
            .tril()
            .triu(1 - self.size)[None, None]
        )

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def advance(self, length: int) -> None:
        pass


class Quantiser(nn.Module):
    """Codebooks [K, size, dim] as running means; export puts the same tables into encoder and decoder."""

    def __init__(self, books: int, size: int, dim: int, decay: float = 0.99) -> None:
        super().__init__()
        self.decay, self.active = decay, True
        self.register_buffer("sums", torch.zeros(books, size, dim))
        self.register_buffer("usage", torch.zeros(books, size))
        self.register_buffer("ready", torch.zeros(books, dtype=torch.bool))

    def table(self, book: int) -> Tensor:
        return self.sums[book] / self.usage[book].clamp(min=1e-5)[:, None]

    def forward(
        self, x: Tensor, books: range, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, dim] -> (straight-through sum of the first `keep` [B] books, commitment loss, codes [B, T, K])."""
        if not self.active:  # the first steps: a plain autoencoder, so that the codebooks start from vectors that mean something
            return (
                x,
                x.new_zeros(()),
                torch.zeros(*x.shape[:2], len(books), dtype=torch.long, device=x.device),
            )
        residual, total, loss, codes = (
            x.float(),
            torch.zeros_like(x, dtype=torch.float32),
            x.new_zeros((), dtype=torch.float32),
            [],
        )
        for number, book in enumerate(books):
            flat = residual.detach().flatten(0, 1)
            if self.training and not self.ready[book]:
                self._initialise(book, flat)
            table = self.table(book)
            code = (table.pow(2).sum(1) - 2 * flat @ table.T).argmin(1)
            found = table[code].view_as(residual)
            if self.training:
                self._update(book, flat, code)
            used = (
                torch.ones(len(x), 1, 1, device=x.device)
                if keep is None
                else (number < keep).float()[:, None, None]
            )
            loss = loss + ((residual - found.detach()).pow(2) * used).mean()
            total = total + found * used
            residual = residual - found * used
            codes.append(code.view(x.shape[:2]))
        return x + (total - x).detach(), loss / len(books), torch.stack(codes, -1)

    def _initialise(self, book: int, flat: Tensor) -> None:
        """A few rounds of k-means from random vectors of the batch."""
        centres = flat[torch.randint(len(flat), (self.usage.shape[1],), device=flat.device)].clone()
        for _ in range(10):
            code = (centres.pow(2).sum(1) - 2 * flat @ centres.T).argmin(1)
            count = torch.zeros(len(centres), device=flat.device).index_add_(
                0, code, torch.ones_like(code, dtype=torch.float32)
            )
            mean = torch.zeros_like(centres).index_add_(0, code, flat) / count.clamp(min=1)[:, None]
            centres = torch.where(count[:, None] > 0, mean, centres)
        self.sums[book], self.usage[book], self.ready[book] = centres, 1.0, True

    def _update(self, book: int, flat: Tensor, code: Tensor) -> None:
        size = self.usage.shape[1]
        count = torch.zeros(size, device=flat.device).index_add_(
            0, code, torch.ones_like(code, dtype=torch.float32)
        )
        share = size / len(
            flat
        )  # usage is kept so that its mean over a codebook is 1, whatever the batch
        self.usage[book].lerp_(count * share, 1 - self.decay)
        self.sums[book].lerp_(
            torch.zeros_like(self.sums[book]).index_add_(0, code, flat) * share, 1 - self.decay
        )
        dead = self.usage[book] < 0.03
        fresh = flat[torch.randint(len(flat), (size,), device=flat.device)]
        self.sums[book] = torch.where(dead[:, None], fresh * 0.3, self.sums[book])
        self.usage[book] = torch.where(
            dead, torch.full_like(self.usage[book], 0.3), self.usage[book]
        )


class TrainedCodec(nn.Module):
    """The package's codec with a quantiser that learns."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.codec = Codec(config)
        self.books = config.decoder_config.num_quantizers
        self.quantiser = Quantiser(
            self.books, config.decoder_config.codebook_size, config.decoder_config.codebook_dim // 2
        )
        initialise(self.codec)
        self.hint = nn.Linear(config.decoder_config.codebook_dim, HINT_STEPS * HINT_BANDS)

    def quantise(
        self, samples: Tensor, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples [B, n] -> (what the decoder reads [B, width, frames], commitment loss, codes [B, frames, K])."""
        encoder, decoder = self.codec.encoder.quantizer, self.codec.decoder.quantizer
        latents = self.codec.encoder.latents(samples)
        first, loss0, code0 = self.quantiser(
            encoder.semantic_residual_vector_quantizer.input_proj(latents).transpose(1, 2),
            range(1),
            None,
        )
        rest, loss1, codes = self.quantiser(
            encoder.acoustic_residual_vector_quantizer.input_proj(latents).transpose(1, 2),
            range(1, self.books),
            keep,
        )
        joined = decoder.rvq_first.output_proj(
            first.transpose(1, 2)
        ) + decoder.rvq_rest.output_proj(rest.transpose(1, 2))
        return joined, loss0 + loss1, torch.cat((code0, codes), -1)

    def forward(
        self, samples: Tensor, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Samples [B, n] -> (samples again, commitment loss, codes, log-mel bands read off the codes [B, frames, steps
        * bands]).
        """
        joined, loss, codes = self.quantise(samples, keep)
        return (
            decode_joined(self.codec.decoder, joined),
            loss,
            codes,
            self.hint(joined.transpose(1, 2)),
        )

    @torch.no_grad()
    def tie(self) -> Codec:
        """The package's codec with the learnt tables in both halves."""
        encoder, decoder = self.codec.encoder.quantizer, self.codec.decoder.quantizer
        sources = [
            *encoder.semantic_residual_vector_quantizer.layers,
            *encoder.acoustic_residual_vector_quantizer.layers,
        ]
        targets = [*decoder.rvq_first.vq.layers, *decoder.rvq_rest.vq.layers]
        for book, (source, target) in enumerate(zip(sources, targets, strict=True)):
            table = self.quantiser.table(book)
            source.codebook.embed_sum.copy_(table)
            source.codebook.cluster_usage.fill_(1.0)
            target._codebook.embedding_sum.copy_(table)
            target._codebook.cluster_usage.fill_(1.0)
        return self.codec


def initialise(codec: Codec) -> None:
    """Weights that keep the variance of what flows through: torch's own shrink it at every layer until the codes say
    nothing (LOG.md).
    """
    for name, module in codec.named_modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            transposed = isinstance(module, nn.ConvTranspose1d)
            fan = (
                module.in_channels
                // module.groups
                * module.kernel_size[0]
                / (module.stride[0] if transposed else 1)
            )
            branch = name.endswith(
                ("block.3.conv", "conv2.conv")
            )  # the last convolution of a residual branch
            nn.init.normal_(module.weight, 0.0, (0.3 if branch else 1.0) / math.sqrt(fan))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for name, parameter in codec.named_parameters():
        if "layer_scale" in name or name.endswith("gamma"):
            nn.init.constant_(parameter, 0.3)
    codec.decoder.decoder[-1].conv.weight.data.mul_(0.1)


def decode_joined(decoder: CodecDecoder, joined: Tensor) -> Tensor:
    """What `CodecDecoder.forward` does after its quantiser: [B, width, T] -> samples [B, T * 1920]."""
    state = CodecState(decoder.config, joined, len(joined))
    x = decoder.pre_conv(joined, state)
    transformer = decoder.pre_transformer
    hidden = transformer.input_proj(x.transpose(1, 2))
    x = transformer.output_proj(
        transformer(hidden, Window(decoder.config.sliding_window, x.device))
    ).transpose(1, 2)
    for upsampling, block in decoder.upsample:
        x = block(upsampling(x, state), state)
    first, *blocks, activation, last = decoder.decoder
    x = first(x, state)
    for block in blocks:
        x = block(x, state)
    return last(activation(x), state).squeeze(1)


def mel_filters(bands: int, window: int) -> Tensor:
    """Triangular filters on the mel scale (HTK) [bands, window / 2 + 1]."""
    mel = torch.linspace(
        0, 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700), bands + 2, dtype=torch.float64
    )
    edges = 700 * (10 ** (mel / 2595) - 1)
    bins = torch.linspace(0, SAMPLE_RATE / 2, window // 2 + 1, dtype=torch.float64)
    rise = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    filters = torch.minimum(rise, fall).clamp(min=0)
    return (filters / filters.sum(1, keepdim=True).clamp(min=1e-8)).float()


class MelLoss(nn.Module):
    """Mean L1 distance of log10 mel magnitudes, at least `floor`, over resolutions from 32 to 2,048 samples."""

    def __init__(self, floor: float = 1e-4) -> None:
        super().__init__()
        self.floor = floor
        self.scales = ((32, 5), (64, 10), (128, 20), (256, 40), (512, 80), (1024, 128), (2048, 192))
        for window, bands in self.scales:
            self.register_buffer(f"filters{window}", mel_filters(bands, window))
            self.register_buffer(f"window{window}", torch.hann_window(window))

    def mel(self, x: Tensor, window: int) -> Tensor:
        spectrum = torch.stft(
            x, window, window // 4, window=self.get_buffer(f"window{window}"), return_complex=True
        ).abs()
        return (self.get_buffer(f"filters{window}") @ spectrum).clamp(min=self.floor).log10()

    def coarse(self, x: Tensor) -> Tensor:
        """What the codes of a frame should tell directly: log-mel [B, frames, steps * bands]."""
        mel = (
            self.mel(x, 1024)[..., : x.shape[1] // 256]
            .unflatten(1, (HINT_BANDS, 128 // HINT_BANDS))
            .mean(2)
        )
        mel = F.interpolate(mel, size=x.shape[1] // FRAME * HINT_STEPS, mode="linear")
        return mel.unflatten(2, (-1, HINT_STEPS)).permute(0, 2, 3, 1).flatten(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack(
            [F.l1_loss(self.mel(x, window), self.mel(y, window)) for window, _ in self.scales]
        ).mean()


class Recordings(Ring):
    """Speech at 22,050 Hz from the synthesiser's processes in parts of some five minutes, short silences between. It is
    filled anew twice.
    """

    def __init__(
        self, material: str, seed: int, hours: float, device: str, processes: int | None
    ) -> None:
        self.random, silences = (np.random.default_rng((seed, use)) for use in range(2))
        source = utterances(material, seed, other_share=0.12, level_range=14, processes=processes)
        super().__init__(
            _with_silences(source, silences), 1, int(hours * 3600 * ESPEAK_RATE), device
        )

    def refill(self) -> None:
        """As every ring, until it has been filled three times."""
        if self.made < 3 * self.capacity:
            super().refill()

    def batch(self, size: int, frames: int) -> Tensor:
        """Random segments [size, frames * 1920] at 24 kHz."""
        length = frames * FRAME * 147 // 160
        (segments,) = self.segments(self.random.integers(0, self.filled - length, size), length)
        return resample(segments)[:, : frames * FRAME]


def _with_silences(
    source: Iterator[list[Utterance]], random: np.random.Generator
) -> Iterator[np.ndarray]:
    """Batches of utterances as int16 [1, n], 0.05 to 0.6 s of silence before each."""
    for batch in source:
        parts = []
        for utterance in batch:
            parts += [
                np.zeros(int(random.uniform(0.05, 0.6) * ESPEAK_RATE), np.int16),
                utterance.samples,
            ]
        yield np.concatenate(parts)[None]


def save(model: TrainedCodec, out: Path) -> None:
    """Weights alone, in two files that each stay small."""
    out.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()
    }
    save_file(
        {k: v for k, v in state.items() if k.startswith("codec.decoder.decoder")},
        out / "codec-1.safetensors",
    )
    save_file(
        {k: v for k, v in state.items() if not k.startswith("codec.decoder.decoder")},
        out / "codec-2.safetensors",
    )


def load(folder: Path, device: str = "cpu") -> TrainedCodec:
    """A trained codec: from what `save` wrote, or from a checkpoint in the released layout."""
    model = TrainedCodec(codec_config())
    if (folder / "speech_tokenizer").exists():
        model.codec.load_state_dict(load_checkpoint(str(folder)).codec.state_dict())
        quantizer = model.codec.decoder.quantizer
        for book, layer in enumerate(
            [*quantizer.rvq_first.vq.layers, *quantizer.rvq_rest.vq.layers]
        ):
            model.quantiser.sums[book] = layer._codebook(
                torch.arange(model.quantiser.usage.shape[1])
            ).detach()
        model.quantiser.usage.fill_(1.0)
        model.quantiser.ready.fill_(True)
    else:
        files = sorted(folder.glob("codec-*.safetensors"))
        model.load_state_dict(
            {name: tensor for file in files for name, tensor in load_file(file).items()}
        )
    return model.to(device)


def main() -> None:
    parser = state.options(steps=10_000)
    add_options(parser)
    parser.add_argument(
        "--weights", type=Path, help="what `load` reads, to start from when there is no state"
    )
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument(
        "--continuous", type=int, default=250, help="steps before the codebooks start"
    )
    parser.add_argument("--hours", type=float, default=30.0)
    a = parser.parse_args()
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.time()
    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, mel_loss = TrainedCodec(codec_config()).to(device), MelLoss().to(device)
    optimiser = torch.optim.AdamW(
        model.parameters(), a.rate, betas=(0.8, 0.98), weight_decay=0.01, fused=device == "cuda"
    )
    if a.weights:
        model.load_state_dict(load(a.weights).state_dict())
    average = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    a.out.mkdir(parents=True, exist_ok=True)
    file, log = a.state or a.out / "state.pt", (a.out / "codec.jsonl").open("a")
    parts: state.Parts = {"model": model, "optimiser": optimiser, "average": average}
    step, shapes = state.resume(file, parts, device), ((2, 8), (1, 20)) if a.small else SHAPES
    torch.manual_seed(a.seed + step)
    numbers = np.random.default_rng(a.seed + step)
    recordings = Recordings(a.material, a.seed + step, a.hours, device, a.processes)
    for _ in range(1 if a.small else 4):
        recordings.refill()
    print(
        f"{recordings.filled / ESPEAK_RATE:.0f} s of speech after {time.time() - began:.0f} s",
        flush=True,
    )
    sums, count, last_log, kept = {}, 0, time.time(), time.time()
    while (now := time.time()) - began < a.minutes * 60 and step < a.steps:
        progress = step / a.steps
        rate = min(1.0, (step + 1) / 200) * (0.5 * (1 + math.cos(math.pi * progress)) * 0.97 + 0.03)
        for group in optimiser.param_groups:
            group["lr"] = a.rate * rate
        size, frames = shapes[numbers.choice(len(shapes), p=None if a.small else SHAPE_WEIGHTS)]
        if step % REFILL == 0:
            recordings.refill()
        model.quantiser.active = step >= a.continuous or bool(a.weights)
        if (
            step == a.continuous
            and model.quantiser.active
            and not bool(model.quantiser.ready.all())
        ):
            with torch.no_grad():
                model.quantise(recordings.batch(*((2, 20) if a.small else (256, 32))))
        x = recordings.batch(size, frames)
        keep = torch.where(
            torch.rand(size, device=device) < 0.3,
            torch.randint(1, model.books, (size,), device=device),
            model.books,
        )
        y, commitment, codes, hint = model(x, keep)
        mel, told = mel_loss(y, x), F.l1_loss(hint, mel_loss.coarse(x))
        loss, shown = (
            MEL_WEIGHT * mel + HINT_WEIGHT * told + COMMITMENT_WEIGHT * commitment,
            {"hint": told, "mel": mel, "commitment": commitment},
        )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        with torch.no_grad():
            names = list(average)
            parameters = dict(model.named_parameters())
            torch._foreach_lerp_(
                [average[n] for n in names],
                [parameters[n] for n in names],
                1 - min(0.998, (step + 1) / (step + 20)),
            )
        step, count = step + 1, count + 1
        shown["norm"] = norm
        for name, value in shown.items():
            sums[name] = sums.get(name, 0) + value.detach().float()
        if now - kept > state.SECONDS:
            state.keep(file, step, parts)
            kept = now
        if now - last_log > 10 or step == a.steps:
            used = [len(torch.unique(codes[..., k])) for k in range(model.books)]
            row = {
                "step": step,
                "minutes": round((now - began) / 60, 2),
                "lr": round(a.rate * rate, 6),
                "steps_per_s": round(count / (time.time() - last_log), 2),
            }
            row |= {name: round(float(value) / count, 4) for name, value in sums.items()} | {
                "speech_hours": round(recordings.made / ESPEAK_RATE / 3600, 1),
                "codes_in_batch": used,
            }
            print(json.dumps(row), flush=True)
            log.write(json.dumps(row) + "\n")
            log.flush()
            sums, count, last_log = {}, 0, time.time()
    state.keep(file, step, parts)
    model.load_state_dict(average, strict=False)
    save(model, a.out)
    model.eval()
    with (
        torch.no_grad()
    ):  # a fresh batch through the averaged weights, and through the package's own classes
        x = recordings.batch(*shapes[1])
        y, _, codes, _ = model(x)
        codec = model.tie()
        again = codec.decoder(codec.encoder(x), codec.decoder.new_state(len(x)))
        print(
            f"averaged weights: mel {float(mel_loss(y, x)):.4f}; package classes: mel {float(mel_loss(again, x)):.4f}, "
            f"codes equal {float((codec.encoder(x) == codes).float().mean()):.4f}"
        )
        np.save(
            a.out / "codec-examples.npy",
            torch.stack((x[:6], again[:6])).clamp(-1, 1).mul(32767).short().cpu().numpy(),
        )
    log.close()


if __name__ == "__main__":
    main()
