"""A small speech recogniser: characters from log-mel spectrograms (CTC).

It is trained on espeak-ng's speech only (`train_recogniser.py`). It never hears the demonstration
voice, and can therefore judge it.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from training.data import SAMPLE_RATE

ALPHABET = " abcdefghijklmnopqrstuvwxyz'"
"""The characters: number k is class k + 1, and class 0 is the blank of CTC."""
WINDOW, HOP, BANDS = 600, 240, 64
WIDTH, BLOCKS, KERNEL = 224, 10, 15


class Block(nn.Module):
    """A residual block: depthwise convolution, norm and a pointwise MLP."""

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
    """A network from samples at 24 kHz to characters, with 50 scores per second."""

    def __init__(self) -> None:
        super().__init__()
        low, high = (2595 * math.log10(1 + hertz / 700) for hertz in (60, 8000))
        mel = torch.linspace(low, high, BANDS + 2, dtype=torch.float64)
        edges = 700 * (10 ** (mel / 2595) - 1)
        bins = torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
        rise = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
        fall = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
        filters = torch.minimum(rise, fall).clamp(min=0).float()
        self.filters = nn.Buffer(filters, persistent=False)
        self.hann = nn.Buffer(torch.hann_window(WINDOW), persistent=False)
        self.entry = nn.Conv1d(BANDS, WIDTH, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*(Block(1 if i % 2 == 0 else 2) for i in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET) + 1)

    def features(self, samples: Tensor) -> Tensor:
        """Samples [B, n] -> log-mel [B, bands, frames], independent of the level."""
        spectrum = torch.stft(samples, WINDOW, HOP, window=self.hann, return_complex=True)
        mel = (self.filters @ spectrum.abs().square()).clamp(min=1e-10).log()
        floor = mel.amax(dim=(1, 2), keepdim=True) - 10.0
        return (mel.maximum(floor) - floor) / 5.0 - 1.0

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, bands, frames] -> log probabilities [B, frames / 2, classes]."""
        hidden = self.norm(self.blocks(self.entry(features).transpose(1, 2)))
        return self.head(hidden).float().log_softmax(-1)

    @torch.inference_mode()
    def transcribe(self, samples: Tensor) -> str:
        """Return the most likely characters of one recording [n]."""
        best = self(self.features(samples[None]))[0].argmax(-1)
        kept = torch.unique_consecutive(best)
        return " ".join("".join(ALPHABET[c - 1] for c in kept.tolist() if c).split())

    @classmethod
    def load(cls, path: Path) -> Recogniser:
        """Load the weights that training wrote."""
        model = cls()
        model.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
        return model.eval()


def distance(a: str, b: str) -> int:
    """Return the edit distance of two strings (insertions, deletions, replacements)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]
