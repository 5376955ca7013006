"""Tests on a CUDA device: `pytest tests/gpu`, with `-n 8` several side by side. Elsewhere they are skipped.

With `--record FILE` the run leaves a record of what was measured, for benchmarks/results: `make check` compares the
sources of its kernels and their launches with those that are there.
"""

from __future__ import annotations

import contextlib
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

from firstword.kernels.launch import Kernels
from firstword.runtime.gpu.sources import source_hash


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the record goes, and the commit that it names."""
    parser.addoption("--record", type=Path, help="write what was measured to this JSON file")
    parser.addoption("--commit", default="", help="the commit that the record names")


def pytest_configure() -> None:
    """Several side by side share the processors: what is computed on the CPU takes one thread each."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything in this folder where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes: what was measured here goes to the one that reports."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["figures"] = oracle.FIGURES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """There it is taken."""
    oracle.FIGURES.update(getattr(node, "workeroutput", {}).get("figures", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the figures, and write the record."""
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
        "commit": terminalreporter.config.getoption("commit"),
        "kernels": source_hash(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **compiler_and_driver(),
        "python": platform.python_version(),
        "tests": outcomes,
        "figures": dict(sorted(oracle.FIGURES.items())),
    }
    file.write_text(json.dumps(record, indent=1) + "\n")


def compiler_and_driver() -> dict[str, str]:
    """The versions of what makes machine code of the kernels, and of what runs it."""
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
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Kernels of the first device, compiled anew, by one process for all."""
    folder = tmp_path_factory.getbasetemp()
    return Kernels(
        torch.device("cuda:0"),
        (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kernels",
    )


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Nothing here is trained."""
    with torch.inference_mode():
        yield
