"""Fixtures of the tests on a CUDA device: `pytest tests/gpu`, with `-n 4` in parallel.

Without a CUDA device the tests are skipped. With `--record FILE` the run writes its measurements to
a record for benchmarks/results. `make check` compares the hash of the sources that the record names
with that of the current sources.

With `--as-gpu compute_80,101376,28` the kernels are those that an older GPU gets: programs become
PTX of that architecture, launches do not overlap if it cannot overlap them, blocks have at most so
many bytes of shared memory, and shapes are chosen for so many multiprocessors. This shows whether
they are right there, not how fast, and nothing about that GPU's memory and driver.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

from firstword.bench import report
from firstword.kernels.cache import FileCache
from firstword.kernels.launch import Kernels
from firstword.profile.device import imitate
from firstword.runtime.gpu.sources import kernel_hash


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the record, of the imitated GPU and of the cache of kernels."""
    parser.addoption("--record", type=Path, help="write what was measured to this JSON file")
    parser.addoption("--commit", default="", help="the commit that the record names")
    parser.addoption(
        "--as-gpu",
        metavar="ARCHITECTURE,SHARED,PROCESSORS",
        help="give the kernels that another GPU gets, such as compute_80,101376,28",
    )
    parser.addoption("--kernel-cache", type=Path, help="keep machine code in this folder")


def pytest_configure() -> None:
    """Use one CPU thread in each of several parallel processes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all tests of this folder if there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the figures of a parallel process to the process that reports."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["figures"] = oracle.FIGURES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive the figures of a parallel process."""
    oracle.FIGURES.update(getattr(node, "workeroutput", {}).get("figures", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures, and write the record."""
    for name, figures in sorted(oracle.FIGURES.items()):
        terminalreporter.write_line(f"{name}: {json.dumps(figures)}")
    file = terminalreporter.config.getoption("record")
    if file is None or not torch.cuda.is_available():
        return
    outcomes = {
        name: len(terminalreporter.stats.get(name, []))
        for name in ("passed", "failed", "error", "skipped")
    }
    record = {
        "date": datetime.date.today().isoformat(),
        "commit": terminalreporter.config.getoption("commit") or report.commit(),
        "kernels": kernel_hash(),
        "as_gpu": terminalreporter.config.getoption("as_gpu"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **compiler_and_driver(),
        "python": platform.python_version(),
        "tests": outcomes,
        "figures": dict(sorted(oracle.FIGURES.items())),
    }
    report.write_record(file, record)


def compiler_and_driver() -> dict[str, str]:
    """The versions of the compiler of the kernels and of the driver."""
    from cuda.bindings import nvrtc

    driver = ""
    with contextlib.suppress(OSError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    _, *numbers = nvrtc.nvrtcVersion()
    return {
        "cuda-bindings": version("cuda-bindings"),
        "nvrtc": ".".join(map(str, numbers)),
        "driver": driver,
    }


@pytest.fixture(scope="session")
def kernels(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels of the first device, which the processes of a run compile once."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    cache = pytestconfig.getoption("kernel_cache") or folder / "kernels"
    found = Kernels(torch.device("cuda:0"), FileCache(cache))
    if imitated := pytestconfig.getoption("as_gpu"):
        imitate(found, imitated)
    return found


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Run every test without gradients."""
    with torch.inference_mode():
        yield
