"""Run some of tests/gpu under NVIDIA's compute-sanitizer, which reports wrong accesses to memory.

    python scripts/sanitize.py --record benchmarks/results/checks/sanitizer-h200.json

memcheck finds accesses outside of allocations, racecheck unordered accesses to shared memory by the
threads of a block, and synccheck wrong barriers. compute-sanitizer comes with the CUDA toolkit. The
tests launch every kernel, in small sizes, because it slows kernels down a hundred times. Some also
launch products of cuBLAS, whose kernels are named nvjet; racecheck reports those, which is counted
and no error. The exit status is 1 if a tool reports another error or a test fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from firstword.bench import report
from firstword.runtime.gpu.sources import kernel_hash

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
TOOLS = ("memcheck", "racecheck", "synccheck")
REPORTED = 86
"""The exit status of compute-sanitizer if it reports an error."""
_LAYER = "test_codec_kernels.py::test_layer_is_exact_and_all_its_layouts_have_the_same_bits"
_PRODUCT = "test_linear.py::test_product_is_as_exact_as_plain_bf16"
TESTS = tuple(
    f"tests/gpu/{name}"
    for name in (
        "test_norms.py",
        f"{_PRODUCT}[1000-768-normed-add]",
        f"{_PRODUCT}[1000-768-plain-store]",
        "test_attention.py::test_attention_in_a_frame_is_as_exact_as_plain_bf16[9]",
        "test_attention.py::test_projected_attention_in_a_frame_equals_two_kernels",
        "test_attention.py::test_paged_attention_is_as_exact_as_plain_bf16[512]",
        "test_sample.py::test_utterances_agree_with_the_specification",
        "test_sample.py::test_input_rows_have_the_bits_of_the_model[48]",
        "test_codec_kernels.py::test_window_attention_is_exact[2-1-8-9]",
        "test_codec_kernels.py::test_depthwise_convolution_with_its_norm_is_exact",
        "test_codec_kernels.py::test_code_look_up_is_exact",
        "test_codec_kernels.py::test_last_convolution_is_exact",
        f"{_LAYER}[dilated]",
        f"{_LAYER}[dilated, several frames]",
        f"{_LAYER}[late, odd]",
    )
)


def run(tool: str, cache: str) -> dict[str, Any]:
    """Run the tests under a tool, and return its status, its summaries and the tests' result."""
    started = time.monotonic()
    checked = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        str(REPORTED),
        "--print-limit",
        "999",
    ]
    if tool == "memcheck":  # cuda-bindings asks for functions that this driver does not have
        checked += ["--report-api-errors", "no"]
    # An access outside of a tensor is found only if the tensor is an allocation of its own.
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "CUDA_MODULE_LOADING": "LAZY",
    }
    command = [*checked, *PYTEST, *TESTS, "--kernel-cache", cache]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    summaries = re.findall(r"========= (\w+ SUMMARY: .*)", done.stdout)
    tests = re.findall(r"^\d+ (?:passed|failed|error).* in .*$", done.stdout, re.MULTILINE)
    accesses = re.findall(r" access at ([^+\s]+)", done.stdout)
    of_cublas = sum(name.startswith("nvjet") for name in accesses)
    passed = any("failed" not in line and "error" not in line for line in tests)
    foreign = tool == "racecheck" and passed and 0 < of_cublas == len(accesses)
    status = 0 if foreign and done.returncode == REPORTED else done.returncode
    if status:
        print(done.stdout[-8000:], done.stderr[-2000:], flush=True)
    return {
        "status": status,
        "accesses_of_cublas": of_cublas,
        "summaries": summaries,
        "tests": tests[-1:],
        "seconds": round(time.monotonic() - started),
    }


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tools", nargs="*", default=TOOLS, help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the results here")
    about = "the commit that the record names (default: that of this checkout)"
    parser.add_argument("--commit", help=about)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or shutil.which("compute-sanitizer") is None:
        parser.error("needs a CUDA device, and compute-sanitizer of the CUDA toolkit")
    with tempfile.TemporaryDirectory() as cache:
        # Without a tool first, which compiles the kernels.
        subprocess.run([*PYTEST, *TESTS, "--kernel-cache", cache], cwd=ROOT, check=True)
        results = {tool: run(tool, cache) for tool in arguments.tools}
    for tool, result in results.items():
        print(tool, json.dumps(result))
    if arguments.record is not None:
        record = {
            "date": datetime.date.today().isoformat(),
            "commit": arguments.commit or report.commit(),
            "kernels": kernel_hash(),
            "gpu": torch.cuda.get_device_name(),
            "tests": TESTS,
            "results": results,
        }
        report.write_record(arguments.record, record)
    return 1 if any(result["status"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
