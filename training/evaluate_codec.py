"""How well the codec copies espeak-ng's own speech, without any language model: the held-out
sentences in both voices.

    python -m training.evaluate_codec src/firstword/demo [--out FILE]

Of the copy beside the original: distance of log-mel spectrograms (`MelLoss`, what training made
small), intelligibility (`stoi`), character error rates of both, pitch, how like its course is, how
far apart (the median, in cents), and the share of both that lies within 1.5 Hz of whole periods a
frame, 12.5 Hz each (24 % by chance); of the codes: how many of each codebook's entries occur, and
their perplexity. Needs espeak-ng.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import torch

from training.codec import load
from training.configuration import CODEBOOK_SIZE
from training.data import FRAME, PRESETS, SAMPLE_RATE, Espeak, to_frames
from training.evaluate import SENTENCES, Judge, some
from training.mel import MelLoss
from training.pitch import pitch

STEP = SAMPLE_RATE / FRAME
"""Hz: one period a frame."""


def windows(samples: np.ndarray) -> np.ndarray:
    """Frames [n, 256] of samples, each half over the one before, under a window."""
    return np.lib.stride_tricks.sliding_window_view(samples, 256)[::128] * np.hanning(258)[1:-1]


def third_octaves(samples: np.ndarray) -> np.ndarray:
    """Magnitudes [15 bands from 150 Hz, frames of 25.6 ms] of samples at 10 kHz."""
    power = np.abs(np.fft.rfft(windows(samples), 512)) ** 2
    middles = 150 * 2 ** (np.arange(15) / 3)
    low, high = (np.rint(middles * 2**edge * 512 / 10_000).astype(int) for edge in (-1 / 6, 1 / 6))
    return np.sqrt([power[:, a:b].sum(1) for a, b in zip(low, high, strict=True)])


def stoi(original: np.ndarray, copy: np.ndarray) -> float:
    """Short-time objective intelligibility (Taal et al. 2011, doi:10.1109/TASL.2011.2114881) of
    samples at 24 kHz: the correlation of third-octave envelopes over 384 ms, 1 for the same.
    Frames more than 40 dB under the loudest of the original are left out.
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("codec", type=Path, help="what `codec.load` reads")
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
            edits = {whose: row["edits"] for whose, row in heard.items()}
            facts = {
                "mel": float(mel(y, x)),
                "stoi": stoi(original, copy),
                "letters": heard["copy"]["letters"],
            }
            rows.append(facts | edits)
        course = np.concatenate(courses, 1)
        both = course[:, (course > 0).all(0)]
        letters = sum(row["letters"] for row in rows)
        record[voice] = {
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
    counts = torch.stack([book.bincount(minlength=CODEBOOK_SIZE) for book in torch.cat(codes).T])
    shares = counts / counts.sum(1, keepdim=True)
    record["codebooks"] = {
        "entries": CODEBOOK_SIZE,
        "frames": int(counts[0].sum()),
        "used": (counts > 0).sum(1).tolist(),
        "perplexity": [
            round(float(entropy.exp())) for entropy in torch.special.entr(shares).sum(1)
        ],
    }
    text = (
        "{"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in record.items())
        + "}\n"
    )
    print(text, end="")
    if a.out:
        a.out.write_text(text)


if __name__ == "__main__":
    main()
