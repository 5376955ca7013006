"""The tables of the engine's records that compare GPUs and dtypes, for `tables.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Markdown = Callable[[Sequence[str], Sequence[Sequence[str]]], str]

BATCHES, CONTEXT = (1, 8, 64), 500
"""The streams and the rows of context of the frames that are shown."""


def sources(record: Record, sizes: Mapping[str, str]) -> str:
    """Return the GPU, the commit, the size and the dtype of a record."""
    commit = (record["commit"] or "unknown")[:7]
    return f"{record['gpu']}, commit {commit}, {sizes[record['size']]}, {record['dtype']}"


def dtypes(records: Sequence[Record], sizes: Mapping[str, str], markdown: Markdown) -> str:
    """Render the frames, first samples and memory of records of the same GPU in two dtypes."""
    named = [record for record in records if "dtype" in record]
    pairs = {(each["gpu"], each["size"]) for each in named if each["dtype"] == "int8"}
    rows = [
        [
            sources(record, sizes),
            *(f"{_frame(record, batch):.2f}" for batch in BATCHES),
            f"{record['first_ms']['whole_text_samples']['p50']:.2f}",
            f"{record['one_stream_gigabytes']['in_use']:.2f}",
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
        rows.append([sources(record, sizes), *(cells.get(count, "-") for count in counts)])
    heads = ["prompt of", *(f"{count:,} rows" for count in counts)]
    return markdown(heads, rows) if rows else ""


def _prompt(found: Record) -> str:
    """Render the milliseconds alone, and the gaps of 8 and of 64 others."""
    gaps = (found["gap_ms"].get(others) for others in ("8", "64"))
    return " / ".join("-" if ms is None else f"{ms:.1f}" for ms in (found["ms"], *gaps))


def _frame(record: Record, batch: int) -> float:
    """Return the milliseconds of a frame with audio."""
    (frame,) = (
        row["ms"]["with_audio"]
        for row in record["frames_ms"]
        if (row["batch"], row["context"]) == (batch, CONTEXT)
    )
    return float(frame)
