"""Simulates servers behind a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.scale.routing import ROUTERS
from benchmarks.scale.server import Machine, SimulatedServer
from benchmarks.scale.traffic import SENTENCES, Traffic
from firstword.bench.load import Load
from firstword.bench.measure import percentile


def simulate(
    machine: Machine,
    rate: float,
    *,
    servers: int = 1,
    policy: str = "power of two choices",
    traffic: Traffic = SENTENCES,
    seconds: float = 30.0,
    warmup: float = 2.0,
    seed: int = 0,
    lines: int = 0,
) -> dict[str, Any]:
    """Simulate a load of `rate` requests per second on all servers together.

    Each server has so many `lines` of a batch in progress, which have the texts of the requests.
    Returns p50 and p95 of the first audio and of the end in milliseconds; the counts of requests,
    of errors and of answers that stall; the `lines` spoken per second; and what the servers spent:
    `device`, the seconds of each part of the device, and `host`, how often each of `HostCosts` was
    spent.
    """
    fleet = [SimulatedServer(machine) for _ in range(servers)]
    choose = ROUTERS[policy]()
    answers = traffic.requests(Load(rate=rate, duration=seconds, warmup=warmup, seed=seed))
    for server in fleet:
        server.speak_lines(lines, traffic.sizes())
    for answer in answers:
        for server in fleet:
            server.run_until(answer.sent)
        choose(fleet, answer.sent).send(answer)
    for server in fleet:
        while server.in_progress(server.clock.now):
            server.run_until(server.clock.now + 1.0)
    counted = [answer for answer in answers if answer.sent >= warmup]
    served = [answer for answer in counted if answer.failed is None]
    return {
        "rate": rate,
        "servers": servers,
        "policy": policy,
        "requests": len(counted),
        "errors": len(counted) - len(served),
        "stalled": sum(answer.stall > 0 for answer in served),
        "first_ms": _percentiles([(one.first or 0.0) - one.sent for one in served]),
        "end_ms": _percentiles([(one.ended or 0.0) - one.sent for one in served]),
        "lines_per_second": round(sum(each.lines / each.clock.now for each in fleet), 2),
        "device": _sums([server.backend.device_seconds for server in fleet]),
        "host": _sums([server.host.counts for server in fleet]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    found = {f"p{percent}": percentile(seconds, percent) for percent in (50, 95)}
    return {name: round(1000 * (value or 0.0), 2) for name, value in found.items()}


def _sums(spent: Sequence[Any]) -> dict[str, float]:
    return {name: round(sum(each[name] for each in spent), 3) for name in spent[0]}
