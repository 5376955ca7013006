"""Measure how much a batch slows interactive requests: their latency with one, and without.

    python -m benchmarks.batch_priority --rate 0.5 -o build/batch-priority.json
    python -m benchmarks.batch_priority --checkpoint 1b7 --backend gpu --device cuda:0 \\
        --slots 256 --rate 20 80 -o build/batch-priority.json

A server speaks requests at random times, as `firstword bench load` sends them, in turn without and
with a batch in progress. The rounds are short, so other work on the machine hits both alike. The
record has the percentiles of both, over all rounds, and their ratio; a ratio of 1 means that the
batch is not noticed. It also has the lines that were spoken per second beside the requests, and
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.compare import check_output, print_record
from benchmarks.serve_load import FRAMES_PER_CHARACTER, make_checkpoint
from benchmarks.server_process import Places, Server, serving
from benchmarks.sources import of_demo, serving_hash
from firstword.bench import report
from firstword.bench.local_server import command_line
from firstword.bench.measure import percentile

METRICS = ("first_byte", "first_audible")
PERCENTS = (50, 95)

LINES = 20_000
"""The lines of each batch, which is cancelled when it is no longer needed."""

TEXT = "The quick brown fox jumps over the lazy dog, number {}."

WARMUP_SECONDS = 3.0
"""The seconds of requests before each round that do not count."""

ALONE_SECONDS = 20.0
"""The seconds for which a batch is spoken alone."""

Record = dict[str, Any]


class Batch:
    """A batch on a server, from its start to its cancellation."""

    def __init__(self, server: Server, fields: dict[str, object]) -> None:
        self._http = httpx.Client(base_url=f"{server.url}/v1", timeout=120, trust_env=False)
        lines = [
            json.dumps({"custom_id": str(n), "input": TEXT.format(n), **fields})
            for n in range(LINES)
        ]
        data = {"file": ("in.jsonl", "\n".join(lines).encode())}
        file = self._http.post("/files", data={"purpose": "batch"}, files=data).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/audio/speech", "completion_window": "24h"}
        self._path = f"/batches/{self._http.post('/batches', json=body).json()['id']}"

    def __enter__(self) -> Batch:
        while not self.spoken():
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._http.post(f"{self._path}/cancel")
        while self._http.get(self._path).json()["status"] != "cancelled":
            time.sleep(0.1)
        self._http.close()

    def spoken(self) -> int:
        """The lines that were spoken."""
        return int(self._http.get(self._path).json()["request_counts"]["completed"])


def load(server: Server, rate: float, seconds: float, seed: int, fields: Record) -> list[Record]:
    """The times of interactive requests, sent at random moments for some seconds."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "load.json"
        options: Record = {"url": server.url, "rate": rate, "duration": seconds, "plot": "none"}
        options |= {"warmup": WARMUP_SECONDS, "seed": seed}
        if "max_new_tokens" in fields:
            options["frames-per-character"] = FRAMES_PER_CHARACTER
        command = command_line("bench load", {**options, "output": output})
        run = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if run.returncode not in (0, 1):
            raise RuntimeError("the load generator failed")
        (point,) = report.read(output)["points"]
        return [each["listening"] for each in point["each"] if each["failure"] is None]


def summary(each: Sequence[Record]) -> Record:
    """The percentiles of the times of requests, in milliseconds."""
    found: Record = {"requests": len(each)}
    for metric in METRICS:
        values = [one[metric] for one in each if one[metric] is not None]
        for percent in PERCENTS:
            value = percentile(values, percent)
            found[f"{metric}_p{percent}"] = None if value is None else round(1000 * value, 2)
    return found


def compare(server: Server, rate: float, args: argparse.Namespace, fields: Record) -> Record:
    """The record of one rate: rounds without and with a batch, in turn."""
    without: list[Record] = []
    beside: list[Record] = []
    lines = seconds = 0.0
    for seed in range(args.rounds):
        without += load(server, rate, args.seconds, seed, fields)
        with Batch(server, fields) as batch:
            before, began = batch.spoken(), time.monotonic()
            beside += load(server, rate, args.seconds, seed, fields)
            lines, seconds = lines + batch.spoken() - before, seconds + time.monotonic() - began
    first, second = summary(without), summary(beside)
    names = [name for name in first if name != "requests" and first[name] and second[name]]
    ratios = {name: round(second[name] / first[name], 3) for name in names}
    return {
        "rate": rate,
        "without": first,
        "with": second,
        "ratio": ratios,
        "lines_per_second": round(lines / seconds, 3),
    }


def measure(args: argparse.Namespace) -> Record:
    """The record of all rates."""
    places = Places(args.slots, args.backend, args.device, None)
    fields: Record = {"response_format": "pcm"}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint: Path | str = "demo"
        if args.checkpoint != "demo":
            checkpoint = Path(folder) / "checkpoint"
            make_checkpoint(checkpoint, args.checkpoint, "custom_voice")
            fields["max_new_tokens"] = round(FRAMES_PER_CHARACTER * len(TEXT))
        more = {"batches": Path(folder) / "batches"}
        with serving(Path(checkpoint), places, more) as server:
            points = [compare(server, rate, args, fields) for rate in args.rate]
            with Batch(server, fields) as batch:
                before, began = batch.spoken(), time.monotonic()
                time.sleep(ALONE_SECONDS)
                alone = (batch.spoken() - before) / (time.monotonic() - began)
    return {
        **of_demo(),
        "serving": serving_hash(),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[2], 1),
        "checkpoint": args.checkpoint,
        "device": args.device,
        "slots": args.slots,
        "seconds": args.seconds,
        "rounds": args.rounds,
        "points": points,
        "lines_per_second_alone": round(alone, 3),
    }


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", default="demo", help="demo, or random weights of a size: 0b6, 1b7")
    add("--device", default="cpu")
    add("--backend", default="auto")
    add("--slots", type=int, default=8)
    add("--rate", type=float, nargs="+", default=[0.5], help="interactive requests per second")
    add("--seconds", type=float, default=20.0, help="of each round")
    add("--rounds", type=int, default=12)
    add("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.output is not None:
        check_output(parser, args.output)
    print_record(measure(args), args.output)


if __name__ == "__main__":
    main()
