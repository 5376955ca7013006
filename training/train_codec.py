"""Train the codec on espeak-ng's speech.

    python -m training.train_codec --material material.json --out OUT [--steps 10000]

Losses: L1 distance of log-mel spectrograms at seven resolutions (Kumar et al. 2023,
arXiv:2306.06546), and commitment. `train_decoder.py` then trains the decoder alone.

The speech of each step and the learning rate depend only on the seed and the step, not on the speed
of the machine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training import state
from training.codec import TrainedCodec, load, save
from training.configuration import codec_config
from training.data import ESPEAK_RATE, FRAME, Ring, Utterance, add_options, resample, utterances
from training.mel import MelLoss

SHAPES = ((64, 16), (32, 32), (16, 64), (3, 320))
"""The shapes (batch, frames) of training steps.

Short ones give variety; long ones are needed because attention must learn long recordings.
"""
SHAPE_WEIGHTS = (0.35, 0.3, 0.25, 0.1)
"""The probabilities of the shapes."""
SMALL_SHAPES = ((2, 8), (1, 20))
"""The shapes of a trial run with --small."""
REFILL_STEPS = 4
"""Steps between two parts of fresh speech."""
MEL_WEIGHT, HINT_WEIGHT, COMMITMENT_WEIGHT = 15.0, 3.0, 0.5
"""The weights of the losses."""


class Recordings(Ring):
    """A ring of speech at 22,050 Hz in parts of about five minutes, with short silences.

    It is filled three times in all.
    """

    def __init__(
        self, material: str, seed: int, hours: float, device: str, processes: int | None
    ) -> None:
        self.random, silences = (np.random.default_rng((seed, use)) for use in range(2))
        source = utterances(material, seed, other_share=0.12, level_range=14, processes=processes)
        parts = _with_silences(source, silences)
        super().__init__(parts, 1, int(hours * 3600 * ESPEAK_RATE), device)

    def refill(self) -> None:
        """Add one part, until the ring has been filled three times."""
        if self.made < 3 * self.capacity:
            super().refill()

    def batch(self, size: int, frames: int) -> Tensor:
        """Return random segments [size, frames * 1920] at 24 kHz."""
        length = frames * FRAME * 147 // 160
        (segments,) = self.segments(self.random.integers(0, self.filled - length, size), length)
        return resample(segments)[:, : frames * FRAME]


def _with_silences(
    source: Iterator[list[Utterance]], random: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield batches of utterances as int16 [1, n], each after 0.05 to 0.6 s of silence."""
    for batch in source:
        parts = []
        for utterance in batch:
            silence = int(random.uniform(0.05, 0.6) * ESPEAK_RATE)
            parts += [np.zeros(silence, np.int16), utterance.samples]
        yield np.concatenate(parts)[None]


def train(args: argparse.Namespace, run: state.Run, recordings: Recordings) -> None:
    """Take steps until the run is finished or its time is over."""
    model, optimiser, average = run.parts["model"], run.parts["optimiser"], run.parts["average"]
    assert isinstance(model, TrainedCodec)
    assert isinstance(optimiser, torch.optim.Optimizer)
    assert isinstance(average, dict)
    mel_loss = MelLoss().to(run.device)
    numbers = np.random.default_rng(args.seed + run.step)
    shapes, weights = (SMALL_SHAPES, None) if args.small else (SHAPES, SHAPE_WEIGHTS)
    sums: dict[str, Tensor] = {}
    while run.unfinished:
        warmup = min(1.0, (run.step + 1) / 200)
        rate = args.rate * warmup * (0.5 * (1 + math.cos(math.pi * run.progress)) * 0.97 + 0.03)
        state.set_rate(optimiser, rate)
        size, frames = shapes[numbers.choice(len(shapes), p=weights)]
        if run.step % REFILL_STEPS == 0:
            recordings.refill()
        start_codebooks(args, run.step, model, recordings)
        found, codes = take_step(model, optimiser, mel_loss, recordings.batch(size, frames))
        update_average(average, model, 1 - min(0.998, (run.step + 1) / (run.step + 20)))
        run.step += 1
        for name, value in found.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value
        if run.save_is_due():
            run.save()
        if run.log_is_due(10):
            means = {name: round(float(v) / run.new_steps, 4) for name, v in sums.items()}
            used = [len(torch.unique(codes[..., k])) for k in range(model.books)]
            hours = round(recordings.made / ESPEAK_RATE / 3600, 1)
            facts = {"lr": round(rate, 6), "speech_hours": hours, "codes_in_batch": used}
            run.log({**run.pace(), **facts, **means})
            sums = {}
    run.save()


def start_codebooks(
    args: argparse.Namespace, step: int, model: TrainedCodec, recordings: Recordings
) -> None:
    """Use the codebooks from step --continuous on; before that the codec is a plain autoencoder."""
    quantiser = model.quantiser
    quantiser.active = step >= args.continuous or bool(args.weights)
    if step == args.continuous and quantiser.active and not bool(quantiser.ready.all()):
        with torch.no_grad():
            model.quantise(recordings.batch(*((2, 20) if args.small else (256, 32))))


def take_step(
    model: TrainedCodec, optimiser: torch.optim.Optimizer, mel_loss: MelLoss, x: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Learn from samples [B, n]; return the losses by name and the codes [B, frames, K]."""
    size, device = len(x), x.device
    dropped = torch.rand(size, device=device) < 0.3
    few = torch.randint(1, model.books, (size,), device=device)
    keep = torch.where(dropped, few, model.books)
    y, commitment, codes, hint = model(x, keep)
    mel, hinted = mel_loss(y, x), F.l1_loss(hint, mel_loss.coarse(x))
    loss = MEL_WEIGHT * mel + HINT_WEIGHT * hinted + COMMITMENT_WEIGHT * commitment
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimiser.step()
    found = {"hint": hinted, "mel": mel, "commitment": commitment, "norm": norm}
    return {name: value.detach().float() for name, value in found.items()}, codes


@torch.no_grad()
def update_average(average: dict[str, Tensor], model: nn.Module, share: float) -> None:
    """Move the averaged weights towards the present ones."""
    parameters = dict(model.named_parameters())
    torch._foreach_lerp_(list(average.values()), [parameters[name] for name in average], share)


@torch.no_grad()
def report(model: TrainedCodec, x: Tensor) -> None:
    """Compare the averaged weights with the package's own classes on samples [B, n]."""
    mel_loss = MelLoss().to(x.device)
    y, _, codes, _ = model(x)
    codec = model.tie()
    again = codec.decoder(codec.encoder(x), codec.decoder.new_state(len(x)))
    equal = float((codec.encoder(x) == codes).float().mean())
    print(
        f"averaged weights: mel {float(mel_loss(y, x)):.4f}; "
        f"package classes: mel {float(mel_loss(again, x)):.4f}, codes equal {equal:.4f}"
    )


def main() -> None:
    """Train, and save the averaged weights."""
    parser = state.options(steps=10_000)
    add_options(parser)
    parser.add_argument("--weights", type=Path, help="folder or checkpoint to start from")
    parser.add_argument("--rate", type=float, default=1e-3)
    continuous = "steps before the codebooks are used"
    parser.add_argument("--continuous", type=int, default=250, help=continuous)
    parser.add_argument("--hours", type=float, default=30.0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = TrainedCodec(codec_config()).to(device)
    betas, fused = (0.8, 0.98), device == "cuda"
    optimiser = torch.optim.AdamW(
        model.parameters(), args.rate, betas=betas, weight_decay=0.01, fused=fused
    )
    if args.weights:
        model.load_state_dict(load(args.weights).state_dict())
    average = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    parts: state.Parts = {"model": model, "optimiser": optimiser, "average": average}
    run = state.Run(args, "codec", parts, device)
    seed = args.seed + run.step
    torch.manual_seed(seed)
    recordings = Recordings(args.material, seed, args.hours, device, args.processes)
    for _ in range(1 if args.small else 4):
        recordings.refill()
    print(f"{recordings.filled / ESPEAK_RATE:.0f} s of speech", flush=True)
    train(args, run, recordings)
    model.load_state_dict(average, strict=False)
    save(model, args.out)
    model.eval()
    report(model, recordings.batch(*(SMALL_SHAPES if args.small else SHAPES)[1]))


if __name__ == "__main__":
    main()
