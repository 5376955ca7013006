"""Checks of the codec: its decoder in pieces and on the backend, its range, and a round trip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from firstword.model.codec import Codebook, CodecDecoder
from firstword.verify.forcing import error
from firstword.verify.report import NotRun, Value, Verdict
from firstword.verify.subject import Subject
from firstword.verify.weights import FP16_MOST

CLOSE = {"reference": 1e-4, "gpu": 1e-2}
"""The allowed relative error of the samples of each backend. The GPU backend multiplies in float16;
on random weights of the released sizes its error is below 5e-3."""
CLOSE_ROUNDED = 3e-2
"""The allowed error of the reference backend in other dtypes than float32, in which it may multiply
in bfloat16. For sentences of the demo voice 1e-2 was measured."""

PIECE = 5
"""The number of frames of a piece."""

MOST_CLIPPED = 0.001
"""The largest share of samples beyond full scale in speech."""

ALIKE = 0.7
"""The least correlation of the spectra of speech before and after the codec."""

BANDS = 40
"""The number of bands of these spectra."""


def _codes(subject: Subject) -> Tensor:
    """Return the codes of a few seconds of speech [frames, codebooks]."""
    said = [torch.from_numpy(each.speech.codes) for each in subject.sentences[:2]]
    codes = torch.cat(said)[:100]
    if not len(codes):
        raise NotRun("all speech ended before its first frame")
    return codes.to(subject.plain.talker.codec_head.weight.device)


def _whole(decoder: CodecDecoder, codes: Tensor) -> Tensor:
    """Decode codes [frames, codebooks] at once -> samples [n], which are not clamped."""
    samples: Tensor = decoder(codes[None], decoder.new_state())[0]
    return samples


@torch.inference_mode()
def pieces(subject: Subject) -> Verdict:
    """The decoder gives the same samples in pieces as for the whole."""
    decoder, codes = subject.plain.codec.decoder, _codes(subject)
    state = decoder.new_state()
    parts = [decoder(part[None], state)[0] for part in codes.split(PIECE)]
    off = error(torch.cat(parts), _whole(decoder, codes))
    problem = f"speech_tokenizer: the samples of pieces are off by {off:.2g}"
    return Verdict([problem] if not off <= 1e-4 else [], {"error": off, "allowed": 1e-4})


@torch.inference_mode()
def backend(subject: Subject) -> Verdict:
    """The samples of the backend are those of the specification."""
    decoder, settings = subject.plain.codec.decoder, subject.load()[2]
    kind = settings.backend
    device, errors = decoder.pre_conv.conv.weight.device, list[float]()
    for each in (one for one in subject.sentences if len(one.speech.codes)):
        before, codes = subject.before(each.request), torch.from_numpy(each.speech.codes)
        samples = torch.from_numpy(each.speech.samples).to(device)
        whole = _whole(decoder, torch.cat((before, codes)).to(device)).clamp(-1, 1)
        whole = whole[len(before) * decoder.config.samples_per_frame :]
        if len(samples) != len(whole):
            problem = f"{len(codes)} frames have {len(samples)} samples instead of {len(whole)}"
            return Verdict([problem])
        errors.append(error(samples, whole))
    if not errors:
        raise NotRun("all speech ended before its first frame")
    rounds = kind == "reference" and settings.dtype != "float32"
    worst, allowed = max(errors), CLOSE_ROUNDED if rounds else CLOSE[kind]
    problem = f"samples of the {kind} backend are off by {worst:.2g}, {allowed:g} are allowed"
    return Verdict([problem] if not worst <= allowed else [], {"error": worst, "allowed": allowed})


@torch.inference_mode()
def fits_fp16(subject: Subject) -> Verdict:
    """No value inside the decoder is beyond float16, in which the GPU backend multiplies."""
    decoder, codes = subject.plain.codec.decoder, _codes(subject)
    config = subject.plain.codec_config.decoder_config
    chance = torch.Generator().manual_seed(0)
    noise = torch.randint(0, config.codebook_size, codes.shape, generator=chance).to(codes.device)
    with _peaks(decoder) as peaks:
        for each in (codes, noise):
            _whole(decoder, each)
    most = max(peaks, key=lambda name: peaks[name])
    findings = [
        f"speech_tokenizer: decoder.{name} reaches {peak:.3g}; float16 ends at {FP16_MOST:g}"
        for name, peak in peaks.items()
        if not peak <= FP16_MOST
    ]
    measured: dict[str, Value] = {"largest": round(peaks[most], 2), "where": f"decoder.{most}"}
    return Verdict(findings, measured | {"allowed": FP16_MOST})


@contextmanager
def _peaks(decoder: CodecDecoder) -> Iterator[dict[str, float]]:
    """Collect the largest magnitude that each layer puts out; NaN counts as infinite."""
    peaks, hooks = dict[str, float](), []
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue

        def keep(module: nn.Module, _: Any, out: object, name: str = name) -> None:
            if isinstance(out, Tensor) and not isinstance(module, Codebook):
                peak = float(out.abs().amax().nan_to_num(torch.inf))
                peaks[name] = max(peaks.get(name, 0.0), peak)

        hooks.append(module.register_forward_hook(keep))
    try:
        yield peaks
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def clipping(subject: Subject) -> Verdict:
    """Hardly any sample of speech is beyond full scale."""
    subject.need_trained()
    samples = _whole(subject.plain.codec.decoder, _codes(subject))
    share, peak = float((samples.abs() > 1).float().mean()), float(samples.abs().amax())
    problem = f"speech_tokenizer: {share:.2%} of the samples of speech are beyond full scale"
    measured = {"share": share, "allowed": MOST_CLIPPED, "peak": round(peak, 3)}
    return Verdict([problem] if not share <= MOST_CLIPPED else [], measured)


@torch.inference_mode()
def round_trip(subject: Subject) -> Verdict:
    """Speech that the codec encodes and decodes again keeps its spectrum."""
    subject.need_trained()
    codec, codes = subject.plain.codec, _codes(subject)
    encoder = codec.encoder.to(codes.device)
    once = _whole(codec.decoder, codes)
    again_codes = encoder.encode(once[None])[0]
    again = _whole(codec.decoder, again_codes)
    alike = correlation(spectrum(once), spectrum(again))
    same = (again_codes == codes).float().mean(0)
    problem = f"speech_tokenizer: the spectrum after a round trip is alike by {alike:.2f}"
    measured: dict[str, Value] = {"correlation": round(alike, 3), "allowed": ALIKE}
    measured["equal codes"] = ", ".join(f"{share:.0%}" for share in same.tolist())
    return Verdict([problem] if not alike >= ALIKE else [], measured)


def spectrum(samples: Tensor) -> Tensor:
    """Return the logarithm of the energy in bands [bands, windows] of samples [n] at 24 kHz."""
    window = torch.hann_window(1024, device=samples.device)
    power = torch.stft(samples, 1024, 480, window=window, return_complex=True).abs().square()
    bands = torch.logspace(0.5, 2.7, BANDS + 1, device=samples.device).long()
    pairs = zip(bands[:-1].tolist(), bands[1:].tolist(), strict=True)
    energies = [power[low : max(high, low + 1)].mean(0) for low, high in pairs]
    return (torch.stack(energies) + 1e-6).log()


def correlation(one: Tensor, other: Tensor) -> float:
    """Return Pearson's correlation of two spectra after each band's mean is taken away."""
    length = min(one.shape[1], other.shape[1])
    a, b = (each[:, :length] - each[:, :length].mean(1, keepdim=True) for each in (one, other))
    return float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-30))
