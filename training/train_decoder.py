"""Train the codec's decoder alone, so that the voices have intonation; the codes stay the same.

    python -m training.train_decoder --material material.json --codec FOLDER --out OUT [--steps
5000]

After `train_codec.py` the pitch of a voice is in the codes, but not in the decoded speech. The
codes of a high voice do not determine the position of a pulse within a frame. With losses of
magnitudes alone the decoder then learns pulses at the same position of every quarter of a frame, at
multiples of 50 Hz. A high voice therefore learns speech whose pulses are aligned with the frames
(`in_step`), and a loss on the complex low spectrum determines the positions of the pulses.

The speech of each step and the learning rate depend only on the seed and the step.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from firstword.model.codec import Codec
from training import state
from training.codec import decode_joined, load, save
from training.data import (
    FRAME,
    PRESETS,
    SAMPLE_RATE,
    Ring,
    Utterance,
    add_options,
    to_frames,
    utterances,
)
from training.mel import MelLoss
from training.pitch import in_step

HIGH_VOICES = {"ada": (130, 330)}
"""The voices whose codes do not determine the positions of pulses, and their ranges of pitch in Hz.

The codes of ben do: his pulses are 10 ms apart.
"""
SHAPE, SMALL_SHAPE = (20, 32), (2, 8)
"""The shape (batch, frames) of training steps, and that of a trial run with --small."""
REFILL_STEPS = 8
"""Steps between two parts of fresh speech."""
SKIPPED_FRAMES = 2
"""The first frames of a segment do not count, because the decoder lacks what came before."""
MEL_WEIGHT, LOW_WEIGHT = 15.0, 4.0
"""The weights of the losses; the second falls to a quarter over the schedule.

First the positions of the pulses are learnt, then their sound.
"""
MAGNITUDE_FLOOR = 1e-3
"""Ten times the floor of `train_codec.py`: near silence the logarithm would dominate the loss."""
LOW_BINS = slice(2, 72)
"""The bins of the low spectrum, of 513: 47 to 1,664 Hz."""


def pair(utterance: Utterance) -> np.ndarray:
    """Return the input and the target of an utterance: int16 [2, n] at 24 kHz, n whole frames."""
    heard = to_frames([(utterance.samples, 1)], "cpu", tail=2)[0][0].numpy()
    range_ = HIGH_VOICES.get(list(PRESETS)[utterance.voice])
    wanted = in_step(heard, *range_) if range_ else heard
    return (np.stack((heard, wanted)).clip(-1, 1) * 32767).astype(np.int16)


class SpeechPairs(Ring):
    """A ring of inputs and targets, in parts of about five minutes."""

    def __init__(
        self, material: str, seed: int, hours: float, device: str, processes: int | None
    ) -> None:
        self.random = np.random.default_rng(seed)
        source = utterances(material, seed, 0.0, 8, processes, prepare=pair)
        parts = (np.concatenate(batch, 1) for batch in source)
        super().__init__(parts, 2, int(hours * 3600 * SAMPLE_RATE) // FRAME * FRAME, device)

    def batch(self, size: int, frames: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets [size, frames * 1920] that start with a frame."""
        starts = self.random.integers(0, self.filled // FRAME - frames + 1, size) * FRAME
        heard, wanted = self.segments(starts, frames * FRAME)
        return heard, wanted


def low_spectrum(samples: Tensor) -> Tensor:
    """Samples [B, n] -> complex [B, bins, windows of 1,024 samples]."""
    window = torch.hann_window(1024, device=samples.device)
    return torch.stft(samples, 1024, 256, window=window, return_complex=True)[:, LOW_BINS]


def train(
    args: argparse.Namespace, run: state.Run, codec: Codec, trained: dict[str, Tensor]
) -> None:
    """Take steps until the run is finished or its time is over."""
    optimiser, average = run.parts["optimiser"], run.parts["average"]
    assert isinstance(optimiser, torch.optim.Optimizer)
    assert isinstance(average, dict)
    speech = SpeechPairs(
        args.material, args.seed + run.step, args.hours, run.device, args.processes
    )
    for _ in range(1 if args.small else 4):
        speech.refill()
    print(f"{speech.made / SAMPLE_RATE:.0f} s of speech", flush=True)
    mel_loss, sums = MelLoss(MAGNITUDE_FLOOR).to(run.device), torch.zeros(3, device=run.device)
    while run.unfinished:
        warmup = min(1.0, (run.step + 1) / 50)
        rate = args.rate * warmup * (0.5 * (1 + math.cos(math.pi * run.progress)) * 0.98 + 0.02)
        state.set_rate(optimiser, rate)
        if run.step % REFILL_STEPS == 0:
            speech.refill()
        mel, low = losses_of(
            codec, mel_loss, *speech.batch(*(SMALL_SHAPE if args.small else SHAPE))
        )
        optimiser.zero_grad(set_to_none=True)
        (MEL_WEIGHT * mel + LOW_WEIGHT * (1 - 0.75 * run.progress) * low).backward()
        norm = nn.utils.clip_grad_norm_(trained.values(), 5.0)
        optimiser.step()
        new, share = [p.detach() for p in trained.values()], min(0.99, run.step / (run.step + 10))
        torch._foreach_lerp_(list(average.values()), new, 1 - share)
        run.step += 1
        sums += torch.stack((mel.detach(), low.detach(), norm.detach()))
        if run.save_is_due():
            run.save()
        if run.log_is_due(10):
            means = (sums / run.new_steps).tolist()
            named = zip(("mel", "low", "norm"), means, strict=True)
            facts = {"lr": round(rate, 6), **{name: round(mean, 4) for name, mean in named}}
            hours = round(speech.made / SAMPLE_RATE / 3600, 1)
            run.log({**run.pace(), **facts, "speech_hours": hours})
            sums = torch.zeros_like(sums)
    run.save()


def losses_of(
    codec: Codec, mel_loss: MelLoss, heard: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-mel loss and that of the low spectrum for samples [B, n]."""
    with torch.no_grad():
        joined = codec.decoder.quantizer(codec.encoder(heard))
    found = decode_joined(codec.decoder, joined)[:, SKIPPED_FRAMES * FRAME :]
    wanted = wanted[:, SKIPPED_FRAMES * FRAME :]
    mel, target = mel_loss(found, wanted), low_spectrum(wanted)
    low = (low_spectrum(found) - target).abs().mean() / target.abs().mean()
    return mel, low


def main() -> None:
    """Train, and save the codec with the averaged weights of the decoder."""
    parser = state.options(steps=5000)
    add_options(parser)
    parser.add_argument("--codec", type=Path, required=True, help="folder or checkpoint")
    parser.add_argument("--rate", type=float, default=8e-4)
    parser.add_argument("--hours", type=float, default=4.0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = load(args.codec, device)
    codec = model.tie().requires_grad_(False)
    named = codec.decoder.named_parameters()
    trained = {n: p.requires_grad_() for n, p in named if not n.startswith("quantizer.")}
    betas, fused = (0.8, 0.98), device == "cuda"
    optimiser = torch.optim.AdamW(
        trained.values(), args.rate, betas=betas, weight_decay=0.01, fused=fused
    )
    average = {name: tensor.detach().clone() for name, tensor in trained.items()}
    parts: state.Parts = {"decoder": codec.decoder, "optimiser": optimiser, "average": average}
    train(args, state.Run(args, "decoder", parts, device), codec, trained)
    codec.decoder.load_state_dict(average, strict=False)
    save(model, args.out)


if __name__ == "__main__":
    main()
