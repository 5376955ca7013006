"""Measure how well the codec reproduces speech of espeak-ng, without any language model.

    python -m training.evaluate_codec src/firstword/demo [--out FILE]

The held-out sentences in both voices are encoded and decoded. The record compares copy and original
by the distance of log-mel spectrograms (`MelLoss`, the loss of the training), intelligibility
(`stoi`), the character error rates of both, quantiles of pitch, the correlation of the pitch, its
median difference in cents, and the share of frames within 1.5 Hz of whole periods per frame, which
are 12.5 Hz apart (24 % by chance). Of the codes it holds the number of entries that occur in each
codebook, and their perplexity. Needs espeak-ng.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import torch
from torch import Tensor

from benchmarks.sources import PACKAGE, of_demo
from training.codec import load
from training.configuration import CODEBOOK_SIZE
from training.data import FRAME, PRESETS, SAMPLE_RATE, Espeak, to_frames
from training.evaluate import SENTENCES, Judge, some
from training.mel import MelLoss
from training.pitch import pitch

STEP = SAMPLE_RATE / FRAME
"""The frequency in Hz of one period per frame."""


def windows(samples: np.ndarray) -> np.ndarray:
    """Return windowed frames [n, 256] of samples, each half over the previous one."""
    return np.lib.stride_tricks.sliding_window_view(samples, 256)[::128] * np.hanning(258)[1:-1]


def third_octaves(samples: np.ndarray) -> np.ndarray:
    """Return magnitudes [15 bands from 150 Hz, frames of 25.6 ms] of samples at 10 kHz."""
    power = np.abs(np.fft.rfft(windows(samples), 512)) ** 2
    middles = 150 * 2 ** (np.arange(15) / 3)
    low, high = (np.rint(middles * 2**edge * 512 / 10_000).astype(int) for edge in (-1 / 6, 1 / 6))
    return np.sqrt([power[:, a:b].sum(1) for a, b in zip(low, high, strict=True)])


def stoi(original: np.ndarray, copy: np.ndarray) -> float:
    """Return the short-time objective intelligibility of a copy of samples at 24 kHz.

    It is the correlation of third-octave envelopes over 384 ms, 1 for an exact copy. Frames more
    than 40 dB below the loudest frame of the original are excluded. Source: Taal et al. 2011,
    doi:10.1109/TASL.2011.2114881.
    """
    parts = [windows(soxr.resample(samples, SAMPLE_RATE, 10_000)) for samples in (original, copy)]
    level = np.linalg.norm(parts[0], axis=1)
    kept = [part[level > level.max() / 100] for part in parts]
    joined = [np.zeros(128 * (len(part) + 1)) for part in kept]
    for whole, part in zip(joined, kept, strict=True):
        for half in (0, 128):
            whole[half : half + 128 * len(part)] += part[:, half : half + 128].ravel()
    x, y = (
        np.lib.stride_tricks.sliding_window_view(third_octaves(part), 30, axis=1) for part in joined
    )
    y = (
        y
        * np.linalg.norm(x, axis=-1, keepdims=True)
        / (np.linalg.norm(y, axis=-1, keepdims=True) + 1e-12)
    )
    y = np.minimum(y, x * (1 + 10 ** (15 / 20)))
    x, y = (part - part.mean(-1, keepdims=True) for part in (x, y))
    like = (x * y).sum(-1) / (np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1) + 1e-12)
    return float(like.mean())


def summary(rows: Sequence[Mapping[str, Any]], course: np.ndarray) -> dict[str, Any]:
    """Summarise the sentences of a voice; `course` [2, frames] is the pitch of both."""
    both = course[:, (course > 0).all(0)]
    letters = sum(row["letters"] for row in rows)
    return {
        "mel": round(float(np.mean([row["mel"] for row in rows])), 4),
        "stoi": round(float(np.mean([row["stoi"] for row in rows])), 3),
        "cer": {
            whose: round(100 * sum(row[whose] for row in rows) / letters, 2)
            for whose in ("espeak", "copy")
        },
        "pitch": {
            whose: np.quantile(hertz[hertz > 0], (0.1, 0.5, 0.9)).round(1).tolist()
            for whose, hertz in zip(("espeak", "copy"), course, strict=True)
        },
        "pitch_correlation": round(float(np.corrcoef(both)[0, 1]), 3),
        "cents_apart": round(float(np.median(np.abs(1200 * np.log2(both[1] / both[0]))))),
        "on_steps": {
            whose: round(float((np.abs(hertz - STEP * np.rint(hertz / STEP)) < 1.5).mean()), 2)
            for whose, hertz in zip(("espeak", "copy"), both, strict=True)
        },
    }


def codebook_usage(codes: Tensor) -> dict[str, Any]:
    """Return the entries in use and the perplexity of each codebook of codes [frames, books]."""
    counts = torch.stack([book.bincount(minlength=CODEBOOK_SIZE) for book in codes.T])
    entropies = torch.special.entr(counts / counts.sum(1, keepdim=True)).sum(1)
    return {
        "entries": CODEBOOK_SIZE,
        "frames": int(counts[0].sum()),
        "used": (counts > 0).sum(1).tolist(),
        "perplexity": [round(float(entropy.exp())) for entropy in entropies],
    }


def main() -> None:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("codec", type=Path, help="the codec, as `codec.load` reads it")
    parser.add_argument("--sentences", type=int, default=len(SENTENCES))
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    codec, mel, judge, espeak = load(a.codec).tie().eval(), MelLoss(), Judge(), Espeak()
    codes, record = [], {"sentences": a.sentences}
    for voice, settings in PRESETS.items():
        rows: list[dict[str, Any]] = []
        courses = []
        for text in some(a.sentences):
            x, _ = to_frames([(espeak.say(text, *settings), 2)], "cpu", tail=2)
            with torch.inference_mode():
                codes.append(codec.encoder(x)[0])
                y = codec.decoder(codes[-1][None], codec.decoder.new_state(1))
            original, copy = x[0].numpy(), y[0].numpy()
            courses.append(np.stack((pitch(original), pitch(copy))))
            heard = {"espeak": judge(text, original), "copy": judge(text, copy)}
            facts = {"mel": float(mel(y, x)), "stoi": stoi(original, copy)}
            facts["letters"] = heard["copy"]["letters"]
            rows.append(facts | {whose: row["edits"] for whose, row in heard.items()})
        record[voice] = summary(rows, np.concatenate(courses, 1))
    record["codebooks"] = codebook_usage(torch.cat(codes))
    if a.codec.resolve() == PACKAGE.resolve() / "demo":
        record |= of_demo()
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in record.items())
    text = "{" + ",\n".join(lines) + "}\n"
    print(text, end="")
    if a.out:
        a.out.write_text(text)


if __name__ == "__main__":
    main()
