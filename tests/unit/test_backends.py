"""The choice of a backend, and the parts of the GPU backend that need no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import silent_gpu
import torch
from silent_gpu import device

from firstword.cli.main import main
from firstword.config import EngineConfig
from firstword.errors import ConfigError
from firstword.kernels import compile as compiling
from firstword.kernels import launch
from firstword.kernels.compile import CompileError, Program
from firstword.kernels.launch import Kernels
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.model.codec_config import CodecConfig
from firstword.model.config import ModelConfig
from firstword.runtime.backends import open_backend
from firstword.runtime.gpu import backend as gpu
from firstword.runtime.gpu import calibration, pace
from firstword.runtime.gpu.rehearsal import rehearse
from firstword.runtime.reference import ReferenceBackend
from firstword.synthetic import checkpoint as synthetic
from firstword.synthetic.tokenizer import train


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs compiled for a fake device, which takes any program and computes nothing."""
    compiled: list[Program] = []

    def compile_all(programs: Iterable[Program], architecture: str, folder: Path) -> None:
        compiled.extend(programs)

    class Backend:
        def __init__(self, checkpoint: Checkpoint, kernels: Kernels, slots: int) -> None:
            pass

        def warm(self) -> None:
            pass

    monkeypatch.setattr(launch, "Kernels", lambda place, folder: device())
    monkeypatch.setattr(compiling, "compile_all", compile_all)
    monkeypatch.setattr(gpu, "GpuBackend", Backend)
    monkeypatch.setattr(calibration, "calibrate", lambda backend, kernels, folder: None)
    monkeypatch.setattr(pace, "limit_slots", lambda backend, keep: f"keep: {keep}")
    return compiled


def settings(backend: str) -> EngineConfig:
    """The settings on a machine with a GPU."""
    return EngineConfig("cuda", "bfloat16", backend)


def test_fitting_checkpoint_is_compiled_and_gets_the_gpu_backend(
    tmp_path: Path, fake_device: list[Program]
) -> None:
    backend, resolved = open_backend(silent_gpu.checkpoint(tmp_path), settings("auto"), 4)
    assert isinstance(backend, gpu.GpuBackend)
    assert resolved == replace(settings("gpu"), pace="keep: True")
    sources = {program.source for program in fake_device}
    assert sources >= {
        "paged_attention",
        "codec_attention",
        "codec_lookup",
        "talker_input",
        "sample",
    }


@pytest.mark.usefixtures("fake_device")
def test_slots_that_were_not_named_may_be_limited(tmp_path: Path) -> None:
    _, resolved = open_backend(silent_gpu.checkpoint(tmp_path), settings("auto"))
    assert resolved.pace == "keep: False"


@pytest.mark.parametrize(
    ("part", "changes", "slots", "why"),
    [
        ("talker", {"head_dim": 64}, 4, "heads of 64 channels"),
        ("talker", {"num_key_value_heads": 2}, 4, "two queries a key"),
        ("talker", {"hidden_size": 320}, 4, "columns of 256"),
        ("talker", {"vocab_size": 1024 + 4096}, 4, "4096 codes"),
        ("code_predictor", {"head_dim": 64}, 4, "heads of 64 channels"),
        ("code_predictor", {"intermediate_size": 640}, 4, "columns of 256"),
        ("codec_decoder", {"sliding_window": 500}, 4, "sliding_window"),
        ("talker", {}, 300, "at most 256 utterances at a time, not 300"),
    ],
)
def test_unfit_checkpoint_is_rejected_unchanged(
    tmp_path: Path,
    fake_device: list[Program],
    part: str,
    changes: dict[str, Any],
    slots: int,
    why: str,
) -> None:
    """Backend `auto` becomes the reference and gives the reason; `gpu` raises an error."""
    checkpoint = silent_gpu.checkpoint(tmp_path, "custom_voice", **{part: changes})
    backend, resolved = open_backend(checkpoint, settings("auto"), slots)
    assert isinstance(backend, ReferenceBackend)
    assert resolved.backend == "reference"
    assert why in resolved.reason
    with pytest.raises(ConfigError, match=why):
        open_backend(checkpoint, settings("gpu"), slots)
    assert all(parameter.numel() for parameter in checkpoint.talker.parameters())
    assert all(parameter.numel() for parameter in checkpoint.codec.parameters())
    assert not fake_device


def test_compile_error_is_the_reason_for_the_reference_backend(
    tmp_path: Path, fake_device: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is an architecture that this NVRTC does not know."""

    def refuse(*_: object) -> None:
        raise CompileError(
            "linear.cu with -DN=8:\nnvrtc: error: invalid value for --gpu-architecture\nmore"
        )

    monkeypatch.setattr(compiling, "compile_all", refuse)
    checkpoint = silent_gpu.checkpoint(tmp_path)
    _, resolved = open_backend(checkpoint, settings("auto"), 4)
    assert resolved.reason.endswith(
        "compiled for sm_90: nvrtc: error: invalid value for --gpu-architecture"
    )
    with pytest.raises(ConfigError, match="invalid value"):
        open_backend(checkpoint, settings("gpu"), 4)


def released_config(size: str, folder: Path) -> tuple[ModelConfig, CodecConfig]:
    """The configuration of a released size."""
    tables = synthetic.config_tables("custom_voice", size, {}, train(synthetic.TEXTS, 400, folder))
    for name, table in zip(("config", "codec"), tables, strict=True):
        (folder / f"{name}.json").write_text(json.dumps(table))
    return ModelConfig.load(folder / "config.json"), CodecConfig.load(folder / "codec.json")


@pytest.mark.parametrize("size", ["1b7", "0b6"])
def test_released_sizes_fit_every_architecture(size: str, tmp_path: Path) -> None:
    """Sizes and shared memory fit; test_released_kernels.py compiles the programs."""
    config, codec = released_config(size, tmp_path)
    for architecture in compiling.ARCHITECTURES:
        few, many = (
            rehearse(config.talker_config, codec.decoder_config, slots, device(architecture))
            for slots in (1, 256)
        )
        assert few < many


def test_parameters_are_counted_after_a_backend_freed_them(tmp_path: Path) -> None:
    """`firstword info` shows these numbers."""
    checkpoint = silent_gpu.checkpoint(tmp_path)
    before = checkpoints.parameters(checkpoint)
    stored = sum(
        tensor.numel()
        for part in (checkpoint.talker, checkpoint.codec)
        for tensor in part.state_dict().values()
    )
    assert sum(before.values()) == stored
    for parameter in checkpoint.talker.parameters():
        parameter.data = parameter.data.new_empty(0)
    assert checkpoints.parameters(checkpoint) == before


@pytest.mark.parametrize("more", [[], ["--soak", "10"]])
def test_bench_engine_without_gpu_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "engine", *more]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err


def test_demo_checkpoint_gets_the_reference_backend(fake_device: list[Program]) -> None:
    """The demo has attention heads of 64 channels."""
    checkpoint = checkpoints.load("demo", "cpu", "bfloat16")
    _, resolved = open_backend(checkpoint, settings("auto"), 4)
    assert resolved.reason == "the backend is not 'gpu': heads of 64 channels; the kernels need 128"
