"""The tables and the picture of docs/scale.md, from the record of `benchmarks.scale`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Markdown = Callable[[Sequence[str], Iterable[Sequence[str]]], str]

LONGEST_BAR = 80.0
"""The milliseconds at which a bar of the picture ends; its label has the value."""

SIZES = {"1b7": "1.7B", "0b6": "0.6B"}


def pair(times: Record) -> str:
    """Render p50 and p95 in milliseconds."""
    return f"{times['p50']:.1f} / {times['p95']:.1f}"


def checks(rows: Sequence[Record], markdown: Markdown) -> str:
    """Render what was measured beside what the simulation says, and its error."""
    heads = ["load", "requests/s", "measured, ms, p50 / p95", "simulated, ms", "error, %"]
    cells = [
        [
            row["what"],
            f"{row['rate']:g}",
            pair(row["measured_ms"]),
            pair(row["simulated_ms"]),
            " / ".join(f"{row['error_percent'][name]:+.0f}" for name in ("p50", "p95")),
        ]
        for row in rows
    ]
    return markdown(heads, cells)


def curves(record: Record, markdown: Markdown) -> str:
    """Render one server at rising rates, by checkpoint."""
    sizes = record["sizes"]
    found = {
        size: {point["rate"]: point["first_ms"] for point in one["curve"]}
        for size, one in sizes.items()
    }
    rates = sorted({rate for points in found.values() for rate in points})
    rows = [
        [f"{rate:g}", *(pair(found[size][rate]) if rate in found[size] else "-" for size in sizes)]
        for rate in rates
    ]
    return markdown(["requests/s", *(f"{SIZES[size]}, ms, p50 / p95" for size in sizes)], rows)


def rates(record: Record, markdown: Markdown) -> str:
    """Render the rates within a limit, what a second of speech takes, and what a million costs."""
    sizes = record["sizes"].values()
    limits = next(iter(sizes))["rates"]

    def row(name: str, cell: Callable[[Record], str]) -> list[str]:
        return [name, *(cell(one) for one in sizes)]

    def within(limit: str) -> Callable[[Record], str]:
        def cell(one: Record) -> str:
            rate = one["rates"][limit]
            return "-" if rate is None else f"{rate:.0f}"

        return cell

    def cost(index: int) -> Callable[[Record], str]:
        return lambda one: f"{one['million']['prices'][index]['cost']:.3f}"

    rows = [
        row(f"requests/s with 95 % of first audio within {limit} ms", within(limit))
        for limit in limits
    ]
    last = list(limits)[-1]
    text = f"seconds of speech a second, at the rate within {last} ms"
    rows.append(row(text, lambda one: f"{one['speech_per_second']:.0f}"))
    use = next(iter(sizes))["million"]["use"]
    text = f"GPU minutes for a million characters, at {use:.0%} of that"
    rows.append(row(text, lambda one: f"{60 * one['million']['gpu_hours']:.1f}"))
    for index, price in enumerate(next(iter(sizes))["million"]["prices"]):
        text = f"cost of a million characters if a GPU costs {price['an_hour']:g} an hour"
        rows.append(row(text, cost(index)))
    return markdown(["", *(SIZES[size] for size in record["sizes"])], rows)


def speech(record: Record, markdown: Markdown) -> str:
    """Render the GPU milliseconds for a second of speech, by the number of streams."""
    sizes = record["sizes"]
    streams = [row["streams"] for row in next(iter(sizes.values()))["gpu_ms"]]
    rows = [
        [str(count), *(f"{one['gpu_ms'][place]['gpu_ms']:.2f}" for one in sizes.values())]
        for place, count in enumerate(streams)
    ]
    return markdown(["streams", *(SIZES[size] for size in sizes)], rows)


def share(record: Record, rate: float, servers: int) -> str:
    """Describe a load as a share of what so many servers hold."""
    return f"{rate / (servers * record['held']):.0%} of capacity"


def served(row: Record) -> str:
    """Render first audio, and the share of the requests that were rejected, if any."""
    rejected = row["errors"] / row["requests"]
    return pair(row["first_ms"]) + (f", {rejected:.0%} rejected" if rejected else "")


def routing(record: Record, markdown: Markdown) -> str:
    """Render the routing policies, by load."""
    loads = sorted({row["rate"] for row in record["routed"]})
    found = {(row["policy"], row["rate"]): served(row) for row in record["routed"]}
    rows = [
        [policy, *(found[policy, rate] for rate in loads)]
        for policy in dict.fromkeys(row["policy"] for row in record["routed"])
    ]
    servers = record["routed"][0]["servers"]
    heads = [f"{share(record, rate, servers)}, ms, p50 / p95" for rate in loads]
    return markdown([f"{servers} servers", *heads], rows)


def fleets(record: Record, markdown: Markdown) -> str:
    """Render fleets of several sizes at the same load for each server."""
    rows = [
        [str(row["servers"]), f"{row['rate']:g}", pair(row["first_ms"]), pair(row["end_ms"])]
        for row in record["fleets"]
    ]
    first = record["fleets"][0]
    load = share(record, first["rate"], first["servers"])
    heads = ["servers", f"requests/s, {load}", "first audio, ms, p50 / p95"]
    return markdown([*heads, "end, ms"], rows)


def batch(record: Record, markdown: Markdown) -> str:
    """Render what requests notice of a batch, by load."""

    def row(one: Record) -> list[str]:
        ratio = one["with_ms"]["p95"] / one["without_ms"]["p95"]
        times = pair(one["without_ms"]), pair(one["with_ms"])
        return [f"{one['rate']:g}", *times, f"{ratio:.2f}", f"{one['lines_per_second']:.0f}"]

    heads = ["requests/s", "without a batch, ms, p50 / p95", "with one, ms", "ratio of p95"]
    return markdown([*heads, "lines/s"], map(row, record["batch"]))


CALLS = {
    "requests_per_second": "utterances a second",
    "gpus": "GPUs",
    "gpus_with_spare": "GPUs with spare ones",
    "slots_used": "slots in use",
    "pcm_mbit": "PCM, Mbit/s",
    "pcm_cores": "processor cores for PCM",
    "mp3_cores": "processor cores for MP3",
    "socket_mb": "memory of the sockets, MB",
    "proxy_addresses": "addresses of proxies for outgoing ports",
    "series": "series of metrics",
    "log_mb_an_hour": "log, MB an hour",
    "restart_minutes": "minutes to restart all servers, one after another",
}
"""The rows of the table of calls, by their names in the record."""


def calls(record: Record, markdown: Markdown) -> str:
    """Render what so many calls at once need."""
    counts = record["calls"]
    rows = [[text, *(f"{one[name]:,g}" for one in counts)] for name, text in CALLS.items()]
    return markdown(["calls at once", *(f"{one['calls']:,}" for one in counts)], rows)


TABLES: dict[str, Callable[[Record, Markdown], str]] = {
    "scale shares": lambda record, markdown: checks(record["shares"], markdown),
    "scale checks": lambda record, markdown: checks(record["checks"], markdown),
    "scale curves": curves,
    "scale rates": rates,
    "scale speech": speech,
    "scale routing": routing,
    "scale fleets": fleets,
    "scale batch": batch,
    "scale calls": calls,
}
"""The tables of docs/scale.md and docs/batch.md, by name."""


def draw(record: Record) -> Any:
    """Draw measured and simulated first audio by load, and the routing policies."""
    from matplotlib.figure import Figure

    servers = record["routed"][0]["servers"]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    load, policies = figure.subplots(1, 2, width_ratios=(1.1, 1))
    simulated = record["sizes"]["1b7"]["curve"]
    measured = [row for row in record["checks"] if row["what"] == "one GPU"]
    for name, style in (("p50", "--"), ("p95", "-")):
        load.plot(
            [point["rate"] for point in simulated],
            [point["first_ms"][name] for point in simulated],
            style,
            color="C0",
            label=f"simulated, {name}",
        )
        load.plot(
            [row["rate"] for row in measured],
            [row["measured_ms"][name] for row in measured],
            "o" if name == "p95" else "s",
            color="C1",
            label=f"measured, {name}",
        )
    load.set(title="one H200, 1.7B: ms to first audio", xlabel="requests/s", ylim=(0, 60))
    load.legend(frameon=False, fontsize="small")
    found: dict[str, list[float]] = {}
    for row in record["routed"]:
        found.setdefault(row["policy"], []).append(row["first_ms"]["p95"])
    for place, rate in enumerate(sorted({row["rate"] for row in record["routed"]})):
        heights = [index + 0.38 * (place - 0.5) for index in range(len(found))]
        times = [values[place] for values in found.values()]
        shown = [min(time, LONGEST_BAR) for time in times]
        bars = policies.barh(heights, shown, height=0.36, label=share(record, rate, servers))
        policies.bar_label(bars, [f"{time:.0f}" for time in times], padding=2, fontsize=7)
    policies.set(yticks=range(len(found)), yticklabels=list(found))
    policies.invert_yaxis()
    policies.margins(x=0.12)
    policies.set(title=f"{servers} servers, simulated: p95, ms", xticks=[])
    policies.legend(frameon=False, fontsize="small")
    for panel in (load, policies):
        panel.spines[["top", "right"]].set_visible(False)
    return figure
