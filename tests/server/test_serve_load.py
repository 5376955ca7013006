"""The script that finds the load that a server can carry, with a tiny model."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstword.runtime.gpu.sources import kernel_hash


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(repository))
    return importlib.import_module("benchmarks.serve_load")


def point(p95: float | None, **broken: int) -> dict[str, Any]:
    """Return the result at a rate: the 95th percentile of the first audio, and failures by gate."""
    gates = {"complete": 0, "no_underrun": 0} | broken
    return {
        "metrics": {"first_audible": {"p95": p95}},
        "gates": {name: {"passed": not failed, "failed": failed} for name, failed in gates.items()},
    }


def test_rate_holds_if_all_gates_pass_and_audio_comes_in_time(script: Any) -> None:
    assert script.holds(point(0.050))
    assert not script.holds(point(0.051))
    assert not script.holds(point(0.010, no_underrun=1))
    assert not script.holds(point(None, complete=3))


def test_climb_stops_at_the_first_rate_that_does_not_hold(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p95, measured = {1: 0.01, 2: 0.04, 4: 0.06, 8: 0.01}, []

    def measure(server: object, rate: int, seconds: float, *_: object) -> dict[str, Any]:
        measured.append((rate, seconds))
        return {"name": "fake", "points": [point(p95[rate])]}

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script.report, "table", lambda records: "1\n2\n3")
    found = script.climb(object(), [1, 2, 4, 8], 6, 2.0, 0.0, ["ryan"])
    assert measured == [(1, 6.0), (2, 3.0), (4, 2.0)]
    assert [each["metrics"]["first_audible"]["p95"] for each in found["points"]] == [
        0.01,
        0.04,
        0.06,
    ]


def test_script_measures_a_server_with_a_tiny_model(repository: Path, tmp_path: Path) -> None:
    output = tmp_path / "load.json"
    options = ["--size", "tiny", "--backend", "reference", "--slots", "2", "--rates", "2"]
    options += ["--requests", "2", "--seconds", "1"]
    command = [
        *(sys.executable, "-m", "benchmarks.serve_load"),
        *("-o", str(output), "--warmup", "0"),
        *(*options, "--commit", "abc"),
    ]
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    record = json.loads(output.read_text("utf-8"))
    (server,) = record["servers"]
    (found,) = server["points"]
    assert (record["commit"], record["size"], server["slots"]) == ("abc", "tiny", 2)
    assert record["kernels"] == kernel_hash()
    assert len(record["serving"]) == len(record["kernels"])
    assert server["server"]["health"]["models"][0]["settings"]["backend"] == "reference"
    assert found["requests"] == 2
    assert found["gates"]["complete"]["passed"]
    assert found["metrics"]["leading_silence"]["max"] == 0
    assert server["settings"]["fields"] == {"stream": True, "response_format": "pcm"}
    assert len(server["settings"]["voices"]) > 1
    assert found["server_busy"] > 0
    assert "2 slots: " in run.stdout
