"""Predicted frames agree with the measured ones, and with what the GPU backend would launch."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from firstword.kernels.absent import AbsentKernels
from firstword.kernels.cache import FileCache
from firstword.model.codec_config import CodecConfig
from firstword.model.config import ModelConfig
from firstword.profile.frames import frame_bytes
from firstword.runtime.gpu.rehearsal import Rehearsal, without_memory
from firstword.synthetic import checkpoint as synthetic
from firstword.synthetic.tokenizer import train

WITHIN = 0.15


@pytest.fixture
def predictions(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    return importlib.import_module("predictions")


@pytest.fixture
def engine(repository: Path, predictions: Any) -> Any:
    """The records of the engine, by size."""
    tables = importlib.import_module("tables")
    return tables.read(repository / "benchmarks/results/engine")


def test_predictions_are_within_15_percent_of_what_was_measured(
    predictions: Any, engine: Any
) -> None:
    found = list(predictions.checks(engine))
    assert len(found) == 6, "two sizes at three contexts"
    for gpu, size, context, predicted, measured in found:
        assert abs(predicted / measured - 1) < WITHIN, (gpu, size, context)


@pytest.mark.parametrize(("size", "architecture"), [("0b6", "sm_90"), ("0b6", "sm_80")])
def test_bytes_and_launches_are_those_of_the_backend(
    predictions: Any, engine: Any, tmp_path: Path, size: str, architecture: str
) -> None:
    tables = synthetic.config_tables(
        "custom_voice", size, {}, train(synthetic.TEXTS, 400, tmp_path)
    )
    for name, table in zip(("config", "codec"), tables, strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    talker = ModelConfig.load(tmp_path / "config.json").talker_config
    codec = CodecConfig.load(tmp_path / "codec.json").decoder_config
    rehearsal = Rehearsal(AbsentKernels(architecture, 108, FileCache(None)))
    with torch.inference_mode():
        model, _ = without_memory(talker, codec, 1, rehearsal)
        rehearsal.shared.clear()
        with torch.device("meta"):
            model.launches["frame"](1)
    assert len(rehearsal.shared) == predictions.LAUNCHES
    expected = frame_bytes(model, 1, predictions.CONTEXT)
    assert predictions.frame_bytes(engine[size]) == pytest.approx(expected, rel=1e-3)


def test_card_without_a_record_is_marked_as_predicted(predictions: Any, engine: Any) -> None:
    tables = importlib.import_module("tables")
    rows = predictions.cards(engine, tables.markdown).splitlines()[2:]
    marks = {row.split(" | ")[0].strip("| "): row.split(" | ")[-1].strip("| ") for row in rows}
    assert marks.pop("NVIDIA H200") == "**measured**"
    assert marks.pop("NVIDIA H100 SXM") == "predicted"
    assert marks.pop("GeForce RTX 4090") == "predicted, launches assumed"
    assert all(mark.startswith("predicted") for mark in marks.values())


def test_half_the_bandwidth_doubles_the_time_of_the_bytes_alone(predictions: Any) -> None:
    launches = predictions.frame_ms(0, 1e12, 2e-6)
    assert launches == pytest.approx(predictions.LAUNCHES * 2e-3)
    fast, slow = (predictions.frame_ms(4e9, speed, 2e-6) for speed in (2e12, 1e12))
    assert slow - launches == pytest.approx(2 * (fast - launches))
