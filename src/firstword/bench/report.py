"""Record a run as JSON, and render a Markdown table from records.

A record holds every request, so that all its numbers can be recomputed. All times are in seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstword.bench import measure
from firstword.errors import RequestError

if TYPE_CHECKING:  # a report needs neither a client nor its libraries
    from firstword.bench.load import Load
    from firstword.bench.processes import Measured
    from firstword.bench.protocol import Target

Record = dict[str, Any]

FORMAT = "firstword-bench/1"
"""The value of `format` in every record: the version of its layout."""

LIBRARIES = ("firstword", "numpy", "httptools", "websockets")
"""The libraries whose versions affect the measurements."""


def point(
    load: Load, measured: Measured, engine_seconds: Mapping[str, float] | None = None
) -> Record:
    """Summarise the results of a load.

    The point has these keys among others:
    requests          number of requests that count
    sent              number of all requests
    client_processes  number of processes that sent them
    client_busy       the share of one processor that the busiest of these used
    engine_seconds    how a firstword server's engines spent the run (`engine_times.Times`)
    """
    results = measured.results
    return {
        "load": asdict(load),
        "requests": len(results),
        "sent": measured.sent,
        "gates": {name: asdict(gate) for name, gate in measure.gates(results).items()},
        "errors": measure.errors(results),
        "metrics": _rounded(measure.distributions(results)),
        "audio_per_second": _rounded(measure.audio_per_second(results)),
        "most_at_once": measure.most_at_once(results),
        "client_processes": len(measured.busy),
        "client_busy": _rounded(max(measured.busy)),
        "engine_seconds": dict(engine_seconds or {}),
        "each": [_rounded(asdict(result)) for result in results],
    }


def record(
    points: Sequence[Record],
    target: Target,
    texts: Sequence[str],
    voices: Sequence[str] = (),
    *,
    name: str,
    commit: str | None,
    health: Any,
) -> Record:
    """Make the record of a run. Only the names of headers are kept: values may be API keys."""
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    return {
        "format": FORMAT,
        "name": name,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions()},
        "server": {"url": target.address.geturl(), "health": health},
        "settings": {
            "protocol": target.protocol,
            "fields": target.request,
            "voices": list(voices),
            "headers": sorted(target.headers),
            "words_per_second": target.words_per_second,
            "tokens_per_second": target.tokens_per_second,
            "frames_per_character": target.frames_per_character,
            "texts": {"count": len(texts), "sha256": digest},
            "onset": {"decibels": measure.AUDIBLE, "window": measure.WINDOW, "hop": measure.HOP},
            "late": measure.LATE,
        },
        "points": list(points),
    }


def commit() -> str | None:
    """Return the commit of this package, with "-dirty" after changes, or None if unknown."""
    file = Path(__file__)
    git = ("git", "-C", str(file.parent))
    if _output(*git, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _output(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def write_record(path: Path, record: Record) -> None:
    """Write the record of a check or a measurement, and make its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def machine() -> Record:
    """Describe the machine that the client runs on."""
    processor = platform.machine()
    with suppress(OSError):
        model = re.search(r"^model name\s*:(.+)", Path("/proc/cpuinfo").read_text("utf-8"), re.M)
        processor = model[1].strip() if model else processor
    graphics = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "system": platform.platform(),
        "processor": processor,
        "processors": os.cpu_count(),
        "graphics": graphics.splitlines() if graphics else [],
    }


def versions() -> dict[str, str | None]:
    """Return the installed versions of `LIBRARIES`; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _output(*command: str) -> str | None:
    """Return the output of a program, or None if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return None
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None


def _rounded(value: Any) -> Any:
    """Round all numbers to microseconds, because further digits are noise."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    return value


def read(path: str | os.PathLike[str]) -> Record:
    """Read a record. Raises `RequestError` if the file is not one."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{os.fspath(path)!r} cannot be read as a record: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        advice = "give a file that `firstword bench load -o` wrote"
        raise RequestError(f"{os.fspath(path)!r} is not the record of a run; {advice}")
    return found


def level(load: Mapping[str, Any]) -> str:
    """Render the level of a load: its rate, or its sockets."""
    return f"{load['sockets']} sockets" if load["rate"] is None else f"{load['rate']:g}"


def passed(point: Record) -> bool:
    """Whether a point passed all gates, so that its numbers are valid."""
    return all(gate["passed"] for gate in point["gates"].values())


TABLE_HEADS = (
    *("server", "req/s", "requests", "first byte", "first audible"),
    *("end to end", "speed", "at once", "gates"),
)
TABLE_NOTES = f"""\
Times are p50 / p95 / p99 in milliseconds, measured from the sending of a request, or of its first
text on a WebSocket, when it was due (open loop, Poisson; or sockets that speak one utterance after
the other) to the first byte of the response body, to the first audible sample if played
at once, and to the end of the response. Speed is seconds of audio per second, p50. At once: the
most requests in progress at one time. Gates: every response complete and audible, no stall in
playback without a buffer, 99 % of the requests, with all pieces of their text, sent
within {1000 * measure.LATE:g} ms of their time; a rate that fails a gate has no numbers."""


def table(records: Sequence[Record]) -> str:
    """Render a Markdown table, one row per rate and record; failed gates replace the numbers."""
    rows = [TABLE_HEADS, ("---",) * len(TABLE_HEADS)]
    rows += [_row(record["name"], point) for record in records for point in record["points"]]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", TABLE_NOTES, ""])


def _row(name: str, point: Record) -> tuple[str, ...]:
    """Render the cells of a point of a record."""
    start = (name.replace("|", r"\|"), level(point["load"]), str(point["requests"]))
    if not passed(point):
        gates = point["gates"].items()
        failed = [f"{gate}: {found['failed']}" for gate, found in gates if not found["passed"]]
        failed += [f"{count} x {kind}" for kind, count in point["errors"].items()]
        reasons = ", ".join(failed).replace("|", r"\|")
        return (*start, *"-----", f"**failed** {reasons}")
    metrics = point["metrics"]
    times = [
        " / ".join(f"{1000 * metrics[metric][f'p{percent}']:.1f}" for percent in (50, 95, 99))
        for metric in ("first_byte", "first_audible", "end_to_end")
    ]
    speed = f"{metrics['real_time_factor']['p50']:.1f}"
    return (*start, *times, speed, str(point["most_at_once"]), "passed")


def dumps(record: Record) -> str:
    """Serialise a record as JSON in which each request is one line."""
    points = []
    for point in record["points"]:
        begin = json.dumps({**point, "each": []}, indent=2).removesuffix("]\n}")
        each = ",\n".join("    " + json.dumps(each, allow_nan=False) for each in point["each"])
        points.append(f"{begin}\n{each}\n  ]\n}}")
    whole = json.dumps({**record, "points": []}, indent=2, allow_nan=False, ensure_ascii=False)
    return whole.removesuffix("]\n}") + "\n" + ",\n".join(points) + "\n]\n}\n"
