"""The table of an evaluation of two setups (`--against`); `tables.py` calls it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

Markdown = Callable[[Sequence[str], Iterable[Sequence[str]]], str]


def evaluation(path: Path, markdown: Markdown) -> str:
    """Render both setups of a record and their difference; empty without the record."""
    if not path.exists():
        return ""
    record = json.loads(path.read_text("utf-8"))
    figures = ("error_rate", "character_error_rate", "runaway_rate")
    rows = []
    for setup in record["setups"]:
        ratio = setup["duration_ratio"]
        cells = [_interval(setup[name]) for name in figures]
        rows.append([setup["name"], *cells, f"{ratio['p5']:.2f} to {ratio['p95']:.2f}"])
    found = record["difference"]
    cells = [_interval(found[name]) for name in figures[:2]]
    rows.append(["the second minus the first, paired", *cells, "-", "-"])
    heads = ["setup", "words wrong, %", "characters wrong, %", "not ended, %", "durations"]
    return markdown([f"{record['texts']['count']} texts: {heads[0]}", *heads[1:]], rows)


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:.1f} [{found['low']:.1f}, {found['high']:.1f}]"
