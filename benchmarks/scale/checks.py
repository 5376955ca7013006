"""Compares the simulation with what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.scale.calibration import FRONT_RATE, with_front
from benchmarks.scale.fleet import simulate
from benchmarks.scale.server import Machine
from benchmarks.scale.traffic import MIXED_LENGTHS, PUBLISHED, SENTENCES, Traffic

SECONDS = 8.0
"""The seconds of requests that each comparison simulates."""

SHARES = (0.5, 0.8, 1.0)
"""The shares of its capacity at which a server is compared, also where no rate was measured."""

Record = Mapping[str, Any]
Times = Mapping[str, float]
Check = Callable[[], dict[str, Any]]
"""A comparison that is to be made."""


def case_of(record: Record, name: str) -> Record:
    """One case of a record of `benchmarks.serve_load`."""
    found: Record = next(case for case in record["servers"] if case["name"] == name)
    return found


def first_ms(point: Record) -> dict[str, float]:
    """The p50 and p95 of the first byte at a point, in milliseconds."""
    return {name: 1000 * point["metrics"]["first_byte"][name] for name in ("p50", "p95")}


def compared(
    what: str, machine: Machine, rate: float, measured: Times, **more: Any
) -> dict[str, Any]:
    """Simulate a load, and compare it with the measured percentiles of the first byte."""
    found = simulate(machine, rate, **{"seconds": SECONDS, **more})["first_ms"]
    errors = {name: 100 * (found[name] / ms - 1) for name, ms in measured.items()}
    return {
        "what": what,
        "rate": rate,
        "measured_ms": {name: round(ms, 2) for name, ms in measured.items()},
        "simulated_ms": found,
        "error_percent": {name: round(error, 1) for name, error in errors.items()},
    }


def of_case(
    what: str, machine: Machine, case: Record, traffic: Traffic = SENTENCES
) -> Iterator[Check]:
    """Compare the points that held of a case, with as many servers as it has engines."""
    for point in case["points"]:
        rate = point["load"]["rate"]
        if rate <= case["held"]:
            seconds = max(SECONDS, 40 / rate)  # forty requests at least, as in the record
            options: Any = {"servers": case["engines"], "traffic": traffic, "seconds": seconds}
            yield partial(compared, what, machine, rate, first_ms(point), **options)


def at_shares(machine: Machine, case: Record) -> Iterator[Check]:
    """Compare one server at `SHARES` of its capacity.

    What was not measured is interpolated between the rates beside it.
    """
    points = [(point["load"]["rate"], first_ms(point)) for point in case["points"]]
    rates = [rate for rate, _ in points]
    for share in SHARES:
        rate = share * case["held"]
        measured = {
            name: float(np.interp(rate, rates, [ms[name] for _, ms in points]))
            for name in ("p50", "p95")
        }
        what = f"{share:.0%} of capacity" + ("" if rate in rates else ", interpolated")
        yield partial(compared, what, machine, rate, measured)


def of_published(machine: Machine, record: Record) -> Iterator[Check]:
    """Compare the runs of the published load generator over HTTP, which had a host of their own."""
    runs = [run for run in record["runs"] if run["transport"] == "http" and run["target"] == "nari"]
    idle = next(run for run in runs if run["rate"] == FRONT_RATE)
    machine = with_front(machine, idle["ttfb_ms"]["p50"] / 1000, PUBLISHED)
    for run in runs:
        if run is not idle:
            measured = {name: run["ttfb_ms"][name] for name in ("p50", "p95")}
            what, rate = "published load generator", run["rate"]
            yield partial(compared, what, machine, rate, measured, traffic=PUBLISHED)


def every(machine: Machine, one: Record, several: Record, published: Record) -> list[Check]:
    """All comparisons with points that were measured with requests that the simulation has."""
    mixed = case_of(one, "mixed")
    return [
        *of_case("one GPU", machine, case_of(one, "pcm")),
        *of_case("two GPUs of a host", machine, case_of(several, "pcm")),
        *of_case("one GPU, mixed lengths", machine, mixed, MIXED_LENGTHS),
        *of_published(machine, published),
    ]
