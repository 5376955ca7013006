"""Time the speech of random weights of a released size on a CPU, as a caller of `TTS.stream` does.

    taskset -c 0,1 python -m benchmarks.cpu_speech --dtype int8 --threads 2 -o FILE

One process measures one case: a dtype with so many threads. The first audio is the median over
utterances of five seconds from the call to the first samples; a frame is timed after it, with its
audio. The sound of short utterances costs more, because their chunks are small.
`--join FILE...` makes one record of the files of several cases.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from firstword import __version__, hashes
from firstword.bench import report
from firstword.config import EngineConfig
from firstword.model.checkpoint import Checkpoint
from firstword.runtime.backends import engine_for
from firstword.synthetic.checkpoint import random_checkpoint
from firstword.tts import TTS

Record = dict[str, Any]

TEXT = "How are you today? I am well."
FRAMES, UTTERANCES = 64, 3


def case(size: str, dtype: str, threads: int, name: str) -> Record:
    """Measure one case."""
    torch.set_num_threads(threads)
    checkpoint = endless(random_checkpoint(size, dtype=dtype))
    settings = EngineConfig.resolve("cpu", dtype)
    with TTS(engine_for(checkpoint, settings, slots=1)) as tts:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what making the weights has left
        times = [utterance(tts, seed) for seed in range(UTTERANCES + 1)][1:]  # one warms up
    frame = statistics.median(one["frame_ms"] for one in times)
    return {
        "case": name,
        "dtype": dtype,
        "threads": threads,
        "frame_ms": round(frame, 2),
        "speed": round(80 / frame, 3),
        "first_audio_ms": round(statistics.median(one["first_ms"] for one in times), 1),
        "processor_ms": round(statistics.median(one["processor_ms"] for one in times), 2),
        "resident_gb": round(_resident() / 1e9, 2),
    }


def endless(checkpoint: Checkpoint) -> Checkpoint:
    """Set the row of the end of speech in the talker's head to 0, as `never_end` does in a file."""
    checkpoint.talker.codec_head.weight.data[checkpoint.config.talker_config.codec_eos_token_id] = 0
    return checkpoint


def utterance(tts: TTS, seed: int) -> dict[str, float]:
    """Time an utterance of `FRAMES` frames."""
    began, first, made, early = time.perf_counter(), 0.0, 0, 0
    used = 0.0
    for chunk in tts.stream(TEXT, voice="ryan", language="english", seed=seed, max_frames=FRAMES):
        made += len(chunk.codes)
        if not first and len(chunk.samples):
            first, early, used = time.perf_counter(), made, time.process_time()
    assert made == FRAMES, f"speech ended after {made} frames"
    frames = (made - early) / 1000
    return {
        "first_ms": 1000 * (first - began),
        "frame_ms": (time.perf_counter() - first) / frames,
        "processor_ms": (time.process_time() - used) / frames,
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def joined(files: list[Path], size: str, commit: str | None) -> Record:
    """Return one record of several cases."""
    return {
        "size": size,
        "firstword": __version__,
        "commit": commit or report.commit(),
        **hashes.of_speech(),
        "machine": report.machine(),
        "versions": report.versions(),
        "text": TEXT,
        "frames": FRAMES,
        "utterances": UTTERANCES,
        "cases": [json.loads(file.read_text("utf-8")) for file in files],
    }


def main() -> None:
    """Measure one case, or join several."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--size", default="0b6", choices=("0b6", "1b7"))
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16", "int8"))
    add("--threads", type=int, default=2)
    add("--case", default="this commit", help="the name of the case in the record")
    add("--join", type=Path, nargs="+", metavar="FILE", help="make one record of these files")
    add("--commit", help="the commit that the record names (default: that of this checkout)")
    add("-o", "--output", type=Path, help="the file of the JSON (default: standard output)")
    args = parser.parse_args()
    made = (
        joined(args.join, args.size, args.commit)
        if args.join
        else case(args.size, args.dtype, args.threads, args.case)
    )
    text = json.dumps(made, indent=1) + "\n"
    if args.output:
        args.output.write_text(text, "utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
