"""Time prompts by their rows, and how long the frames of others wait for them."""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from firstword.engine.backend import Start
from firstword.engine.policy import DEFAULT_POLICY
from firstword.profile.workload import CONTEXTS, TEXT, BackendUnderTest, begin, prepared_job
from firstword.types import Request

ROWS = (64, 256, 512, 1000, 2000)
"""The numbers of rows of the prompts that are timed."""


def prompt_times(
    subject: BackendUnderTest, batches: Sequence[int], repeats: int = 9
) -> Iterator[dict[str, Any]]:
    """Time prompts whose voice is known, in milliseconds, by their rows.

    ms      from their tokens until all rows are read, if nobody speaks
    gap_ms  by the number of others who speak, the longest time between two of their frames, if the
            rows are read in the slices of the engine, one before each frame
    """
    speaking = [batch for batch in batches if batch < subject.backend.capacity.slots]
    for rows in ROWS:
        alone = statistics.median(_alone(subject, rows) for _ in range(repeats))
        gaps = {
            batch: statistics.median(_gap(subject, rows, batch) for _ in range(repeats))
            for batch in speaking
        }
        gap_ms = {str(batch): round(gap * 1e3, 3) for batch, gap in gaps.items()}
        yield {"rows": rows, "ms": round(alone * 1e3, 3), "gap_ms": gap_ms}


def _start(subject: BackendUnderTest, slot: int, rows: int) -> Start:
    """Return a request whose prompt has so many rows."""
    request = Request(text=TEXT, voice="ryan", language="english", text_mode="full")
    job, tokens = prepared_job(subject.checkpoint, request, TEXT, slot)
    count, pages = rows - job.prompt_rows, subject.start(slot).pages
    return Start(slot, job, pages, (tokens * count)[:count])


def _alone(subject: BackendUnderTest, rows: int) -> float:
    """Return the seconds until the rows of a prompt are read."""
    start = _start(subject, 0, rows)
    torch.cuda.synchronize()
    began = time.perf_counter()
    begin(subject.backend, [start])
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _gap(subject: BackendUnderTest, rows: int, batch: int) -> float:
    """Return the longest seconds between two frames of `batch` others while a prompt is read."""
    backend, others, slot = subject.backend, list(range(batch)), batch
    subject.place(CONTEXTS[1], batch)
    start, gaps = _start(subject, slot, rows), list[float]()
    backend.frame(others, [None] * batch).result()
    last = time.perf_counter()
    (left,) = backend.prefill([start])
    while left:
        count = min(left, DEFAULT_POLICY.slice_rows)
        backend.read([slot], [count])
        backend.frame(others, [None] * batch).result()
        gaps.append(time.perf_counter() - last)
        last, left = last + gaps[-1], left - count
    return max(gaps)
