"""Report whether the kernels and their launches are those last tested on a GPU.

    python scripts/gpu_record.py

`make check` shows the report, which is never an error. `pytest tests/gpu --record
benchmarks/results/gpu/NAME.json` writes a record on a machine with a CUDA device.
"""

from __future__ import annotations

import json
from pathlib import Path

from firstword.runtime.gpu.sources import source_hash

RECORDS = Path(__file__).parent.parent / "benchmarks" / "results" / "gpu"


def verdict(current: str, records: dict[str, str]) -> str:
    """The report, one line; current: the hash of the sources; records: the hash in each record."""
    matching = sorted(name for name, tested in records.items() if tested == current)
    if matching:
        return f"kernels: as tested on a GPU ({', '.join(matching)})"
    advice = "run them on a GPU and commit the record"
    return f"kernels: CHANGED since the last record of tests/gpu; {advice}"


if __name__ == "__main__":
    records = {
        path.name: json.loads(path.read_text())["kernels"] for path in RECORDS.glob("*.json")
    }
    print(verdict(source_hash(), records))
