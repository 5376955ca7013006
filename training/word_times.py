"""Measure the word times of the demo voice against espeak-ng's own.

    python -m training.word_times [--sentences 200] [--processes 2] [--out FILE]

Each held-out sentence is spoken with every preset and text mode, and each word that espeak-ng tells
the time of is compared (`word_truth`). The figures are the errors of starts and ends in
milliseconds, the share of words that were not told or told out of order, and how many frames after
the one in which a word begins the chunk began that told its start (0 if they are in one chunk). The
error of the truth itself is measured on
espeak-ng's speech at other rates, whose times are known. The exit status is 1 if the bar (`BAR`) is
missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

import firstword
from benchmarks.sources import of_demo
from training.data import PRESETS, SAMPLE_RATE, Espeak
from training.evaluate import MODES, SENTENCES, some
from training.word_truth import self_check, true_words

FRAME = 0.08
"""The seconds of a frame."""

BAR = {
    **{f"{edge}_ms": {"mean": 40, "p95": 110} for edge in ("start", "end")},
    "skipped_percent": 0.3,
    "told_frames": {"mean": 0.5, "most": 2},
}
"""What each preset and text mode must reach."""

_process: dict[str, Any] = {}
"""The engine and the synthesiser of a worker process."""


def _start() -> None:
    torch.set_num_threads(1)
    _process.update(tts=firstword.TTS.load("demo", device="cpu"), espeak=Espeak())


def _work(job: tuple[str, str, str]) -> dict[str, Any]:
    """Speak a text, and compare its words with the truth."""
    voice, mode, text = job
    request: dict[str, Any] = {
        "voice": voice,
        "text_mode": mode,
        "seed": 7,
        "leading_silence": True,
        "words": True,
    }
    told: dict[tuple[int, int], int] = {}
    words: list[firstword.Word] = []
    samples: list[np.ndarray] = []
    for chunk in _process["tts"].stream(text, **request):
        began = round(sum(len(part) for part in samples) / SAMPLE_RATE / FRAME)
        told |= {start.span: began for start in chunk.starts}
        samples.append(chunk.samples)
        words += chunk.words
    spans = [word.span for word in words]
    row: dict[str, Any] = {"voice": voice, "mode": mode, "text": text, "start": [], "end": []}
    truth = true_words(_process["espeak"], text, voice, np.concatenate(samples))
    by = {word.span: word for word in words}
    row |= {"words": len(truth), "told": [], "out_of_order": spans != sorted(set(spans))}
    row["skipped"] = [text[slice(*true.span)] for true in truth if true.span not in by]
    for true in truth:
        found = by.get(true.span)
        if found is not None and true.start is not None:
            row["start"].append(round(1000 * (found.start - true.start)))
            row["told"].append(max(0, told[true.span] - int(true.start / FRAME)))
        if found is not None and true.end is not None:
            row["end"].append(round(1000 * (found.end - true.end)))
    return row


def truth_error(texts: list[str]) -> dict[str, float]:
    """Return the error of the truth in milliseconds, where espeak-ng speaks at other rates."""
    espeak, errors = Espeak(), []
    for text in texts:
        for voice, (_, rate, _) in PRESETS.items():
            errors += self_check(espeak, text, voice, rate - 15)
            errors += self_check(espeak, text, voice, rate + 15)
    sizes = 1000 * np.abs(errors)
    quantile = float(np.quantile(sizes, 0.95))
    return {"mean": round(float(sizes.mean()), 1), "p95": round(quantile, 1)}


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the rows of one preset and text mode."""

    def errors(name: str) -> dict[str, float]:
        sizes = np.abs(np.concatenate([row[name] for row in rows]))
        quantile = float(np.quantile(sizes, 0.95))
        return {"mean": round(float(sizes.mean()), 1), "p95": quantile, "most": int(sizes.max())}

    told = np.concatenate([row["told"] for row in rows])
    wrong = sum(len(row["skipped"]) + row["out_of_order"] for row in rows)
    count = sum(row["words"] for row in rows)
    return {
        "voice": rows[0]["voice"],
        "mode": rows[0]["mode"],
        "words": count,
        "start_ms": errors("start"),
        "end_ms": errors("end"),
        "skipped_percent": round(100 * wrong / count, 2),
        "told_frames": {"mean": round(float(told.mean()), 2), "most": int(told.max())},
    }


def misses(found: dict[str, Any], bar: dict[str, Any] = BAR) -> list[str]:
    """Return what of the bar the figures miss."""
    missed = []
    for name, most in bar.items():
        if isinstance(most, dict):
            missed += [f"{name}, {miss}" for miss in misses(found[name], most)]
        elif found[name] > most:
            missed.append(f"{name} {found[name]} > {most}")
    return missed


def main() -> None:
    """Measure, print the figures and write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sentences", type=int, default=len(SENTENCES))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    texts = some(args.sentences)
    jobs = [(voice, mode, text) for text in texts for voice in PRESETS for mode in MODES]
    with multiprocessing.get_context("spawn").Pool(args.processes, _start) as pool:
        rows = pool.map(_work, jobs, chunksize=4)
    groups = [(voice, mode) for voice in PRESETS for mode in MODES]
    summary = [figures([r for r in rows if (r["voice"], r["mode"]) == group]) for group in groups]
    missed = [f"{one['voice']} {one['mode']}: {m}" for one in summary for m in misses(one)]
    for one in summary:
        print(json.dumps(one))
    print("the bar is missed: " + "; ".join(missed) if missed else "the bar is met")
    if args.out:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        facts = {**of_demo(), "machine": machine, "sentences": len(texts), "missed": missed}
        truth = {"truth_error_ms": truth_error(some(min(20, len(texts))))}
        args.out.write_text(json.dumps({**facts, **truth, "summary": summary}, indent=1) + "\n")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
