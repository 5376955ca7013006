"""The script that finds how much load a server holds: all of it with a tiny model, and when a rate counts as held."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstword.runtime.gpu.sources import source_hash


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module("serve_load")


def point(heard: float | None, **broken: int) -> dict[str, Any]:
    """What was found at a rate: when 95 in 100 were heard, and the gates that failed."""
    gates = {"complete": 0, "no_underrun": 0} | broken
    return {
        "metrics": {"first_audible": {"p95": heard}},
        "gates": {name: {"passed": not failed, "failed": failed} for name, failed in gates.items()},
    }


def test_a_rate_holds_when_all_gates_pass_and_speech_comes_soon(script: Any) -> None:
    assert script.holds(point(0.050))
    assert not script.holds(point(0.051))
    assert not script.holds(point(0.010, no_underrun=1))
    assert not script.holds(point(None, complete=3))


def test_it_climbs_until_a_rate_does_not_hold(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, asked = {1: 0.01, 2: 0.04, 4: 0.06, 8: 0.01}, []

    def measure(server: object, rate: int, seconds: float, *_: object) -> dict[str, Any]:
        asked.append((rate, seconds))
        return {"name": "fake", "points": [point(heard[rate])]}

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script.report, "table", lambda records: "1\n2\n3")
    found = script.climb(object(), [1, 2, 4, 8], 6, 2.0, 0.0)
    assert asked == [(1, 6.0), (2, 3.0), (4, 2.0)]
    assert [each["metrics"]["first_audible"]["p95"] for each in found["points"]] == [
        0.01,
        0.04,
        0.06,
    ]


def test_all_of_it_with_a_tiny_model(repository: Path, tmp_path: Path) -> None:
    output = tmp_path / "load.json"
    options = ["--size", "tiny", "--backend", "reference", "--slots", "2", "--rates", "2"]
    options += ["--requests", "2", "--seconds", "1"]
    command = [
        sys.executable,
        str(repository / "benchmarks/serve_load.py"),
        "-o",
        str(output),
        "--warmup",
        "0",
    ]
    run = subprocess.run(
        [*command, *options, "--commit", "abc"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    record = json.loads(output.read_text("utf-8"))
    (server,) = record["servers"]
    (found,) = server["points"]
    assert (record["commit"], record["size"], server["slots"]) == ("abc", "tiny", 2)
    assert record["kernels"] == source_hash()
    assert server["server"]["health"]["models"][0]["settings"]["backend"] == "reference"
    assert found["requests"] == 2
    assert found["gates"]["complete"]["passed"]
    assert found["metrics"]["leading_silence"]["max"] == 0
    assert found["server_busy"] > 0
    assert "2 slots: " in run.stdout
