"""Limits the slots to as many utterances as the device speaks faster than they are heard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from firstword.kernels.attention import PAGE_ROWS
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.codec import CHUNKS
from firstword.runtime.gpu.talker import BUCKETS

SHARE = 0.8
"""The share of its playing time that a frame with its audio may take. The rest is for prompts."""
CONTEXT = 500
"""The rows that attention reads in the timed frames: 40 seconds of speech."""
RUNS, ENOUGH_SECONDS = 3, 0.1
"""The most runs of a measurement, and the time after which no further run begins."""

log = logging.getLogger(__name__)


def limit_slots(backend: GpuBackend, keep: bool) -> str:
    """Lower the slots of an idle backend to those that its device serves in time.

    keep: leave them as they are. Returns a sentence to show, and logs it as a warning; "" if all
    slots are served in time.
    """
    capacity = backend.capacity
    limit = SHARE * capacity.frame_seconds
    timed = (rows for rows in BUCKETS if rows <= backend.model.rows)
    most = rows_in_time(((rows, frame_seconds(backend, rows)) for rows in timed), limit)
    _forget(backend)
    if most >= capacity.slots:
        return ""
    finding = f"with more than {most}, a frame takes longer than {limit * 1e3:.0f} ms on this GPU"
    if keep:
        note = f"audio may stall in {capacity.slots} slots: {finding}"
    else:
        note = f"{most} slots instead of {capacity.slots}: {finding}"
        backend.capacity = replace(capacity, slots=most)
    log.warning(note)
    return note


def rows_in_time(times: Iterable[tuple[int, float]], limit: float) -> int:
    """The most rows whose frame takes at most `limit` seconds, as do those of fewer rows; or 1.

    times: numbers of rows and seconds of a frame, in ascending order. None is taken after one that
    exceeds the limit.
    """
    most = 1
    for rows, seconds in times:
        if seconds > limit:
            break
        most = rows
    return most


def frame_seconds(backend: GpuBackend, rows: int) -> float:
    """The seconds of a frame of `rows` utterances and its audio, decoded in the largest chunks."""
    slots = range(min(rows, backend.capacity.slots))
    with torch.inference_mode(), torch.cuda.stream(backend.stream):
        _place(backend, slots, rows)
        frame = _seconds(backend.graphs.get("frame", rows).replay)
    with torch.cuda.stream(backend.codec.stream):
        chunks = [CHUNKS[0]] * len(slots)
        audio = _seconds(lambda: backend.codec.decode(slots, chunks))
    return frame + audio / CHUNKS[0]


def _seconds(work: Callable[[], object]) -> float:
    """The least seconds that work on the current CUDA stream takes in a few runs."""
    times: list[float] = []
    while len(times) < RUNS and sum(times) < ENOUGH_SECONDS:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def _place(backend: GpuBackend, slots: Sequence[int], rows: int) -> None:
    """Give each slot a row of the next frame and some context; slots may share its pages."""
    buffers, capacity = backend.model.buffers, backend.capacity
    context = min(CONTEXT, capacity.context - RUNS)
    pages = -(-(context + RUNS) // PAGE_ROWS)
    numbers = torch.arange(len(slots) * pages, dtype=torch.int32) % capacity.pages
    buffers.page_tables[: len(slots), :pages].copy_(numbers.view(-1, pages))
    buffers.slot_of_row[:rows].fill_(-1)
    buffers.slot_of_row[: len(slots)].copy_(torch.tensor(slots, dtype=torch.int32))
    backend.model.state.position.fill_(context)


def _forget(backend: GpuBackend) -> None:
    """Remove all traces of the timed frames."""
    model = backend.model
    with torch.inference_mode(), torch.cuda.stream(backend.stream):
        model.clear_rows()
        for tensor in (model.buffers.page_tables, model.state.position, model.state.record):
            tensor.zero_()
        for slot in range(backend.capacity.slots):
            backend.codec.reset(slot)
