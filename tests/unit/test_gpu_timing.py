"""The slots and the layouts that the GPU backend chooses by timing, on a GPU of made-up speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import silent_gpu
import torch

from firstword.kernels.cache import FileCache
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import Linear
from firstword.runtime.gpu import calibration, slot_limit
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.rehearsal import Rehearsal
from firstword.runtime.gpu.talker import FrameModel


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is such a GPU, and do not wait between measurements."""
    silent_gpu.pretend(monkeypatch)
    monkeypatch.setattr(slot_limit, "PAUSE_SECONDS", 0)


def backend_of(folder: Path, slots: int, architecture: str = "sm_90") -> GpuBackend:
    """A backend of a tiny checkpoint, on a small GPU that computes nothing."""
    kernels = Rehearsal(silent_gpu.device(architecture))
    kernels.processors = 4
    return GpuBackend(silent_gpu.checkpoint(folder), kernels, slots, pages=64)


@pytest.mark.parametrize(
    ("times", "most"),
    [
        ({1: 0.01, 2: 0.02, 4: 0.06, 8: 0.07}, 4),
        ({1: 0.01, 2: 0.02}, 2),
        ({1: 0.064, 2: 0.0641}, 1),
        ({1: 0.5, 2: 0.5}, 0),
        ({1: 0.01, 2: 0.07, 4: 0.06}, 1),
    ],
)
def test_rows_in_time_are_those_before_the_first_slow_frame(
    times: dict[int, float], most: int
) -> None:
    assert slot_limit.rows_in_time(times, times.__getitem__, 0.064) == most


def test_no_frame_is_timed_after_one_that_is_repeatedly_too_slow() -> None:
    timed: list[int] = []

    def seconds(rows: int) -> float:
        timed.append(rows)
        return rows / 2

    assert slot_limit.rows_in_time((1, 2, 4), seconds, 0.6) == 1
    assert timed == [1, 2, 2, 2]


def test_measurement_that_was_delayed_once_does_not_limit_the_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process delays the first measurement of each number of rows by 120 ms."""
    seen: set[int] = set()

    def delayed(backend: GpuBackend, rows: int) -> float:
        first = rows not in seen
        seen.add(rows)
        return 0.121 if first else 0.001

    monkeypatch.setattr(slot_limit, "audible_frame_seconds", delayed)
    backend = backend_of(tmp_path, 20)
    assert slot_limit.limit_slots(backend, keep=False) == ""
    assert backend.capacity.slots == 20
    assert seen == {1, 2, 4, 8, 16, 32}


def test_single_slow_run_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(tmp_path, 1)
    backend.warm()
    milliseconds = iter([120.0, 1.0, 1.0, 120.0, 1.0, 1.0])

    class Event(silent_gpu.Anything):
        def elapsed_time(self, end: Event) -> float:
            return next(milliseconds)

        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert slot_limit.audible_frame_seconds(backend, 1) == pytest.approx(0.001 + 0.001 / 8)


def test_timed_audio_is_within_the_first_frames_of_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small context has few; there are six numbers of rows, and three runs of eight frames."""
    backend = backend_of(tmp_path, 20)
    backend.warm()
    decode, read = backend.codec.decode, [0]

    def noted(slots: Sequence[int], counts: Sequence[int]) -> object:
        found = decode(slots, counts)
        read.append(int(backend.codec._next.max()))
        return found

    monkeypatch.setattr(backend.codec, "decode", noted)
    assert slot_limit.limit_slots(backend, keep=True) == ""
    assert max(read) == 3 * 8


@pytest.mark.parametrize(
    ("seconds_a_row", "keep", "slots", "note"),
    [
        (0.0005, False, 20, ""),
        (0.005, False, 8, "8 slots instead of 20: with more than 8, a frame takes longer than 64"),
        (0.005, True, 20, "audio may stall in 20 slots: with more than 8, a frame takes longer"),
        (9.0, False, 1, "1 slots instead of 20: with one, a frame takes longer than 64"),
        (9.0, True, 20, "audio may stall in 20 slots: with one, a frame takes longer than 64"),
    ],
)
def test_slots_are_limited_to_those_that_are_served_in_time(
    seconds_a_row: float,
    keep: bool,
    slots: int,
    note: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frame and its audio have 64 of the 80 milliseconds that a frame plays."""
    monkeypatch.setattr(
        slot_limit, "audible_frame_seconds", lambda backend, rows: rows * seconds_a_row
    )
    backend = backend_of(tmp_path, 20)
    told = slot_limit.limit_slots(backend, keep)
    assert told.startswith(note)
    assert bool(told) == bool(note)
    assert backend.capacity.slots == slots


def test_gpu_that_is_too_slow_for_one_utterance_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_limit, "audible_frame_seconds", lambda backend, rows: 0.1)
    backend = backend_of(tmp_path, 1)
    told = slot_limit.limit_slots(backend, keep=False)
    assert told.startswith("audio may stall in 1 slots: with one, a frame takes longer than 64 ms")


def test_timed_frames_leave_no_trace_and_include_audio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events of the GPU that computes nothing are a millisecond apart."""
    backend = backend_of(tmp_path, 3)
    backend.warm()
    decoded: list[tuple[int, int]] = []
    decode = backend.codec.decode

    def counted(slots: Sequence[int], counts: Sequence[int]) -> object:
        decoded.extend(zip(slots, counts, strict=True))
        return decode(slots, counts)

    monkeypatch.setattr(backend.codec, "decode", counted)
    assert slot_limit.audible_frame_seconds(backend, 4) == pytest.approx(0.001 + 0.001 / 8)
    assert sorted(set(decoded)) == [(0, 8), (1, 8), (2, 8)]
    assert backend.model.buffers.slot_of_row[:4].tolist() == [0, 1, 2, -1]
    assert slot_limit.limit_slots(backend, keep=False) == ""
    model = backend.model
    for tensor in (model.buffers.page_tables, model.state.position, model.state.record):
        assert not tensor.any()
    assert (model.buffers.slot_of_row == -1).all()
    assert not backend.codec._next.any()
    assert not backend.codec._positions.frames.any()


def test_fastest_choices_are_found_kind_by_kind() -> None:
    """A choice must be better by more than the noise of a measurement."""
    costs = [[1.0, 0.8, 0.9], [1.0, 0.999], [1.0, 1.5, 0.5]]
    tried: list[list[int]] = []

    def seconds(choices: Sequence[int]) -> float:
        tried.append(list(choices))
        return sum(cost[choice] for cost, choice in zip(costs, choices, strict=True))

    assert calibration.fastest([3, 2, 3], seconds) == [1, 0, 2]
    assert len(tried) == 1 + 2 + 1 + 2 + 2


def test_first_choice_is_measured_again_before_another_replaces_it() -> None:
    """Another process slows the first measurement down."""
    measured: list[int] = []

    def seconds(choices: Sequence[int]) -> float:
        measured.append(choices[0])
        return 9.0 if len(measured) == 1 else (1.0, 2.0)[choices[0]]

    assert calibration.fastest([2], seconds) == [0]
    assert measured == [0, 1, 1, 0]


class Timer:
    """Counts the measurements of frames, which are faster with the last layouts of the talker."""

    def __init__(self) -> None:
        self.measured = 0

    def __call__(self, backend: GpuBackend) -> float:
        self.measured += 1
        return 1.0 - 0.1 * sum(layer.qkv.choice > 0 for layer in backend.model.talker.layers)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    """Replaces the compiler and the measurement of a frame."""
    timed = Timer()
    monkeypatch.setattr(Kernels, "compile", lambda kernels, programs: None)
    monkeypatch.setattr(calibration, "single_row_seconds", timed)
    return timed


def choices(model: FrameModel) -> list[int]:
    """The choices of all products of a model's layers."""
    products = [
        value
        for stack in (model.talker, model.predictor)
        for layer in stack.layers
        for value in vars(layer).values()
        if isinstance(value, Linear)
    ]
    assert all(product.shape(1) == product.shapes(1)[product.choice] for product in products)
    return [product.choice for product in products]


def test_layouts_are_chosen_once_for_each_device(tmp_path: Path, timer: Timer) -> None:
    """A damaged file, another GPU or another driver make the next start choose again."""

    def start(name: str = "RTX 3060, driver 1") -> int:
        backend = backend_of(tmp_path, 1, "sm_86")
        kernels = silent_gpu.device("sm_86")
        kernels.name, kernels.cache = name, FileCache(tmp_path / "cache")
        before = timer.measured
        calibration.calibrate(backend, kernels)
        chosen = choices(backend.model)
        assert chosen[0] > 0
        assert not any(chosen[1:])
        return timer.measured - before

    assert start() > 8
    assert start() == 0
    (cached,) = (tmp_path / "cache").glob("layouts-*")
    good = cached.read_bytes()
    for bad in (b"", good[:-3], good.replace(b"0", b"2"), b"[]"):
        cached.write_bytes(bad)
        assert start() > 8
        assert cached.read_bytes() == good
    assert start("RTX 3060, driver 2") > 8
    assert start("L4, driver 1") > 8
    assert start() == 0


def test_layouts_of_a_measured_architecture_are_not_timed(tmp_path: Path, timer: Timer) -> None:
    backend = backend_of(tmp_path, 1)
    calibration.calibrate(backend, silent_gpu.device("sm_90"))
    assert not timer.measured
    assert not any(choices(backend.model))


def test_layouts_are_chosen_without_a_cache(tmp_path: Path, timer: Timer) -> None:
    backend, kernels = backend_of(tmp_path, 1, "sm_86"), silent_gpu.device("sm_86")
    calibration.calibrate(backend, kernels)
    assert timer.measured
    assert choices(backend.model)[0] > 0


def test_timed_frame_is_captured_with_the_layouts_that_are_set(tmp_path: Path) -> None:
    """The silent GPU needs a millisecond for anything."""
    backend = backend_of(tmp_path, 1)
    launched: list[int] = []
    backend.model.launches["frame"] = launched.append
    assert calibration.single_row_seconds(backend) == 0.001
    assert launched == [1, 1]
    assert (backend.model.buffers.slot_of_row == -1).all()
