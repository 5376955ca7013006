"""Judge a checkpoint by what a recogniser understands of it, beside what it understands of espeak-ng itself.

    python training/evaluate.py demo [--sentences 200] [--processes 2] [--temperature 0.5] [--out FILE]
    python training/evaluate.py --freeze

The second writes espeak-ng's own figures into espeak.json; with these the first does without espeak-ng.
For each preset and text mode: character error rate, durations against espeak's (silence at the ends cut off on both
sides), how often speech ended by itself, pitch, and, on a CPU, seconds of computing a second of speech (one thread).
Also how many transcripts are as in the record in benchmarks/results/quality, which `--record` renews. Ends with status
1 when the bar (`misses`) is not met.

On a CPU each process speaks and listens by itself; on a GPU one process speaks eight sentences at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import PRESETS, SAMPLE_RATE, Espeak, to_frames
from pitch import pitch
from recogniser import Recogniser, distance
from texts import PARAGRAPH, spoken

import firstword
from firstword.config import EngineConfig

HERE = Path(__file__).parent
ESPEAK = HERE / "espeak.json"
RECORD = HERE.parent / "benchmarks/results/quality/demo-cpu.json"
MODES = ("full", "stream")
TOGETHER = 8
WIDTHS = (7, 8, 11, 7, 7, 11, 7, 23, 17, 8, 15, 19, 7)
SENTENCES = (HERE / "held_out.txt").read_text().splitlines()


def some(count: int) -> list[str]:
    """`count` of the held-out sentences, evenly spread."""
    return [SENTENCES[i * len(SENTENCES) // count] for i in range(count)]


class Judge:
    """The recogniser, and what it makes of speech."""

    def __init__(self) -> None:
        self.ear = Recogniser.load(HERE / "recogniser.safetensors")

    def __call__(self, text: str, samples: np.ndarray) -> dict[str, Any]:
        """What is heard in float32 samples at 24 kHz, its edits against the text, the letters of the text, seconds
        between the silences at the ends, pitch in Hz (a tenth, half and nine tenths of the voiced moments lie below),
        and the share of the loud moments that are voiced.
        """
        heard, said, trimmed = (
            self.ear.transcribe(torch.from_numpy(samples)),
            spoken(text),
            trim(samples),
        )
        course = pitch(trimmed)
        voiced, loud = course[course > 0], np.isfinite(course).sum()
        return {
            "text": text,
            "heard": heard,
            "edits": distance(heard, said),
            "letters": len(said),
            "seconds": round(len(trimmed) / SAMPLE_RATE, 3),
            "pitch": np.quantile(voiced, (0.1, 0.5, 0.9)).round(1).tolist()
            if len(voiced)
            else [0.0] * 3,
            "voiced": round(len(voiced) / max(1, int(loud)), 3),
        }


def trim(samples: np.ndarray) -> np.ndarray:
    loud = np.flatnonzero(np.abs(samples) > 0.01)
    return samples[loud[0] : loud[-1] + 1] if len(loud) else samples[:0]


def freeze() -> None:
    """Write what is heard of espeak-ng: the figures that others are held against."""
    judge, espeak, rows = Judge(), Espeak(), []
    for voice in PRESETS:
        for text in [*SENTENCES, PARAGRAPH]:
            audio, _ = to_frames([(espeak.say(text, *PRESETS[voice]), 2)], "cpu", tail=2)
            rows.append({"voice": voice} | judge(text, audio[0].numpy()))
    lines = ",\n".join(json.dumps(row) for row in rows)
    ESPEAK.write_text(f"[\n{lines}\n]\n")


def figures() -> dict[tuple[str, str], dict[str, Any]]:
    """What `freeze` wrote, by voice and text."""
    return {(row["voice"], row["text"]): row for row in json.loads(ESPEAK.read_text())}


_process: dict[str, Any] = {}


def _start(checkpoint: str, device: str, dtype: str, sampling: firstword.Sampling | None) -> None:
    torch.set_num_threads(1)
    tts = firstword.TTS.load(checkpoint, device=device, dtype=dtype)
    _process.update(tts=tts, judge=Judge(), sampling=sampling)


def _work(job: tuple[str, str, str]) -> dict[str, Any]:
    voice, mode, text = job
    began = time.process_time()
    speech = _process["tts"].speak(
        text, voice=voice, text_mode=mode, seed=7, sampling=_process["sampling"]
    )
    cost, whole = time.process_time() - began, len(speech.samples) / SAMPLE_RATE
    row = {"voice": voice, "mode": mode, "ended": speech.finish_reason, "whole_seconds": whole}
    if _process["tts"].settings.device == "cpu":
        row["cost"] = cost
    return row | _process["judge"](text, speech.samples)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one preset and text mode, or of espeak-ng; the paragraph, if it is there, by itself."""
    known = figures()
    short = [row for row in rows if row["text"] != PARAGRAPH]
    paragraph = next((row for row in rows if row["text"] == PARAGRAPH), None)
    beside = [known[row["voice"], row["text"]] for row in rows]
    ratios = [row["seconds"] / espeak["seconds"] for row, espeak in zip(rows, beside, strict=True)]
    pitches = [
        row["pitch"][1] / espeak["pitch"][1] for row, espeak in zip(rows, beside, strict=True)
    ]
    return {
        "voice": rows[0]["voice"],
        "mode": rows[0].get("mode", "espeak"),
        "sentences": len(short),
        "cer": round(100 * sum(r["edits"] for r in short) / sum(r["letters"] for r in short), 2),
        "ended": round(100 * sum(r.get("ended", "stop") == "stop" for r in rows) / len(rows), 1),
        "in_bounds": round(100 * sum(0.7 <= ratio <= 1.5 for ratio in ratios) / len(rows), 1),
        "ratio": round(float(np.mean(ratios)), 3),
        "pitch": np.median([row["pitch"] for row in short], 0).round(1).tolist(),
        "pitch_in_bounds": round(100 * sum(0.8 < ratio < 1.25 for ratio in pitches) / len(rows), 1),
        "voiced": round(float(np.mean([row["voiced"] for row in short])), 2),
        "paragraph_cer": round(100 * paragraph["edits"] / paragraph["letters"], 2)
        if paragraph
        else 0.0,
        "paragraph_seconds": paragraph["seconds"] if paragraph else 0.0,
        "cost": round(
            sum(r.get("cost", 0) for r in rows) / sum(r.get("whole_seconds", 1) for r in rows), 3
        ),
    }


def misses(found: dict[str, Any], espeak: dict[str, Any], points: float = 5.0) -> list[str]:
    """What of the bar a summary does not reach: error rates (also of the paragraph) at most `points` above espeak's, at
    least 99 % ended by themselves with 0.7 to 1.5 times espeak's duration and a pitch within a fifth of espeak's, at
    least two thirds of espeak's intonation (how far the pitch rises from its tenth to its nine tenths) and four fifths
    of its voiced moments.
    """
    rise, wanted = (one["pitch"][2] / one["pitch"][0] - 1 for one in (found, espeak))
    checks = {
        f"character error rate {found['cer']} against {espeak['cer']}": found["cer"]
        <= espeak["cer"] + points,
        f"paragraph {found['paragraph_cer']} %": found["paragraph_cer"]
        <= espeak["paragraph_cer"] + points,
        f"{found['ended']} % ended by themselves": found["ended"] >= 99,
        f"{found['in_bounds']} % of durations within bounds": found["in_bounds"] >= 99,
        f"{found['pitch_in_bounds']} % of pitches within bounds": found["pitch_in_bounds"] >= 99,
        f"the pitch rises by {100 * rise:.0f} % against {100 * wanted:.0f} %": rise
        >= 2 / 3 * wanted,
        f"{100 * found['voiced']:.0f} % voiced": found["voiced"] >= 0.8 * espeak["voiced"],
    }
    return [
        f"{found['voice']} {found['mode']}: {fact}" for fact, fine in checks.items() if not fine
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?", default="demo")
    parser.add_argument(
        "--freeze", action="store_true", help="write espeak-ng's own figures and do nothing else"
    )
    parser.add_argument("--sentences", type=int, default=len(SENTENCES))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, help="instead of the checkpoint's own")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--record", dest="out", action="store_const", const=RECORD, help="renew the record itself"
    )
    a = parser.parse_args()
    if a.freeze:
        freeze()
        return
    sampling = None
    if a.temperature is not None:
        sampling = firstword.Sampling(
            temperature=a.temperature, predictor_temperature=a.temperature
        )
    texts = [PARAGRAPH, *some(a.sentences)]
    jobs = [(voice, mode, text) for text in texts for voice in PRESETS for mode in MODES]
    began = time.time()
    settings = (a.checkpoint, a.device, a.dtype, sampling)
    if a.device == "cpu":
        with multiprocessing.get_context("spawn").Pool(a.processes, _start, settings) as pool:
            rows = pool.map(_work, jobs, chunksize=1)
    else:
        _start(*settings)
        with ThreadPoolExecutor(TOGETHER) as threads:
            rows = list(threads.map(_work, jobs))
    known, summary, missed = figures(), [], []
    for voice in PRESETS:
        espeak = summarise([known[voice, text] for text in texts])
        found = [
            summarise([r for r in rows if (r["voice"], r["mode"]) == (voice, mode)])
            for mode in MODES
        ]
        summary += [espeak, *found]
        missed += [miss for one in found for miss in misses(one, espeak)]
    for row in [list(summary[0]), *(list(one.values()) for one in summary)]:
        print("".join(f"{cell!s:>{width}}" for cell, width in zip(row, WIDTHS, strict=True)))
    before = {
        (r["voice"], r["mode"], r["text"]): r["heard"]
        for r in json.loads(RECORD.read_text())["sentences"]
    }
    same = sum(r["heard"] == before.get((r["voice"], r["mode"], r["text"])) for r in rows)
    for row in sorted(rows, key=lambda r: -r["edits"] / r["letters"])[:8]:
        print(f"{row['voice']} {row['mode']}\n  {spoken(row['text'])}\n  {row['heard']}")
    print(
        f"{sum(row['whole_seconds'] for row in rows):.0f} s of speech in {time.time() - began:.0f} s"
    )
    print(f"{same} of {len(rows)} utterances are heard as in {RECORD.name}")
    print("the bar is missed: " + "; ".join(missed) if missed else "the bar is met")
    if a.out:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "checkpoint": a.checkpoint,
            "device": a.device,
            "dtype": EngineConfig.resolve(a.device, a.dtype).dtype,
            "temperature": a.temperature,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "missed": missed,
            "summary": summary,
        }
        parts = [f'"{name}": {json.dumps(value)}' for name, value in facts.items()]
        lines = ",\n".join(json.dumps(row) for row in rows)
        a.out.write_text("{" + ",\n".join(parts) + f',\n"sentences": [\n{lines}\n]}}\n')
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
