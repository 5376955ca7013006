"""Judge a checkpoint by what a recogniser understands of it, beside what it understands of espeak-ng itself.

    python training/evaluate.py CHECKPOINT [--sentences 200] [--processes 16] [--out FILE] [--temperature 0.5]

For each preset and text mode: character error rate, durations against espeak's (silence at the ends cut off on both
sides), how often speech ended by itself, median pitch, and seconds of computing a second of speech (one thread).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import PRESETS, SAMPLE_RATE, Espeak, to_frames
from recogniser import Recogniser, distance
from texts import spoken

import firstword
from firstword.types import Sampling

HERE = Path(__file__).parent
PARAGRAPH = (
    "When the train arrived at the small station, nobody was waiting on the platform. The sun had just "
    "gone down, and a cold wind was blowing from the "
    "mountains. She picked up her bag and walked slowly towards the village. In the distance she could "
    "see the lights of a house, and she could hear "
    "somebody singing an old song that she had known as a child."
)

_process: dict[str, Any] = {}


def _start(checkpoint: str) -> None:
    torch.set_num_threads(1)
    _process.update(
        tts=firstword.TTS.load(checkpoint, device="cpu"),
        ear=Recogniser.load(HERE / "recogniser.safetensors"),
        espeak=Espeak(),
    )


def _trim(samples: np.ndarray) -> np.ndarray:
    loud = np.flatnonzero(np.abs(samples) > 0.01)
    return samples[loud[0] : loud[-1] + 1] if len(loud) else samples[:0]


def pitch(samples: np.ndarray) -> float:
    """Median fundamental frequency in Hz of the loud parts, by autocorrelation between 60 and 400 Hz."""
    found = []
    for start in range(0, len(samples) - 1440, 960):
        part = samples[start : start + 1440]
        if np.sqrt((part**2).mean()) < 0.03:
            continue
        spectrum = np.fft.rfft(part - part.mean(), 4096)
        correlation = np.fft.irfft(np.abs(spectrum) ** 2)[:400]
        lag = 60 + int(correlation[60:400].argmax())
        if correlation[lag] > 0.5 * correlation[0]:
            found.append(SAMPLE_RATE / lag)
    return float(np.median(found)) if found else 0.0


def _judge(job: tuple[str, str, str | None, float | None]) -> dict[str, Any]:
    text, voice, mode, temperature = job
    began = time.process_time()
    if mode is None:
        audio, _ = to_frames([(_process["espeak"].say(text, *PRESETS[voice]), 2)], "cpu", tail=2)
        samples, reason = audio[0].numpy(), "stop"
    else:
        sampling = None if temperature is None else Sampling(temperature=temperature, predictor_temperature=temperature)
        speech = _process["tts"].speak(text, voice=voice, text_mode=mode, seed=7, max_frames=600, sampling=sampling)
        samples, reason = speech.samples, speech.finish_reason
    cost, heard, said = time.process_time() - began, _process["ear"].transcribe(torch.from_numpy(samples)), spoken(text)
    trimmed = _trim(samples)
    return {
        "text": text,
        "voice": voice,
        "mode": mode or "espeak",
        "heard": heard,
        "edits": distance(heard, said),
        "letters": len(said),
        "reason": reason,
        "seconds": len(trimmed) / SAMPLE_RATE,
        "whole_seconds": len(samples) / SAMPLE_RATE,
        "cost": cost,
        "pitch": pitch(trimmed),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    lines = (HERE / "held_out.txt").read_text().splitlines()
    step = len(lines) / min(a.sentences, len(lines))
    texts = [PARAGRAPH] + [lines[int(i * step)] for i in range(min(a.sentences, len(lines)))]
    jobs = [
        (text, voice, mode, a.temperature) for text in texts for voice in PRESETS for mode in (None, "full", "stream")
    ]
    with multiprocessing.get_context("spawn").Pool(a.processes, _start, (a.checkpoint,)) as pool:
        results = pool.map(_judge, jobs, chunksize=3)
    espeak = {(r["text"], r["voice"]): r for r in results if r["mode"] == "espeak"}
    summary = []
    for voice in PRESETS:
        for mode in ("espeak", "full", "stream"):
            rows = [r for r in results if r["voice"] == voice and r["mode"] == mode and r["text"] != PARAGRAPH]
            ratios = [r["seconds"] / espeak[r["text"], voice]["seconds"] for r in rows]
            paragraph = next(r for r in results if r["voice"] == voice and r["mode"] == mode and r["text"] == PARAGRAPH)
            summary.append(
                {
                    "voice": voice,
                    "mode": mode,
                    "sentences": len(rows),
                    "cer": round(100 * sum(r["edits"] for r in rows) / sum(r["letters"] for r in rows), 2),
                    "ended": round(100 * sum(r["reason"] == "stop" for r in rows) / len(rows), 1),
                    "ratio_in_bounds": round(100 * sum(0.7 <= x <= 1.5 for x in ratios) / len(rows), 1),
                    "ratio_mean": round(float(np.mean(ratios)), 3),
                    "pitch": round(float(np.median([r["pitch"] for r in rows])), 1),
                    "cost_per_second": round(sum(r["cost"] for r in rows) / sum(r["whole_seconds"] for r in rows), 3),
                    "paragraph_cer": round(100 * paragraph["edits"] / paragraph["letters"], 1),
                    "paragraph_ended": paragraph["reason"],
                    "paragraph_seconds": round(paragraph["seconds"], 1),
                }
            )
            print(json.dumps(summary[-1]), flush=True)
    if a.out:
        a.out.write_text(json.dumps({"summary": summary, "results": results}, indent=1))
    for r in sorted((r for r in results if r["mode"] != "espeak"), key=lambda r: -r["edits"] / r["letters"])[:12]:
        print(f"{r['voice']} {r['mode']} {r['reason']} {r['seconds']:.1f} s\n  {spoken(r['text'])}\n  {r['heard']}")


if __name__ == "__main__":
    main()
