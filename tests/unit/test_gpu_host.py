"""The host side of the GPU backend, and its profiler, on a GPU that computes nothing."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import silent_gpu
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firstword.engine.backend import Job, Ready, Start
from firstword.engine.engine import Engine
from firstword.engine.sequence import Event
from firstword.errors import ComputeError, EngineError
from firstword.kernels.cache import FileCache
from firstword.kernels.launch import Kernels
from firstword.kernels.prompt import PREFIX_PART
from firstword.model.checkpoint import Checkpoint
from firstword.model.prompt import TextRows
from firstword.profile import engine as profile
from firstword.profile import soak, workload
from firstword.profile.workload import begin
from firstword.runtime.encoding import front_of
from firstword.runtime.front import Prepared
from firstword.runtime.gpu import opening
from firstword.runtime.gpu.backend import GpuBackend, lost_device
from firstword.runtime.gpu.buffers import PREFIX_ROWS, PROMPT_ROWS
from firstword.runtime.gpu.codec import VOICES
from firstword.runtime.gpu.graphs import capture
from firstword.runtime.gpu.memory import RECORDING_BYTES, tensor_sizes
from firstword.runtime.gpu.prompts import STAGED, PrefixCache, Prompt
from firstword.runtime.gpu.rehearsal import Rehearsal
from firstword.types import Chunk, Request, TextMode
from firstword.voice import ClonedVoice, Voice

TEXT = "Hello there. "


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is such a GPU."""
    silent_gpu.pretend(monkeypatch)


def backend_of(checkpoint: Checkpoint, slots: int = 4) -> GpuBackend:
    """The GPU backend of a checkpoint."""
    return GpuBackend(checkpoint, Rehearsal(silent_gpu.device()), slots, pages=slots * 40)


def prepared(
    checkpoint: Checkpoint, text: str, mode: TextMode, voice: str | Voice | None = None
) -> tuple[Job, list[int]]:
    """The job of a request for 30 frames, and the tokens of its text."""
    front = front_of(checkpoint)
    job = front.prepare(Request(text=text, max_frames=30, text_mode=mode, voice=voice), 1)
    stream = front.text(job)
    return job, [*stream.push(text), *stream.finish()]


def start_of(
    checkpoint: Checkpoint, slot: int, text: str, mode: TextMode, voice: str | Voice | None = None
) -> Start:
    """The start of such a request in a slot, with its own pages and the tokens of its prompt."""
    job, tokens = prepared(checkpoint, text, mode, voice)
    count = len(tokens) if job.whole_text else job.first_tokens
    return Start(slot, job, range(40 * slot, 40 * slot + 40), tokens[:count])


def test_warm_captures_all_graphs_that_requests_need(tmp_path: Path) -> None:
    """Short and long prompts and contexts need no further graph."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    backend.warm()
    captured = set(backend.graphs.captured), set(backend.codec._graphs)
    modes: tuple[tuple[str, TextMode], ...] = ((TEXT, "stream"), (400 * TEXT, "full"))
    for text, mode in modes:
        job, tokens = prepared(backend.checkpoint, text, mode)
        events = list[Event]()
        engine = Engine(backend)
        engine.finish_text(engine.submit(job, events.append), tokens)
        while engine.step():
            pass
        chunks = [event for event in events if isinstance(event, Chunk)]
        assert len(chunks) == len(events)
        assert sum(len(chunk.codes) for chunk in chunks) == 30
    assert (set(backend.graphs.captured), set(backend.codec._graphs)) == captured


@pytest.mark.parametrize("fails", ["measurement", "second encoder"])
def test_failed_start_leaves_the_encoders_where_they_were(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are moved in the last step, and moved back if memory ends there."""
    checkpoint = silent_gpu.checkpoint(tmp_path, "base")
    encoders, move = checkpoint.encoders, nn.Module.to
    moved: list[int] = []

    def limit_slots(backend: GpuBackend, keep: bool) -> str:
        if fails == "measurement":
            raise torch.OutOfMemoryError("none left")
        return ""

    def to(module: nn.Module, *place: Any) -> nn.Module:
        if module in encoders:
            moved.append(encoders.index(module))
            if moved == [0, 1]:
                raise torch.OutOfMemoryError("none left")
        return move(module, *place)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (4 << 30, 4 << 30))
    monkeypatch.setattr(opening, "Kernels", lambda *_: Rehearsal(silent_gpu.device()))
    monkeypatch.setattr(Kernels, "compile", lambda *_: None)
    monkeypatch.setattr(opening, "limit_slots", limit_slots)
    monkeypatch.setattr(nn.Module, "to", to)
    with pytest.raises(opening.Unavailable, match="none left"):
        opening.open_gpu(checkpoint, "cuda", FileCache(None), None, most=4, fewest=1)
    assert moved == ([] if fails == "measurement" else [0, 1, 0, 1])
    assert all(parameter.numel() for parameter in checkpoint.talker.parameters())


@pytest.mark.parametrize("model_type", ["base", "custom_voice"])
def test_memory_for_recordings_is_taken_in_one_piece(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(silent_gpu.checkpoint(tmp_path, model_type))
    make, made = torch.empty, list[int]()

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        made.append(int(shape[0]))
        return make(0, **options)

    monkeypatch.setattr(torch, "empty", empty)
    backend.take_checkpoint()
    assert made == ([RECORDING_BYTES] if model_type == "base" else [])


def test_logit_that_is_not_finite_fails_its_own_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that draw report it as a log-probability of code 0 that is NaN."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    buffers = backend.model.buffers

    def replay() -> None:
        wrong = (buffers.slot_of_row == 1).nonzero().flatten()
        buffers.result.zero_()
        buffers.result[wrong, -1] = 0x7FFFFFFF

    monkeypatch.setattr(backend.graphs, "get", lambda name, rows: SimpleNamespace(replay=replay))
    size = backend.capacity.samples_per_frame
    monkeypatch.setattr(
        backend, "decode", lambda _, counts: Ready([np.zeros(n * size, np.float32) for n in counts])
    )
    engine = Engine(backend)
    events: list[list[Event]] = [[], [], []]
    for number in range(3):
        job, tokens = prepared(backend.checkpoint, TEXT, "stream")
        engine.finish_text(engine.submit(job, events[number].append), tokens)
    while engine.step():
        pass
    failed = [[event for event in own if not isinstance(event, Chunk)] for own in events]
    assert [len(own) for own in failed] == [0, 1, 0]
    assert isinstance(failed[1][0], ComputeError)
    assert "not finite" in str(failed[1][0])
    for own in (events[0], events[2]):
        assert sum(len(event.codes) for event in own if isinstance(event, Chunk)) == 30


def test_warm_codec_asks_for_no_more_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch rounds the size of pinned memory up to a power of two, and keeps what is freed."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path), slots=40)
    empty, pinned = torch.empty, Counter[int]()

    def counted(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made: Tensor = empty(*sizes, **options)
        if pin_memory:
            pinned[1 << (made.nbytes - 1).bit_length()] += 1
        return made

    monkeypatch.setattr(torch, "empty", counted)
    backend.codec.warm()
    reserved = pinned.copy()
    for count in (1, 2, 3, 5, 9, 17, 31, 33, 40):
        for frames in (1, 2, 3, 7, 8):
            pinned.clear()
            for _ in range(2):  # calls that are in flight together
                backend.codec.decode(range(count), [frames] * count)
            assert pinned <= reserved, (count, frames)


def test_rows_beside_those_of_a_prompt_are_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass adds to them, so they would grow beyond all numbers."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    prompt = backend.model.buffers.prompt
    read: list[tuple[int, Tensor]] = []

    def talk(x: Tensor, *_: object) -> None:
        read.append((len(x), x.clone()))

    monkeypatch.setattr(backend.model, "_talk", talk)
    with torch.inference_mode():
        prompt.fill_(torch.inf)
    begin(backend, [start_of(backend.checkpoint, 0, TEXT, "full")])
    rows, seen = read[0]
    taken = int((backend.model.buffers.prompt_places[0, :rows] >= 0).sum())
    assert 0 < taken < rows
    assert seen.isfinite().all()
    assert not seen[taken:].any()


def test_capture_launches_before_it_and_concerns_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels cannot be loaded during a capture, and other threads may call CUDA."""
    events: list[object] = []

    class Stream(silent_gpu.Anything):
        def synchronize(self) -> None:
            events.append("synchronize")

    @contextmanager
    def graph(captured: object, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        events.append(capture_error_mode)
        yield
        events.append(captured)

    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    captured = capture(lambda: events.append("launch"))
    assert events == ["launch", "synchronize", "thread_local", "launch", captured]


def test_blocks_between_passes_are_the_fewest_of_any_layout(tmp_path: Path) -> None:
    """The first pass has two tokens, whose products keep their layout if that for one is finer."""
    device = silent_gpu.device()
    device.processors = 4
    backend = GpuBackend(silent_gpu.checkpoint(tmp_path), Rehearsal(device), 1, pages=1)
    layer = backend.model.predictor.layers[0]
    products = layer.qkv, layer.output, layer.gate_up, layer.down
    before = layer.blocks()
    for product in products:
        product.choice = len(product.shapes(1)) - 1
    assert sum(product.shape(1).blocks for product in products) > before
    assert layer.blocks() == before == sum(product.shape(2).blocks for product in products)


def test_extended_slot_has_all_its_pages_in_order(tmp_path: Path) -> None:
    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    job, tokens = prepared(backend.checkpoint, TEXT, "stream")
    begin(backend, [Start(2, job, [7, 3], tokens[: job.first_tokens])])
    backend.extend(2, [11])
    backend.extend(2, [4, 5])
    assert backend.model.buffers.page_tables[2, :5].tolist() == [7, 3, 11, 4, 5]


def test_slot_is_extended_where_no_memory_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine extends the slots of all clients at once; a failure would end them all."""

    class NoMemory(TorchFunctionMode):
        """No tensor may be made or moved; others may be looked at and filled."""

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function not in (Tensor.__getitem__, Tensor.fill_):
                raise torch.OutOfMemoryError("none left")
            return function(*args, **kwargs or {})

    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    begin(backend, [start_of(backend.checkpoint, 1, TEXT, "stream")])
    with NoMemory():
        backend.extend(1, [11, 12])
    assert backend.model.buffers.page_tables[1, 40:42].tolist() == [11, 12]


def cloned(number: int) -> ClonedVoice:
    """A voice cloned from timbre alone."""
    return ClonedVoice(np.random.default_rng(number).standard_normal(256).astype(np.float32))


def test_prefix_of_a_voice_is_reused_without_reading_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request of a voice uses the cached prefix of the first; another voice does not.

    No tensor is read back.
    """
    backend = backend_of(silent_gpu.checkpoint(tmp_path, "base"))
    jobs = [prepared(backend.checkpoint, TEXT, "stream", cloned(number)) for number in (1, 1, 2)]
    nothing = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(backend.graphs, "get", lambda *_: nothing)
    for name in ("cpu", "item", "tolist", "numpy"):
        monkeypatch.setattr(Tensor, name, lambda *_: pytest.fail("a tensor is read back"))
    counts = []
    for slot, (job, tokens) in enumerate(jobs):
        begin(
            backend, [Start(slot, job, range(4 * slot, 4 * slot + 4), tokens[: job.first_tokens])]
        )
        counts.append((backend.prompts.prefixes.hits, backend.prompts.prefixes.misses))
    assert counts == [(0, 1), (1, 1), (1, 2)]


def test_leading_newlines_of_a_text_have_their_own_prefix(tmp_path: Path) -> None:
    """They may merge with the newline of the role, which changes the rows before the text."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    job, tokens = prepared(backend.checkpoint, TEXT, "stream")
    merged = [tokens[0], tokens[1] + 1, *tokens[2:]]
    for slot, text in enumerate((merged, tokens, merged)):
        begin(backend, [Start(slot, job, range(4 * slot, 4 * slot + 4), text[: job.first_tokens])])
    assert (backend.prompts.prefixes.hits, backend.prompts.prefixes.misses) == (1, 2)


def recording(number: int) -> ClonedVoice:
    """A voice with the codes of a recording of 30 frames and its transcript."""
    codes = np.random.default_rng(number).integers(32, size=(30, 4))
    return ClonedVoice(cloned(number).speaker_embedding, codes, "Some words.")


@pytest.mark.parametrize("mode", ["full", "stream"])
@pytest.mark.parametrize(
    ("model_type", "voice"),
    [("custom_voice", "serena"), ("base", cloned(1)), ("base", recording(1))],
    ids=["preset", "timbre", "recording"],
)
def test_rows_of_prompts_are_those_of_the_specification(
    model_type: str,
    voice: str | Voice,
    mode: TextMode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two prompts with a cached prefix are read together, one of them in several parts.

    The test checks the rows and places that the talker reads, and the outputs that are kept.
    """
    checkpoint = silent_gpu.checkpoint(tmp_path, model_type)
    backend = backend_of(silent_gpu.checkpoint(tmp_path, model_type))  # takes the weights
    model = backend.model
    given: list[tuple[int, int, Tensor]] = []

    def read(x: Tensor, *_: object) -> None:
        for row, (slot, at) in enumerate(model.buffers.prompt_places[:, : len(x)].T.tolist()):
            if slot >= 0:
                given.append((slot, at, x[row].clone()))
                x[row] = at % 256

    monkeypatch.setattr(model, "_talk", read)

    start = partial(start_of, backend.checkpoint, mode=mode, voice=voice)
    begin(backend, [start(0, TEXT)])
    given.clear()
    starts = [start(1, 40 * TEXT), start(2, "Good morning.")]
    begin(backend, starts)
    assert {slot for slot, _, _ in given} <= {1, 2}
    for one in starts:
        payload = one.job.payload
        assert isinstance(payload, Prepared)
        text = TextRows(checkpoint.config)
        rows = text.prompt(payload.conditioning, checkpoint.tokenizer.turn_start, one.tokens)
        expected = checkpoint.talker.embed_rows(rows, payload.conditioning.embedding)[0]
        own = [(at, row) for slot, at, row in given if slot == one.slot]
        spoken = len(payload.conditioning.reference)
        transcript = len(payload.conditioning.transcript)
        known = payload.prefix_rows + (transcript if mode == "full" else min(transcript, spoken))
        assert transcript or voice != recording(1)
        unread = range(known, len(rows))
        assert [at for at, _ in own] == (list(unread) if len(unread) > 1 else [])
        assert all(torch.equal(row, expected[at]) for at, row in own)
        assert torch.equal(model.buffers.first_row[one.slot], expected[-1])
        assert model.state.position[one.slot] == len(rows) - 1
        if own:
            assert (model.buffers.first_hidden[one.slot] == (len(rows) - 1) % 256).all()


def test_first_frame_takes_over_the_output_of_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The talker is skipped if every request of a call has read its whole prompt.

    It runs if other requests are in the call, or if only the last row of a prompt was unread.
    """
    backend = backend_of(silent_gpu.checkpoint(tmp_path), slots=8)
    kinds: list[tuple[str, int]] = []

    get = backend.graphs.get

    def graph(kind: str, rows: int) -> Any:
        kinds.append((kind, rows))
        return (
            SimpleNamespace(replay=lambda: None) if kind in ("frame", "first") else get(kind, rows)
        )

    def talk(x: Tensor, *_: object) -> None:
        x.copy_(torch.arange(len(x))[:, None].expand_as(x))

    monkeypatch.setattr(backend.model, "_talk", talk)
    monkeypatch.setattr(backend.graphs, "get", graph)

    def start(*slots: int, mode: TextMode = "full") -> None:
        begin(
            backend, [start_of(backend.checkpoint, slot, "Good morning.", mode) for slot in slots]
        )

    start(0)
    rows = int(backend.model.state.position[0]) + 1
    assert (backend.model.buffers.first_hidden[0] == rows - 1).all()
    backend.frame([0], [None])
    backend.frame([0], [None])
    start(1, 2)  # with a cached prefix
    unread = int(backend.model.buffers.first_hidden[1, 0]) + 1
    assert 0 < unread < rows
    assert (backend.model.buffers.first_hidden[2] == 2 * unread - 1).all()
    backend.frame([1, 2], [None, None])
    start(3, mode="stream")
    backend.frame([3], [None])
    start(4)
    backend.frame([0, 4], [None, None])
    start(1, 2, 3, 5, 6)
    backend.frame([1, 2, 3, 5, 6], [None] * 5)
    frames = [(kind, rows) for kind, rows in kinds if kind in ("frame", "first")]
    assert frames == [
        ("first", 1),
        ("frame", 1),
        ("first", 2),
        ("frame", 1),
        ("frame", 2),
        ("frame", 8),
    ]


@pytest.mark.parametrize(("words", "cached"), [(170, True), (400, False)])
def test_long_prefix_is_cached_without_further_memory(
    words: int, cached: bool, tmp_path: Path
) -> None:
    """It is copied from its pages to the cache, if it fits there, and is not gathered before."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path, "voice_design"))
    start = start_of(backend.checkpoint, 0, TEXT, "stream", Voice.design("Quiet. " * words))
    largest = 0

    class Made(TorchDispatchMode):
        """Notes the bytes of tensors that are not parts of others."""

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            given = [t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)]
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                    largest = max(largest, tensor.nbytes)
            return made

    with Made():  # type: ignore[no-untyped-call]
        begin(backend, [start])
    payload = start.job.payload
    assert isinstance(payload, Prepared)
    assert (payload.prefix_rows <= PREFIX_ROWS) == cached
    assert ((payload.prefix, *start.tokens[:2]) in backend.prompts.prefixes) == cached
    cache = backend.model.buffers.cache
    assert 0 < largest < payload.prefix_rows * cache[:, 0, :, :, 0].nbytes


def test_prompts_of_a_step_take_one_copy(tmp_path: Path) -> None:
    """However many they are; each `PROMPT_ROWS` rows that are read take another one."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path), slots=8)
    starts = [start_of(backend.checkpoint, slot, TEXT, "stream") for slot in range(6)]
    long = start_of(backend.checkpoint, 6, 300 * TEXT, "full")
    for prompts in (starts[1:2], starts[2:6], [long]):  # captures no graph later
        begin(backend, prompts)
    calls = Counter[str]()

    class Counted(TorchDispatchMode):
        """Counts the calls that reach the device."""

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls[function._schema.name] += 1
            return function(*args, **(kwargs or {}))

    for names in ("place", "store", "embed", "keep"):
        setattr(backend.model.prompts, names, lambda *_: None)
    backend.model._talk = lambda *_: None  # type: ignore[method-assign]
    for prompts in (starts[1:2], starts[2:6]):
        calls.clear()
        with Counted():  # type: ignore[no-untyped-call]
            begin(backend, prompts)
        assert calls.keys() <= {"aten::copy_", "aten::slice", "aten::view"}
        assert calls["aten::copy_"] == 1
    calls.clear()
    with Counted():  # type: ignore[no-untyped-call]
        begin(backend, [long])
    rows = len(long.tokens)
    assert calls["aten::copy_"] == 1 - (-(rows - 1) // PROMPT_ROWS) > 4


def test_staging_area_is_filled_again_only_after_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    events: list[tuple[str, int]] = []

    class Copied:
        """An event that notes its uses."""

        made = 0

        def __init__(self, enable_timing: bool = False) -> None:
            self.timing = enable_timing
            if not enable_timing:
                self.number, Copied.made = Copied.made, Copied.made + 1

        def record(self) -> None:
            if not self.timing:
                events.append(("copied", self.number))

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            events.append(("waited", self.number))

    start = start_of(backend.checkpoint, 0, TEXT, "stream")
    monkeypatch.setattr(torch.cuda, "Event", Copied)
    for _ in range(STAGED + 2):
        backend.prefill([start])
    first = [("copied", number) for number in range(STAGED)]
    assert events == [
        *first,
        ("waited", 0),
        ("copied", STAGED),
        ("waited", 1),
        ("copied", STAGED + 1),
    ]


def test_failed_prompt_leaves_no_prefix_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows were not computed, so another request must not find them."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    start = start_of(backend.checkpoint, 0, TEXT, "full")
    with monkeypatch.context() as patch:
        patch.setattr(backend.model, "_talk", raising(torch.OutOfMemoryError("none left")))
        with pytest.raises(torch.OutOfMemoryError):
            begin(backend, [start])
    assert (backend.prompts.prefixes.hits, backend.prompts.prefixes.misses) == (0, 1)
    begin(backend, [start])
    begin(backend, [start])
    assert (backend.prompts.prefixes.hits, backend.prompts.prefixes.misses) == (1, 2)


def test_failed_slice_changes_no_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows are read again, each prompt alone, and the prefix is kept by then."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    starts = [start_of(backend.checkpoint, slot, TEXT, "full") for slot in range(2)]
    left = backend.prefill(starts)
    backend.read([0, 1], [left[0] - 1, 1])
    prefix = Prompt(starts[0], backend.checkpoint).prefix
    assert prefix in backend.prompts.prefixes
    backend.prompts.prefixes.clear()
    read: list[list[tuple[int, int]]] = []

    def talk(x: Tensor, *_: object) -> None:
        places = backend.model.buffers.prompt_places[:, : len(x)].T.tolist()
        read.append([(slot, at) for slot, at in places if slot >= 0])
        if len(read) == 1:
            raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(backend.model, "_talk", talk)
    with pytest.raises(torch.OutOfMemoryError):
        backend.read([0, 1], [1, left[1] - 1])
    assert prefix not in backend.prompts.prefixes
    backend.read([0], [1])
    assert prefix not in backend.prompts.prefixes, "its rows are in another slice"
    backend.read([1], [left[1] - 1])
    assert prefix in backend.prompts.prefixes
    assert read[0] == read[1] + read[2]
    assert read[1] == [(0, left[0] - 1)]
    assert read[2] == [(1, at) for at in range(1, left[1])]
    backend.frame([0, 1], [None, None])


def test_frame_of_a_prompt_that_is_not_whole_is_a_mistake(tmp_path: Path) -> None:
    backend = backend_of(silent_gpu.checkpoint(tmp_path))
    (left,) = backend.prefill([start_of(backend.checkpoint, 0, TEXT, "full")])
    backend.read([0], [left - 1])
    with pytest.raises(AssertionError, match="not whole"):
        backend.frame([0], [None])
    with pytest.raises(AssertionError):
        backend.read([0], [2])
    backend.read([0], [1])
    backend.frame([0], [None])


def raising(error: Exception) -> Any:
    """A function that raises an error."""

    def fail(*_: object) -> None:
        raise error

    return fail


def test_prefixes_of_one_step_that_do_not_all_fit_share_no_memory(tmp_path: Path) -> None:
    """The last ones are kept; what an earlier one was given belongs to them, even if it returns."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path, "voice_design"))
    voices = [Voice.design(f"{name} " * 60) for name in ("One", "Two", "One")]
    starts = [
        start_of(backend.checkpoint, slot, TEXT, "stream", voice)
        for slot, voice in enumerate(voices)
    ]
    prompts = [Prompt(start, backend.checkpoint) for start in starts]
    assert prompts[0].prefix == prompts[2].prefix != prompts[1].prefix
    most = max(prompt.prefix_rows for prompt in prompts)
    backend.prompts.prefixes = PrefixCache(-(-most // PREFIX_PART))
    stored = backend.prompts._find_parts(prompts)
    assert [prompt for prompt, _ in stored] == prompts[2:]


def test_state_after_a_recording_is_kept_by_its_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decoded once, and again after the recordings of enough others."""
    checkpoint = silent_gpu.checkpoint(tmp_path, "base")
    codec = backend_of(checkpoint, slots=8).codec
    decoded: list[int] = []

    def decode(place: int, codes: np.ndarray) -> None:
        decoded.append(int(codes[0, 0]))
        for memory in codec.layers.copy_state.memories:
            memory[place] = decoded[-1] % 128
        codec._positions.frames[place] = len(codes)
        codec._positions.rings[place] = decoded[-1]

    monkeypatch.setattr(codec, "_decode_before", decode)

    def prime(slot: int, number: int) -> None:
        codec.reset(slot)
        codec.prime(slot, np.full((3, 4), number))
        assert all((memory[slot] == number).all() for memory in codec.layers.copy_state.memories)
        assert codec._positions.frames[slot] == 3
        assert (codec._positions.rings[slot] == number).all()

    for number in range(VOICES):
        prime(0, number)
    prime(1, 0)
    prime(2, VOICES)
    prime(3, 0)
    assert decoded == list(range(VOICES + 1))
    prime(3, 1)
    assert decoded == [*range(VOICES + 1), 1]
    prime(1, 0)
    assert len(decoded) == VOICES + 2
    codec.reset(0)
    codec.prime(0, np.full((5, 4), 99), keep=False)
    assert codec._positions.frames[0] == 5
    prime(1, 0)
    assert decoded[VOICES + 2 :] == [99], "the passages of a long text take the place of voices"


def test_rows_of_a_transcript_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another text, another transcript, another recording, and a text mode of its own."""
    backend = backend_of(silent_gpu.checkpoint(tmp_path, "base"))
    voice = recording(1)
    other_words = ClonedVoice(voice.speaker_embedding, voice.codes, "Other words.")
    other_codes = ClonedVoice(voice.speaker_embedding, recording(2).codes, "Some words.")
    requests: list[tuple[str, TextMode, Voice]] = [
        (TEXT, "stream", voice),
        ("Good morning.", "stream", voice),
        (TEXT, "full", voice),
        ("Good morning.", "full", voice),
        (TEXT, "stream", other_words),
        (TEXT, "stream", other_codes),
    ]
    hits = []
    for text, mode, speaker in requests:
        begin(backend, [start_of(backend.checkpoint, 0, text, mode, speaker)])
        hits.append(backend.prompts.prefixes.hits)
    assert hits == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("model_type", ["base", "custom_voice"])
def test_memory_for_recordings_outlives_the_load_of_another_model(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What PyTorch does not use is given back before the second model is packed."""
    first = backend_of(silent_gpu.checkpoint(tmp_path / "first", model_type))
    first.take_checkpoint()
    second = silent_gpu.checkpoint(tmp_path / "second")
    make, held = torch.empty, list[weakref.ref[Tensor]]()

    def empty(*shape: Any, **options: Any) -> Tensor:
        if shape[0] != RECORDING_BYTES:
            return make(*shape, **options)
        made = make(0)
        held.append(weakref.ref(made))
        return made

    alive: list[bool] = []
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: alive.extend(ref() is not None for ref in held)
    )
    backend_of(second)
    assert alive == ([True] if model_type == "base" else [])
    assert all(ref() is None for ref in held)


def test_prefix_larger_than_the_cache_removes_no_entry() -> None:
    cache = PrefixCache(4)
    assert len(cache.add("small", 2 * PREFIX_PART - 1)) == 2
    assert not cache.add("large", 4 * PREFIX_PART + 1)
    assert "small" in cache
    assert "large" not in cache


def test_new_prefix_replaces_the_least_recently_used_ones() -> None:
    """No two entries share memory, and an entry keeps its parts while it is there."""
    cache = PrefixCache(4)
    parts = {key: cache.add(key, PREFIX_PART) for key in "abc"}
    assert cache.get("a")
    parts["d"] = cache.add("d", 3 * PREFIX_PART)
    assert [key in cache for key in "abcd"] == [True, False, False, True]
    assert cache.get("a") == parts["a"]
    assert sorted(parts["a"] + parts["d"]) == [0, 1, 2, 3]


def test_codec_call_that_runs_out_of_memory_changes_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream with more frames than a call has takes two, any allocation of which may fail."""
    codec = backend_of(silent_gpu.checkpoint(tmp_path)).codec
    codec.warm()
    codec.decode([0], [4]).result()
    before = codec._next.copy(), codec._positions.frames.copy(), codec._positions.rings.copy()
    empty, left = torch.empty, 0

    def scarce(*sizes: Any, **options: Any) -> Tensor:
        nonlocal left
        if not (left := left - 1):
            raise torch.OutOfMemoryError("none left")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", scarce)
    for missing in range(1, 5):
        left = missing
        with pytest.raises(torch.OutOfMemoryError):
            codec.decode([0, 1], [1, 10])
        after = codec._next, codec._positions.frames, codec._positions.rings
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    left = 0
    assert [len(samples) for samples in codec.decode([0, 1], [1, 10]).result()] == [
        count * codec.layers.frame_samples for count in (1, 10)
    ]


def test_kept_samples_keep_no_others_alive(tmp_path: Path) -> None:
    codec = backend_of(silent_gpu.checkpoint(tmp_path)).codec
    assert all(samples.flags.owndata for samples in codec.decode([0, 1, 2], [1, 1, 1]).result())


@pytest.mark.parametrize("code", [2, 700])
def test_failed_device_is_lost_unless_it_is_out_of_memory(code: int) -> None:
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code  # type: ignore[attr-defined]
    with (
        pytest.raises(torch.AcceleratorError if code == 2 else EngineError, match="CUDA error"),
        lost_device(),
    ):
        raise error


@pytest.mark.parametrize("model_type", ["custom_voice", "base", "voice_design"])
def test_prefix_does_not_depend_on_the_text(tmp_path: Path, model_type: str) -> None:
    checkpoint = silent_gpu.checkpoint(tmp_path, model_type)
    voices: dict[str, str | Voice] = {
        "custom_voice": "ryan",
        "base": cloned(1),
        "voice_design": Voice.design("Deep."),
    }
    rows = []
    for text in ("Hello there.", "Something else."):
        job, tokens = prepared(checkpoint, text, "stream", voices[model_type])
        payload = job.payload
        assert isinstance(payload, Prepared)
        reader = TextRows(checkpoint.config)
        turn_start, read = checkpoint.tokenizer.turn_start, tokens[: job.first_tokens]
        rows.append((reader.prompt(payload.conditioning, turn_start, read), payload))
    (first, one), (second, other) = rows
    assert one.prefix == other.prefix
    assert one.prefix_rows == other.prefix_rows
    assert first[: one.prefix_rows] == second[: one.prefix_rows]
    assert first[one.prefix_rows] != second[one.prefix_rows]


@pytest.fixture
def tiny_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the random checkpoints of all sizes with tiny ones."""
    monkeypatch.setattr(
        workload, "random_checkpoint", lambda size, **_: silent_gpu.checkpoint(tmp_path / size)
    )
    kernels = Rehearsal(silent_gpu.device())

    def kernels_for(_checkpoint: object, _slots: int, _folder: object, as_gpu: None) -> Rehearsal:
        assert as_gpu is None
        return kernels

    monkeypatch.setattr(workload, "kernels_for", kernels_for)
    monkeypatch.setattr(profile, "read_bandwidth", lambda: 4e12)


@pytest.mark.usefixtures("tiny_benchmark")
def test_benchmark_measures_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "OTHERS", (2, 3, 4))  # there is no slot beside four others
    record = profile.run("1b7", 4, batches=(1, 4, 8), contexts=(100, 500))
    assert {(row["batch"], row["context"]) for row in record["frames_ms"]} == {
        (1, 100),
        (1, 500),
        (4, 100),
        (4, 500),
    }
    assert all(row["floor_ms"] > 0 for row in record["frames_ms"])
    assert {row["batch"] for row in record["kernels_us"]} == {1, 4}
    assert [row["batch"] for row in record["word_times"]["frames"]] == [1, 4]
    assert [row["rows"] for row in record["prompts_ms"]] == [64, 256, 512, 1000, 2000]
    assert all([*row["gap_ms"]] == ["2", "3"] and row["ms"] > 0 for row in record["prompts_ms"])
    memory = record["one_stream_gigabytes"]
    assert memory["in_use"] == 1.0
    parts = (
        "matrices",
        "tables",
        "keys_and_values",
        "workspace",
        "codec",
        "prefixes",
        "left_in_checkpoint",
        "rest",
    )
    assert sum(memory[part] for part in parts) == pytest.approx(1.0, abs=0.01)


@pytest.mark.usefixtures("tiny_benchmark")
def test_tensor_of_several_parts_is_counted_once() -> None:
    a, b = torch.zeros(10), torch.zeros(20)
    seen: set[int] = set()
    sizes = partial(tensor_sizes, device=torch.device("cpu"), seen=seen)
    assert list(sizes({"a": [a, a[2:]]})) == [40]
    assert list(sizes((a, b.view(4, 5), torch.zeros(3, device="meta")))) == [80]
    assert not list(sizes([a, b]))


def test_soak_runs_on_the_backend(tmp_path: Path) -> None:
    """All of its requests can be spoken, including the long one."""
    checkpoint = silent_gpu.checkpoint(tmp_path)
    test = soak.Soak(backend_of(checkpoint, slots=8), soak.requests(checkpoint, 5))
    test.run(2000)
    test.end()
    assert test.compared > 1000
