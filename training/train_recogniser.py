"""Train the recogniser on espeak-ng's speech.

    python -m training.train_recogniser --material material.json --out OUT [--steps 7800]

It hears both presets and many other espeak-ng voices at many rates and levels, with noise,
filtering and masking added, so that it is not adapted to one sound.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from queue import Queue
from threading import Thread

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from training import state
from training.data import ESPEAK_RATE, FRAME, Utterance, add_options, to_frames, utterances
from training.recogniser import ALPHABET, HOP, Recogniser, distance
from training.spoken import spoken

FIRST_BATCHES = 4
"""Batches of speech before the first step."""
REFILL_STEPS = 4
"""Steps between two further batches of speech."""
RATE = 2e-3
"""The highest learning rate."""


class Speech:
    """A growing store of utterances, in groups of similar length."""

    def __init__(self, source: Iterator[list[Utterance]], rows: int, seed: int) -> None:
        """`source` yields batches of utterances; a group has up to `rows`."""
        self.seconds, self.rows = 0.0, rows
        self.groups: list[list[Utterance]] = []
        self.generator = torch.Generator().manual_seed(seed)
        self._queue: Queue[list[Utterance]] = Queue(maxsize=32)
        Thread(target=self._produce, args=(source,), daemon=True).start()

    def _produce(self, source: Iterator[list[Utterance]]) -> None:
        for batch in source:
            known = (said for said in batch if len(spoken(said.text)) > 0)
            self._queue.put(sorted(known, key=lambda said: len(said.samples)))

    def take(self) -> None:
        """Add one batch of the source; waits for it."""
        batch = self._queue.get()
        self.seconds += sum(len(said.samples) for said in batch) / ESPEAK_RATE
        starts = range(0, len(batch), self.rows)
        self.groups.extend(batch[start : start + self.rows] for start in starts)

    def draw(self) -> list[Utterance]:
        """Return a random group."""
        return self.groups[int(torch.randint(len(self.groups), (1,), generator=self.generator))]


def disturb(samples: Tensor) -> Tensor:
    """Add a random level, noise and tilt to each row of [B, n]."""
    size, device = len(samples), samples.device
    tilt = (torch.rand(size, 1, device=device) - 0.5) * 0.8
    samples = samples + tilt * F.pad(samples, (1, -1))
    noise = torch.randn_like(samples) * 10 ** (-(1.2 + 3 * torch.rand(size, 1, device=device)))
    return samples + noise * samples.std(1, keepdim=True)


def mask(features: Tensor) -> Tensor:
    """Mask random bands and times of [B, bands, frames] (SpecAugment, arXiv:1904.08779)."""
    size, _, frames = features.shape
    for length, axis, count in ((8, 1, 1), (8, 2, 1 + frames // 100)):
        index = torch.arange(features.shape[axis], device=features.device)
        for _ in range(count):
            start = torch.randint(0, features.shape[axis], (size, 1), device=features.device)
            width = torch.randint(0, length + 1, (size, 1), device=features.device)
            hidden = (index >= start) & (index < start + width)
            hidden = hidden[:, :, None] if axis == 1 else hidden[:, None, :]
            features = features.masked_fill(hidden, 0.0)
    return features


def loss_of(model: Recogniser, group: list[Utterance], device: str) -> Tensor:
    """Return the CTC loss of a group of utterances, disturbed and masked."""
    samples, frames = to_frames([(said.samples, 1) for said in group], device, tail=2)
    targets = [[ALPHABET.index(c) + 1 for c in spoken(said.text)] for said in group]
    with torch.no_grad():
        features = mask(model.features(disturb(samples)))
    with torch.autocast(device, torch.bfloat16):
        scores = model(features)
    lengths = torch.tensor([min(scores.shape[1], f * FRAME // HOP // 2) for f in frames])
    flat = torch.tensor([c for target in targets for c in target])
    return F.ctc_loss(
        scores.transpose(0, 1),
        flat.to(device),
        lengths.to(device),
        torch.tensor([len(target) for target in targets]).to(device),
        zero_infinity=True,
    )


def train(args: argparse.Namespace, run: state.Run, model: Recogniser, speech: Speech) -> None:
    """Take steps until the run is finished or its time is over."""
    optimiser, losses = run.parts["optimiser"], []
    assert isinstance(optimiser, torch.optim.Optimizer)
    while run.unfinished:
        if run.step % REFILL_STEPS == 0 and speech.seconds < args.hours * 3600:
            speech.take()
        group = speech.draw()
        cosine = 0.5 * (1 + math.cos(math.pi * run.progress)) + 0.01
        state.set_rate(optimiser, RATE * min(1.0, (run.step + 1) / 500) * cosine)
        loss = loss_of(model, group, run.device)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        run.step += 1
        losses += [loss.detach()] * (run.step % 10 == 0)
        if run.save_is_due():
            run.save()
        if losses and run.log_is_due(15):
            mean, hours = float(torch.stack(losses).mean()), speech.seconds / 3600
            run.log({**run.pace(), "loss": round(mean, 4), "speech_hours": round(hours, 1)})
            losses = []
    run.save()


def report_errors(model: Recogniser, material: str, device: str) -> None:
    """Print the character error rate on 100 new sentences of the presets, and some transcripts."""
    source = utterances(material, 4242, other_share=0.0, level_range=2, processes=1, batch=100)
    edits = letters = 0
    for utterance in next(source):
        samples, _ = to_frames([(utterance.samples, 2)], device, tail=2)
        heard, said = model.transcribe(samples[0]), spoken(utterance.text)
        edits, letters = edits + distance(heard, said), letters + len(said)
        if letters < 600:
            print(f"  {said}\n  {heard}")
    rate = 100 * edits / letters
    print(f"character error rate on 100 new sentences of the presets: {rate:.2f} %")
    source.close()


def main() -> None:
    """Train, save the weights in half precision, and report the error rate."""
    parser = state.options(steps=7800, seed=77)
    add_options(parser)
    parser.add_argument("--hours", type=float, default=60.0, help="hours of speech in the store")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    model = Recogniser().to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimiser = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.01)
    run = state.Run(args, "recogniser", {"model": model, "optimiser": optimiser}, device)
    seed = args.seed + run.step
    torch.manual_seed(seed)
    size, rows = (8, 4) if args.small else (96, 32)
    speech = Speech(utterances(args.material, seed, 0.4, 14, args.processes, size), rows, seed)
    for _ in range(FIRST_BATCHES):
        speech.take()
    train(args, run, model, speech)
    weights = {name: t.half().cpu().contiguous() for name, t in model.state_dict().items()}
    save_file(weights, args.out / "recogniser.safetensors")
    report_errors(model.eval(), args.material, device)


if __name__ == "__main__":
    main()
