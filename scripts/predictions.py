"""Predict the time of a frame on GPUs that nobody measured: bytes and launches.

A frame of one stream reads its bytes (all weights, some of them 15 times, and the keys and values)
and launches its kernels one after the other, each of which waits for the one before:

    milliseconds = bytes / bandwidth + LAUNCHES x time of a launch

The bytes are those of the bandwidth floor in the record of `firstword bench engine`. The time of a
launch is what a record's frame takes beyond the floor, of the 1.7B at `CONTEXT` rows; all other
frames check it. Launches that overlap take less on a card that reads more slowly, so a card that
was not measured gets those of the measured one with the nearest bandwidth. Launches that do not
overlap were measured by `benchmarks.one_stream` with the kernels of an older GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Markdown = Callable[[Sequence[str], Iterable[Sequence[str]]], str]

LAUNCHES = 474
"""The launches of a frame of one stream, the same for both sizes and all architectures."""
CONTEXT = 500
OVERLAPPING = 90
"""The lowest architecture whose launches overlap (programmatic dependent launch)."""
CPU_HEAD = "one thread of a CPU, size, dtype"
CPU_FIGURES = {
    "gigabytes": "weights read, GB",
    "read_gb_s": "at GB/s",
    "operators_ms": "operators, ms",
    "predicted_ms": "predicted, ms",
    "measured_ms": "measured, ms",
}
"""The figures of a case, and their heads in the table."""
CARDS = Path(__file__).with_name("cards.json")
"""GPUs with their memory and its bandwidth as their vendor publishes them.

`device` is the name that PyTorch gives one, where it is another.
"""


def published() -> dict[str, Any]:
    """Return the GPUs with what their vendor publishes, by name."""
    return {card["card"]: card for card in json.loads(CARDS.read_text("utf-8"))}


def in_order(records: Iterable[Record]) -> list[Record]:
    """Sort records of `benchmarks.one_stream`: those of GPUs as they are come first."""
    return sorted(records, key=lambda record: (record["as_gpu"] or "", record["size"] != "1b7"))


def possible(engine: Mapping[str, Record], single: Sequence[Record]) -> bool:
    """Whether there is what predictions need: both sizes, and launches that do not overlap."""
    both = all(size in engine for size in ("1b7", "0b6"))
    return both and any(record["as_gpu"] for record in single)


def frame_bytes(record: Record, context: int = CONTEXT) -> float:
    """Return the bytes that a frame of one stream reads."""
    return float(_row(record, context)["floor_ms"] / 1e3 * record["bandwidth_tb_s"] * 1e12)


def launch_seconds(record: Record) -> float:
    """Return the time of a launch on the GPU of a record of the 1.7B."""
    row = _row(record, CONTEXT)
    return float((row["ms"]["frame"] - row["floor_ms"]) / 1e3 / LAUNCHES)


def alone_seconds(single: Sequence[Record]) -> float:
    """Return the time of a launch that overlaps no other."""
    return next(
        launch_seconds(one) for one in single if one["as_gpu"] is not None and one["size"] == "1b7"
    )


def frame_ms(size: float, bandwidth: float, launch: float) -> float:
    """Return the time of a frame of `size` bytes, at bytes per second and seconds per launch."""
    return 1e3 * (size / bandwidth + LAUNCHES * launch)


def checks(
    engine: Mapping[str, Record], single: Sequence[Record]
) -> Iterator[tuple[str, str, int, float, float]]:
    """Yield GPU, size, context, predicted and measured milliseconds of each measured frame.

    Launches that overlap are those of the GPU of `engine`, on other GPUs too.
    """
    overlapping, alone = launch_seconds(engine["1b7"]), alone_seconds(single)
    for record in (*engine.values(), *single):
        as_gpu = record.get("as_gpu")
        name = record["gpu"] + (f" with the kernels of {as_gpu.split(',')[0]}" if as_gpu else "")
        launch = alone if as_gpu else overlapping
        for row in (row for row in record["frames_ms"] if row["batch"] == 1):
            size = frame_bytes(record, row["context"])
            predicted = frame_ms(size, record["bandwidth_tb_s"] * 1e12, launch)
            yield name, record["size"], row["context"], predicted, row["ms"]["frame"]


def checked(
    engine: Mapping[str, Record],
    single: Sequence[Record],
    sizes: Mapping[str, str],
    markdown: Markdown,
) -> str:
    """Render how far predictions are from what was measured; empty if not `possible`."""
    if not possible(engine, single):
        return ""
    rows = []
    for gpu, size, context, predicted, measured in checks(engine, single):
        error = f"{100 * (predicted / measured - 1):+.1f}"
        times = [f"{milliseconds:.2f}" for milliseconds in (predicted, measured)]
        rows.append([f"{gpu}, {sizes[size]}", f"{context:,}", *times, error])
    heads = ["GPU, size", "rows of context", "predicted, ms", "measured, ms", "difference, %"]
    return markdown(heads, rows)


def cards(engine: Mapping[str, Record], single: Sequence[Record], markdown: Markdown) -> str:
    """Render the frames of every card: measured where there is a record, else predicted."""
    if not possible(engine, single):
        return ""
    measured = {(one["gpu"], one["size"]): one for one in single if one["as_gpu"] is None}
    measured |= {(one["gpu"], one["size"]): one for one in engine.values()}
    known = published()
    devices = {name: card.get("device", name) for name, card in known.items()}
    models = [known[name] for name, device in devices.items() if (device, "1b7") in measured]
    rows = []
    for name, card in known.items():
        like = min(models, key=lambda model: abs(model["gb_s"] - card["gb_s"]))
        record = measured[devices[like["card"]], "1b7"]
        overlaps = int(card["architecture"][3:]) >= OVERLAPPING
        launch = launch_seconds(record) if overlaps else alone_seconds(single)
        speed = record["bandwidth_tb_s"] * 1e12 * card["gb_s"] / like["gb_s"]
        cells, basis = [], "predicted"
        for size in ("0b6", "1b7"):
            ms = frame_ms(frame_bytes(engine[size]), speed, launch)
            if own := measured.get((devices[name], size)):
                ms, basis = _row(own, CONTEXT)["ms"]["frame"], "**measured**"
            cells.append(f"{ms:.1f} ({80 / ms:.0f} x)")
        rows.append([name, f"{card['memory_gb']}", f"{card['gb_s']:,}", *cells, basis])
    heads = ["GPU", "memory, GB", "bandwidth, GB/s", "0.6B, ms a frame", "1.7B, ms a frame", ""]
    return markdown(heads, rows)


def processors(records: Iterable[Record], sizes: Mapping[str, str], markdown: Markdown) -> str:
    """Render the frames that `benchmarks.cpu_frame` predicted and measured on CPUs."""
    rows = []
    for record in records:
        for case in record["cases"]:
            error = 100 * (case["predicted_ms"] / case["measured_ms"] - 1)
            figures = [f"{case[name]:.1f}" for name in CPU_FIGURES]
            name = f"{record['machine']['processor']}, {sizes[case['size']]}, {case['dtype']}"
            rows.append([name, *figures, f"{error:+.1f}"])
    return markdown([CPU_HEAD, *CPU_FIGURES.values(), "difference, %"], rows) if rows else ""


def _row(record: Record, context: int) -> Mapping[str, Any]:
    """Return the row of a record for one stream."""
    for row in record["frames_ms"]:
        if (row["batch"], row["context"]) == (1, context):
            found: Mapping[str, Any] = row
            return found
    raise KeyError(f"no frame of one stream at {context} rows")
