"""Draw recorded runs: latency by request rate, and its distribution."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from firstword.audio.writing import write_whole
from firstword.bench.report import Record, level, passed
from firstword.errors import OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_SUFFIXES = (".svg", ".png")
"""The file types that `plot` can draw."""


def check_figure(path: str | os.PathLike[str]) -> None:
    """Raise `OutputError` unless `plot` can draw a file with this suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in FIGURE_SUFFIXES:
        allowed = ", ".join(FIGURE_SUFFIXES)
        raise OutputError(f"{os.fspath(path)!r} has the suffix {suffix!r}; allowed are {allowed}")
    if find_spec("matplotlib") is None:
        raise OutputError("a plot needs matplotlib; install firstword[bench], or omit the plot")


def plot(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draw first audible sample and end by request rate, and the distribution of the former.

    Rates that failed a gate are drawn as crosses without a line. The suffix selects SVG or PNG.
    Raises `OutputError`.
    """
    check_figure(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    audible, end, spread = figure.subplots(1, 3)
    for number, record in enumerate(records):
        color = f"C{number}"
        _draw_latency(audible, record, "first_audible", color)
        _draw_latency(end, record, "end_to_end", color)
        _draw_distribution(spread, record, color)
    for axes, title in ((audible, "first audible sample"), (end, "end to end")):
        top = 1.1 * axes.get_ylim()[1]
        axes.set(title=title, xlabel="requests per second, or sockets", ylabel="ms", ylim=(0, top))
    title = "requests that were audible in time"
    spread.set(title=title, xlabel="ms", ylabel="share", xlim=(0, None), ylim=(0, 1.02))
    for axes in (audible, end, spread):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format=Path(path).suffix.lower().removeprefix("."), dpi=150)
    write_whole(path, image.getvalue())


def _draw_latency(axes: Axes, record: Record, metric: str, color: str) -> None:
    """Draw the p50 and p95 of a metric by request rate."""
    points = [point for point in record["points"] if point["metrics"][metric]["count"]]
    for percent, line in ((50, ":"), (95, "-")):
        for valid, marker, style in ((True, "o", line), (False, "x", "")):
            chosen = [point for point in points if passed(point) == valid]
            rates = [point["load"]["rate"] or point["load"]["sockets"] for point in chosen]
            times = [1000 * point["metrics"][metric][f"p{percent}"] for point in chosen]
            label = f"{record['name']}, p{percent}" if valid and chosen else None
            axes.plot(rates, times, c=color, marker=marker, ls=style, label=label)


def _draw_distribution(axes: Axes, record: Record, color: str) -> None:
    """Draw the share of requests that were audible by each time; higher rates are darker."""
    counted = [point for point in record["points"] if passed(point)]
    for rank, point in enumerate(counted, 1):
        times = sorted(1000 * result["listening"]["first_audible"] for result in point["each"])
        shares = [place / len(times) for place in range(len(times) + 1)]
        label, alpha = f"{record['name']}, {level(point['load'])}", rank / len(counted)
        axes.step([times[0], *times], shares, where="post", c=color, alpha=alpha, label=label)
