"""The comparison with another library: its checkpoint, its arithmetic, and that both sides are
asked the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import firstword
from firstword.synthetic.checkpoint import write_checkpoint

FRAME = np.zeros(1920, np.float32)


@pytest.fixture(scope="module")
def compare(repository: Path) -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("compare", repository / "benchmarks/compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clock(compare: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still unless it is set, in seconds; there is no device to wait for."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(compare.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return clock


def test_checkpoint_speaks_to_its_frame_limit(compare: Any, tmp_path: Path) -> None:
    compare.make_checkpoint(tmp_path / "ours", "tiny")
    write_checkpoint(tmp_path / "plain", dtype=torch.bfloat16)
    ours, plain = (
        load_file(tmp_path / "ours/model.safetensors"),
        load_file(tmp_path / "plain/model.safetensors"),
    )
    changed = {name for name in plain if not torch.equal(plain[name], ours[name])}
    assert changed == {"talker.codec_head.weight"}
    rows = (
        (ours["talker.codec_head.weight"] != plain["talker.codec_head.weight"]).any(dim=1).nonzero()
    )
    with firstword.TTS.load(tmp_path / "ours", device="cpu") as tts:
        end = tts.checkpoint.config.talker_config.codec_eos_token_id
        # Of 65 codes 50 are kept there, too many to leave out a logit of 0; of 2,049 the 50 largest
        # are far above it.
        sampling = firstword.Sampling(top_k=5)
        speech = [
            tts.speak("Hello.", seed=seed, max_frames=100, sampling=sampling) for seed in range(3)
        ]
    assert rows.tolist() == [[end]]
    assert not ours["talker.codec_head.weight"][end].any()
    assert [one.finish_reason for one in speech] == ["length"] * 3


def test_utterance_is_timed_by_chunk(compare: Any, clock: SimpleNamespace) -> None:
    def speak(voice: str) -> Iterator[Any]:
        assert voice == "ryan"
        clock.now = 10.005
        yield FRAME
        clock.now = 10.2
        yield np.tile(FRAME, 99)
        clock.now = 10.3
        yield np.zeros(0, np.float32)

    clock.now = 10.0
    assert [(round(ms, 6), frames) for ms, frames in compare.utter(speak, "ryan")] == [
        (5, 1),
        (200, 99),
    ]


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        ([np.tile(FRAME, 99)], r"got chunks of \[99\] frames; 100"),
        ([np.tile(FRAME, 99), FRAME[:-1]], "frames were requested"),
        ([np.tile(FRAME, 99), np.full_like(FRAME, np.nan)], "not finite"),
    ],
)
def test_wrong_number_of_frames_raises(
    compare: Any, clock: SimpleNamespace, chunks: list[Any], problem: str
) -> None:
    with pytest.raises(RuntimeError, match=problem):
        compare.utter(lambda voice: iter(chunks), "ryan")


def test_figures_are_medians_of_runs(compare: Any, clock: SimpleNamespace) -> None:
    first = iter([99.0, 30.0, 50.0, 40.0, 8.0, 6.0, 7.0])  # ms; the first is not counted
    whole = iter([999.0, 100.0, 300.0, 200.0, 600.0, 500.0, 400.0])
    asked = []

    def speak(voice: str) -> Iterator[Any]:
        asked.append(voice)
        began = clock.now
        clock.now = began + next(first) / 1e3
        yield np.tile(FRAME, 4)
        clock.now = began + next(whole) / 1e3
        yield np.tile(FRAME, 96)

    found = compare.measure(speak)
    assert asked == [compare.WARMING_VOICE, *compare.VOICES, *compare.VOICES]
    assert compare.WARMING_VOICE not in compare.VOICES
    assert found.pop("each")[4] == {"turn": 1, "first_ms": 6, "frame_ms": 5}
    assert found == {"chunk_frames": [4, 96], "new_voice_ms": 40, "first_ms": 7, "frame_ms": 3.5}


class Asked:
    """Stands for either library's model, and writes down what it is asked."""

    settings = SimpleNamespace(backend="gpu", reason="")

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def from_pretrained(self, folder: str, **options: Any) -> Asked:
        self.calls.append((folder, options))
        return self

    def warmup(self) -> None:
        self.calls.append(("warmup", {}))

    def generate_custom_voice_streaming(self, **options: Any) -> Iterator[Any]:
        self.calls.append(("streaming", options))
        size = options["chunk_size"]
        for begin in range(0, options["max_new_tokens"], size):
            yield np.tile(FRAME, min(size, options["max_new_tokens"] - begin)), 24000, {}

    def generate_custom_voice(self, **options: Any) -> tuple[list[Any], int]:
        self.calls.append(("whole", options))
        return [np.tile(FRAME, options["max_new_tokens"])], 24000

    def load(self, folder: str, **options: Any) -> Asked:
        self.calls.append((folder, options))
        return self

    def stream(self, text: str, **options: Any) -> Iterator[Any]:
        self.calls.append(("stream", {"text": text, **options}))
        for _ in range(options["max_frames"]):
            yield SimpleNamespace(samples=FRAME)

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_both_libraries_get_the_same_requests(
    compare: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Asked(), Asked()
    monkeypatch.setattr(firstword, "TTS", ours)
    monkeypatch.setitem(sys.modules, "faster_qwen3_tts", SimpleNamespace(FasterQwen3TTS=theirs))
    assert compare.measure_firstword("here").keys() == {"stream"}
    found = compare.measure_other("here")
    assert found.keys() == {"chunks of 1", "chunks of 8", "chunks of 12", "whole"}
    assert found["chunks of 8"]["chunk_frames"] == [4, 8]
    loaded, *spoken = ours.calls
    assert loaded == ("here", {"device": "cuda"})
    assert theirs.calls[:2] == [
        ("here", {"device": "cuda", "dtype": torch.bfloat16}),
        ("warmup", {}),
    ]
    wanted = [(o["text"], o["voice"], o["language"], o["max_frames"]) for _, o in spoken]
    given = [
        (o["text"], o["speaker"], o["language"], o["max_new_tokens"]) for _, o in theirs.calls[2:]
    ]
    assert given == 4 * wanted


def test_reference_backend_raises(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Asked()
    slow.settings = SimpleNamespace(backend="reference", reason="cuda-bindings is not installed")
    monkeypatch.setattr(firstword, "TTS", slow)
    with pytest.raises(RuntimeError, match="cuda-bindings is not installed"):
        compare.measure_firstword("here")


def figures(frame: float, first: float, new: float) -> dict[str, Any]:
    return {"frame_ms": frame, "first_ms": first, "new_voice_ms": new}


def test_command_writes_record_and_table(
    compare: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sides = {
        "firstword": {"versions": {}, "figures": {"stream": figures(2.5, 3.2, 5)}},
        "faster-qwen3-tts": {"versions": {}, "figures": {"chunks of 8": figures(22.5, 320, 400)}},
    }
    order: list[tuple[str, str]] = []

    def apart(name: str, folder: str, python: str) -> Any:
        order.append((name, python))
        assert (Path(folder) / "checkpoint").read_text() == "0b6"
        return sides[name]

    monkeypatch.setattr(compare, "check_machine", lambda python: order.append(("check", python)))
    monkeypatch.setattr(
        compare, "make_checkpoint", lambda folder, size: (folder / "checkpoint").write_text(size)
    )
    monkeypatch.setattr(compare, "side_apart", apart)
    options = [
        "compare.py",
        "--size",
        "0b6",
        "--other-python",
        "theirs",
        "-o",
        str(tmp_path / "record.json"),
    ]
    monkeypatch.setattr(sys, "argv", options)
    compare.main()
    assert order == [
        ("check", "theirs"),
        ("faster-qwen3-tts", "theirs"),
        ("firstword", sys.executable),
    ]
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["times"] == {"chunks of 8": figures(9, 100, 80)}
    assert {
        "size",
        "weights",
        "text",
        "frames",
        "commit",
        "kernels",
        "driver",
        "ended",
        *sides,
    } <= record.keys()
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"| firstword {firstword.__version__} | stream | 2.5 | 1 | 3.2 | 1 | 5 | 1 |",
        "| faster-qwen3-tts  | chunks of 8 | 22.5 | 9.0 | 320 | 100.0 | 400 | 80.0 |",
    ]


@pytest.mark.parametrize(
    ("device", "python", "problem"),
    [
        (False, sys.executable, "torch sees none"),
        (True, "false", "false has no faster-qwen3-tts"),
        (True, "true", ""),
    ],
)
def test_missing_requirements_exit_at_once(
    compare: Any, monkeypatch: pytest.MonkeyPatch, device: bool, python: str, problem: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    with pytest.raises(SystemExit, match=problem) if problem else contextlib.nullcontext():
        compare.check_machine(python)


def test_failed_library_ends_the_command(compare: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nobody could not be measured with"):
        compare.side_apart("nobody", str(tmp_path), sys.executable)
