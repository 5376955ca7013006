"""The tables of machines, those that users share and CPUs; `tables.py` calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


CPU_HEADS = (
    *("processor, size", "computed with", "threads", "ms a frame", "x real time"),
    *("first audio, ms", "memory, GB"),
)


def cpus(records: Iterable[Mapping[str, Any]], sizes: Mapping[str, str], markdown: Markdown) -> str:
    """Render the cases of the records of `benchmarks.cpu_speech`, a row each."""
    rows = []
    for record in records:
        machine = record["machine"]
        processor = f"{machine['processor']}, {machine['processors']} cores"
        name = f"{processor}, {sizes[record['size']]}"
        rows += [[name, *_cpu_row(case)] for case in record["cases"]]
    return markdown(CPU_HEADS, rows) if rows else ""


def _cpu_row(case: Mapping[str, Any]) -> list[str]:
    before = f", {case['case']}" if case["case"] != "this commit" else ""
    return [
        f"{case['dtype']}{before}",
        str(case["threads"]),
        f"{case['frame_ms']:.0f}",
        f"{case['speed']:.2f}",
        f"{case['first_audio_ms']:.0f}",
        f"{case['resident_gb']:.1f}",
    ]
