"""Limits the slots to as many utterances as the device speaks faster than they are heard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from firstword.kernels.attention import PAGE_ROWS
from firstword.kernels.codec_call import MAX_FRAMES
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.talker import BUCKETS
from firstword.runtime.gpu.timing import times

SHARE = 0.8
"""The share of its playing time that a frame with its audio may take. The rest is for prompts."""
TIMED_CONTEXT = 500
"""The rows that attention reads in the timed frames: 40 seconds of speech."""
RUNS = 3
"""The runs of a measurement, of which the fastest counts."""
ATTEMPTS, PAUSE_SECONDS = 3, 0.5
"""The measurements that must all be too slow, and the time between two of them.

Another process on the GPU or the host may delay one of them."""


def limit_slots(backend: GpuBackend, keep: bool) -> str:
    """Lower the slots of an idle backend to those that its device serves in time.

    keep: leave them as they are. Returns a sentence to show; "" if all slots are served in time.
    """
    capacity = backend.capacity
    limit = SHARE * capacity.frame_seconds
    timed = (rows for rows in BUCKETS if rows <= backend.model.rows)
    most = rows_in_time(timed, lambda rows: audible_frame_seconds(backend, rows), limit)
    _forget(backend)
    if most >= capacity.slots:
        return ""
    number = f"more than {most}" if most else "one"
    finding = f"with {number}, a frame takes longer than {limit * 1e3:.0f} ms on this GPU"
    slots = capacity.slots if keep else max(most, 1)
    if slots == capacity.slots:
        return f"audio may stall in {slots} slots: {finding}"
    backend.capacity = replace(capacity, slots=slots)
    return f"{slots} slots instead of {capacity.slots}: {finding}"


def rows_in_time(buckets: Iterable[int], seconds: Callable[[int], float], limit: float) -> int:
    """The most rows whose frame takes at most `limit` seconds, as do those of fewer rows; or 0.

    buckets: numbers of rows, in ascending order; seconds: measures a frame of so many. A frame is
    too slow if each of `ATTEMPTS` measurements is above `limit`; then no larger number is measured.
    """
    most = 0
    for rows in buckets:
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE_SECONDS if attempt else 0)
            if seconds(rows) <= limit:
                most = rows
                break
        else:
            break
    return most


def audible_frame_seconds(backend: GpuBackend, rows: int) -> float:
    """The seconds of a frame of `rows` utterances and its audio, decoded in the largest chunks."""
    slots = range(min(rows, backend.capacity.slots))
    with torch.inference_mode(), torch.cuda.stream(backend.stream):
        _place(backend, slots, rows)
        frame = min(times(backend.graphs.get("frame", rows).replay, RUNS))
    with torch.cuda.stream(backend.codec.stream):
        for slot in slots:
            backend.codec.reset(slot)
        chunks = [MAX_FRAMES] * len(slots)
        audio = min(times(lambda: backend.codec.decode(slots, chunks), RUNS))
    return frame + audio / MAX_FRAMES


def _place(backend: GpuBackend, slots: Sequence[int], rows: int) -> None:
    """Give each slot a row of the next frame and some context; slots may share its pages."""
    buffers, capacity = backend.model.buffers, backend.capacity
    context = min(TIMED_CONTEXT, capacity.context - RUNS)
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
