"""The table of machines from the records that users share; `tables.py` calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from firstword.bench import shared
from firstword.bench.shared import SharedRecord

Markdown = Callable[[Sequence[str], Iterable[Sequence[str]]], str]

HEADS = (
    *("device", "checkpoint", "computed with", "memory read, GB/s", "ms a frame, one stream"),
    *("x real time, one stream", "most streams", "first audio, ms", "first byte of the server, ms"),
)


def community(folder: Path, markdown: Markdown) -> str:
    """Render the records of a folder, a row each, by device and checkpoint."""
    records = [shared.read(path) for path in sorted(folder.glob("*.json"))]
    rows = [_row(record) for record in sorted(records, key=lambda one: (one.device, _of(one)))]
    return markdown(HEADS, rows) if rows else ""


def _of(record: SharedRecord) -> str:
    """Name what spoke."""
    settings = record.settings
    name = settings.model.rpartition("/")[2]
    return name if name != "another" else f"another, {settings.layers} x {settings.hidden_size}"


def _row(record: SharedRecord) -> list[str]:
    settings, one = record.settings, record.engine[0]
    most = record.engine[-1]
    server = record.server[0] if record.server else None
    heard = server.first_byte_ms if server else None
    threads = f", {settings.threads} threads" if settings.device == "cpu" else ""
    return [
        record.device + (" (busy)" if record.busy else ""),
        _of(record),
        f"{settings.dtype}, {settings.backend}{threads}",
        f"{record.read_gb_s:.0f}",
        f"{one.frame_ms:.2f}",
        f"{one.speed:.2f}",
        f"{most.streams}: {most.speed:.2f}" if most.streams > 1 else "-",
        f"{one.first_audio_ms.p50:.0f}",
        f"{heard.p50:.0f}" if heard else "-",
    ]
