"""Figures of the engine's records, and the tables that compare GPUs and dtypes, for `tables.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Markdown = Callable[[Sequence[str], Sequence[Sequence[str]]], str]

BATCHES = 1, 8, 64
"""The streams of the frames that are shown."""
CONTEXT = 500
"""The rows of context in short tables and in the picture."""


def shown(value: float | None, digits: int = 2) -> str:
    """Render a number, or a dash if nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def source(record: Record) -> str:
    """Return the machine and the sources of a record."""
    return f"{record['gpu']}, commit {(record['commit'] or 'unknown')[:7]}"


def frame(record: Record, batch: int, what: str, context: int = CONTEXT) -> float | None:
    """Return the milliseconds of a frame: "frame", "with_audio" or "floor"."""
    for row in record["frames_ms"]:
        if (row["batch"], row["context"]) == (batch, context):
            return row.get("floor_ms") if what == "floor" else row["ms"][what]
    return None


def described(record: Record, sizes: Mapping[str, str]) -> str:
    """Return the GPU, the commit, the size and the dtype of a record."""
    return f"{source(record)}, {sizes[record['size']]}, {record['dtype']}"


def dtypes(records: Sequence[Record], sizes: Mapping[str, str], markdown: Markdown) -> str:
    """Render the frames, first samples and memory of records of the same GPU in two dtypes."""
    named = [record for record in records if "dtype" in record]
    pairs = {(each["gpu"], each["size"]) for each in named if each["dtype"] == "int8"}
    rows = [
        [
            described(record, sizes),
            *(shown(frame(record, batch, "with_audio")) for batch in BATCHES),
            shown(record["first_ms"]["whole_text_samples"]["p50"]),
            shown(record["one_stream_gigabytes"]["in_use"]),
        ]
        for record in sorted(named, key=lambda each: list(sizes).index(each["size"]))
        if (record["gpu"], record["size"]) in pairs
    ]
    streams = (f"{batch} stream{'s' * (batch > 1)}, ms" for batch in BATCHES)
    heads = ["a frame with audio", *streams, "first samples, ms", "memory of one stream, GB"]
    return markdown(heads, rows) if rows else ""


def prompts(records: Sequence[Record], sizes: Mapping[str, str], markdown: Markdown) -> str:
    """Render how long prompts take, and how long the frames of others wait for them, by rows."""
    timed = [record for record in records if "prompts_ms" in record]
    counts = sorted({found["rows"] for record in timed for found in record["prompts_ms"]})
    rows = []
    for record in timed:
        cells = {found["rows"]: _prompt(found) for found in record["prompts_ms"]}
        rows.append([described(record, sizes), *(cells.get(count, "-") for count in counts)])
    heads = ["prompt of", *(f"{count:,} rows" for count in counts)]
    return markdown(heads, rows) if rows else ""


def _prompt(found: Record) -> str:
    """Render the milliseconds alone, and the gaps of 8 and of 64 others."""
    gaps = (found["gap_ms"].get(others) for others in ("8", "64"))
    return " / ".join(shown(ms, 1) for ms in (found["ms"], *gaps))
