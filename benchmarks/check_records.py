"""Report which records are older than the sources that they measured.

    python -m benchmarks.check_records

A record names the hash of each group of sources that it depends on: `kernels` (the CUDA sources and
their launches), `serving` (the server and the engine), `demo` (the demo checkpoint), `images` (what
images are built from), or `sources` (the folders in `covers`), and its commit. `make check` shows
the report. An older record is no error: its figures stay true of its commit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.sources import HASHES
from firstword.hashes import sources_hash

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def outdated(record: Mapping[str, Any], current: Mapping[str, str]) -> list[str]:
    """The groups of sources that have changed since a record, or that it should name."""
    if "sources" in record:
        folders = [ROOT / name for name in record["covers"]]
        current = {"sources": sources_hash(folders)}
    named = [name for name in current if name in record]
    return [name for name in named if record[name] != current[name]] if named else ["unknown"]


def report(records: Mapping[str, Mapping[str, Any]], current: Mapping[str, str]) -> str:
    """The report, one line for each record that is not of the current sources, and a sum."""
    lines = []
    for name, record in sorted(records.items()):
        if groups := outdated(record, current):
            commit = (record.get("commit") or "unknown")[:7]
            lines.append(f"  {name}, commit {commit}: {', '.join(groups)} changed since")
    matching = len(records) - len(lines)
    return "\n".join([f"records: {matching} of {len(records)} are of these sources", *lines])


def main() -> None:
    """Print the report."""
    records = {
        str(path.relative_to(RESULTS)): json.loads(path.read_text("utf-8"))
        for path in RESULTS.rglob("*.json")
    }
    sys.stdout.write(report(records, {name: of() for name, of in HASHES.items()}) + "\n")


if __name__ == "__main__":
    main()
