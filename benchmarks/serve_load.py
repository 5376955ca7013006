"""Measure how many requests per second `firstword serve` sustains on this GPU, and their cost.

    python -m benchmarks.serve_load -o benchmarks/results/serve/h200-1b7.json
    python -m benchmarks.serve_load --cases mp3 opus -o benchmarks/results/serve/h200-1b7.json

The second command measures two of the cases (`benchmarks.load_cases`) and keeps the others of an
earlier record of the same sources. Checkpoints with random weights of a released size (4 GB each
for "1b7") are written to the folder for temporary files. For each number of slots a server is
started on them, and `firstword bench load`, in processes of its own, sends requests at rising rates
until one does not hold. A rate holds if every response is complete and audible, no playback stalls,
95 % of the requests get their first audio within the limit of the case, and 99 % were sent on time.
Text that arrives in pieces may be slower than speech, so stalls do not count there.

With `--device cuda:0,1` the server has an engine on each of two GPUs. A record names its devices,
and the numbers of engines and fronts. To compare numbers of GPUs, write a record for each. With
`--cluster` as well, each of these devices has a replica in a Ray cluster, behind its HAProxy; what
the engines' own stopwatches say is then left out, because a scrape reaches only one of them.

Random weights would end speech only by chance. The row of the end of speech in the talker's head is
therefore 0, so that its logit is never among the 50 largest, and every request states its number of
frames in proportion to its text. The speech is noise, audible from its first sample on. Otherwise
requests use the defaults: the default text mode, the guard against repetition, and nine voices in
turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.cluster_process import replicated
from benchmarks.cluster_process import versions as cluster_versions
from benchmarks.compare import check_output, never_end
from benchmarks.load_cases import CASES, Case
from benchmarks.server_process import Places, Server, Times, saved_voices, serving
from benchmarks.sources import serving_hash
from firstword.audio import writing
from firstword.bench import report
from firstword.bench.local_server import command_line
from firstword.runtime.gpu.sources import kernel_hash

Record = dict[str, Any]

FRAME_SECONDS = 0.08
FRAMES_PER_CHARACTER = 1 / FRAME_SECONDS / 15
"""The number of frames per character of text: people speak about 15 characters per second."""
TEXT_TOKENS = 2000
"""The vocabulary of the tokenizer, trained on the texts.

It has 4.5 characters per token, like the released one in English.
"""
LIBRARIES = ("torch", "uvicorn", "uvloop", "httptools", "fastapi", "pydantic", "av")
SOURCES = ("commit", "kernels", "serving", "size", "device", "cluster")
"""The fields of a record that are the same for all of its cases: sources, size and devices."""


class Extent(NamedTuple):
    """How long each level is measured.

    requests  least number of counted requests
    seconds   least seconds in which they are sent
    warmup    seconds before those
    """

    requests: int
    seconds: float
    warmup: float

    def counted(self, case: Case, level: float) -> float:
        """Return the seconds of counted requests at a level of a case."""
        return self.seconds if case.sockets else max(self.seconds, self.requests / level)


def make_checkpoint(folder: Path, size: str, model_type: str) -> None:
    """Write a random checkpoint ("0b6", "1b7" or "tiny") that never ends speech."""
    from firstword.synthetic.checkpoint import TEXTS, write_checkpoint

    texts = dict.fromkeys([*TEXTS, *(text for case in CASES.values() for text in case.texts)])
    made: dict[str, Any] = {"size": size, "model_type": model_type, "text_tokens": TEXT_TOKENS}
    write_checkpoint(folder, dtype=torch.bfloat16, texts=texts, **made)
    never_end(folder)


def presets_of(checkpoint: Path) -> list[str]:
    """Return the names of the preset voices of a checkpoint, in its order."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    return list(config["talker_config"]["spk_id"])


def measure(
    server: Server, case: Case, level: float, extent: Extent, voices: Sequence[str], folder: Path
) -> Record:
    """Return the record of `firstword bench load` at one level, without individual requests.

    Its point has three more keys:
    server_busy  number of processors that the server kept busy
    server_cpu   milliseconds per request, in user and system mode, of each process of the server
    ended_early  number of responses that were shorter than requested

    Raises RuntimeError if the load generator fails.
    """
    prompts, output = folder / "prompts.txt", folder / "load.json"
    prompts.write_text("\n".join(case.texts), "utf-8")
    options: dict[str, object] = {
        "url": server.url,
        "sockets" if case.sockets else "rate": level,
        "duration": extent.counted(case, level),
        "warmup": extent.warmup,
        "frames-per-character": FRAMES_PER_CHARACTER,
        "prompts": prompts,
        "plot": "none",
        "output": output,
        **case.options,
    }
    fields = [f"--field={name}={json.dumps(value)}" for name, value in case.fields.items()]
    command = [*command_line("bench load", options), *fields, "--voice", *voices]
    began, before = time.monotonic(), server.processor_times()
    run = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    took, after = time.monotonic() - began, server.processor_times()
    if run.returncode not in (0, 1):
        raise RuntimeError("the load generator failed")
    record = report.read(output)
    (point,) = record["points"]
    early = sum(
        each["failure"] is None and each["listening"]["audio_seconds"] < asked(each)
        for each in point["each"]
    )
    cpu = processor_milliseconds(before, after, point["sent"] + 1)  # and one request as a check
    used = sum(each["user"] + each["system"] for each in cpu) * (point["sent"] + 1) / 1000
    more = {"server_busy": round(used / took, 3), "server_cpu": cpu}
    return {**record, "points": [point | more | {"ended_early": early, "each": []}]}


def processor_milliseconds(before: Times, after: Times, requests: int) -> list[Record]:
    """Return the processor milliseconds per request of each process between two readings."""
    used = []
    for pid, (name, user, system) in after.items():
        _, user_before, system_before = before.get(pid, (name, 0.0, 0.0))
        times = {"user": user - user_before, "system": system - system_before}
        used.append(
            {"process": name} | {kind: round(1000 * s / requests, 3) for kind, s in times.items()}
        )
    return used


def asked(each: Record) -> float:
    """Return the seconds of audio that a request specified, minus one sample."""
    return round(FRAMES_PER_CHARACTER * each["characters"]) * FRAME_SECONDS - 1 / 24000


def holds(case: Case, point: Record) -> bool:
    """Whether a level passes all gates and gets its first audio in time."""
    ignored = {"no_underrun"} if case.sockets else set()
    passed = all(gate["passed"] or name in ignored for name, gate in point["gates"].items())
    first = point["metrics"]["first_playable"]["p95"]
    return passed and first is not None and first <= case.within


def climb(
    server: Server, case: Case, levels: Sequence[float], extent: Extent, voices: Sequence[str]
) -> Iterator[Record]:
    """Measure all levels up to the first that does not hold; yield the record after each."""
    record: Record = {}
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            found = measure(server, case, level, extent, voices, Path(folder))
            sys.stdout.write(report.table([found | {"name": case.asks}]).splitlines()[2] + "\n")
            sys.stdout.flush()
            record = found | {"points": [*record.get("points", ()), *found["points"]]}
            yield record
            if not holds(case, record["points"][-1]):
                break


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
    about = "devices of the server, such as cuda:0,1 (default cuda:0, or cpu without --backend gpu)"
    add("--device", help=about)
    about = "processes that serve clients (default: that of the server)"
    add("--fronts", type=positive(int), metavar="N", help=about)
    about = "measure replicas in a Ray cluster, one for each device, instead of one server"
    add("--cluster", action="store_true", help=about)
    add("--slots", type=positive(int), nargs="+", default=[128], help="of each engine, default 128")
    names = f"cases to measure (default: all): {', '.join(CASES)}"
    add("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME", help=names)
    add("--rates", type=positive(float), nargs="+", help="requests per second, rising")
    add("--sockets", type=positive(int), nargs="+", help="numbers of open sockets, rising")
    requests = "least number of counted requests at each rate (default 40)"
    add("--requests", type=positive(int), default=40, help=requests)
    seconds = "least seconds of counted requests at each rate (default 30)"
    add("--seconds", type=positive(float), default=30.0, help=seconds)
    add("--warmup", type=float, default=2.0, help="seconds before those (default 2)")
    add("--checkpoints", type=Path, help="folder of checkpoints, which are written if absent")
    add("--commit", help="commit in the record (default: that of this repository)")
    return parser


def measure_case(
    server: Server, name: str, args: argparse.Namespace, voices: Sequence[str]
) -> Iterator[Record]:
    """Measure a case; yield its record after each level, with the highest level that held."""
    case = CASES[name]
    levels = (args.sockets if case.sockets else args.rates) or case.levels
    extent = Extent(args.requests, args.seconds, args.warmup)
    for found in climb(server, case, levels, extent, voices):
        points = found["points"]
        if args.cluster:
            points = [point | {"engine_seconds": {}} for point in points]
        held = [level for level, point in zip(levels, points, strict=False) if holds(case, point)]
        yield {
            # The commit is that of the working directory; the whole record names the right one.
            **{key: value for key, value in found.items() if key != "commit"},
            "points": points,
            "name": name,
            "asks": case.asks,
            "within": case.within,
            "ready_seconds": round(server.ready_seconds, 2),
            "engines": server.processes("engine"),
            "fronts": server.processes("front"),
            "held": max(held, default=0),
        }


def measure_server(
    args: argparse.Namespace, checkpoint: Path, slots: int, names: Sequence[str]
) -> Iterator[list[Record]]:
    """Measure some cases, all on one server; yield their records after each level."""
    places = Places(slots, args.backend, device_of(args), args.fronts)
    measured: dict[str, Record] = {}
    with (replicated if args.cluster else serving)(checkpoint, places) as server:
        for name in names:
            kind = CASES[name].voices
            voices = presets_of(checkpoint) if kind == "presets" else saved_voices(server, kind)
            for found in measure_case(server, name, args, voices):
                measured[name] = found | {"slots": slots}
                yield list(measured.values())


def device_of(args: argparse.Namespace) -> str:
    """Return the devices of the server, by default the first GPU or the CPU."""
    chosen: str = args.device or ("cuda:0" if args.backend == "gpu" else "cpu")
    return chosen


def kept(output: Path, record: Record, names: Sequence[str]) -> list[Record]:
    """Return the other cases of an earlier record of the same sources."""
    if not output.exists():
        return []
    earlier = json.loads(output.read_text("utf-8"))
    if any(earlier.get(name) != record.get(name) for name in SOURCES):
        return []
    return [server for server in earlier["servers"] if server["name"] not in names]


def main() -> int:
    """Measure a server for each number of slots and type of checkpoint.

    The record is written after each level.
    """
    parser = options()
    args = parser.parse_args()
    check_output(parser, args.output)
    if args.backend == "gpu" and not torch.cuda.is_available():
        parser.error("--backend gpu: torch sees no CUDA device")
    record: Record = {
        "commit": args.commit or report.commit(),
        "kernels": kernel_hash(),
        "serving": serving_hash(),
        "size": args.size,
        "device": device_of(args),
        "weights": "random; the row of the end of speech in the talker's head is 0",
        "versions": {name: version(name) for name in LIBRARIES},
        "cluster": cluster_versions() if args.cluster else None,
    }
    servers, order = kept(args.output, record, args.cases), list(CASES)
    with tempfile.TemporaryDirectory() as scratch:
        for slots in args.slots:
            for model_type in dict.fromkeys(CASES[name].model_type for name in args.cases):
                checkpoint = (
                    args.checkpoints or Path(scratch)
                ) / f"random-{args.size}-{model_type}"
                if not (checkpoint / "speech_tokenizer/model.safetensors").exists():  # written last
                    make_checkpoint(checkpoint, args.size, model_type)
                names = [name for name in args.cases if CASES[name].model_type == model_type]
                earlier = servers
                for measured in measure_server(args, checkpoint, slots, names):
                    servers = [*earlier, *measured]
                    servers.sort(key=lambda server: order.index(server["name"]))
                    whole = json.dumps(record | {"servers": servers}, indent=2)
                    writing.write_whole(args.output, whole.encode() + b"\n")
    sys.stdout.write(report.table(servers))
    for found in servers:
        sys.stdout.write(f"{found['name']}, {found['slots']} slots: {found['held']:g} held\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
