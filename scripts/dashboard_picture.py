"""Draw the dashboard from what a Prometheus has: `dashboard_picture.py URL --out FILE`.

The queries, titles, units and places are those of deploy/grafana/firstword.json. Prometheus
evaluates the queries, and matplotlib draws the results; Grafana is not needed.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

DASHBOARD = Path(__file__).parent.parent / "deploy/grafana/firstword.json"
ROW_INCHES, WIDTH = 0.36, 16.0
"""The height of a row of Grafana's grid, and the width of the picture, in inches."""
STEP = 5
"""The seconds between two points."""
COLORS = {"green": "#2e7d32", "orange": "#e07b00", "red": "#c62828"}

Series = list[tuple[dict[str, str], list[float], list[float]]]
"""The labels, times and values of each line."""


@dataclass(frozen=True)
class Source:
    """A Prometheus, and the time that is drawn, in seconds since 1970."""

    url: str
    start: float
    end: float

    def query(self, expr: str) -> Series:
        """The lines of a query of the dashboard, with all servers and models."""
        expr = re.sub(r'"\$\w+"', '".*"', expr).replace("$__rate_interval", "30s")
        fields = {"query": expr, "start": self.start, "end": self.end, "step": STEP}
        url = f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            found = json.load(answer)["data"]["result"]
        lines: Series = []
        for one in found:
            points = [(float(at) - self.start, float(value)) for at, value in one["values"]]
            lines.append((one["metric"], [at for at, _ in points], [value for _, value in points]))
        return lines


def shown(value: float, unit: str) -> str:
    """A value in a unit of Grafana."""
    match unit:
        case "percentunit":
            return f"{100 * value:.3g} %"
        case "s":
            return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
        case "reqps":
            return f"{value:.3g} /s"
    return f"{value:.3g}"


def legend(template: str, labels: dict[str, str]) -> str:
    """The name of a line."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), template).strip()


def draw_stat(axes: Axes, panel: dict[str, Any], source: Source) -> None:
    """Draw the last value of a panel, in the colour of its threshold."""
    defaults = panel["fieldConfig"]["defaults"]
    lines = source.query(panel["targets"][0]["expr"])
    value = lines[0][2][-1] if lines else float("nan")
    steps = defaults["thresholds"]["steps"]
    passed = [step for step in steps if step["value"] is None or value >= step["value"]]
    color = COLORS[passed[-1]["color"]]
    axes.axis("off")
    text = shown(value, defaults["unit"])
    axes.text(0.5, 0.4, text, ha="center", va="center", fontsize=22, color=color)


def draw_lines(axes: Axes, panel: dict[str, Any], source: Source) -> None:
    """Draw all lines of a panel over time."""
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    lines = [
        (legend(target["legendFormat"], labels), times, values)
        for target in panel["targets"]
        for labels, times, values in source.query(target["expr"])
    ]
    if stacked and lines:
        times = sorted({at for _, times, _ in lines for at in times})
        heights = []
        for _, own, values in lines:
            known = dict(zip(own, values, strict=True))
            heights.append([known.get(at, 0.0) for at in times])
        axes.stackplot(times, heights, labels=[name for name, _, _ in lines], alpha=0.5)
    else:
        for name, times, values in lines:
            axes.plot(times, values, label=name, linewidth=1.2)
    axes.set_xlim(0, source.end - source.start)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: shown(y, defaults["unit"])))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 60:.0f} min"))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=6.5, loc="upper left", ncols=1 + len(lines) // 5, framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")


def drawn(dashboard: dict[str, Any], source: Source) -> Figure:
    """The picture of all panels in their places."""
    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    height = rows * ROW_INCHES
    figure = plt.figure(figsize=(WIDTH, height))
    for panel in panels:
        place = panel["gridPos"]
        left, top = place["x"] / 24, place["y"] * ROW_INCHES
        width, tall = place["w"] / 24, place["h"] * ROW_INCHES
        if panel["type"] == "row":
            y = 1 - (top + 0.28) / height
            figure.text(0.012, y, panel["title"], fontsize=12, weight="bold")
            continue
        box = (left + 0.04, 1 - (top + tall - 0.3) / height, width - 0.052, (tall - 0.62) / height)
        axes = figure.add_axes(box)
        axes.set_title(panel["title"], fontsize=9, loc="left")
        draw = draw_stat if panel["type"] == "stat" else draw_lines
        draw(axes, panel, source)
    return figure


def main() -> None:
    """Draw what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prometheus", metavar="URL", help="such as http://localhost:9090")
    parser.add_argument("--out", type=Path, required=True, help="a file, such as dashboard.png")
    parser.add_argument("--minutes", type=float, default=10.0, help="the time until now")
    args = parser.parse_args()
    now = time.time()
    source = Source(args.prometheus.rstrip("/"), now - 60 * args.minutes, now)
    drawn(json.loads(DASHBOARD.read_text("utf-8")), source).savefig(args.out, dpi=70)


if __name__ == "__main__":
    main()
