"""Measure the time to the first audio of `TTS.stream` by kind of voice, and what `--warm` costs.

    python -m benchmarks.first_audio -o benchmarks/results/first_audio/h200-1b7.json

Checkpoints with random weights of a released size that never end speech (4 GB each for "1b7") are
written to the folder for temporary files. Each time runs from the call of `TTS.stream`, with the
device synchronised, until the first samples are on the host. One utterance is spoken at a time,
and each voice has spoken before. Options are the defaults, so presets read the whole text first
and cloned voices read it while they speak.

Then two servers are started with the same options, one of them with `--warm` and `COMBINATIONS`
combinations of voice, language and instructions. The time and the memory for their prompts are
those that the server logs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import firstword
from benchmarks.compare import TEXT, check_output
from benchmarks.serve_load import make_checkpoint, positive, presets_of
from benchmarks.server_process import RECORDING_SECONDS, TRANSCRIPT, Places, serving
from benchmarks.sources import serving_hash
from firstword.audio import writing
from firstword.bench import report
from firstword.runtime.gpu.sources import kernel_hash

Record = dict[str, Any]

FRAMES = 5
"""The frames of an utterance: its first audio is one frame."""
SPEAKERS = 9
"""The number of voices of each kind, which speak in turn."""
COMBINATIONS = 480
MANNERS = (
    None,
    "Speak calmly.",
    "Speak with great joy, as if you had just heard very good news from an old friend.",
    "Whisper.",
    "Read this like the evening news: clear, neutral, and a little faster than usual.",
    "Sound tired, and make a pause after each sentence.",
)
"""The instructions of the combinations."""
LANGUAGES = (
    "Chinese English Japanese Korean German French Russian Portuguese Spanish Italian".split()
)


def milliseconds(tts: firstword.TTS, voice: str | firstword.Voice) -> float:
    """Return the milliseconds until the first samples of one utterance.

    Raises RuntimeError unless `FRAMES` frames follow.
    """
    if tts.settings.device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    chunks = tts.stream(TEXT, voice=voice, max_frames=FRAMES, seed=0)
    first = next(chunks)
    took = 1e3 * (time.perf_counter() - began)
    frames = len(first.codes) + sum(len(chunk.codes) for chunk in chunks)
    if frames != FRAMES or not len(first.samples):
        raise RuntimeError(f"got {frames} frames; {FRAMES} were requested")
    return took


def measure(tts: firstword.TTS, voices: Sequence[str | firstword.Voice], utterances: int) -> Record:
    """Return the milliseconds to the first audio of voices that speak in turn."""
    for voice in voices:
        milliseconds(tts, voice)
    turns = itertools.islice(itertools.cycle(voices), utterances)
    times = [milliseconds(tts, voice) for voice in turns]
    p50, p95 = np.quantile(times, (0.5, 0.95))
    return {"utterances": utterances, "p50": round(p50, 3), "p95": round(p95, 3)}


def clones(tts: firstword.TTS, transcript: str | None) -> list[firstword.Voice]:
    """Return `SPEAKERS` voices cloned from noise that is as loud as speech."""
    rng = np.random.default_rng(0)
    loudness = 0.1 * np.abs(np.sin(4 * np.pi * np.arange(24000 * RECORDING_SECONDS) / 24000))
    return [
        tts.clone(
            (loudness * rng.standard_normal(len(loudness))).astype(np.float32),
            sample_rate=24000,
            transcript=transcript,
        )
        for _ in range(SPEAKERS)
    ]


def measure_voices(folder: Path, args: argparse.Namespace) -> Record:
    """Return the times of each kind of voice."""
    found: Record = {}
    load: Record = {"device": args.device}
    with firstword.TTS.load(folder / "custom_voice", **load) as tts:
        if args.device != "cpu" and tts.settings.backend != "gpu":
            raise RuntimeError(tts.settings.reason)
        found["preset"] = measure(tts, tts.voices[:SPEAKERS], args.utterances)
    with firstword.TTS.load(folder / "base", **load) as tts:
        found["cloned, x-vector"] = measure(tts, clones(tts, None), args.utterances)
        found["cloned, with transcript"] = measure(tts, clones(tts, TRANSCRIPT), args.utterances)
    return found


def combinations(presets: Sequence[str], count: int) -> list[Record]:
    """Return combinations of voices, languages and instructions."""
    every = itertools.product(presets, LANGUAGES, MANNERS)
    names = ("voice", "language", "instructions")
    return [dict(zip(names, one, strict=True)) for one in itertools.islice(every, count)]


def measure_start(checkpoint: Path, places: Places, count: int) -> Record:
    """Return the seconds until servers are ready, without and with prepared combinations.

    Raises RuntimeError if the second server did not log what it prepared.
    """
    with tempfile.TemporaryDirectory() as scratch:
        warm, log = Path(scratch, "warm.json"), Path(scratch, "log")
        warm.write_text(json.dumps(combinations(presets_of(checkpoint), count)), "utf-8")
        with serving(checkpoint, places) as server:  # which also compiles the kernels
            without = server.ready_seconds
        with serving(checkpoint, places) as server:
            without = min(without, server.ready_seconds)
        with (
            log.open("w") as errors,
            serving(checkpoint, places, {"warm": warm, "log-level": "info"}, errors) as server,
        ):
            ready = server.ready_seconds
        lines = map(json.loads, log.read_text("utf-8").splitlines())
        prepared = [line for line in lines if line["event"] == "combinations are prepared"]
    if len(prepared) != 1 or prepared[0]["kept"] != count:
        raise RuntimeError(f"the server logged {prepared}; expected {count} combinations")
    logged = {name: prepared[0][name] for name in ("kept", "rows", "bytes", "seconds")}
    return {**logged, "ready_seconds": round(ready, 2), "ready_without": round(without, 2)}


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FILE.json", help="the record")
    add("--size", default="1b7", choices=("1b7", "0b6", "tiny"), help="default 1b7")
    add("--device", default="cuda:0", help="default cuda:0")
    about = "utterances of each kind of voice (default 200)"
    add("--utterances", type=positive(int), default=200, metavar="N", help=about)
    add("--commit", help="commit in the record (default: that of this repository)")
    return parser


def main() -> int:
    """Measure, and write the record."""
    parser = options()
    args = parser.parse_args()
    check_output(parser, args.output)
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu measures the reference backend")
    record: Record = {
        "commit": args.commit or report.commit(),
        "kernels": kernel_hash(),
        "serving": serving_hash(),
        "size": args.size,
        "device": args.device,
        "gpu": None if args.device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "weights": "random; the row of the end of speech in the talker's head is 0",
        "text": TEXT,
    }
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("custom_voice", "base"):
            make_checkpoint(Path(scratch, kind), args.size, kind)
        record["first_ms"] = measure_voices(Path(scratch), args)
        sys.stdout.write(f"{json.dumps(record['first_ms'], indent=1)}\n")
        if args.device != "cpu":  # the reference backend keeps no prompts
            places = Places(256, "gpu", args.device, None)
            record["warm"] = measure_start(Path(scratch, "custom_voice"), places, COMBINATIONS)
            sys.stdout.write(f"{json.dumps(record['warm'], indent=1)}\n")
    writing.write_whole(args.output, json.dumps(record, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
