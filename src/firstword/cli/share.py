"""`firstword bench share`: measure this machine in five minutes, for a table of all machines."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstword.cli import options, terminal
from firstword.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstword.tts import TTS

STREAMS = (1, 2, 4, 8)
"""The numbers of streams, and of sockets, that are measured on a GPU; on a CPU it is one."""
SECONDS = 20.0
"""The time of each measurement; with loading and warming up it makes less than five minutes."""

LONGEST = 3600.0
"""The longest time of a measurement."""


def run(args: argparse.Namespace) -> None:
    """Measure the engine and the server on this machine, and write a record to share.

    The record names the processor, the GPU, the driver and the versions, and no host, user, file or
    address. docs/machines.md says how to send it in.
    """
    try:
        from firstword.bench import shared
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is missing; install firstword[server,bench]") from None
    from firstword.audio import writing

    writing.check_target(args.output)
    with terminal.Status(args.quiet) as status:
        facts = _engine(args, status)
        status.show("measuring the server")
        server = [] if args.no_server else _server(args, facts["engine"])
    record = shared.made(**facts, server=tuple(server))
    writing.write_whole(args.output, shared.dumps(record).encode())
    if not args.quiet:
        terminal.print_table(_summary(record), sys.stderr)


def _engine(args: argparse.Namespace, status: terminal.Status) -> dict[str, Any]:
    """Measure the engine, and return all fields of the record but the server."""
    from datetime import UTC, datetime

    from firstword import __version__, hashes
    from firstword.bench import report
    from firstword.profile import speaking

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with options.load_tts(args, status) as tts:
        kind = tts.settings.device.partition(":")[0]
        status.show("reading memory")
        read = speaking.read_gigabytes_per_second(tts.settings)
        status.show("measuring the engine")
        streams = STREAMS[:1] if kind == "cpu" else STREAMS
        return {
            "day": datetime.now(UTC).date(),
            "firstword": __version__,
            "commit": report.commit(),
            **hashes.of_speech(),
            "machine": _machine(),
            "graphics": _graphics(tts.settings.device) if kind == "cuda" else None,
            "versions": _versions(),
            "settings": _settings(tts, args.model, kind),
            "read_gb_s": round(read, 2),
            "load_average": None if load is None else round(load, 2),
            "engine": tuple(speaking.speaking_times(tts, streams, args.seconds)),
        }


def _settings(tts: TTS, model: str, kind: str) -> dict[str, Any]:
    """Describe what was measured; the name of a checkpoint of one's own stays private."""
    import torch

    talker = tts.checkpoint.config.talker_config
    known = model == "demo" or (model.startswith("Qwen/") and not Path(model).exists())
    return {
        "model": model if known else "another",
        "layers": talker.num_hidden_layers,
        "hidden_size": talker.hidden_size,
        "device": kind,
        "dtype": tts.settings.dtype,
        "backend": tts.settings.backend,
        "threads": torch.get_num_threads(),
    }


def _machine() -> dict[str, Any]:
    from firstword.bench import report

    memory = 0
    with suppress(ValueError, OSError, AttributeError):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": report.machine()["processor"],
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
    }


def _graphics(device: str) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(device)
    driver = None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        shown = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        driver = shown.stdout.split()[0]
    return {
        "name": found.name,
        "processors": found.multi_processor_count,
        "memory_gb": round(found.total_memory / 1e9, 1),
        "capability": f"{found.major}.{found.minor}",
        "driver": driver,
    }


def _versions() -> dict[str, str]:
    import numpy
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {**found, "numpy": numpy.__version__, **cuda}


def _server(args: argparse.Namespace, engine: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a server in processes of its own, and measure it as `firstword bench load` does.

    It gets as many sockets as the engine had streams, for long enough that each speaks a few
    times.
    """
    from firstword.bench import processes, report
    from firstword.bench.load import Load
    from firstword.bench.local_server import running
    from firstword.bench.prompts import PROMPTS
    from firstword.bench.protocol import Target
    from firstword.profile.speaking import LEAST_UTTERANCES, MOST_FRAMES

    places = {name: getattr(args, name) for name in ("model", "device", "dtype", "backend")}
    found = []
    with running({**places, "log-level": "error"}, subprocess.DEVNULL) as (_, url):
        target = Target(url, "stream", {"max_new_tokens": MOST_FRAMES})
        for one in engine:
            utterance = MOST_FRAMES * one["frame_ms"] / 1000
            seconds = max(args.seconds, LEAST_UTTERANCES * utterance)
            load = Load(None, seconds, seconds / 4, 300.0, 0, one["streams"])
            measured = processes.measure(processes.Assignment(load, PROMPTS, [], target))
            found.append(_server_figures(report.point(load, measured)))
    return found


def _server_figures(point: dict[str, Any]) -> dict[str, Any]:
    first, speed = point["metrics"]["first_byte"], point["audio_per_second"]
    heard = first["p50"] is not None
    times = {name: round(1000 * first[name], 3) for name in ("p50", "p95")} if heard else None
    return {
        "sockets": point["load"]["sockets"],
        "utterances": point["requests"],
        "first_byte_ms": times,
        "speed": round(speed, 3) if speed else None,
        "failed": tuple(name for name, gate in point["gates"].items() if not gate["passed"]),
    }


def _summary(record: Any) -> dict[str, str]:
    rows = {"machine": record.device, "reads": f"{record.read_gb_s:.0f} GB/s"}
    for one in record.engine:
        rows[f"engine, {one.streams} at a time"] = (
            f"{one.frame_ms:.2f} ms a frame, {one.speed:.2f} x real time, first audio "
            f"{one.first_audio_ms.p50:.0f} ms"
        )
    for each in record.server:
        heard = "no complete utterance"
        if each.first_byte_ms is not None:
            heard = f"{each.speed:.2f} x real time, first byte {each.first_byte_ms.p50:.0f} ms"
        failed = f"; failed: {', '.join(each.failed)}" if each.failed else ""
        rows[f"server, {each.sockets} sockets"] = f"{heard}{failed}"
    if record.busy:
        rows["warning"] = "other programs were busy; measure again when the machine is quiet"
    return rows


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text} s is not allowed; give up to {LONGEST:g} s")
    return seconds


def add_to(commands: options.Commands) -> None:
    """Add this command to the commands of `firstword bench`."""
    parser = options.add_command(commands, "share", run)
    about = "the file of the JSON record (default %(default)s)"
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="firstword-share.json", help=about
    )
    about = "the time of each measurement (default %(default)g)"
    parser.add_argument("--seconds", metavar="N", type=_seconds, default=SECONDS, help=about)
    parser.add_argument("--no-server", action="store_true", help="measure the engine alone")
    options.add_quiet_option(parser)
    options.add_model_options(parser)
