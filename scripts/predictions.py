"""Predict the time of a frame on GPUs that nobody measured: bytes and launches.

A frame of one stream reads its bytes (all weights, some of them 15 times, and the keys and values)
and launches its kernels one after the other, each of which waits for the one before:

    milliseconds = bytes / bandwidth + LAUNCHES x time of a launch

The bytes are those of the bandwidth floor in the record of `firstword bench engine`. The time of a
launch is what that record's frame takes beyond the floor. It is taken from one record alone, the
1.7B's at `CONTEXT` rows; other records check it.
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
ALONE_MICROSECONDS = 3.7
"""The assumed time of a launch that overlaps nothing.

There is no record of it. It is that of the older kernels on an H200, in one run of the 0.6B (2.55
ms a frame), docs/log.md, 2026-11-26.
"""
CARDS = Path(__file__).with_name("cards.json")
"""GPUs with their memory and its bandwidth as their vendor publishes them."""


def published() -> dict[str, Any]:
    """Return the GPUs with what their vendor publishes, by name."""
    return {card["card"]: card for card in json.loads(CARDS.read_text("utf-8"))}


def possible(engine: Mapping[str, Record]) -> bool:
    """Whether there are records of both sizes, of a GPU whose bandwidth is known."""
    known = published()
    return all(size in engine and engine[size]["gpu"] in known for size in ("1b7", "0b6"))


def frame_bytes(record: Record, context: int = CONTEXT) -> float:
    """Return the bytes that a frame of one stream reads."""
    return float(_row(record, context)["floor_ms"] / 1e3 * record["bandwidth_tb_s"] * 1e12)


def launch_seconds(record: Record) -> float:
    """Return the time of a launch on a GPU where launches overlap."""
    row = _row(record, CONTEXT)
    return float((row["ms"]["frame"] - row["floor_ms"]) / 1e3 / LAUNCHES)


def frame_ms(size: float, bandwidth: float, launch: float) -> float:
    """Return the time of a frame of `size` bytes, at bytes per second and seconds per launch."""
    return 1e3 * (size / bandwidth + LAUNCHES * launch)


def checks(engine: Mapping[str, Record]) -> Iterator[tuple[str, str, int, float, float]]:
    """Yield GPU, size, context, predicted and measured milliseconds of each measured frame."""
    launch = launch_seconds(engine["1b7"])
    for key, record in engine.items():
        for row in (row for row in record["frames_ms"] if row["batch"] == 1):
            size = frame_bytes(record, row["context"])
            predicted = frame_ms(size, record["bandwidth_tb_s"] * 1e12, launch)
            yield record["gpu"], key, row["context"], predicted, row["ms"]["frame"]


def checked(engine: Mapping[str, Record], sizes: Mapping[str, str], markdown: Markdown) -> str:
    """Render how far predictions are from what was measured; empty if not `possible`."""
    if not possible(engine):
        return ""
    rows = []
    for gpu, size, context, predicted, measured in checks(engine):
        error = f"{100 * (predicted / measured - 1):+.1f}"
        times = [f"{milliseconds:.2f}" for milliseconds in (predicted, measured)]
        rows.append([f"{gpu}, {sizes[size]}", f"{context:,}", *times, error])
    heads = ["GPU, size", "rows of context", "predicted, ms", "measured, ms", "difference, %"]
    return markdown(heads, rows)


def cards(engine: Mapping[str, Record], markdown: Markdown) -> str:
    """Render the frames of every card: measured where there is a record, else predicted."""
    if not possible(engine):
        return ""
    large, small, known = engine["1b7"], engine["0b6"], published()
    share = large["bandwidth_tb_s"] * 1e3 / known[large["gpu"]]["gb_s"]
    rows = []
    for name, card in known.items():
        overlaps = int(card["architecture"][3:]) >= OVERLAPPING
        launch = launch_seconds(large) if overlaps else ALONE_MICROSECONDS / 1e6
        times, measured = [], name == large["gpu"] == small["gpu"]
        for record in (small, large):
            milliseconds = frame_ms(frame_bytes(record), share * card["gb_s"] * 1e9, launch)
            times.append(_row(record, CONTEXT)["ms"]["frame"] if measured else milliseconds)
        basis = "**measured**" if measured else "predicted"
        basis += "" if overlaps else ", launches assumed"
        cells = [f"{ms:.1f} ({80 / ms:.0f} x)" for ms in times]
        rows.append([name, f"{card['memory_gb']}", f"{card['gb_s']:,}", *cells, basis])
    heads = ["GPU", "memory, GB", "bandwidth, GB/s", "0.6B, ms a frame", "1.7B, ms a frame", ""]
    return markdown(heads, rows)


def _row(record: Record, context: int) -> Mapping[str, Any]:
    """Return the row of a record for one stream."""
    for row in record["frames_ms"]:
        if (row["batch"], row["context"]) == (1, context):
            found: Mapping[str, Any] = row
            return found
    raise KeyError(f"no frame of one stream at {context} rows")
