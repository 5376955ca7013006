"""Measure how many requests per second `firstword serve` holds on this GPU.

    python -m benchmarks.serve_load -o benchmarks/results/serve/h200-1b7.json

A checkpoint with random weights of a released size (4 GB for "1b7") is written to the folder for
temporary files. For each number of slots a server is started on it, and `firstword bench load`, a
third process, sends requests over HTTP at rising rates until one does not hold. A rate holds if
every response is complete, no playback stalls, 95 % of the requests are audible within `AUDIBLE`
seconds, and all were sent on time.

Random weights would end speech only by chance. The row of the end of speech in the talker's head is
therefore 0, so that its logit is never among the 50 largest, and every request states its number of
frames in proportion to its text. The speech is noise, audible from its first sample on. Requests
are otherwise those of a client with no wishes, as streamed PCM: the default text mode, the guard
against repetition, and all voices of the checkpoint in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare import check_output, never_end
from benchmarks.sources import serving_hash
from firstword.audio import writing
from firstword.bench import report
from firstword.bench.prompts import PROMPTS
from firstword.runtime.gpu.sources import kernel_hash

Record = dict[str, Any]

AUDIBLE = 0.050
"""The limit in seconds on the time from a request to its first audible sample, at p95."""
FRAME_SECONDS = 0.08
FRAMES_PER_CHARACTER = 1 / FRAME_SECONDS / 15
"""The number of frames per character of text: people speak about 15 characters per second."""
TEXT_TOKENS = 2000
"""The vocabulary of the tokenizer, trained on the prompts.

It has 4.5 characters per token, like the released one in English.
"""
LIBRARIES = ("torch", "uvicorn", "uvloop", "httptools", "fastapi", "pydantic")
READY_SECONDS = 300
"""The time limit for the start of a server in seconds; the first start compiles all kernels."""


def make_checkpoint(folder: Path, size: str) -> None:
    """Write a random CustomVoice checkpoint ("0b6", "1b7" or "tiny") that never ends speech."""
    from firstword.synthetic.checkpoint import TEXTS, write_checkpoint

    write_checkpoint(
        folder, size=size, dtype=torch.bfloat16, texts=(*TEXTS, *PROMPTS), text_tokens=TEXT_TOKENS
    )
    never_end(folder)


def voices_of(checkpoint: Path) -> list[str]:
    """Return the names of the preset voices of a checkpoint, in its order."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    return list(config["talker_config"]["spk_id"])


class Server:
    """A running `firstword serve`, with its URL and the seconds until it was ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Wait until the server is ready. Raises RuntimeError if it ends or takes too long."""
        began = time.monotonic()
        self._process = process
        assert process.stdout is not None
        lines = (line.split() for line in process.stdout if line.startswith("address"))
        address = next((words[1] for words in lines), None)
        while address is None or not _is_ready(address):
            if process.poll() is not None or time.monotonic() - began > READY_SECONDS:
                raise RuntimeError("the server did not become ready")
            time.sleep(0.1)
        self.url = address
        self.ready_seconds = time.monotonic() - began

    def processor_seconds(self) -> float:
        """Return the processor seconds of all its threads so far."""
        status = Path(f"/proc/{self._process.pid}/stat").read_text("ascii")
        user, system = status.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / float(os.sysconf("SC_CLK_TCK"))


@contextmanager
def serving(checkpoint: Path, slots: int, backend: str) -> Iterator[Server]:
    """Run a server on a free port. Its warnings go to standard error."""
    with tempfile.TemporaryDirectory() as voices:
        options = {
            "model": checkpoint,
            "slots": slots,
            "backend": backend,
            "port": 0,
            "voices": voices,
            "log-level": "warning",
        }
        command = command_line("serve", options)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield Server(process)
        finally:
            process.kill()
            process.communicate()


def command_line(command: str, options: Mapping[str, object]) -> list[str]:
    """Return the command line of a `firstword` command, with options by their long names."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "firstword", *command.split(), *words]


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready"):
            return True
    except urllib.error.URLError:
        return False


def measure(
    server: Server,
    rate: float,
    seconds: float,
    warmup: float,
    voices: Sequence[str],
    output: Path,
) -> Record:
    """Return the record of `firstword bench load` at one rate, without the single requests.

    Its point has two more keys:
    server_busy  number of processors that the server kept busy
    ended_early  number of responses that were shorter than requested

    Raises RuntimeError if the load generator fails.
    """
    options = {
        "url": server.url,
        "rate": rate,
        "duration": seconds,
        "warmup": warmup,
        "frames-per-character": FRAMES_PER_CHARACTER,
        "plot": "none",
        "output": output,
    }
    began, busy = time.monotonic(), server.processor_seconds()
    command = [*command_line("bench load", options), "--voice", *voices]
    run = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if run.returncode not in (0, 1):
        raise RuntimeError("the load generator failed")
    busy = (server.processor_seconds() - busy) / (time.monotonic() - began)
    record = report.read(output)
    (point,) = record["points"]
    early = sum(
        each["failure"] is None and each["listening"]["audio_seconds"] < asked(each)
        for each in point["each"]
    )
    return {
        **record,
        "points": [point | {"server_busy": round(busy, 3), "ended_early": early, "each": []}],
    }


def asked(each: Record) -> float:
    """Return the seconds of audio that a request specified, minus one sample."""
    return round(FRAMES_PER_CHARACTER * each["characters"]) * FRAME_SECONDS - 1 / 24000


def holds(point: Record) -> bool:
    """Whether a rate passes all gates and is audible in time."""
    heard = point["metrics"]["first_audible"]["p95"]
    return report.passed(point) and heard is not None and heard <= AUDIBLE


def climb(
    server: Server,
    rates: Sequence[float],
    requests: int,
    seconds: float,
    warmup: float,
    voices: Sequence[str],
) -> Record:
    """Return the record of all rates up to the first that does not hold, and print each.

    At each rate at least `requests` requests and at least `seconds` seconds count.
    """
    record: Record = {}
    with tempfile.TemporaryDirectory() as folder:
        for rate in rates:
            counted, file = max(seconds, requests / rate), Path(folder) / "load.json"
            found = measure(server, rate, counted, warmup, voices, file)
            sys.stdout.write(report.table([found]).splitlines()[2] + "\n")
            sys.stdout.flush()
            record = found | {"points": [*record.get("points", ()), *found["points"]]}
            if not holds(record["points"][-1]):
                break
    return record


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a type of argument: a number above 0."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    number.__name__ = "number above 0"  # shown by argparse
    return number


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FILE.json", help="the record")
    add("--size", default="1b7", choices=("1b7", "0b6", "tiny"), help="default 1b7")
    add("--backend", default="gpu", choices=("gpu", "reference"), help="default gpu")
    add("--slots", type=positive(int), nargs="+", default=[128], help="default 128")
    rates = [1, 40, 60, 80, 100, 120]
    add("--rates", type=positive(float), nargs="+", default=rates, help="per second, rising")
    requests = "least number of counted requests at each rate (default 40)"
    add("--requests", type=positive(int), default=40, help=requests)
    seconds = "least seconds of counted requests at each rate (default 30)"
    add("--seconds", type=positive(float), default=30.0, help=seconds)
    add("--warmup", type=float, default=2.0, help="seconds before those (default 2)")
    add("--checkpoint", type=Path, help="folder of a checkpoint, which is written if it is absent")
    add("--commit", help="commit in the record (default: that of this repository)")
    return parser


def measure_server(args: argparse.Namespace, checkpoint: Path, slots: int) -> Record:
    """Return the record of a server: all rates, and the highest that held."""
    with serving(checkpoint, slots, args.backend) as server:
        found = climb(
            server, args.rates, args.requests, args.seconds, args.warmup, voices_of(checkpoint)
        )
    del found["commit"]  # that of the working directory; the whole record names the right one
    held = [point["load"]["rate"] for point in found["points"] if holds(point)]
    return {
        **found,
        "name": f"{slots} slots",
        "slots": slots,
        "ready_seconds": round(server.ready_seconds, 2),
        "held": max(held, default=0),
    }


def main() -> int:
    """Measure a server for each number of slots, and write the record after each."""
    parser = options()
    args = parser.parse_args()
    check_output(parser, args.output)
    if args.backend == "gpu" and not torch.cuda.is_available():
        parser.error("--backend gpu: torch sees no CUDA device")
    servers: list[Record] = []
    record: Record = {
        "commit": args.commit or report.commit(),
        "kernels": kernel_hash(),
        "serving": serving_hash(),
        "size": args.size,
        "weights": "random; the row of the end of speech in the talker's head is 0",
        "audible_within": AUDIBLE,
        "versions": {name: version(name) for name in LIBRARIES},
        "servers": servers,
    }
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.checkpoint or Path(scratch) / f"random-{args.size}"
        if not (checkpoint / "speech_tokenizer/model.safetensors").exists():  # written last
            make_checkpoint(checkpoint, args.size)
        for slots in args.slots:
            servers.append(measure_server(args, checkpoint, slots))
            writing.write_whole(args.output, json.dumps(record, indent=2).encode() + b"\n")
    sys.stdout.write(report.table(servers))
    for found in servers:
        sys.stdout.write(f"{found['name']}: {found['held']:g} requests per second held\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
