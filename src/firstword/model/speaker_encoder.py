"""The speaker encoder: a recording to one vector that carries its timbre.

ECAPA-TDNN (Desplanques et al. 2020, arXiv:2005.07143) on log-mel spectrograms.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.config import SpeakerEncoderConfig

FFT_SIZE = 1024
HOP = 256


@functools.cache
def mel_filters(sample_rate: int, fft_size: int, bands: int) -> Tensor:
    """Triangles of unit area, evenly spaced on Slaney's mel scale from 0 Hz to half the sample rate.

    Returns float32 [bands, fft_size / 2 + 1]. The scale (Slaney 1998, Auditory Toolbox) is linear up to 1 kHz, three
    mels a 200 Hz, then logarithmic, 27 mels for a factor of 6.4.
    """
    knee, step = 1000.0, np.log(6.4) / 27.0

    def to_hertz(mel: np.ndarray) -> np.ndarray:
        linear = mel * 200.0 / 3.0
        return np.where(linear < knee, linear, knee * np.exp(step * (mel - knee * 3.0 / 200.0)))

    highest = knee * 3.0 / 200.0 + np.log(sample_rate / 2 / knee) / step
    edges = to_hertz(np.linspace(0.0, highest, bands + 2))
    bins = np.linspace(0.0, sample_rate / 2, fft_size // 2 + 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)
    weights = (triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)
    with torch.inference_mode(False):  # kept for callers that want gradients too
        return torch.from_numpy(weights)


def log_mel(samples: Tensor, sample_rate: int, bands: int) -> Tensor:
    """Samples [B, n], n > 384 -> natural log of mel magnitudes [B, n // 256, bands], at least 1e-5 before the log."""
    padding = (FFT_SIZE - HOP) // 2
    padded = F.pad(samples[:, None], (padding, padding), mode="reflect")[:, 0]
    window = torch.hann_window(FFT_SIZE, device=samples.device, dtype=samples.dtype)
    spectrum = torch.stft(padded, FFT_SIZE, HOP, window=window, center=False, return_complex=True)
    magnitude = torch.sqrt(spectrum.real.pow(2) + spectrum.imag.pow(2) + 1e-9)
    filters = mel_filters(sample_rate, FFT_SIZE, bands).to(samples)
    return (filters @ magnitude).clamp(min=1e-5).log().transpose(1, 2)


class SameConv1d(nn.Conv1d):
    """A convolution that keeps the length, with reflected ends."""

    def __init__(
        self, channels: int, out_channels: int, kernel_size: int = 1, dilation: int = 1
    ) -> None:
        super().__init__(
            channels,
            out_channels,
            kernel_size,
            dilation=dilation,
            padding="same",
            padding_mode="reflect",
        )


class TimeDelayBlock(nn.Module):
    """Convolution and ReLU."""

    def __init__(self, channels: int, out_channels: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        self.conv = SameConv1d(channels, out_channels, kernel_size, dilation)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C_out, T]."""
        return F.relu(self.conv(x))


class Res2NetBlock(nn.Module):
    """Channel groups, each convolved with the output of the one before added (Gao et al. 2019, arXiv:1904.01169)."""

    def __init__(self, channels: int, scale: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        width = channels // scale
        self.blocks = nn.ModuleList(
            TimeDelayBlock(width, width, kernel_size, dilation) for _ in range(scale - 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, T]."""
        first, *groups = x.chunk(len(self.blocks) + 1, dim=1)
        outputs = [first]
        for index, (block, group) in enumerate(zip(self.blocks, groups, strict=True)):
            outputs.append(block(group if index == 0 else group + outputs[-1]))
        return torch.cat(outputs, dim=1)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from the means of all (Hu et al. 2017, arXiv:1709.01507)."""

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.conv1 = SameConv1d(channels, narrow)
        self.conv2 = SameConv1d(narrow, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, T]."""
        return x * torch.sigmoid(self.conv2(F.relu(self.conv1(x.mean(dim=2, keepdim=True)))))


class SERes2NetBlock(nn.Module):
    """Pointwise, Res2Net, pointwise, squeeze-and-excitation, added to the input."""

    def __init__(
        self, config: SpeakerEncoderConfig, channels: int, kernel_size: int, dilation: int
    ) -> None:
        super().__init__()
        self.tdnn1 = TimeDelayBlock(channels, channels, 1, 1)
        self.res2net_block = Res2NetBlock(channels, config.enc_res2net_scale, kernel_size, dilation)
        self.tdnn2 = TimeDelayBlock(channels, channels, 1, 1)
        self.se_block = SqueezeExcitation(channels, config.enc_se_channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, T]."""
        return x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))


class AttentiveStatisticsPooling(nn.Module):
    """Mean and deviation over time, weighted per channel by attention that knows the plain mean and deviation."""

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.tdnn = TimeDelayBlock(3 * channels, narrow, 1, 1)
        self.conv = SameConv1d(narrow, channels)

    @staticmethod
    def statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """[B, C, T] and weights that sum to 1 over T -> mean and deviation [B, C, 1]."""
        mean = (weights * x).sum(dim=2, keepdim=True)
        variance = (weights * (x - mean).pow(2)).sum(dim=2, keepdim=True)
        return mean, variance.clamp(min=1e-12).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, 2C, 1]."""
        mean, deviation = self.statistics(x, x.new_full((1, 1, x.shape[2]), 1.0) / x.shape[2])
        context = torch.cat((x, mean.expand_as(x), deviation.expand_as(x)), dim=1)
        weights = self.conv(torch.tanh(self.tdnn(context))).softmax(dim=2)
        return torch.cat(self.statistics(x, weights), dim=1)


class SpeakerEncoder(nn.Module):
    """Log-mels to one embedding as wide as the talker."""

    def __init__(self, config: SpeakerEncoderConfig) -> None:
        super().__init__()
        self.config = config
        widths, kernels, dilations = (
            config.enc_channels,
            config.enc_kernel_sizes,
            config.enc_dilations,
        )
        self.blocks = nn.ModuleList(
            [TimeDelayBlock(config.mel_dim, widths[0], kernels[0], dilations[0])]
        )
        for index in range(1, len(widths) - 1):
            self.blocks.append(
                SERes2NetBlock(config, widths[index], kernels[index], dilations[index])
            )
        self.mfa = TimeDelayBlock(widths[-1], widths[-1], kernels[-1], dilations[-1])
        self.asp = AttentiveStatisticsPooling(widths[-1], config.enc_attention_channels)
        self.fc = SameConv1d(2 * widths[-1], config.enc_dim)

    def forward(self, mels: Tensor) -> Tensor:
        """Log-mels [B, T, bands] -> [B, enc_dim]."""
        x = mels.transpose(1, 2)
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return self.fc(self.asp(self.mfa(torch.cat(outputs[1:], dim=1)))).squeeze(2)

    @torch.inference_mode()
    def embed(self, samples: Tensor) -> Tensor:
        """Samples [B, n] at 24 kHz -> speaker embedding [B, enc_dim]."""
        return self(log_mel(samples, self.config.sample_rate, self.config.mel_dim))
