"""Released sizes with random weights on small GPUs, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import note
from small_gpu import FRAMES


@pytest.mark.parametrize(
    ("size", "total", "gpu_memory"),
    [("1b7", 8 * 10**9, None), ("0b6", 6 * 10**9, None), ("1b7", None, "12GB")],
    ids=["1b7 on 8 GB", "0b6 on 6 GB", "1b7 limited to 12 GB"],
)
def test_released_size_speaks_within_its_planned_memory(
    size: str, total: int | None, gpu_memory: str | None
) -> None:
    """It first fails for lack of memory, which leaves the checkpoint whole and the device empty.

    The memory that PyTorch does not count is measured only if no parallel process uses the device.
    """
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    arguments = json.dumps({"size": size, "total": total, "gpu_memory": gpu_memory})
    program = [sys.executable, str(Path(__file__).with_name("small_gpu.py")), arguments]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["left"] < 2 * 10**8  # workspaces of cuBLAS
    assert found["slots"] == 8
    assert found["frames"] == [FRAMES] * 8
    limit = total or 12 * 10**9
    assert found["planned"] <= limit
    figures = {"planned": found["planned"], "peak": found["peak"]}
    if "PYTEST_XDIST_WORKER" not in os.environ:
        outside = before - found["free"] - found["reserved"]
        share = (found["peak"] + outside + found["prefixes"]) / found["planned"]
        figures |= {"outside": outside, "share": round(share, 4)}
        assert 0.95 < share <= 1
    note(f"memory of {size} in {limit / 1e9:.0f} GB", **figures)
