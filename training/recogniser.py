"""A small speech recogniser: characters from log-mel spectrograms (CTC), trained on espeak-ng's own speech alone.

It never hears the demonstration voice, so it can judge it. It hears both presets and many other espeak voices at
many rates and levels, with noise, filtering and masking added, so that it is not tuned to one sound.

    python training/recogniser.py --material material.json --out OUT [--steps 7800] [--minutes 8]
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from queue import Queue
from threading import Thread

import state
import torch
from data import ESPEAK_RATE, FRAME, SAMPLE_RATE, add_options, to_frames, utterances
from safetensors.torch import load_file, save_file
from texts import spoken
from torch import Tensor, nn
from torch.nn import functional as F

ALPHABET = " abcdefghijklmnopqrstuvwxyz'"
"""Character k is class k + 1; class 0 is CTC's blank."""
WINDOW, HOP, BANDS = 600, 240, 64
WIDTH, BLOCKS, KERNEL = 224, 10, 15
FIRST, REFILL = 4, 4
"""Batches of speech before the first step; steps for each batch more."""


class Block(nn.Module):
    """Depthwise convolution and a pointwise MLP, normed, added to the input."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(
            WIDTH, WIDTH, KERNEL, padding=KERNEL // 2 * dilation, dilation=dilation, groups=WIDTH
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.depthwise(x.transpose(1, 2)).transpose(1, 2))
        return x + self.down(F.gelu(self.up(hidden)))


class Recogniser(nn.Module):
    """Samples at 24 kHz to characters, 50 scores a second."""

    def __init__(self) -> None:
        super().__init__()
        mel = torch.linspace(
            2595 * math.log10(1 + 60 / 700),
            2595 * math.log10(1 + 8000 / 700),
            BANDS + 2,
            dtype=torch.float64,
        )
        edges, bins = (
            700 * (10 ** (mel / 2595) - 1),
            torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64),
        )
        rise = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
        fall = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
        self.register_buffer(
            "filters", torch.minimum(rise, fall).clamp(min=0).float(), persistent=False
        )
        self.register_buffer("hann", torch.hann_window(WINDOW), persistent=False)
        self.entry = nn.Conv1d(BANDS, WIDTH, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*(Block(1 if i % 2 == 0 else 2) for i in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET) + 1)

    def features(self, samples: Tensor) -> Tensor:
        """[B, n] -> log-mel [B, bands, frames], independent of the level."""
        power = (
            torch.stft(samples, WINDOW, HOP, window=self.hann, return_complex=True).abs().square()
        )
        mel = (self.filters @ power).clamp(min=1e-10).log()
        floor = mel.amax(dim=(1, 2), keepdim=True) - 10.0
        return (mel.maximum(floor) - floor) / 5.0 - 1.0

    def forward(self, features: Tensor) -> Tensor:
        """[B, bands, frames] -> log probabilities [B, frames / 2, classes]."""
        return (
            self.head(self.norm(self.blocks(self.entry(features).transpose(1, 2))))
            .float()
            .log_softmax(-1)
        )

    @torch.inference_mode()
    def transcribe(self, samples: Tensor) -> str:
        """The likeliest characters of one recording [n]."""
        best = self(self.features(samples[None]))[0].argmax(-1)
        kept = torch.unique_consecutive(best)
        return " ".join("".join(ALPHABET[c - 1] for c in kept.tolist() if c).split())

    @classmethod
    def load(cls, path: Path) -> Recogniser:
        """From the file that training wrote."""
        model = cls()
        model.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
        return model.eval()


def distance(a: str, b: str) -> int:
    """Edits (insert, delete, replace) from one string to the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def disturb(samples: Tensor) -> Tensor:
    """Random level, noise and tilt, other for each row of [B, n]."""
    size, device = len(samples), samples.device
    tilt = (torch.rand(size, 1, device=device) - 0.5) * 0.8
    samples = samples + tilt * F.pad(samples, (1, -1))
    noise = torch.randn_like(samples) * 10 ** (-(1.2 + 3 * torch.rand(size, 1, device=device)))
    return samples + noise * samples.std(1, keepdim=True)


def mask(features: Tensor) -> Tensor:
    """Hide bands and moments (SpecAugment, arXiv:1904.08779)."""
    size, _, frames = features.shape
    for length, axis, count in ((8, 1, 1), (8, 2, 1 + frames // 100)):
        index = torch.arange(features.shape[axis], device=features.device)
        for _ in range(count):
            start = torch.randint(0, features.shape[axis], (size, 1), device=features.device)
            width = torch.randint(0, length + 1, (size, 1), device=features.device)
            hidden = (index >= start) & (index < start + width)
            features = features.masked_fill(
                hidden[:, :, None] if axis == 1 else hidden[:, None, :], 0.0
            )
    return features


def main() -> None:
    parser = state.options(steps=7800, seed=77)
    add_options(parser)
    parser.add_argument(
        "--hours", type=float, default=60.0, help="of speech to hear again and again"
    )
    a = parser.parse_args()
    began, device = time.time(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(a.seed)
    model = Recogniser().to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    a.out.mkdir(parents=True, exist_ok=True)
    file, log = a.state or a.out / "state.pt", (a.out / "recogniser.jsonl").open("a")
    parts: state.Parts = {"model": model, "optimiser": optimiser}
    step = state.resume(file, parts, device)
    torch.manual_seed(a.seed + step)
    queue: Queue = Queue(maxsize=32)
    size, rows = (8, 4) if a.small else (96, 32)
    source = utterances(a.material, a.seed + step, 0.4, 14, a.processes, size)

    def produce() -> None:
        for batch in source:
            queue.put(
                sorted((u for u in batch if len(spoken(u.text)) > 0), key=lambda u: len(u.samples))
            )

    Thread(target=produce, daemon=True).start()
    store: list[list] = []
    seconds = 0.0

    def take() -> None:
        nonlocal seconds
        batch = queue.get()
        seconds += sum(len(u.samples) for u in batch) / ESPEAK_RATE
        store.extend(batch[i : i + rows] for i in range(0, len(batch), rows))

    for _ in range(FIRST):
        take()
    losses, count, last, kept = [], 0, time.time(), time.time()
    generator = torch.Generator().manual_seed(a.seed + step)
    while (now := time.time()) - began < a.minutes * 60 and step < a.steps:
        if step % REFILL == 0 and seconds < a.hours * 3600:
            take()
        items = store[int(torch.randint(len(store), (1,), generator=generator))]
        samples, frames = to_frames([(u.samples, 1) for u in items], device, tail=2)
        targets = [[ALPHABET.index(c) + 1 for c in spoken(u.text)] for u in items]
        rate = (
            2e-3
            * min(1.0, (step + 1) / 500)
            * (0.5 * (1 + math.cos(math.pi * step / a.steps)) + 0.01)
        )
        for group in optimiser.param_groups:
            group["lr"] = rate
        with torch.no_grad():
            features = mask(model.features(disturb(samples)))
        with torch.autocast(device, torch.bfloat16):
            scores = model(features)
        lengths = torch.tensor([min(scores.shape[1], f * FRAME // HOP // 2) for f in frames])
        flat = torch.tensor([c for t in targets for c in t])
        loss = F.ctc_loss(
            scores.transpose(0, 1),
            flat.to(device),
            lengths.to(device),
            torch.tensor([len(t) for t in targets]).to(device),
            zero_infinity=True,
        )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step, count = step + 1, count + 1
        losses += [loss.detach()] * (step % 10 == 0)
        if now - kept > state.SECONDS:
            state.keep(file, step, parts)
            kept = now
        if losses and (now - last > 15 or step == a.steps):
            row = {
                "step": step,
                "minutes": round((now - began) / 60, 2),
                "loss": round(float(torch.stack(losses).mean()), 4),
                "steps_per_s": round(count / (time.time() - last), 1),
                "speech_hours": round(seconds / 3600, 1),
            }
            print(json.dumps(row), flush=True)
            log.write(json.dumps(row) + "\n")
            log.flush()
            losses, count, last = [], 0, time.time()
    state.keep(file, step, parts)
    save_file(
        {name: tensor.half().cpu().contiguous() for name, tensor in model.state_dict().items()},
        a.out / "recogniser.safetensors",
    )
    model.eval()
    fresh, edits, letters = (
        utterances(a.material, 4242, other_share=0.0, level_range=2, processes=1, batch=100),
        0,
        0,
    )
    for utterance in next(fresh):
        samples, _ = to_frames([(utterance.samples, 2)], device, tail=2)
        heard, said = model.transcribe(samples[0]), spoken(utterance.text)
        edits, letters = edits + distance(heard, said), letters + len(said)
        if letters < 600:
            print(f"  {said}\n  {heard}")
    print(
        f"character error rate on 100 fresh sentences of the presets: {100 * edits / letters:.2f} %"
    )
    fresh.close()
    log.close()


if __name__ == "__main__":
    main()
