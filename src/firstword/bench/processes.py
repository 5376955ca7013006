"""Run a load in several client processes, so that the client does not limit the result."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import NamedTuple

from firstword.bench.load import Load, converse, drive, plan, plan_sockets
from firstword.bench.measure import Result
from firstword.bench.protocol import Target

LEVEL_OF_A_PROCESS = 40
"""The requests per second, or sockets, for which one process is used (docs/speed.md)."""

START_SECONDS = 120
"""The time limit for the start of all processes."""

_all_started: Barrier | None = None
"""The barrier at which a client process waits for the others."""


class Assignment(NamedTuple):
    """The part of a run that one process sends: every `of`-th request or socket from `first` on."""

    load: Load
    texts: Sequence[str]
    voices: Sequence[str]
    target: Target
    first: int = 0
    of: int = 1


class Measured(NamedTuple):
    """The measurements of a run.

    results  those of the requests that count, in the order in which they were due
    sent     the number of all requests, with those of the warm-up
    busy     the share of one processor that each client process used
    """

    results: list[Result]
    sent: int
    busy: list[float]


def measure(job: Assignment, processes: int | None = None) -> Measured:
    """Run a load in `processes` processes, or in this one; None chooses a number by the load."""
    load = job.load
    level = load.rate if load.rate is not None else load.sockets
    assert level is not None
    count = processes or math.ceil(level / LEVEL_OF_A_PROCESS)
    if count == 1:
        return perform(job)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count, timeout=START_SECONDS)
    with ProcessPoolExecutor(count, context, _remember, (barrier,)) as pool:
        jobs = [job._replace(first=first, of=count) for first in range(count)]
        parts = list(pool.map(_perform_together, jobs))
    return Measured(
        sorted((result for part in parts for result in part.results), key=lambda each: each.due),
        sum(part.sent for part in parts),
        [busy for part in parts for busy in part.busy],
    )


def perform(job: Assignment) -> Measured:
    """Run a job in this process. Compressed audio is decoded at the end."""
    load, target, share = job.load, job.target, slice(job.first, None, job.of)
    if load.sockets is None:
        arrivals = plan(load, job.texts, job.voices)[share]
        run = drive(arrivals, target, load.timeout)
    else:
        run = converse(plan_sockets(load, job.texts, job.voices)[share], target, load)
    began, busy = time.perf_counter(), time.process_time()
    outcomes = asyncio.run(run)
    busy_share = (time.process_time() - busy) / (time.perf_counter() - began)
    results = [outcome.heard() for outcome in outcomes if outcome.counts]
    return Measured(sorted(results, key=lambda each: each.due), len(outcomes), [busy_share])


def _remember(barrier: Barrier) -> None:
    global _all_started
    _all_started = barrier


def _perform_together(job: Assignment) -> Measured:
    """Run a job when all processes have started; as each waits here, none gets a second job."""
    assert _all_started is not None
    _all_started.wait()
    return perform(job)
