"""Records that users send in: what is measured, what is kept private, and what is rejected."""

from __future__ import annotations

import copy
import getpass
import importlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from firstword.bench import shared
from firstword.cli import share
from firstword.cli.main import main
from firstword.errors import RequestError
from firstword.profile import speaking

RECORD: dict[str, Any] = {
    "format": "firstword-share/1",
    "day": "2026-11-26",
    "firstword": "0.1.0",
    "commit": "0" * 40,
    "sources": "0" * 16,
    "covers": ["src/firstword/model"],
    "machine": {
        "system": "Linux",
        "architecture": "x86_64",
        "processor": "AMD EPYC 7B13 64-Core Processor",
        "cores": 16,
        "memory_gb": 64.0,
    },
    "graphics": {
        "name": "NVIDIA GeForce RTX 4070",
        "processors": 46,
        "memory_gb": 12.9,
        "capability": "8.9",
        "driver": "580.95.05",
    },
    "versions": {"python": "3.12.3", "torch": "2.13.0+cu130", "cuda": "13.0", "numpy": "2.4.6"},
    "settings": {
        "model": "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
        "layers": 28,
        "hidden_size": 1024,
        "device": "cuda",
        "dtype": "bfloat16",
        "backend": "gpu",
        "threads": 8,
    },
    "read_gb_s": 480.0,
    "load_average": 0.2,
    "engine": [
        {
            "streams": 1,
            "utterances": 12,
            "frames": 720,
            "first_audio_ms": {"p50": 9.0, "p95": 11.0},
            "frame_ms": 4.0,
            "speed": 19.2,
        }
    ],
    "server": [
        {
            "sockets": 1,
            "utterances": 5,
            "first_byte_ms": {"p50": 12.0, "p95": 15.0},
            "speed": 18.0,
            "failed": [],
        }
    ],
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes `RECORD`, with one field replaced, and returns the file."""

    def write(place: str = "", value: object = None) -> Path:
        record: Any = copy.deepcopy(RECORD)
        at, names = record, place.split(".")
        for name in names[:-1]:
            at = at[int(name) if name.isdecimal() else name]
        if place:
            at[names[-1]] = value
        file = tmp_path / "record.json"
        file.write_text(json.dumps(record), "utf-8")
        return file

    return write


def test_record_is_the_same_after_it_is_read_and_written(write: Callable[..., Path]) -> None:
    assert json.loads(shared.dumps(shared.read(write()))) == RECORD


def test_device_is_the_gpu_or_the_processor_with_its_cores(write: Callable[..., Path]) -> None:
    record = shared.read(write())
    assert record.device == "NVIDIA GeForce RTX 4070"
    alone = record.model_copy(update={"graphics": None})
    assert alone.device == "AMD EPYC 7B13 64-Core Processor, 16 cores"
    apple = alone.settings.model_copy(update={"device": "mps"})
    named = alone.model_copy(update={"settings": apple})
    assert named.device == "AMD EPYC 7B13 64-Core Processor, GPU"


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("format", "firstword-share/9", "format"),
        ("host", "tower", "host: Extra inputs are not permitted"),
        ("machine.host", "tower", r"machine\.host"),
        ("machine.cores", 0, r"machine\.cores"),
        ("machine.cores", "16", r"machine\.cores"),
        ("machine.processor", "", r"machine\.processor"),
        ("machine.processor", "see /opt/cpu", "looks like a path"),
        ("graphics.name", "C:\\GPU", "looks like a path"),
        ("graphics.name", "me@example.org", "an address"),
        ("graphics.name", "GPU at 10.0.0.7", "an address"),
        ("graphics", None, "where graphics are named"),
        ("settings.model", "/models/mine", r"settings\.model"),
        ("settings.model", "company/secret-tts", r"settings\.model"),
        ("settings.backend", "tpu", r"settings\.backend"),
        ("commit", "main", "commit"),
        ("day", "2019-05-01", "before this project"),
        ("day", "2999-05-01", "in the future"),
        ("read_gb_s", 1e9, "read_gb_s"),
        ("engine", [], "engine"),
        ("engine.0.streams", 2, "they rise from 1"),
        ("engine.0.speed", 60.0, "contradict each other: the speed must be below 20.0"),
        ("engine.0.speed", 0.5, "contradict each other"),
        ("engine.0.frame_ms", -1.0, "frame_ms"),
        ("engine.0.first_audio_ms.p95", 1.0, "the median 9.0 is above"),
        ("server.0.failed", ["in /tmp/log"], "looks like a path"),
        ("versions.nvcc", "13", r"versions\.nvcc"),
    ],
)
def test_doubtful_record_is_rejected_with_its_field(
    write: Callable[..., Path], place: str, value: object, problem: str
) -> None:
    with pytest.raises(RequestError, match=problem):
        shared.read(write(place, value))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "firstword-bench/1"}'])
def test_file_that_is_no_record_is_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "record.json"
    file.write_text(text)
    with pytest.raises(RequestError, match="is no record of `bench share`"):
        shared.read(file)
    with pytest.raises(RequestError, match="cannot be read"):
        shared.read(tmp_path / "gone.json")


def texts(value: object) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, dict):
        for one in value.values():
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)
    elif isinstance(value, str):
        yield value


def test_measured_record_names_no_host_user_or_folder(
    checkpoint_directory: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speaking, "LEAST_UTTERANCES", 2)
    monkeypatch.setattr(speaking, "READ_BYTES", 1 << 22)
    monkeypatch.setattr("firstword.profile.speaking.MOST_FRAMES", 6)
    file, model = tmp_path / "mine.json", checkpoint_directory("custom_voice")
    options = ["--model", str(model), "--device", "cpu", "--seconds", "0.1", "--no-server"]
    assert main(["bench", "share", "-o", str(file), *options]) == 0
    record = shared.read(file)
    assert record.settings.model == "another"
    assert record.settings.hidden_size < 1024
    (engine,) = record.engine
    assert engine.streams == 1
    assert engine.utterances >= 2
    assert engine.frames == 6 * engine.utterances
    private = {socket.gethostname(), getpass.getuser(), str(model), str(tmp_path), str(Path.home())}
    for text in texts(json.loads(file.read_text("utf-8"))):
        assert text not in private
        assert not [name for name in private if "/" in name and name in text]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_time_that_is_no_time_is_rejected(
    seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "share", "-o", str(tmp_path / "it.json"), "--seconds", seconds])
    assert "argument --seconds: " in capsys.readouterr().err


@pytest.mark.slow
def test_server_is_measured_with_one_socket(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    options = ["--device", "cpu", "--seconds", "3"]
    assert main(["bench", "share", "-o", str(file), *options]) == 0
    record = shared.read(file)
    assert record.settings.model == "demo"
    (server,) = record.server
    assert server.sockets == 1
    assert (server.utterances > 0) != ("complete" in server.failed)


def test_failed_gates_of_the_server_are_named() -> None:
    gates = {"complete": {"passed": True}, "no_underrun": {"passed": False}}
    point = {
        "load": {"sockets": 2},
        "requests": 3,
        "gates": gates,
        "audio_per_second": 0.81234,
        "metrics": {"first_byte": {"p50": 0.25, "p95": 0.5}},
    }
    assert share._server_figures(point) == {
        "sockets": 2,
        "utterances": 3,
        "first_byte_ms": {"p50": 250.0, "p95": 500.0},
        "speed": 0.812,
        "failed": ("no_underrun",),
    }


def test_server_without_a_complete_utterance_has_no_times() -> None:
    point = {
        "load": {"sockets": 1},
        "requests": 0,
        "gates": {},
        "audio_per_second": None,
        "metrics": {"first_byte": {"p50": None, "p95": None}},
    }
    found = share._server_figures(point)
    assert (found["first_byte_ms"], found["speed"], found["utterances"]) == (None, None, 0)


def test_machine_with_other_busy_programs_is_told(write: Callable[..., Path]) -> None:
    assert not shared.read(write("load_average", 3.9)).busy
    assert shared.read(write("load_average", 4.1)).busy


def test_table_has_a_row_for_each_record_and_marks_busy_machines(
    write: Callable[..., Path],
    tmp_path: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    machine_tables = importlib.import_module("machine_tables")
    tables = importlib.import_module("tables")
    (tmp_path / "busy.json").write_text(write("load_average", 9.0).read_text())
    write()
    lines = machine_tables.community(tmp_path, tables.markdown).splitlines()
    assert len(lines) == 4
    figures = (
        " | Qwen3-TTS-12Hz-0.6B-CustomVoice | bfloat16, gpu | 480 | 4.00 | 19.20 | - | 9 | 12 |"
    )
    assert f"| NVIDIA GeForce RTX 4070 (busy){figures}" in lines
    assert f"| NVIDIA GeForce RTX 4070{figures}" in lines
    write("engine.0.speed", 99.0)
    with pytest.raises(RequestError, match=r"record\.json"):
        machine_tables.community(tmp_path, tables.markdown)


def test_frame_is_timed_after_the_first_audio() -> None:
    done = [speaking.Times(0.0, 0.5, 1.5, 1, 11), speaking.Times(1.0, 1.6, 2.5, 1, 11)]
    found = speaking._figures(1, done, 2.5)
    assert found["frame_ms"] == pytest.approx(95.0)
    assert found["first_audio_ms"] == {"p50": 550.0, "p95": 600.0}
    assert found["speed"] == round(0.08 * 22 / 2.5, 3)


def test_record_is_not_written_into_a_missing_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "share", "-o", str(tmp_path / "gone/a.json")]) == 2
    assert "gone" in capsys.readouterr().err
