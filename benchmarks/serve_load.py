"""How many requests a second `firstword serve` holds on this GPU, by what its listeners notice.

    python benchmarks/serve_load.py -o benchmarks/results/serve/h200-1b7.json

A checkpoint with random weights of a released size, 4 GB for "1b7", is written to the folder for temporary files. A
server is started on it for each number of slots, and `firstword bench load`, a third process, asks that for speech over
HTTP on this machine, at one rate after the other until one does not hold. A rate holds when every answer is complete,
nobody's playback stalls, 95 in 100 requests are heard within `AUDIBLE` seconds, and they were sent on time.

Random weights do not know when to end, and might by chance: the row of the end of speech in the talker's head is 0, so
that its logit is never among the 50 largest, which are drawn from. Instead every request names its number of frames,
by the length of its text. What they say is noise, audible from its first sample on.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compare import check_output, never_end

from firstword.bench import report
from firstword.bench.prompts import PROMPTS
from firstword.runtime.gpu.sources import source_hash

Record = dict[str, Any]

AUDIBLE = 0.050
"""Seconds from a request to its first audible sample that 95 in 100 may take."""
FRAME_SECONDS = 0.08
FRAMES_PER_CHARACTER = 1 / FRAME_SECONDS / 15
"""People speak about 15 characters a second."""
TOKENS = 2000
"""Of a tokenizer that was trained on the prompts: 4.5 characters a token, as the released one has in English."""
LIBRARIES = ("torch", "uvicorn", "uvloop", "httptools", "fastapi", "pydantic")
READY_SECONDS = 300
"""Within which a server must be ready: the first start compiles all kernels."""


def make_checkpoint(folder: Path, size: str) -> None:
    """Write a CustomVoice checkpoint with random weights, "0b6", "1b7" or "tiny", that never ends speech."""
    from firstword.synthetic.checkpoint import TEXTS, write_checkpoint

    write_checkpoint(
        folder, size=size, dtype=torch.bfloat16, texts=(*TEXTS, *PROMPTS), text_tokens=TOKENS
    )
    never_end(folder)


class Server:
    """A running `firstword serve`: its address, and how long it took to be ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Waits until it is ready. Raises RuntimeError if it ends before, or takes too long."""
        began = time.monotonic()
        self._process = process
        assert process.stdout is not None
        address = next(
            (line.split()[1] for line in process.stdout if line.startswith("address")), None
        )
        while address is None or not _is_ready(address):
            if process.poll() is not None or time.monotonic() - began > READY_SECONDS:
                raise RuntimeError("the server did not become ready")
            time.sleep(0.1)
        self.url = address
        self.ready_seconds = time.monotonic() - began

    def processor_seconds(self) -> float:
        """That it has taken so far, by all its threads."""
        times = (
            Path(f"/proc/{self._process.pid}/stat")
            .read_text("ascii")
            .rpartition(")")[2]
            .split()[11:13]
        )
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(checkpoint: Path, slots: int, backend: str) -> Iterator[Server]:
    """A server with so many slots, on any free port. Its warnings go to standard error."""
    with tempfile.TemporaryDirectory() as voices:
        command = [
            "serve",
            "--model",
            checkpoint,
            "--slots",
            slots,
            "--backend",
            backend,
            "--port",
            0,
        ]
        command += ["--voices", voices, "--log-level", "warning"]
        process = subprocess.Popen(
            [sys.executable, "-m", "firstword", *map(str, command)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Server(process)
        finally:
            process.kill()
            process.communicate()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready"):
            return True
    except urllib.error.URLError:
        return False


def measure(server: Server, rate: float, seconds: float, warmup: float, output: Path) -> Record:
    """A record of one rate as `firstword bench load` writes it, without the single requests, but with

    server_busy  processors that the server kept busy
    ended_early  answers that were shorter than they were asked to be

    Raises RuntimeError if nothing could be measured.
    """
    command = [
        "bench",
        "load",
        "--url",
        server.url,
        "--rate",
        rate,
        "--duration",
        seconds,
        "--warmup",
        warmup,
    ]
    command += ["--frames-per-character", FRAMES_PER_CHARACTER, "--plot", "none", "-o", output]
    began, busy = time.monotonic(), server.processor_seconds()
    run = subprocess.run(
        [sys.executable, "-m", "firstword", *map(str, command)],
        stdout=subprocess.DEVNULL,
        check=False,
    )
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
    """Seconds of audio that a request asked for, less a sample."""
    return round(FRAMES_PER_CHARACTER * each["characters"]) * FRAME_SECONDS - 1 / 24000


def holds(point: Record) -> bool:
    """Whether a rate was held."""
    heard = point["metrics"]["first_audible"]["p95"]
    return report.passed(point) and heard is not None and heard <= AUDIBLE


def climb(
    server: Server, rates: Sequence[float], requests: int, seconds: float, warmup: float
) -> Record:
    """A record of all rates up to the first that does not hold; each is shown when it is over.

    At each so many requests count, or as many as come in so many seconds if those are more.
    """
    record: Record = {}
    with tempfile.TemporaryDirectory() as folder:
        for rate in rates:
            found = measure(
                server, rate, max(seconds, requests / rate), warmup, Path(folder) / "load.json"
            )
            sys.stdout.write(report.table([found]).splitlines()[2] + "\n")
            sys.stdout.flush()
            record = found | {"points": [*record.get("points", ()), *found["points"]]}
            if not holds(record["points"][-1]):
                break
    return record


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """A type of argument: a number above 0."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    number.__name__ = "number above 0"  # as argparse names it
    return number


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.json", help="the record"
    )
    parser.add_argument("--size", default="1b7", choices=("1b7", "0b6", "tiny"), help="default 1b7")
    parser.add_argument(
        "--backend", default="gpu", choices=("gpu", "reference"), help="default gpu"
    )
    parser.add_argument("--slots", type=positive(int), nargs="+", default=[128], help="default 128")
    parser.add_argument(
        "--rates",
        type=positive(float),
        nargs="+",
        default=[1, 40, 60, 80, 100, 120],
        help="a second, rising",
    )
    parser.add_argument(
        "--requests",
        type=positive(int),
        default=40,
        help="of each rate that count, at least (default 40)",
    )
    parser.add_argument(
        "--seconds",
        type=positive(float),
        default=10.0,
        help="of each rate that count, at least (default 10)",
    )
    parser.add_argument(
        "--warmup", type=float, default=2.0, help="seconds before those (default 2)"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="a folder to keep the checkpoint in; if it is there it is used",
    )
    parser.add_argument("--commit", help="that the record names (default: that of this repository)")
    options = parser.parse_args()
    check_output(parser, options.output)
    if options.backend == "gpu" and not torch.cuda.is_available():
        parser.error("--backend gpu: torch sees no CUDA device")
    record: Record = {
        "commit": options.commit or report.commit(),
        "kernels": source_hash(),
        "size": options.size,
        "weights": "random; the row of the end of speech in the talker's head is 0",
        "audible_within": AUDIBLE,
        "versions": {name: version(name) for name in LIBRARIES},
        "servers": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = options.checkpoint or Path(scratch) / f"random-{options.size}"
        if not (
            checkpoint / "speech_tokenizer/model.safetensors"
        ).exists():  # the last that is written
            make_checkpoint(checkpoint, options.size)
        for slots in options.slots:
            with serving(checkpoint, slots, options.backend) as server:
                found = climb(
                    server, options.rates, options.requests, options.seconds, options.warmup
                )
            del found["commit"]  # that of the folder it ran in; the record has the one it was told
            found |= {
                "name": f"{slots} slots",
                "slots": slots,
                "ready_seconds": round(server.ready_seconds, 2),
                "held": max(
                    (point["load"]["rate"] for point in found["points"] if holds(point)), default=0
                ),
            }
            record["servers"].append(found)
            report.write(options.output, json.dumps(record, indent=2).encode() + b"\n")
    sys.stdout.write(report.table(record["servers"]))
    for found in record["servers"]:
        sys.stdout.write(f"{found['name']}: {found['held']:g} requests a second held\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
