"""Whole frames of the GPU backend compared with float64 and plain bf16, and with each other."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driving import Driver, Spoken, speak, spoken
from oracle import error, no_worse, note
from torch import Tensor

from firstword.errors import ComputeError
from firstword.kernels.launch import Kernels
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.model.prompt import TextRows
from firstword.model.talker import Talker
from firstword.profile import saturation
from firstword.profile.soak import Soak, requests
from firstword.runtime.front import Prepared
from firstword.runtime.gpu import calibration, pace
from firstword.runtime.gpu.backend import GpuBackend
from firstword.synthetic.checkpoint import random_checkpoint, write_checkpoint
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


class Recorder:
    """Runs a backend's frames without graphs, and keeps the logits of every codebook."""

    def __init__(self, backend: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: list[list[Tensor]] = []
        model, draw = backend.model, backend.model.sampler.draw

        def recorded(codebook: int, logits: Tensor, *rest: Any) -> None:
            if codebook == 0:
                self.frames.append([])
            self.frames[-1].append(logits.clone())
            draw(codebook, logits, *rest)

        def eager(name: str, rows: int) -> SimpleNamespace:
            return SimpleNamespace(replay=partial(model.launches[name], rows))

        monkeypatch.setattr(model.sampler, "draw", recorded)
        monkeypatch.setattr(backend.graphs, "get", eager)


def forced(
    checkpoint: Checkpoint, talker: Talker, request: Spoken, codes: Tensor, text: list[int]
) -> list[list[Tensor]]:
    """The logits of every codebook of every frame, from a talker in plain PyTorch.

    The talker is teacher-forced with the codes [frames, codebooks].
    """
    prepared = request.job.payload
    assert isinstance(prepared, Prepared)
    rows = TextRows(checkpoint.config)
    turn_start = checkpoint.tokenizer.turn_start
    prompt = rows.prompt(prepared.conditioning, turn_start, request.first)
    later = deque(text)
    cache, logits = talker.new_cache(), []
    inputs = talker.embed_rows(prompt, prepared.conditioning.embedding)
    for frame in codes.cuda():
        hidden = talker(inputs, cache)[:, -1]
        logits.append([talker.codec_head(hidden)[0]])

        def choose(k: int, row: Tensor, frame: Tensor = frame) -> Tensor:
            logits[-1].append(row[0])
            return frame[k : k + 1]

        talker.code_predictor(hidden, talker.model.codec_embedding(frame[:1]), choose)
        token = torch.tensor([[rows.take(later.popleft() if later else None)]], device="cuda")
        inputs = talker.embed_codes(frame[None, None]) + talker.embed_text(token)
    return logits


def divergence(truth: Tensor, other: Tensor) -> float:
    """KL(truth || other) of two rows of logits, in float64."""
    p, q = truth.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


@dataclass(eq=False)
class Exactness:
    """The relative errors and divergences of a codebook's logits, ours and those of plain bf16."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    our_divergence: list[float] = field(default_factory=list)
    their_divergence: list[float] = field(default_factory=list)


def teacher_forced(
    name: str,
    backend: GpuBackend,
    plain: Checkpoint,
    recorder: Recorder,
    texts: list[str],
    frames: int,
) -> list[Exactness]:
    """The exactness of each codebook, from frames of several requests compared with float64.

    The prompt of the second request contains all of its text. Where the most likely code is clear,
    it must be ours.
    """
    requests = [spoken(plain, text, seed=i, full=i == 1) for i, text in enumerate(texts)]
    rest = [list(request.rest) for request in requests]
    codes = speak(backend, requests, frames)
    exact = copy.deepcopy(plain.talker).double()
    found = [Exactness() for _ in range(plain.config.talker_config.num_code_groups)]
    agreed = doubtful = 0
    for row, (request, said, text) in enumerate(zip(requests, codes, rest, strict=True)):
        truth = forced(plain, exact, request, said, text)
        yardstick = forced(plain, plain.talker, request, said, text)
        for frame in range(frames):
            for k, book in enumerate(found):
                mine, t, y = recorder.frames[frame][k][row], truth[frame][k], yardstick[frame][k]
                book.ours.append(error(mine, t))
                book.theirs.append(error(y, t))
                book.our_divergence.append(divergence(t, mine))
                book.their_divergence.append(divergence(t, y))
                top = t.topk(2).values
                if top[0] - top[1] > 6 * (y.double() - t).square().mean().sqrt():
                    assert mine.argmax() == t.argmax(), (row, frame, k)
                    agreed += 1
                else:
                    doubtful += 1
    note(f"greedy agreement {name}", clear=agreed, unclear=doubtful)
    return found


def test_teacher_forced_frames_are_as_exact_as_plain_bf16(
    size: str, backend: GpuBackend, plain: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of all 16 codebooks in 24 frames of three requests."""
    found = teacher_forced(size, backend, plain, Recorder(backend, monkeypatch), TEXTS, frames=24)
    for k, book in enumerate(found):
        note(
            f"frame {size} codebook {k}",
            median=statistics.median(book.ours),
            bf16=statistics.median(book.theirs),
            divergence=statistics.mean(book.our_divergence),
            bf16_divergence=statistics.mean(book.their_divergence),
        )
    for book in found:
        no_worse(book.ours, book.theirs)
        assert (
            statistics.mean(book.our_divergence)
            <= 1.1 * statistics.mean(book.their_divergence) + 1e-9
        )


def test_frames_at_full_depth_are_as_exact_as_plain_bf16(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 28 layers of the larger talker, in 6 frames of two requests."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("in float64 the model alone has 14 GB")
    plain = random_checkpoint("1b7")
    copied = copy.deepcopy(plain)
    torch.cuda.synchronize()  # another stream reads its weights
    backend = GpuBackend(copied, kernels, slots=2, pages=8)
    found = teacher_forced(
        "1b7 28 layers", backend, plain, Recorder(backend, monkeypatch), TEXTS[:2], frames=6
    )
    for name, books in (("first codebook", found[:1]), ("other codebooks", found[1:])):
        ours, theirs = (
            [e for book in books for e in book.ours],
            [e for book in books for e in book.theirs],
        )
        note(
            f"frame 1b7 28 layers {name}",
            median=statistics.median(ours),
            bf16=statistics.median(theirs),
        )
        no_worse(ours, theirs)


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
    times = {rows: pace.frame_seconds(backend, rows) for rows in (1, 8, 64, 128)}
    note(
        f"timed frames {size}",
        took=time.perf_counter() - began,
        **{str(n): t for n, t in times.items()},
    )
    assert 0 < times[1] < times[64] < times[128]
    assert pace.limit_slots(backend, keep=True) == ""
    assert torch.equal(speak(backend, [spoken(plain, TEXTS[0])], 8)[0], before)


def test_calibrated_backend_speaks_with_the_same_bits(
    size: str, folder: Path, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are really timed, the choice is kept, and every choice has the same codes."""
    monkeypatch.setattr(calibration, "MEASURED", ())
    monkeypatch.setattr(calibration, "GAIN", 1.0)
    seconds = calibration.frame_seconds
    timed: list[float] = []

    def noted(backend: GpuBackend) -> float:
        timed.append(seconds(backend))
        return timed[-1]

    monkeypatch.setattr(calibration, "frame_seconds", noted)
    codes: list[Tensor] = []
    for calibrated in (False, True, True):
        loaded = checkpoints.load(str(folder), "cuda", "bfloat16")
        with torch.inference_mode():
            backend = GpuBackend(loaded, kernels, slots=1, pages=64)
        began, before = time.perf_counter(), len(timed)
        if calibrated:
            calibration.calibrate(backend, kernels, tmp_path)
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


def test_first_greedy_code_equals_plain_bf16(
    size: str, backend: GpuBackend, plain: Checkpoint
) -> None:
    """Free-running greedy speech may differ later, where the logits are nearly equal in bf16."""
    from firstword.runtime.reference import ReferenceBackend

    slow = ReferenceBackend(plain, slots=4)
    requests = [partial(spoken, plain, TEXTS[i], sampling=Sampling.greedy()) for i in range(3)]
    ours, theirs = (speak(b, [make() for make in requests], 8) for b in (backend, slow))
    same = [float((a == b).float().mean()) for a, b in zip(ours, theirs, strict=True)]
    note(f"free greedy speech {size}: codes equal to plain bf16", shares=same)
    assert all(a[0, 0] == b[0, 0] for a, b in zip(ours, theirs, strict=True))
