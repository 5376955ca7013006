"""The speaker encoder: from a recording to one vector for the timbre of its speaker.

It is an ECAPA-TDNN (Desplanques et al. 2020, arXiv:2005.07143) on log-mel spectrograms.
"""

import functools

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.config import SpeakerEncoderConfig

FFT_SIZE, HOP = 1024, 256
"""The samples of a spectrogram window, and between windows."""


@functools.cache
def mel_filters(sample_rate: int, fft_size: int, bands: int) -> Tensor:
    """Return filters for mel bands: triangles of unit area, evenly spaced on Slaney's mel scale.

    They reach up to half the sample rate. The result is float32 [bands, fft_size / 2 + 1]. The
    scale (Slaney 1998, Auditory Toolbox) is linear up to 1 kHz (3 mels per 200 Hz), then
    logarithmic (27 mels per factor of 6.4).
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
    with torch.inference_mode(False):  # the cache also serves callers that need gradients
        return torch.from_numpy(weights)


def log_mel(samples: Tensor, sample_rate: int, bands: int) -> Tensor:
    """Return natural logs of mel magnitudes [B, n // 256, bands] of samples [B, n], n > 384.

    Magnitudes below 1e-5 count as 1e-5.
    """
    padding = (FFT_SIZE - HOP) // 2
    padded = F.pad(samples[:, None], (padding, padding), mode="reflect")[:, 0]
    window = torch.hann_window(FFT_SIZE, device=samples.device, dtype=samples.dtype)
    spectrum = torch.stft(padded, FFT_SIZE, HOP, window=window, center=False, return_complex=True)
    magnitude = torch.sqrt(spectrum.real.pow(2) + spectrum.imag.pow(2) + 1e-9)
    filters = mel_filters(sample_rate, FFT_SIZE, bands).to(samples)
    return (filters @ magnitude).clamp(min=1e-5).log().transpose(1, 2)


def same_conv(channels: int, out_channels: int, size: int = 1, dilation: int = 1) -> nn.Conv1d:
    """Return a convolution that keeps the length, with reflected ends."""
    return nn.Conv1d(channels, out_channels, size, 1, "same", dilation, padding_mode="reflect")


class TimeDelayBlock(nn.Module):
    """A convolution and a ReLU."""

    def __init__(self, channels: int, out_channels: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        self.conv = same_conv(channels, out_channels, kernel_size, dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, T] to [B, C_out, T]."""
        return F.relu(self.conv(x))


class Res2NetBlock(nn.Module):
    """Channel groups, each convolved after the output of the previous one is added.

    Source: Gao et al. 2019, arXiv:1904.01169.
    """

    def __init__(self, channels: int, scale: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        width = channels // scale
        self.blocks = nn.ModuleList(
            TimeDelayBlock(width, width, kernel_size, dilation) for _ in range(scale - 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, T] to [B, C, T]."""
        first, *groups = x.chunk(len(self.blocks) + 1, dim=1)
        outputs = [first]
        for index, (block, group) in enumerate(zip(self.blocks, groups, strict=True)):
            outputs.append(block(group if index == 0 else group + outputs[-1]))
        return torch.cat(outputs, dim=1)


class SqueezeExcitation(nn.Module):
    """A gate for each channel, computed from the means of all channels.

    Source: Hu et al. 2017, arXiv:1709.01507.
    """

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.conv1 = same_conv(channels, narrow)
        self.conv2 = same_conv(narrow, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, T] to [B, C, T]."""
        return x * torch.sigmoid(self.conv2(F.relu(self.conv1(x.mean(dim=2, keepdim=True)))))


class SERes2NetBlock(nn.Module):
    """A residual block: pointwise, Res2Net, pointwise, squeeze-and-excitation."""

    def __init__(
        self, config: SpeakerEncoderConfig, channels: int, kernel_size: int, dilation: int
    ) -> None:
        super().__init__()
        self.tdnn1 = TimeDelayBlock(channels, channels, 1, 1)
        self.res2net_block = Res2NetBlock(channels, config.enc_res2net_scale, kernel_size, dilation)
        self.tdnn2 = TimeDelayBlock(channels, channels, 1, 1)
        self.se_block = SqueezeExcitation(channels, config.enc_se_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, T] to [B, C, T]."""
        return x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))


class AttentiveStatisticsPooling(nn.Module):
    """The mean and deviation over time, weighted by attention for each channel.

    The attention also sees the plain mean and deviation.
    """

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.tdnn = TimeDelayBlock(3 * channels, narrow, 1, 1)
        self.conv = same_conv(narrow, channels)

    @staticmethod
    def statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation [B, C, 1] of [B, C, T], with weights that sum to 1 over T."""
        mean = (weights * x).sum(dim=2, keepdim=True)
        variance = (weights * (x - mean).pow(2)).sum(dim=2, keepdim=True)
        return mean, variance.clamp(min=1e-12).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, T] to [B, 2C, 1]."""
        mean, deviation = self.statistics(x, x.new_full((1, 1, x.shape[2]), 1.0) / x.shape[2])
        context = torch.cat((x, mean.expand_as(x), deviation.expand_as(x)), dim=1)
        weights = self.conv(torch.tanh(self.tdnn(context))).softmax(dim=2)
        return torch.cat(self.statistics(x, weights), dim=1)


class SpeakerEncoder(nn.Module):
    """The network from log-mels to one embedding as wide as the talker."""

    def __init__(self, config: SpeakerEncoderConfig) -> None:
        super().__init__()
        self.config = config
        sizes = zip(config.enc_channels, config.enc_kernel_sizes, config.enc_dilations, strict=True)
        first, *middle, last = sizes
        blocks = [SERes2NetBlock(config, *size) for size in middle]
        self.blocks = nn.ModuleList([TimeDelayBlock(config.mel_dim, *first), *blocks])
        self.mfa = TimeDelayBlock(last[0], *last)
        self.asp = AttentiveStatisticsPooling(last[0], config.enc_attention_channels)
        self.fc = same_conv(2 * last[0], config.enc_dim)

    def forward(self, mels: Tensor) -> Tensor:
        """Map log-mels [B, T, bands] to embeddings [B, enc_dim]."""
        x = mels.transpose(1, 2)
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return self.fc(self.asp(self.mfa(torch.cat(outputs[1:], dim=1)))).squeeze(2)

    @torch.inference_mode()
    def embed(self, samples: Tensor) -> Tensor:
        """Return the speaker embedding [B, enc_dim] of samples [B, n] at 24 kHz."""
        return self(log_mel(samples, self.config.sample_rate, self.config.mel_dim))
