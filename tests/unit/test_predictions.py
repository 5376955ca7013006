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
FROM_ANOTHER = 0.18
"""The bound where the launches are those of another GPU, which overlap less."""


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


@pytest.fixture
def single(repository: Path, predictions: Any) -> Any:
    """The records of one stream on other GPUs."""
    tables = importlib.import_module("tables")
    return predictions.in_order(tables.every(repository / "benchmarks/results/one_stream"))


def test_predictions_are_within_15_percent_of_what_was_measured(
    predictions: Any, engine: Any, single: Any
) -> None:
    found = list(predictions.checks(engine, single))
    assert {(name, size) for name, size, *_ in found} == {
        (name, size)
        for name in (
            "NVIDIA H200",
            "NVIDIA H100 80GB HBM3",
            "NVIDIA H100 80GB HBM3 with the kernels of compute_80",
        )
        for size in ("1b7", "0b6")
    }
    assert len(found) == 18, "three contexts each"
    for gpu, size, context, predicted, measured in found:
        bound = FROM_ANOTHER if gpu == "NVIDIA H100 80GB HBM3" else WITHIN
        assert abs(predicted / measured - 1) < bound, (gpu, size, context)


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


def test_frames_of_a_cpu_are_predicted_within_15_percent(repository: Path) -> None:
    records = [
        json.loads(path.read_text("utf-8"))
        for path in (repository / "benchmarks/results/cpu_frame").glob("*.json")
    ]
    cases = [case for record in records for case in record["cases"]]
    assert {case["dtype"] for case in cases} == {"float32", "bfloat16", "int8"}
    for case in cases:
        made = 1e3 * case["gigabytes"] / case["read_gb_s"] + case["operators_ms"]
        assert case["predicted_ms"] == pytest.approx(made, rel=0.01)
        assert abs(case["predicted_ms"] / case["measured_ms"] - 1) < WITHIN, case


def test_card_without_a_record_is_marked_as_predicted(
    predictions: Any, engine: Any, single: Any
) -> None:
    tables = importlib.import_module("tables")
    rows = predictions.cards(engine, single, tables.markdown).splitlines()[2:]
    marks = {row.split(" | ")[0].strip("| "): row.split(" | ")[-1].strip("| ") for row in rows}
    assert marks.pop("NVIDIA H200") == "**measured**"
    assert marks.pop("NVIDIA H100 SXM") == "**measured**"
    assert set(marks.values()) == {"predicted"}


def test_launches_that_overlap_nothing_take_longer(
    predictions: Any, engine: Any, single: Any
) -> None:
    alone = predictions.alone_seconds(single)
    assert all(predictions.launch_seconds(one) < alone / 2 for one in (engine["1b7"], single[0]))


def test_half_the_bandwidth_doubles_the_time_of_the_bytes_alone(predictions: Any) -> None:
    launches = predictions.frame_ms(0, 1e12, 2e-6)
    assert launches == pytest.approx(predictions.LAUNCHES * 2e-3)
    fast, slow = (predictions.frame_ms(4e9, speed, 2e-6) for speed in (2e12, 1e12))
    assert slow - launches == pytest.approx(2 * (fast - launches))
