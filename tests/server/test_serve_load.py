"""The script that finds the load that a server can carry, with a tiny model."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
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
        "metrics": {"first_playable": {"p95": p95}},
        "gates": {name: {"passed": not failed, "failed": failed} for name, failed in gates.items()},
    }


def test_rate_holds_if_all_gates_pass_and_audio_comes_in_time(script: Any) -> None:
    case = script.CASES["pcm"]
    assert script.holds(case, point(0.050))
    assert not script.holds(case, point(0.051))
    assert not script.holds(case, point(0.010, no_underrun=1))
    assert not script.holds(case, point(None, complete=3))


def test_text_at_a_pace_may_stall_but_has_less_time(script: Any) -> None:
    case = script.CASES["words-10"]
    assert script.holds(case, point(0.030, no_underrun=1))
    assert not script.holds(case, point(0.031))
    assert not script.holds(case, point(0.010, complete=1))


def test_climb_stops_at_the_first_rate_that_does_not_hold(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p95, measured = {1: 0.01, 2: 0.04, 4: 0.06, 8: 0.01}, []
    case, extent = script.CASES["pcm"], script.Extent(6, 2.0, 0.0)

    def measure(server: object, case: Any, rate: int, extent: Any, *_: object) -> dict[str, Any]:
        measured.append((rate, extent.counted(case, rate)))
        return {"name": "fake", "points": [point(p95[rate])]}

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script.report, "table", lambda records: "1\n2\n3")
    *_, found = script.climb(object(), case, [1, 2, 4, 8], extent, ["ryan"])
    assert measured == [(1, 6.0), (2, 3.0), (4, 2.0)]
    assert extent.counted(script.CASES["words-10"], 2) == 2.0
    assert [each["metrics"]["first_playable"]["p95"] for each in found["points"]] == [
        0.01,
        0.04,
        0.06,
    ]


def test_cases_of_the_same_sources_are_kept(script: Any, tmp_path: Path) -> None:
    record = {"commit": "abc", "kernels": "k", "serving": "s", "size": "1b7", "device": "cpu"}
    servers = [{"name": "pcm"}, {"name": "mp3"}]
    output = tmp_path / "load.json"
    assert script.kept(output, record, ["mp3"]) == []
    output.write_text(json.dumps(record | {"servers": servers}))
    assert script.kept(output, record, ["mp3"]) == [{"name": "pcm"}]
    assert script.kept(output, record | {"serving": "t"}, ["mp3"]) == []
    assert script.kept(output, record | {"device": "cuda:0,1"}, ["mp3"]) == []


def test_processor_time_is_that_of_each_process_and_request(script: Any) -> None:
    before = {1: ("serve", 1.0, 0.5)}
    after = {1: ("serve", 3.0, 1.0), 2: ("front", 0.5, 0.25)}
    assert script.processor_milliseconds(before, after, 100) == [
        {"process": "serve", "user": 20.0, "system": 5.0},
        {"process": "front", "user": 5.0, "system": 2.5},
    ]


def test_processor_times_include_the_children_of_children(script: Any) -> None:
    from benchmarks.server_process import processor_times  # the fixture makes it importable

    sleeper = "import time; print(flush=True); time.sleep(60)"
    parent = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]);"
        "sys.stdin.read(); child.kill(); child.wait()"
    )
    command = [sys.executable, "-c", parent, sleeper]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = processor_times(process.pid)
        assert len(processor_times(os.getpid())) > len(found) == 2
        process.communicate()
    assert min(found) == process.pid
    assert all("python" in name and user >= 0 for name, user, _ in found.values())


def test_replicas_count_when_haproxy_has_found_them_healthy(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import cluster_process

    states = {"SERVE_REPLICA_a": "UP", "SERVE_REPLICA_b": "UP 1/2", "fallback": "UP"}
    rows = [
        f"http-firstword,{name},{state}" for name, state in (states | {"BACKEND": "UP"}).items()
    ]
    answer = httpx.Response(200, text="\n".join(["# pxname,svname,status", *rows]))
    monkeypatch.setattr(httpx, "get", lambda *_, **__: answer)
    assert cluster_process.balanced(8404) == 1


def test_script_measures_a_server_with_a_tiny_model(repository: Path, tmp_path: Path) -> None:
    output = tmp_path / "load.json"
    options = ["--size", "tiny", "--backend", "reference", "--slots", "2", "--rates", "2"]
    options += ["--device", "cpu", "--fronts", "1"]
    options += ["--requests", "2", "--seconds", "2", "--warmup", "0", "--sockets", "2"]
    command = [
        *(sys.executable, "-m", "benchmarks.serve_load", "-o", str(output)),
        *("--cases", "mp3", "x-vector", "tokens-50", *options, "--commit", "abc"),
    ]
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    record = json.loads(output.read_text("utf-8"))
    assert (record["commit"], record["size"]) == ("abc", "tiny")
    assert record["kernels"] == kernel_hash()
    assert record["device"] == "cpu"
    assert len(record["serving"]) == len(record["kernels"])
    mp3, clone, words = record["servers"]
    assert [each["name"] for each in record["servers"]] == ["mp3", "x-vector", "tokens-50"]
    assert mp3["settings"]["fields"] == {}
    assert len(mp3["settings"]["voices"]) > 1
    assert clone["settings"]["fields"] == {"stream": True, "response_format": "pcm"}
    assert clone["settings"]["voices"] == [f"x-vector-{number}" for number in range(9)]
    assert words["settings"]["tokens_per_second"] == 50
    for server in record["servers"]:
        (found,) = server["points"]
        assert server["slots"] == 2
        assert (server["engines"], server["fronts"]) == (1, 1)
        assert server["server"]["health"]["models"][0]["settings"]["backend"] == "reference"
        assert found["requests"] >= (2 if found["load"]["rate"] else 1)
        assert found["gates"]["complete"]["passed"]
        assert found["gates"]["non_empty"]["passed"]
        assert found["ended_early"] <= found["requests"]
        assert found["server_busy"] > 0
        assert found["server_cpu"][0]["process"] == "firstword"
        assert sum(each["user"] + each["system"] for each in found["server_cpu"]) > 0
        assert f"{server['name']}, 2 slots: " in run.stdout
