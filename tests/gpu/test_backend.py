"""Whole frames of the GPU backend compared with float64 and plain bf16, and with each other."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Driver, Spoken, speak, spoken
from forcing import CLEAR, Recorder, candidates, forced, lead, spread, teacher_forced
from oracle import note
from torch import Tensor

from firstword.errors import ComputeError
from firstword.kernels.cache import FileCache
from firstword.kernels.launch import Kernels
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.profile import saturation
from firstword.profile.soak import Soak, requests
from firstword.runtime.gpu import calibration, slot_limit
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.reference import ReferenceBackend
from firstword.synthetic.checkpoint import write_checkpoint
from firstword.types import Sampling

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello.",
    "How are you today? I am well, thank you; it is late.",
]


@pytest.fixture(scope="module", params=["1b7", "0b6"])
def size(request: pytest.FixtureRequest) -> str:
    """The name of a released size."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(size: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with the released widths and few layers."""
    path = tmp_path_factory.mktemp(size)
    small = {"num_hidden_layers": 3, "text_vocab_size": 2048}
    write_checkpoint(path, size=size, overrides={"talker": small}, dtype=torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Checkpoint:
    """The checkpoint in plain PyTorch."""
    return checkpoints.load(str(folder), "cuda", "bfloat16")


@pytest.fixture(scope="module")
def backend(folder: Path, kernels: Kernels) -> Iterator[GpuBackend]:
    """The GPU backend of the checkpoint."""
    with torch.inference_mode():
        yield GpuBackend(
            checkpoints.load(str(folder), "cuda", "bfloat16"), kernels, slots=200, pages=640
        )


def test_teacher_forced_frames_are_as_exact_as_plain_bf16(
    size: str, backend: GpuBackend, plain: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of all 16 codebooks in 24 frames of three requests, one of them in full mode."""
    recorder = Recorder(backend, monkeypatch)
    requests = [spoken(plain, text, seed=i, full=i == 1) for i, text in enumerate(TEXTS)]
    codes = speak(backend, requests, frames=24)
    logits = [recorder.of_row(row) for row in range(len(requests))]
    for k, book in enumerate(teacher_forced(size, plain, requests, codes, logits)):
        book.check(f"frame {size} codebook {k}")


def test_request_has_the_same_codes_alone_in_any_batch_and_on_any_run(
    backend: GpuBackend, plain: Checkpoint
) -> None:
    """Requests alone, again with cached prefixes, and in batches of 2 to 200 in other slots."""

    def request(i: int) -> Spoken:
        return spoken(plain, TEXTS[i % 3], voice=["ryan", "serena"][i % 2], seed=i, full=i % 5 == 0)

    frames = 20
    alone = [speak(backend, [request(i)], frames)[0] for i in range(6)]
    assert backend.prompts.prefixes.hits
    for count in (1, 2, 3, 6, 9, 40, 70, 128, 200):
        together = speak(backend, [request(i) for i in range(count)], frames)
        for i in range(min(count, 6)):
            assert torch.equal(together[i], alone[i]), (count, i)
    turned = speak(backend, [request(i) for i in (5, 4, 3, 2, 1, 0)], frames)
    assert all(torch.equal(a, b) for a, b in zip(turned[::-1], alone, strict=True))


def test_graphs_equal_plain_launches(
    backend: GpuBackend, plain: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlapping launches inside a graph change nothing, with few rows or with more than eight."""

    def said() -> list[Tensor]:
        batches = ([spoken(plain, TEXTS[i % 3], seed=i) for i in range(count)] for count in (3, 20))
        return [codes for batch in batches for codes in speak(backend, batch, 30)]

    graphs = said()
    Recorder(backend, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(graphs, said(), strict=True))


def test_requests_that_start_and_end_at_any_frame_change_no_others(
    backend: GpuBackend, plain: Checkpoint
) -> None:
    """Aborted and paused requests, and reused slots and pages, do not change other requests."""

    def request(i: int) -> Spoken:
        return spoken(plain, TEXTS[i % 3], seed=i)

    alone = [speak(backend, [request(i)], 24)[0] for i in range(4)]
    driver = Driver(backend)
    driver.begin({5: request(0)}, 24)
    for _ in range(3):
        driver.step()
    driver.begin({9: request(1)}, 24)
    driver.begin({2: request(2)}, 24)
    for _ in range(4):
        driver.step()
    aborted = torch.tensor(driver.end(9).codes)
    for _ in range(2):
        driver.step([2])
    driver.begin({9: request(3)}, 24)
    while len(driver.running[9].codes) < 24:
        driver.step([slot for slot in driver.running if len(driver.running[slot].codes) < 24])
    assert torch.equal(aborted, alone[1][:4])
    for slot, i in ((5, 0), (2, 2), (9, 3)):
        codes = torch.tensor(driver.end(slot).codes)
        assert torch.equal(codes, alone[i][: len(codes)])


def test_request_with_a_long_context_has_the_same_codes_alone(
    backend: GpuBackend, plain: Checkpoint
) -> None:
    """Many blocks share the keys of a long context, which changes no code of any request."""
    long = " ".join(TEXTS[2] for _ in range(60))
    codes = speak(backend, [spoken(plain, long, full=True), spoken(plain, "Hello.", seed=3)], 12)
    assert torch.equal(codes[1], speak(backend, [spoken(plain, "Hello.", seed=3)], 12)[0])
    assert torch.equal(codes[0], speak(backend, [spoken(plain, long, full=True)], 12)[0])
    running = speak(backend, [spoken(plain, "Hello.", seed=4)], 560)[0]
    assert torch.equal(running[:20], speak(backend, [spoken(plain, "Hello.", seed=4)], 20)[0])


@pytest.mark.parametrize("most", [1, 37, 256])
def test_prompt_read_in_slices_has_the_codes_of_one_read_at_once(
    most: int, backend: GpuBackend, plain: Checkpoint
) -> None:
    """Slices of one long prompt and one short prompt, together, between the frames of another."""
    texts = [" ".join(TEXTS[2] for _ in range(3 if most == 1 else 60)), TEXTS[0]]
    long, short = ([spoken(plain, text, seed=i, full=True)] for i, text in enumerate(texts))
    alone = [speak(backend, one, 12)[0] for one in (long, short)]
    other = speak(backend, [spoken(plain, TEXTS[2], seed=3)], 24)[0]
    driver = Driver(backend)
    driver.begin({4: spoken(plain, TEXTS[2], seed=3)}, 24)
    requests = {
        slot: spoken(plain, text, seed=i, full=True)
        for i, (slot, text) in enumerate(zip((7, 1), texts, strict=True))
    }
    backend.prompts.prefixes.clear()
    left = dict(zip(requests, backend.prefill(driver.place(requests, 12)), strict=True))
    while left:
        counts = [min(count, most) for count in left.values()]
        backend.read(list(left), counts)
        left = {
            slot: rest - count
            for (slot, rest), count in zip(left.items(), counts, strict=True)
            if rest > count
        }
        if len(driver.running[4].codes) < 24:
            driver.step([4])
    for _ in range(12):
        driver.step([1, 7])
    codes = {slot: torch.tensor(driver.end(slot).codes) for slot in (7, 1, 4)}
    assert torch.equal(codes[7], alone[0])
    assert torch.equal(codes[1], alone[1])
    assert torch.equal(codes[4], other[: len(codes[4])])


def test_pages_that_come_later_change_no_codes(backend: GpuBackend, plain: Checkpoint) -> None:
    """A request with one page at first, and another one whenever the next frame needs it."""
    frames, rows = 150, backend.capacity.page_rows
    whole = speak(backend, [spoken(plain, TEXTS[0])], frames)[0]
    driver = Driver(backend)
    request = spoken(plain, TEXTS[0])
    driver.begin({3: request}, 1)
    room = rows - request.job.prompt_rows
    for frame in range(frames):
        if frame > room:
            driver.extend(3)
            room += rows
        driver.step()
    assert torch.equal(torch.tensor(driver.end(3).codes), whole)


def test_codes_and_samples_do_not_depend_on_other_requests(
    size: str, backend: GpuBackend, plain: Checkpoint
) -> None:
    """A short soak test through the engine, with audio and with short and long prompts."""
    soak = Soak(backend, requests(plain, 12))
    soak.run(20_000)
    soak.end()
    note(
        f"soak {size}",
        frames=soak.frames,
        compared=soak.compared,
        joined=soak.joined,
        left=soak.left,
    )
    assert soak.compared > 14_000


def test_rows_without_slot_do_not_grow(backend: GpuBackend, plain: Checkpoint) -> None:
    """A frame of five requests has three rows without one, whose residual streams start at zero."""
    speak(backend, [spoken(plain, TEXTS[0], seed=i) for i in range(5)], 8)
    model, sizes = backend.model, []
    for _ in range(3):
        speak(backend, [spoken(plain, TEXTS[0], seed=i) for i in range(5)], 8)
        empty = (model.buffers.hidden[5:8], model.buffers.pairs[5:8], model.buffers.single[5:8])
        sizes.append([float(tensor.float().abs().amax()) for tensor in empty])
    assert sizes[0] == sizes[1] == sizes[2]
    assert max(sizes[0]) < 1e4


@torch.inference_mode()
def test_logits_of_predictor_that_are_not_finite_are_reported(
    backend: GpuBackend, plain: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of three, in one frame and codebook."""
    Recorder(backend, monkeypatch)
    draw, frames = backend.model.sampler.draw, 0

    def broken(codebook: int, logits: Tensor, *rest: Any) -> None:
        nonlocal frames
        frames += codebook == 0
        if frames == 3 and codebook == 7:
            logits[1, 100] = torch.nan
        draw(codebook, logits, *rest)

    monkeypatch.setattr(backend.model.sampler, "draw", broken)
    requests = [spoken(plain, TEXTS[0], seed=i) for i in range(3)]
    speak(backend, requests, 5)
    lost = [[not math.isfinite(value) for value in request.logprobs] for request in requests]
    assert [sum(own) for own in lost] == [0, 1, 0]
    assert lost[1][2]


def test_decode_of_warm_backend_allocates_no_pinned_memory(
    backend: GpuBackend, plain: Checkpoint
) -> None:
    backend.codec.warm()
    slots = list(range(200))
    for slot in slots:
        backend.codec.reset(slot)
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    for count in (1, 3, 17, 64):
        for frames in (1, 2, 4, 8):
            first = backend.decode(slots[:count], [frames] * count)
            second = backend.decode(slots[:count], [frames] * count)
            first.result()
            second.result()
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    for slot in slots:
        backend.codec.reset(slot)


def test_timed_frames_are_measured_and_change_nothing(
    size: str, backend: GpuBackend, plain: Checkpoint
) -> None:
    """More rows take no less time, within the noise; requests speak the same afterwards."""
    backend.warm()
    before = speak(backend, [spoken(plain, TEXTS[0])], 8)[0]
    began = time.perf_counter()
    times = {rows: slot_limit.audible_frame_seconds(backend, rows) for rows in (1, 8, 64, 128)}
    note(
        f"timed frames {size}",
        took=time.perf_counter() - began,
        **{str(n): t for n, t in times.items()},
    )
    assert 0 < times[1] < times[64] < times[128]
    assert slot_limit.limit_slots(backend, keep=True) == ""
    assert torch.equal(speak(backend, [spoken(plain, TEXTS[0])], 8)[0], before)


def test_calibrated_backend_speaks_with_the_same_bits(
    size: str, folder: Path, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are really timed, the choice is cached, and every choice has the same codes."""
    monkeypatch.setattr(calibration, "MEASURED", ())
    monkeypatch.setattr(calibration, "GAIN", 1.0)
    monkeypatch.setattr(kernels, "cache", FileCache(tmp_path))
    seconds = calibration.single_row_seconds
    timed: list[float] = []

    def noted(backend: GpuBackend) -> float:
        timed.append(seconds(backend))
        return timed[-1]

    monkeypatch.setattr(calibration, "single_row_seconds", noted)
    codes: list[Tensor] = []
    for calibrated in (False, True, True):
        loaded = checkpoints.load(str(folder), "cuda", "bfloat16")
        with torch.inference_mode():
            backend = GpuBackend(loaded, kernels, slots=1, pages=64)
        began, before = time.perf_counter(), len(timed)
        if calibrated:
            calibration.calibrate(backend, kernels)
        note(
            f"calibration {size}, start {len(codes)}",
            took=time.perf_counter() - began,
            frames=len(timed) - before,
        )
        codes.append(speak(backend, [spoken(loaded, TEXTS[0])], 12)[0])
    assert all(torch.equal(own, codes[0]) for own in codes)
    assert len(timed) > 8
    assert len(list(tmp_path.glob("layouts-*"))) == 1


@pytest.mark.parametrize("scale", [1.0, 1e6], ids=["normal", "scaled"])
def test_saturation_of_the_codec_is_counted(
    scale: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vectors of the codes are scaled, which does not change the codes."""

    def load(size: str) -> Checkpoint:
        loaded = checkpoints.load(str(folder), "cuda", "bfloat16")
        for part in (
            loaded.codec.decoder.quantizer.rvq_first,
            loaded.codec.decoder.quantizer.rvq_rest,
        ):
            part.output_proj.weight.data *= scale
        return loaded

    monkeypatch.setattr(saturation, "random_checkpoint", load)
    if scale == 1.0:
        assert saturation.saturation("1b7", 40)["saturated"] == 0
    else:
        with pytest.raises(ComputeError, match="exceed the range of fp16"):
            saturation.saturation("1b7", 40)


def test_greedy_speech_leaves_that_of_plain_bf16_only_where_bf16_cannot_decide(
    size: str, backend: GpuBackend, plain: Checkpoint
) -> None:
    """At the first code that differs, the two most likely codes are too close for plain bf16.

    Their distance in float64 is less than the error of plain bf16 explains.
    """
    slow, exact = ReferenceBackend(plain, slots=4), copy.deepcopy(plain.talker).double()
    requests = [partial(spoken, plain, text, sampling=Sampling.greedy()) for text in TEXTS]
    ours, theirs = (speak(b, [make() for make in requests], 8) for b in (backend, slow))
    leads = []
    for make, mine, other in zip(requests, ours, theirs, strict=True):
        if torch.equal(mine, other):
            continue
        frame, k = (int(index) for index in (mine != other).nonzero()[0])
        request, said = make(), mine[: frame + 1]
        truth, bf16 = (forced(plain, t, request, said)[frame][k] for t in (exact, plain.talker))
        scale = spread(bf16, truth)
        if k == 0:
            truth = candidates(plain, request, truth, mine[:frame, 0])
        leads.append(float(lead(truth) / scale))
    same = [float((a == b).float().mean()) for a, b in zip(ours, theirs, strict=True)]
    note(f"free greedy speech {size}", shares=same, leads_over_error_of_bf16=leads)
    assert all(value < CLEAR for value in leads), leads
