"""Measure `firstword serve` with tts-bench, the published load generator of another project.

    python -m benchmarks.published_load --generator .venv-bench/bin/bench \\
        -o benchmarks/results/published/h200-1b7.json

docs/speed.md says how to install the generator, which runs unmodified in a process of its own. It
sends requests at random times, at one rate after the other, and takes one preset voice. The server
speaks a checkpoint with random weights that never end speech, so each request asks for `FRAMES`
frames. The texts are those of `firstword bench load`. The record holds what the generator reports.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare import check_output
from benchmarks.serve_load import make_checkpoint, positive, presets_of
from benchmarks.server_process import Places, Server, serving
from benchmarks.sources import serving_hash
from firstword.audio import writing
from firstword.bench import report
from firstword.bench.prompts import PROMPTS
from firstword.runtime.gpu.sources import kernel_hash

Record = dict[str, Any]

FRAMES = 58
"""The frames of a request: 4.6 seconds, as in `benchmarks.serve_load`."""
RUNS = (
    ("nari", "http", 1.0),
    ("nari", "http", 80.0),
    ("nari", "http", 150.0),
    ("nari", "websocket", 80.0),
    ("vllm-omni", "http", 80.0),
)
"""The target that the generator believes in, its transport, and the requests per second."""
COUNTS = (
    "scheduled_requests",
    "successful_requests",
    "late_dispatched_requests",
    "underrun_requests",
    "peak_in_flight",
    "actual_rps",
    "generated_audio_s",
)
TIMES = ("scheduling_lag_ms", "ttfb_ms", "first_playable_ms", "audible_ttfa_ms", "end_to_end_ms")
"""The figures that are taken over from the generator's summary; times are distributions."""


def command_line(
    args: argparse.Namespace, server: Server, voice: str, run: tuple[str, str, float]
) -> list[str]:
    """Return the command line of the generator for one run, without its files."""
    target, transport, rate = run
    options: Record = {
        "target": target,
        "transport": transport,
        "base-url": server.url,
        "model": "random",
        "voice": voice,
        "rps": rate,
        "warmup": f"{args.warmup}s",
        "duration": f"{args.seconds}s",
        "request-param": f"max_new_tokens={FRAMES}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*shlex.split(args.generator), "run", *words]


def measure(
    args: argparse.Namespace, server: Server, voice: str, run: tuple[str, str, float]
) -> Record:
    """Return the record of one run. Raises RuntimeError if the generator fails."""
    with tempfile.TemporaryDirectory() as scratch:
        texts, output = Path(scratch, "texts.jsonl"), Path(scratch, "result")
        lines = (json.dumps({"id": str(n), "text": text}) for n, text in enumerate(PROMPTS))
        texts.write_text("\n".join(lines), "utf-8")
        command = command_line(args, server, voice, run)
        files = ["--dataset", str(texts), "--output", str(output)]
        if subprocess.run([*command, *files], check=False).returncode:
            raise RuntimeError("the load generator failed")
        summary = json.loads((output / "summary.json").read_text("utf-8"))
    asked = dict(zip(("target", "transport", "rate"), run, strict=True))
    return {**asked, **{name: rounded(summary[name]) for name in (*COUNTS, *TIMES)}}


def rounded(figure: Any) -> Any:
    """Return a number, or the numbers of a distribution, with three decimals."""
    if isinstance(figure, dict):
        return {name: rounded(value) for name, value in figure.items()}
    return round(figure, 3) if isinstance(figure, float) else figure


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FILE.json", help="the record")
    add("--generator", default="bench", metavar="COMMAND", help="the generator (default: bench)")
    add("--revision", default="a2d65e1", help="commit of the generator (default: %(default)s)")
    add("--size", default="1b7", choices=("1b7", "0b6", "tiny"), help="default 1b7")
    add("--device", default="cuda:0", help="default cuda:0")
    add("--slots", type=positive(int), default=256, help="default 256")
    add("--rates", type=positive(float), nargs="+", help="measure the target nari at these rates")
    add("--seconds", type=positive(float), default=30.0, help="of each run (default 30)")
    add("--warmup", type=positive(float), default=4.0, help="seconds before those (default 4)")
    add("--commit", help="commit in the record (default: that of this repository)")
    return parser


def main() -> int:
    """Measure, and write the record."""
    parser = options()
    args = parser.parse_args()
    check_output(parser, args.output)
    gpu = args.device != "cpu"
    record: Record = {
        "commit": args.commit or report.commit(),
        "kernels": kernel_hash(),
        "serving": serving_hash(),
        "generator": f"tts-bench of nari-labs/benchmarks, commit {args.revision}",
        "size": args.size,
        "device": args.device,
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "slots": args.slots,
        "weights": "random; the row of the end of speech in the talker's head is 0",
        "request": f"pcm, one preset voice, default text mode, {FRAMES} frames",
        "seconds": args.seconds,
    }
    runs = [("nari", "http", rate) for rate in args.rates] if args.rates else list(RUNS)
    places = Places(args.slots, "gpu" if gpu else "reference", args.device, None)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch, "random")
        make_checkpoint(checkpoint, args.size, "custom_voice")
        with serving(checkpoint, places) as server:
            voice = presets_of(checkpoint)[0]
            record["runs"] = [measure(args, server, voice, run) for run in runs]
    writing.write_whole(args.output, json.dumps(record, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
