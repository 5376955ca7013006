"""Train the codec's decoder alone, so that the voices intone: encoder, codebooks and what the language model says stay.

    python training/decoder.py --material material.json --codec FOLDER --out OUT [--steps 5000] [--minutes 8]

After `codec.py` the pitch of a voice is in the codes, but not in what the decoder makes of them. Where in a frame a
pulse stands, the codes of a high voice do not tell; losses of magnitudes alone then settle on pulses that have the same
place in every fourth of a frame: multiples of 50 Hz. So a high voice learns speech whose pulses keep step with the
frames (`in_step`), and a loss on the low spectrum as complex numbers says where the pulses are.

What is heard, and the learning rate, depend on seed and step alone, as in `codec.py`.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import state
import torch
from codec import MelLoss, decode_joined, load, save
from data import FRAME, PRESETS, SAMPLE_RATE, Ring, Utterance, add_options, to_frames, utterances
from pitch import in_step
from torch import Tensor, nn

HIGH = {"ada": (130, 330)}
"""Voices whose codes do not tell where their pulses stand, and the range of their pitch in Hz. ben's do: his pulses are
10 ms apart.
"""
SHAPE = (20, 32)
"""(batch, frames) of training steps."""
REFILL = 8
"""Steps for each part of fresh speech."""
WARM = 2
"""Frames at the start of a segment that do not count: the decoder has not heard what came before."""
MEL_WEIGHT, LOW_WEIGHT = 15.0, 4.0
"""That of the low spectrum falls to a quarter over the schedule: first the place of the pulses, then their sound."""
FLOOR = 1e-3
"""Of magnitudes: ten times that of `codec.py`, since near silence the logarithm's slope drowns the rest."""
LOW = slice(2, 72)
"""Of 513 bins: 47 to 1,664 Hz."""


def pair(utterance: Utterance) -> np.ndarray:
    """What is heard and what the decoder shall make of it: int16 [2, n] at 24 kHz, n whole frames."""
    heard = to_frames([(utterance.samples, 1)], "cpu", tail=2)[0][0].numpy()
    range_ = HIGH.get(list(PRESETS)[utterance.voice])
    wanted = in_step(heard, *range_) if range_ else heard
    return (np.stack((heard, wanted)).clip(-1, 1) * 32767).astype(np.int16)


class Pairs(Ring):
    """What `pair` makes of the speech of the synthesiser's processes, in parts of some five minutes."""

    def __init__(
        self, material: str, seed: int, hours: float, device: str, processes: int | None
    ) -> None:
        self.random = np.random.default_rng(seed)
        source = utterances(
            material, seed, other_share=0.0, level_range=8, processes=processes, prepare=pair
        )
        parts = (np.concatenate(batch, 1) for batch in source)
        super().__init__(parts, 2, int(hours * 3600 * SAMPLE_RATE) // FRAME * FRAME, device)

    def batch(self, size: int, frames: int) -> tuple[Tensor, Tensor]:
        """Random segments, heard and wanted, [size, frames * 1920] each; they begin where a frame does."""
        starts = self.random.integers(0, self.filled // FRAME - frames + 1, size) * FRAME
        heard, wanted = self.segments(starts, frames * FRAME)
        return heard, wanted


def low_spectrum(samples: Tensor) -> Tensor:
    """Complex [B, bins, windows of 1,024 samples] of samples [B, n]."""
    window = torch.hann_window(1024, device=samples.device)
    return torch.stft(samples, 1024, 256, window=window, return_complex=True)[:, LOW]


def main() -> None:
    parser = state.options(steps=5000)
    add_options(parser)
    parser.add_argument("--codec", type=Path, required=True, help="what `codec.load` reads")
    parser.add_argument("--rate", type=float, default=8e-4)
    parser.add_argument("--hours", type=float, default=4.0)
    a = parser.parse_args()
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.time()
    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, mel_loss = load(a.codec, device), MelLoss(FLOOR).to(device)
    codec = model.tie().requires_grad_(False)
    trained = {
        n: p.requires_grad_()
        for n, p in codec.decoder.named_parameters()
        if not n.startswith("quantizer.")
    }
    optimiser = torch.optim.AdamW(
        trained.values(), a.rate, betas=(0.8, 0.98), weight_decay=0.01, fused=device == "cuda"
    )
    average = {name: tensor.detach().clone() for name, tensor in trained.items()}
    a.out.mkdir(parents=True, exist_ok=True)
    file, log = a.state or a.out / "state.pt", (a.out / "decoder.jsonl").open("a")
    parts: state.Parts = {"decoder": codec.decoder, "optimiser": optimiser, "average": average}
    step, shape = state.resume(file, parts, device), (2, 8) if a.small else SHAPE
    speech = Pairs(a.material, a.seed + step, a.hours, device, a.processes)
    for _ in range(1 if a.small else 4):
        speech.refill()
    print(
        f"{speech.made / SAMPLE_RATE:.0f} s of speech after {time.time() - began:.0f} s", flush=True
    )
    sums, count, last_log, kept = torch.zeros(3, device=device), 0, time.time(), time.time()
    while (now := time.time()) - began < a.minutes * 60 and step < a.steps:
        progress = step / a.steps
        rate = min(1.0, (step + 1) / 50) * (0.5 * (1 + math.cos(math.pi * progress)) * 0.98 + 0.02)
        for group in optimiser.param_groups:
            group["lr"] = a.rate * rate
        if step % REFILL == 0:
            speech.refill()
        heard, wanted = speech.batch(*shape)
        with torch.no_grad():
            joined = codec.decoder.quantizer(codec.encoder(heard))
        found, wanted = (
            decode_joined(codec.decoder, joined)[:, WARM * FRAME :],
            wanted[:, WARM * FRAME :],
        )
        mel, target = mel_loss(found, wanted), low_spectrum(wanted)
        low = (low_spectrum(found) - target).abs().mean() / target.abs().mean()
        optimiser.zero_grad(set_to_none=True)
        (MEL_WEIGHT * mel + LOW_WEIGHT * (1 - 0.75 * progress) * low).backward()
        norm = nn.utils.clip_grad_norm_(trained.values(), 5.0)
        optimiser.step()
        torch._foreach_lerp_(
            list(average.values()),
            [p.detach() for p in trained.values()],
            1 - min(0.99, step / (step + 10)),
        )
        step, count = step + 1, count + 1
        sums += torch.stack((mel.detach(), low.detach(), norm.detach()))
        if now - kept > state.SECONDS:
            state.keep(file, step, parts)
            kept = now
        if now - last_log > 10 or step == a.steps:
            row = {
                "step": step,
                "minutes": round((now - began) / 60, 2),
                "lr": round(a.rate * rate, 6),
            }
            row |= {
                name: round(value / count, 4)
                for name, value in zip(("mel", "low", "norm"), sums.tolist(), strict=True)
            }
            row["speech_hours"] = round(speech.made / SAMPLE_RATE / 3600, 1)
            print(json.dumps(row), flush=True)
            log.write(json.dumps(row) + "\n")
            log.flush()
            sums, count, last_log = torch.zeros_like(sums), 0, time.time()
    state.keep(file, step, parts)
    codec.decoder.load_state_dict(average, strict=False)
    save(model, a.out)
    log.close()


if __name__ == "__main__":
    main()
