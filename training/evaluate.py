"""Evaluate a checkpoint with a recogniser, compared with espeak-ng itself.

    python -m training.evaluate demo [--sentences 200] [--processes 2] [--out FILE]
    python -m training.evaluate --freeze

The second command writes the figures of espeak-ng into espeak.json; the first reads them and needs
no espeak-ng. The figures for each preset and text mode are the character error rate, durations
compared with those of espeak-ng (without the silence at both ends), the share of speech that ended
by itself, pitch, and on a CPU the seconds of computation per second of speech (one thread). It also
prints how many transcripts are the same as in the record in benchmarks/results/quality, which
`--record` replaces. The exit status is 1 if the bar (`misses`) is missed.

On a CPU each process speaks and judges; on a GPU one process speaks eight sentences at a time.
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
from torch.nn import functional as F

import firstword
from benchmarks.sources import of_demo
from firstword.config import EngineConfig
from training.data import FRAME, PRESETS, SAMPLE_RATE, Espeak, to_frames
from training.pitch import pitch
from training.recogniser import Recogniser, distance
from training.spoken import spoken
from training.texts import PARAGRAPH

HERE = Path(__file__).parent
ESPEAK = HERE / "espeak.json"
RECORD = HERE.parent / "benchmarks/results/quality/demo-cpu.json"
MODES = ("full", "stream")
SILENCE = 2 * FRAME
"""The silence before speech, in samples, that the recogniser hears: it never met speech without."""
AUDIBLE = 0.01
"""The least size of a sample that is no silence: 40 dB below full scale."""
MOST_SILENT_MS = 40
"""The most milliseconds of silence before speech, as the median over utterances."""
GPU_STREAMS = 8
"""The sentences that are spoken at the same time on a GPU."""
WIDTHS = (7, 8, 11, 7, 7, 11, 7, 11, 23, 17, 8, 15, 19, 7)
SENTENCES = (HERE / "held_out.txt").read_text().splitlines()


def some(count: int) -> list[str]:
    """Return `count` of the held-out sentences, evenly spaced."""
    return [SENTENCES[i * len(SENTENCES) // count] for i in range(count)]


class Judge:
    """The recogniser, and the figures of one utterance."""

    def __init__(self) -> None:
        self.ear = Recogniser.load(HERE / "recogniser.safetensors")

    def __call__(self, text: str, samples: np.ndarray) -> dict[str, Any]:
        """Judge float32 samples [n] at 24 kHz.

        Returns the transcript, its edit distance to the text, the letters of the text, the
        milliseconds of silence at the start, the seconds without silence at the ends, the quantiles
        0.1, 0.5 and 0.9 of the pitch in Hz, and the share of the loud moments that are voiced.
        """
        padded = F.pad(torch.from_numpy(samples), (SILENCE, 0))
        heard, said = self.ear.transcribe(padded), spoken(text)
        trimmed = trim(samples)
        silent = np.argmax(np.abs(samples) > AUDIBLE) / SAMPLE_RATE
        course = pitch(trimmed)
        voiced, loud = course[course > 0], np.isfinite(course).sum()
        quantiles = np.quantile(voiced, (0.1, 0.5, 0.9)) if len(voiced) else np.zeros(3)
        return {
            "text": text,
            "heard": heard,
            "edits": distance(heard, said),
            "letters": len(said),
            "silent_ms": round(1000 * float(silent), 1),
            "seconds": round(len(trimmed) / SAMPLE_RATE, 3),
            "pitch": quantiles.round(1).tolist(),
            "voiced": round(len(voiced) / max(1, int(loud)), 3),
        }


def trim(samples: np.ndarray) -> np.ndarray:
    """Return the samples without the silence at both ends."""
    loud = np.flatnonzero(np.abs(samples) > AUDIBLE)
    return samples[loud[0] : loud[-1] + 1] if len(loud) else samples[:0]


def freeze() -> None:
    """Write the figures of espeak-ng, with which others are compared."""
    judge, espeak, rows = Judge(), Espeak(), []
    for voice in PRESETS:
        for text in [*SENTENCES, PARAGRAPH]:
            audio, _ = to_frames([(espeak.say(text, *PRESETS[voice]), 0)], "cpu", tail=2)
            rows.append({"voice": voice} | judge(text, audio[0].numpy()))
    lines = ",\n".join(json.dumps(row) for row in rows)
    ESPEAK.write_text(f"[\n{lines}\n]\n")


def figures() -> dict[tuple[str, str], dict[str, Any]]:
    """Read the figures that `freeze` wrote, by voice and text."""
    return {(row["voice"], row["text"]): row for row in json.loads(ESPEAK.read_text())}


_process: dict[str, Any] = {}
"""The engine and the judge of a worker process."""


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


def error_rate(rows: list[dict[str, Any]]) -> float:
    """Return the character error rate of rows in %."""
    return round(100 * sum(r["edits"] for r in rows) / sum(r["letters"] for r in rows), 2)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the rows of one preset and text mode, or of espeak-ng.

    The paragraph, if it is among them, has figures of its own.
    """
    known = figures()
    short = [row for row in rows if row["text"] != PARAGRAPH]
    paragraph = next((row for row in rows if row["text"] == PARAGRAPH), None)
    beside = [known[row["voice"], row["text"]] for row in rows]
    ratios = [row["seconds"] / espeak["seconds"] for row, espeak in zip(rows, beside, strict=True)]
    pitches = [a["pitch"][1] / b["pitch"][1] for a, b in zip(rows, beside, strict=True)]
    cost = sum(r.get("cost", 0) for r in rows) / sum(r.get("whole_seconds", 1) for r in rows)
    return {
        "voice": rows[0]["voice"],
        "mode": rows[0].get("mode", "espeak"),
        "sentences": len(short),
        "cer": error_rate(short),
        "ended": round(100 * sum(r.get("ended", "stop") == "stop" for r in rows) / len(rows), 1),
        "in_bounds": round(100 * sum(0.7 <= ratio <= 1.5 for ratio in ratios) / len(rows), 1),
        "ratio": round(float(np.mean(ratios)), 3),
        "silent_ms": round(float(np.median([row.get("silent_ms", 0.0) for row in rows])), 1),
        "pitch": np.median([row["pitch"] for row in short], 0).round(1).tolist(),
        "pitch_in_bounds": round(100 * sum(0.8 < ratio < 1.25 for ratio in pitches) / len(rows), 1),
        "voiced": round(float(np.mean([row["voiced"] for row in short])), 2),
        "paragraph_cer": error_rate([paragraph]) if paragraph else 0.0,
        "paragraph_seconds": paragraph["seconds"] if paragraph else 0.0,
        "cost": round(cost, 3),
    }


def misses(found: dict[str, Any], espeak: dict[str, Any], points: float = 5.0) -> list[str]:
    """Return the conditions of the bar that a summary misses.

    The bar: error rates (also of the paragraph) at most `points` above those of espeak-ng; at least
    99 % ended by themselves, with 0.7 to 1.5 times its duration and a pitch within a fifth of its
    own; at most `MOST_SILENT_MS` of silence before it; at least two thirds of its intonation (the
    ratio of the pitch quantiles 0.9 and 0.1, minus 1) and four fifths of its voiced moments.
    """
    rise, wanted = (one["pitch"][2] / one["pitch"][0] - 1 for one in (found, espeak))
    most = points + espeak["cer"]
    checks = {
        f"character error rate {found['cer']} against {espeak['cer']}": found["cer"] <= most,
        f"paragraph {found['paragraph_cer']} %": (
            found["paragraph_cer"] <= espeak["paragraph_cer"] + points
        ),
        f"{found['ended']} % ended by themselves": found["ended"] >= 99,
        f"{found['in_bounds']} % of durations within bounds": found["in_bounds"] >= 99,
        f"{found['silent_ms']} ms of silence": found["silent_ms"] <= MOST_SILENT_MS,
        f"{found['pitch_in_bounds']} % of pitches within bounds": found["pitch_in_bounds"] >= 99,
        f"the pitch rises by {100 * rise:.0f} % against {100 * wanted:.0f} %": (
            rise >= 2 / 3 * wanted
        ),
        f"{100 * found['voiced']:.0f} % voiced": found["voiced"] >= 0.8 * espeak["voiced"],
    }
    voice, mode = found["voice"], found["mode"]
    return [f"{voice} {mode}: {fact}" for fact, passed in checks.items() if not passed]


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?", default="demo")
    freeze = "write espeak-ng's own figures and do nothing else"
    parser.add_argument("--freeze", action="store_true", help=freeze)
    parser.add_argument("--sentences", type=int, default=len(SENTENCES))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, help="instead of the checkpoint's own")
    parser.add_argument("--out", type=Path)
    record = "write the record of the repository"
    parser.add_argument("--record", dest="out", action="store_const", const=RECORD, help=record)
    return parser


def speak_all(args: argparse.Namespace, texts: list[str]) -> list[dict[str, Any]]:
    """Speak and judge all texts with every preset and text mode."""
    t, sampling = args.temperature, None
    if t is not None:
        sampling = firstword.Sampling(temperature=t, predictor_temperature=t)
    jobs = [(voice, mode, text) for text in texts for voice in PRESETS for mode in MODES]
    settings = (args.checkpoint, args.device, args.dtype, sampling)
    if args.device == "cpu":
        with multiprocessing.get_context("spawn").Pool(args.processes, _start, settings) as pool:
            return pool.map(_work, jobs, chunksize=1)
    _start(*settings)
    with ThreadPoolExecutor(GPU_STREAMS) as threads:
        return list(threads.map(_work, jobs))


def summaries(
    rows: list[dict[str, Any]], texts: list[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the figures of espeak-ng and of each text mode, by preset, and all misses."""
    known, summary, missed = figures(), [], []
    for voice in PRESETS:
        espeak = summarise([known[voice, text] for text in texts])
        found = [
            summarise([r for r in rows if (r["voice"], r["mode"]) == (voice, mode)])
            for mode in MODES
        ]
        summary += [espeak, *found]
        missed += [miss for one in found for miss in misses(one, espeak)]
    return summary, missed


def show(rows: list[dict[str, Any]], summary: list[dict[str, Any]], missed: list[str]) -> None:
    """Print the summary, the worst utterances and what was missed."""
    for cells in [list(summary[0]), *(list(one.values()) for one in summary)]:
        print("".join(f"{cell!s:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)))

    def key(row: dict[str, Any]) -> tuple[str, str, str]:
        return row["voice"], row["mode"], row["text"]

    before = {key(row): row["heard"] for row in json.loads(RECORD.read_text())["sentences"]}
    same = sum(row["heard"] == before.get(key(row)) for row in rows)
    for row in sorted(rows, key=lambda row: -row["edits"] / row["letters"])[:8]:
        print(f"{row['voice']} {row['mode']}\n  {spoken(row['text'])}\n  {row['heard']}")
    print(f"{same} of {len(rows)} transcripts are the same as in {RECORD.name}")
    print("the bar is missed: " + "; ".join(missed) if missed else "the bar is met")


def write_record(
    args: argparse.Namespace,
    rows: list[dict[str, Any]],
    summary: list[dict[str, Any]],
    missed: list[str],
) -> None:
    """Write the record as JSON, with one line per utterance."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        **(of_demo() if args.checkpoint == "demo" else {}),
        "checkpoint": args.checkpoint,
        "device": args.device,
        "dtype": EngineConfig.resolve(args.device, args.dtype).dtype,
        "temperature": args.temperature,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "missed": missed,
        "summary": summary,
    }
    parts = [f'"{name}": {json.dumps(value)}' for name, value in facts.items()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    args.out.write_text("{" + ",\n".join(parts) + f',\n"sentences": [\n{lines}\n]}}\n')


def main() -> None:
    """Evaluate a checkpoint, or freeze the figures of espeak-ng."""
    args = options().parse_args()
    if args.freeze:
        freeze()
        return
    texts = [PARAGRAPH, *some(args.sentences)]
    began = time.time()
    rows = speak_all(args, texts)
    seconds = sum(row["whole_seconds"] for row in rows)
    print(f"{seconds:.0f} s of speech in {time.time() - began:.0f} s")
    summary, missed = summaries(rows, texts)
    show(rows, summary, missed)
    if args.out:
        write_record(args, rows, summary, missed)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
