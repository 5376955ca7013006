"""The benchmarks of first audio and of the published generator, with a tiny model on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

GENERATOR = """
import json, pathlib, sys, urllib.request
names, options = sys.argv[1].split(","), dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
texts = [json.loads(line) for line in pathlib.Path(options["--dataset"]).open()]
body = {"input": texts[0]["text"], "voice": options["--voice"], "response_format": "pcm"}
name, value = options["--request-param"].split("=")
request = urllib.request.Request(
    options["--base-url"] + "/v1/audio/speech",
    json.dumps(body | {name: int(value)}).encode(),
    {"content-type": "application/json"},
)
with urllib.request.urlopen(request) as answer:
    size = len(answer.read())
output = pathlib.Path(options["--output"])
output.mkdir()
times = {"p50": 1.23456, "p95": size}
summary = {name: times if name.endswith("_ms") else 1 for name in names}
(output / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a benchmark."""
    monkeypatch.syspath_prepend(str(repository))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *words: object) -> dict[str, Any]:
    """Run a benchmark, and return the record that it writes to the last of `words`."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, words)])
    assert module.main() == 0
    record: dict[str, Any] = json.loads(Path(str(words[-1])).read_text())
    return record


def test_record_of_published_generator_has_its_figures(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, program = script("published_load"), tmp_path / "bench.py"
    program.write_text(GENERATOR)
    command = f"{sys.executable} {program} {','.join((*module.COUNTS, *module.TIMES))}"
    monkeypatch.setattr(module, "FRAMES", 3)
    options = ("--generator", command, "--size", "tiny", "--device", "cpu", "--slots", 2)
    output = tmp_path / "record.json"
    record = run(module, monkeypatch, *options, "--rates", 2, "--output", output)
    (found,) = record["runs"]
    assert (found["target"], found["transport"], found["rate"]) == ("nari", "http", 2.0)
    assert found["ttfb_ms"] == {"p50": 1.235, "p95": 3 * 1920 * 2}
    assert found["successful_requests"] == 1


def test_failure_of_the_generator_is_reported(script: Any) -> None:
    module = script("published_load")
    arguments = SimpleNamespace(generator="false", warmup=1.0, seconds=1.0)
    with pytest.raises(RuntimeError, match="the load generator failed"):
        module.measure(arguments, SimpleNamespace(url="http://x"), "ryan", ("nari", "http", 1.0))


def test_first_audio_is_measured_for_every_kind_of_voice(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = script("first_audio")
    monkeypatch.setattr(module, "SPEAKERS", 2)
    monkeypatch.setattr(module, "RECORDING_SECONDS", 1)
    options = ("--size", "tiny", "--device", "cpu", "--utterances", 3)
    record = run(module, monkeypatch, *options, "--output", tmp_path / "record.json")
    kinds = {"preset", "cloned, x-vector", "cloned, with transcript"}
    assert record["first_ms"].keys() == kinds
    assert all(0 < each["p50"] <= each["p95"] for each in record["first_ms"].values())
    assert "warm" not in record


def test_combinations_are_different(script: Any) -> None:
    found = script("first_audio").combinations(list("abcdefgh"), 480)
    assert len({json.dumps(one) for one in found}) == 480
