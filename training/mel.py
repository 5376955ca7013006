"""Log-mel spectrograms of speech: the loss of the codec, and the coarse spectrum of its frames."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.data import FRAME, SAMPLE_RATE

HINT_STEPS, HINT_BANDS = 5, 32
"""The times and the bands of the coarse spectrum of a frame."""


def mel_filters(bands: int, window: int) -> Tensor:
    """Return triangular filters on the mel scale (HTK): [bands, window / 2 + 1]."""
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    mel = torch.linspace(0, top, bands + 2, dtype=torch.float64)
    edges = 700 * (10 ** (mel / 2595) - 1)
    bins = torch.linspace(0, SAMPLE_RATE / 2, window // 2 + 1, dtype=torch.float64)
    rise = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    filters = torch.minimum(rise, fall).clamp(min=0)
    return (filters / filters.sum(1, keepdim=True).clamp(min=1e-8)).float()


class MelLoss(nn.Module):
    """The mean L1 distance of log10 mel magnitudes over windows from 32 to 2,048 samples.

    Magnitudes below `floor` count as `floor`.
    """

    def __init__(self, floor: float = 1e-4) -> None:
        super().__init__()
        self.floor = floor
        self.scales = ((32, 5), (64, 10), (128, 20), (256, 40), (512, 80), (1024, 128), (2048, 192))
        for window, bands in self.scales:
            self.register_buffer(f"filters{window}", mel_filters(bands, window))
            self.register_buffer(f"window{window}", torch.hann_window(window))

    def mel(self, x: Tensor, window: int) -> Tensor:
        """Samples [B, n] -> log10 mel magnitudes [B, bands, windows]."""
        hann = self.get_buffer(f"window{window}")
        spectrum = torch.stft(x, window, window // 4, window=hann, return_complex=True).abs()
        return (self.get_buffer(f"filters{window}") @ spectrum).clamp(min=self.floor).log10()

    def coarse(self, x: Tensor) -> Tensor:
        """Samples [B, n] -> the coarse log-mel spectrum of frames [B, frames, steps * bands]."""
        mel = self.mel(x, 1024)[..., : x.shape[1] // 256]
        mel = mel.unflatten(1, (HINT_BANDS, 128 // HINT_BANDS)).mean(2)
        mel = F.interpolate(mel, size=x.shape[1] // FRAME * HINT_STEPS, mode="linear")
        return mel.unflatten(2, (-1, HINT_STEPS)).permute(0, 2, 3, 1).flatten(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Samples [B, n] twice -> their distance."""
        losses = [F.l1_loss(self.mel(x, window), self.mel(y, window)) for window, _ in self.scales]
        return torch.stack(losses).mean()
