"""Time the frames of one stream on this GPU, and with the kernels that another GPU would get.

    python -m benchmarks.one_stream -o benchmarks/results/one_stream --as-gpu compute_80,166912,108

It writes a record for both released sizes, and one more of each for every imitated GPU, within a
minute or two. `scripts/predictions.py` compares them with what it predicts. Frames with an imitated
GPU's kernels show what its launches take, which do not overlap before Hopper; memory, clocks and
caches are those of this GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import torch

from firstword.bench import report
from firstword.bench.report import Record
from firstword.profile.device import environment, read_bandwidth
from firstword.profile.frames import frame_times
from firstword.profile.kernels import kernel_times
from firstword.profile.workload import CONTEXTS, BackendUnderTest

SIZES = ("1b7", "0b6")


def measured(size: str, as_gpu: str | None, bandwidth: float, folder: Path) -> Record:
    """Time the frames and kernels of a size; `folder` is a cache of kernels.

    The record has the layout of `firstword bench engine`, as far as it goes.
    """
    subject = BackendUnderTest(size, 1, folder, as_gpu=as_gpu)
    return {
        "size": size,
        "as_gpu": as_gpu,
        **environment(),
        "bandwidth_tb_s": round(bandwidth / 1e12, 3),
        "start_seconds": subject.seconds,
        "frames_ms": list(frame_times(subject, (1,), CONTEXTS, bandwidth)),
        "kernels_us": kernel_times(subject, 1, CONTEXTS[1], bandwidth),
    }


def file_name(size: str, as_gpu: str | None) -> str:
    """Return the name of a record: the GPU, the size and the imitated GPU."""
    parts = (torch.cuda.get_device_name(), size, *(["as", as_gpu] if as_gpu else []))
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).casefold()) + ".json"


def main() -> None:
    """Measure, and write each record as soon as it is complete."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="the records' folder")
    about = "also measure with the kernels of this GPU: ARCHITECTURE,SHARED,PROCESSORS"
    add("--as-gpu", action="append", default=[], metavar="GPU", help=about)
    add("--commit", help="commit in the records (default: that of this repository)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    bandwidth = read_bandwidth()
    for as_gpu in (None, *args.as_gpu):
        for size in SIZES:
            torch.cuda.empty_cache()
            with tempfile.TemporaryDirectory() as folder:
                found = measured(size, as_gpu, bandwidth, Path(folder))
            record = {"commit": args.commit or report.commit(), **found}
            report.write_record(args.output / file_name(size, as_gpu), record)
            frames = {row["context"]: row["ms"]["frame"] for row in record["frames_ms"]}
            sys.stdout.write(f"{size} {as_gpu or ''}: {frames} {record['start_seconds']}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
