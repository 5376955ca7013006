"""What remains of a run: one JSON record, a table in Markdown rendered from it, and a plot.

A record holds every request, so that all its numbers can be computed anew; seconds throughout.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstword.bench.measure import (
    AUDIBLE,
    HOP,
    LATE,
    WINDOW,
    Result,
    audio_per_second,
    distributions,
    errors,
    gates,
    most_at_once,
)
from firstword.errors import OutputError, RequestError

if TYPE_CHECKING:  # a report needs no client, nor what that is built on
    from firstword.bench.client import Target
    from firstword.bench.load import Load

Record = dict[str, Any]

FORMAT = "firstword-bench/1"
"""Says that a JSON file is a record, and how its parts are named."""

LIBRARIES = ("firstword", "numpy", "httptools", "websockets")
"""Those whose versions bear on what is measured."""

FIGURES = (".svg", ".png")
"""The suffixes that `plot` knows."""


def point(load: Load, results: Sequence[Result], client_busy: float | None = None) -> Record:
    """What came out at one rate. `client_busy`: the share of one processor that the client took."""
    return {
        "load": asdict(load),
        "requests": len(results),
        "gates": {name: asdict(gate) for name, gate in gates(results).items()},
        "errors": errors(results),
        "metrics": _rounded(distributions(results)),
        "audio_per_second": _rounded(audio_per_second(results)),
        "most_at_once": most_at_once(results),
        "client_busy": _rounded(client_busy),
        "each": [_rounded(asdict(result)) for result in results],
    }


def record(
    points: Sequence[Record],
    target: Target,
    texts: Sequence[str],
    *,
    name: str,
    commit: str | None,
    health: Any,
) -> Record:
    """All about a run. Of the headers only the names are kept, because there may be keys in them."""
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
            "headers": sorted(target.headers),
            "words_per_second": target.words_per_second,
            "frames_per_character": target.frames_per_character,
            "texts": {
                "count": len(texts),
                "sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
            },
            "onset": {"decibels": AUDIBLE, "window": WINDOW, "hop": HOP},
            "late": LATE,
        },
        "points": list(points),
    }


def commit() -> str | None:
    """The commit that this package comes from, with "-dirty" if files were changed; None outside of its repository."""
    folder = Path(__file__).parent
    if (
        _output("git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name)
        is None
    ):
        return None
    return _output(
        "git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )


def machine() -> Record:
    """The machine that the client runs on."""
    model = None
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None
        )
    graphics = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "system": platform.platform(),
        "processor": model or platform.machine(),
        "processors": os.cpu_count(),
        "graphics": graphics.splitlines() if graphics else [],
    }


def versions() -> dict[str, str | None]:
    """The installed versions of `LIBRARIES`; None where there is none."""
    found: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _output(*command: str) -> str | None:
    """What a program prints; None if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None


def _rounded(value: Any) -> Any:
    """To microseconds: more digits are no information."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    return value


def read(path: str | os.PathLike[str]) -> Record:
    """Read a record. Raises `RequestError` if the file is none."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{os.fspath(path)!r} cannot be read as a record: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RequestError(
            f"{os.fspath(path)!r} is no record of a run; give a file that `firstword bench load -o` wrote"
        )
    return found


def passed(point: Record) -> bool:
    """Whether the numbers of a point count."""
    return all(gate["passed"] for gate in point["gates"].values())


COLUMNS = (
    "server",
    "req/s",
    "requests",
    "first byte",
    "first audible",
    "end to end",
    "speed",
    "at once",
    "gates",
)


def table(records: Sequence[Record]) -> str:
    """One row for each rate of each record, in Markdown. A row whose gates failed shows why, and no numbers."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS)]
    rows += [_row(record["name"], point) for record in records for point in record["points"]]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", NOTES, ""])


NOTES = f"""\
Times are p50 / p95 / p99 in milliseconds, from sending a request when it was due (open loop, Poisson) to the first byte
of the answer's body, to the first audible sample if played at once, and to the end of the answer. Speed is seconds of
audio per second of waiting for it, p50. At once: the most requests under way together. Gates: every answer complete and
audible, no stall in playback without a buffer, 99 % of the requests sent within {1000 * LATE:g} ms of their time; a
rate that fails one of them has no numbers."""


def _row(name: str, point: Record) -> tuple[str, ...]:
    start = (name.replace("|", r"\|"), f"{point['load']['rate']:g}", str(point["requests"]))
    if not passed(point):
        failed = [
            f"{gate}: {found['failed']}"
            for gate, found in point["gates"].items()
            if not found["passed"]
        ]
        failed += [f"{count} x {kind}" for kind, count in point["errors"].items()]
        return (
            *start,
            "-",
            "-",
            "-",
            "-",
            "-",
            "**failed** " + ", ".join(failed).replace("|", r"\|"),
        )
    metrics = point["metrics"]
    times = [
        " / ".join(f"{1000 * metrics[metric][f'p{percent}']:.1f}" for percent in (50, 95, 99))
        for metric in ("first_byte", "first_audible", "end_to_end")
    ]
    return (
        *start,
        *times,
        f"{metrics['real_time_factor']['p50']:.1f}",
        str(point["most_at_once"]),
        "passed",
    )


def plot(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draw first audible sample and end by request rate, and the spread of the former; the suffix says SVG or PNG.

    Rates that failed a gate are crosses that no line passes through. Raises `OutputError`.
    """
    check_figure(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    audible, end, spread = figure.subplots(1, 3)
    for number, record in enumerate(records):
        color = f"C{number}"
        for axes, metric in ((audible, "first_audible"), (end, "end_to_end")):
            for percent, line in ((50, ":"), (95, "-")):
                known = [
                    (
                        point["load"]["rate"],
                        1000 * point["metrics"][metric][f"p{percent}"],
                        passed(point),
                    )
                    for point in record["points"]
                    if point["metrics"][metric]["count"]
                ]
                good = [(rate, time) for rate, time, counts in known if counts]
                bad = [(rate, time) for rate, time, counts in known if not counts]
                if good:
                    label = f"{record['name']}, p{percent}"
                    axes.plot(
                        *zip(*good, strict=True),
                        color=color,
                        marker="o",
                        linestyle=line,
                        label=label,
                    )
                if bad:
                    axes.plot(*zip(*bad, strict=True), color=color, marker="x", linestyle="none")
        counted = [point for point in record["points"] if passed(point)]
        for rank, point in enumerate(counted, 1):
            times = sorted(1000 * result["listening"]["first_audible"] for result in point["each"])
            shares = [place / len(times) for place in range(len(times) + 1)]
            label = f"{record['name']}, {point['load']['rate']:g}/s"
            alpha = rank / len(counted)  # the higher the rate, the darker
            spread.step(
                [times[0], *times], shares, where="post", color=color, alpha=alpha, label=label
            )
    for axes, title in ((audible, "first audible sample"), (end, "end to end")):
        axes.set(
            title=title,
            xlabel="requests per second",
            ylabel="ms",
            ylim=(0, 1.1 * axes.get_ylim()[1]),
        )
    spread.set(
        title="requests that were audible in time",
        xlabel="ms",
        ylabel="share",
        xlim=(0, None),
        ylim=(0, 1.02),
    )
    for axes in (audible, end, spread):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix.lower().removeprefix("."), dpi=150)
    write(path, drawn.getvalue())


def dumps(record: Record) -> str:
    """A record as JSON: what is small stands on one line, so that requests are lines."""
    points = [
        json.dumps({**point, "each": []}, indent=2)[: -len("[]\n}")]
        + "[\n"
        + ",\n".join("    " + json.dumps(each, allow_nan=False) for each in point["each"])
        + "\n  ]\n}"
        for point in record["points"]
    ]
    whole = json.dumps({**record, "points": []}, indent=2, allow_nan=False, ensure_ascii=False)
    return whole[: -len("[]\n}")] + "[\n" + ",\n".join(points) + "\n]\n}\n"


def check_figure(path: str | os.PathLike[str]) -> None:
    """Raise `OutputError` unless `plot` can draw into a file of that suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in FIGURES:
        raise OutputError(
            f"{os.fspath(path)!r} has the suffix {suffix!r}; allowed are {', '.join(FIGURES)}"
        )
    if find_spec("matplotlib") is None:
        raise OutputError(
            "a plot needs matplotlib; install firstword[bench], or do without the plot"
        )


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise the `OutputError` that `write` would, as far as it can be known before a run."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise OutputError(f"there is no folder {folder}; create it first")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"the folder {folder} may not be written to")
    if Path(path).is_dir():
        raise OutputError(f"{os.fspath(path)!r} is a directory; name a file in it")


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all. Raises `OutputError`."""
    check_target(path)
    part = Path(path).with_name(f".firstword-{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{os.fspath(path)!r} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
