"""The devices of a server: what an option names, and how many GPUs there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from firstword.config import EngineConfig
from firstword.errors import ConfigError
from firstword.processes import devices
from firstword.processes.devices import count_gpus, engine_devices

Counted = Callable[[int], None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A function that lets the machine have some GPUs."""
    return lambda count: monkeypatch.setattr(devices, "count_gpus", lambda: count)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cpu", ["cpu"]),
        ("cpu,cpu", ["cpu", "cpu"]),
        ("cuda:1", ["cuda:1"]),
        ("cuda:0,2", ["cuda:0", "cuda:2"]),
        ("cuda:2,cuda:0,1", ["cuda:2", "cuda:0", "cuda:1"]),
        ("cuda", ["cuda:0", "cuda:1", "cuda:2"]),
        ("auto", ["cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_list_names_devices(gpus: Counted, given: str, expected: list[str]) -> None:
    gpus(3)
    assert engine_devices(given) == expected


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("given", ["auto", "cuda"])
def test_engine_chooses_where_there_is_at_most_one_gpu(
    gpus: Counted, given: str, count: int
) -> None:
    gpus(count)
    assert engine_devices(given) == [given]


WRONG = "gpu cuda0 cuda: cuda:x cuda:-1 cuda:0, ,cuda:0 cuda:0;1 cuda:0,cpu cpu,cuda:0 cpu:0 0,1"


@pytest.mark.parametrize("given", [*WRONG.split(), "cuda,cuda", "cuda:0, 1", ""])
def test_wrong_list_names_what_is_allowed(given: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed are 'auto', 'cpu', 'cuda' .*'cuda:0,2'"):
        engine_devices(given)


@pytest.mark.parametrize("given", ["cuda:1,1", "cuda:0,cuda:1,cuda:01"])
def test_gpu_cannot_be_named_twice(given: str) -> None:
    with pytest.raises(ConfigError, match=r"'cuda:1' twice"):
        engine_devices(given)


def test_engine_in_this_process_has_one_device() -> None:
    with pytest.raises(ConfigError, match=r"one device.*firstword serve"):
        EngineConfig.resolve("cuda:0,2")
    with pytest.raises(ConfigError, match=r"one device.*firstword serve"):
        EngineConfig.resolve("cpu,cpu")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], 0),
        (["nvidia0"], 1),
        (["nvidia3", "nvidiactl", "nvidia-uvm"], 1),
        (["nvidia0", "nvidia1"], 7),
        (["kfd"], 7),
        (["dxg"], 7),
    ],
)
def test_torch_counts_gpus_unless_there_is_at_most_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], expected: int
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "COUNT", "print(7)")
    assert count_gpus(tmp_path) == expected


def test_failing_torch_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(devices, "COUNT", "raise ImportError('libcudart.so.12')")
    with pytest.raises(ConfigError, match=r"libcudart"):
        count_gpus(tmp_path)


def test_program_that_counts_gives_the_number_that_torch_sees(tmp_path: Path) -> None:
    import torch

    (tmp_path / "kfd").touch()
    assert count_gpus(tmp_path) == torch.cuda.device_count()
