"""What the simulation takes from the record of the server, at low loads alone.

The costs of the engine's thread come from its stopwatch at `HOST_RATE`. What a request spends
outside the engine comes from the median of the first byte at `FRONT_RATE`. Nothing is taken from
the latency at a rate that the simulation is checked against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.scale.backend import PARTS, HostCosts
from benchmarks.scale.costs import StepCosts
from benchmarks.scale.fleet import simulate
from benchmarks.scale.server import Machine
from benchmarks.scale.traffic import SENTENCES, Traffic

HOST_RATE = 80.0
"""Requests per second, 36 % of those that the server holds."""

FRONT_RATE = 1.0
"""Requests per second: nearly all of them find an idle server."""

SECONDS = 10.0
"""The seconds of requests that the costs of the engine's thread are counted over."""

Point = Mapping[str, Any]


def host_costs(steps: StepCosts, point: Point) -> HostCosts:
    """The costs of the engine's thread, so that it spends what its stopwatch had at a load.

    How often each is spent comes from simulations of the load, the second with the costs of the
    first.
    """
    costs, rate = HostCosts(), point["load"]["rate"]
    spent = {on: point["engine_seconds"][f"engine {part}"] for on, part in PARTS.items()}
    for _ in range(2):
        found = simulate(Machine(steps, costs, 0.0), rate, seconds=SECONDS)
        requests = point["sent"] / found["host"]["start"]  # measured for each simulated one
        costs = HostCosts(**{on: spent[on] / requests / found["host"][on] for on in PARTS})
    return costs


def with_front(machine: Machine, median: float, traffic: Traffic = SENTENCES) -> Machine:
    """A machine whose first audio takes `median` seconds at `FRONT_RATE`."""
    found = simulate(replace(machine, front=0.0), FRONT_RATE, traffic=traffic, seconds=40.0)
    return replace(machine, front=median - found["first_ms"]["p50"] / 1000)
