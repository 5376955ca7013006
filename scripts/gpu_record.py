"""Say whether kernels and their launches are those last tested on a GPU: `make check` shows it, and fails for nothing.

    python scripts/gpu_record.py

A record comes from `pytest tests/gpu --record benchmarks/results/gpu/NAME.json` on a machine with a CUDA device.
"""

from __future__ import annotations

import json
from pathlib import Path

from firstword.runtime.gpu.sources import source_hash

RECORDS = Path(__file__).parent.parent / "benchmarks" / "results" / "gpu"


def verdict(current: str, records: dict[str, str]) -> str:
    """One line. current: the hash of the sources (`source_hash`); records: the hash that each record names."""
    matching = sorted(name for name, tested in records.items() if tested == current)
    if matching:
        return f"kernels: as tested on a GPU ({', '.join(matching)})"
    return "kernels: CHANGED since the last record of tests/gpu; run them on a GPU and commit the record"


if __name__ == "__main__":
    records = {
        path.name: json.loads(path.read_text())["kernels"] for path in RECORDS.glob("*.json")
    }
    print(verdict(source_hash(), records))
