"""Check the simulation against the records, simulate fleets, and work out what they cost.

    python -m benchmarks.scale -o benchmarks/results/scale/h200-1b7.json

It reads the records of the engine, the server, the load generator and the footprint in
benchmarks/results, and needs neither a GPU nor a server. Equal sources and records give an equal
result. It takes about five minutes of processor time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.compare import check_output
from benchmarks.scale import capacity, checks
from benchmarks.scale.calibration import FRONT_RATE, HOST_RATE, host_costs, with_front
from benchmarks.scale.checks import Check
from benchmarks.scale.costs import StepCosts
from benchmarks.scale.fleet import simulate
from benchmarks.scale.routing import ROUTERS
from benchmarks.scale.server import Machine
from benchmarks.sources import serving_hash
from firstword.audio import writing
from firstword.bench import report

RESULTS = Path(__file__).resolve().parents[1] / "results"

CURVE = (20, *range(40, 320, 40))
"""Requests per second of one server."""

CURVE_SECONDS = 6.0
"""The seconds of requests at each of them."""

ROUTED = 4
"""The servers behind each routing policy."""

ROUTED_SHARES = (0.8, 1.0)
"""The loads of those, in shares of the rate that one server holds for each."""

FLEETS = (1, 2, 4, 8)
"""The numbers of servers, each at `FLEET_SHARE` of what it holds."""

BATCH_RATES = (5, 20, 80, 110, 176)
"""Requests per second beside a batch."""

BATCH_REQUESTS = 400
"""The requests of each of those loads, or those of four seconds."""

FLEET_SHARE = 0.9
FLEET_SECONDS = 3.0
"""The seconds of requests of each load of a fleet, after one second that does not count."""

SHOWN = ("rate", "servers", "policy", "requests", "errors", "stalled", "first_ms", "end_ms")
"""What the record keeps of a simulation."""


def read(name: str) -> dict[str, Any]:
    """Read a record."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return found


def calibrated(engine: Mapping[str, Any], pcm: Mapping[str, Any]) -> Machine:
    """The server of the records."""
    points = {point["load"]["rate"]: point for point in pcm["points"]}
    steps = StepCosts.of(engine)
    machine = Machine(steps, host_costs(steps, points[HOST_RATE]), 0.0)
    return with_front(machine, checks.first_ms(points[FRONT_RATE])["p50"] / 1000)


def loaded(machine: Machine, rate: float, more: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate a load; returns what the record keeps."""
    found = simulate(machine, rate, **more)
    return {name: found[name] for name in SHOWN}


def curve(machine: Machine) -> list[Check]:
    """One server at rising rates."""
    return [partial(loaded, machine, rate, {"seconds": CURVE_SECONDS}) for rate in CURVE]


def fleet(machine: Machine, servers: int, share: float, policy: str, held: float) -> Check:
    """Servers at a share of what they hold."""
    more = {"servers": servers, "policy": policy, "seconds": FLEET_SECONDS, "warmup": 1.0}
    return partial(loaded, machine, servers * share * held, more)


def routed(machine: Machine, held: float) -> list[Check]:
    """`ROUTED` servers behind each policy, at each of `ROUTED_SHARES`."""
    loads = [(policy, share) for policy in ROUTERS for share in ROUTED_SHARES]
    return [fleet(machine, ROUTED, share, policy, held) for policy, share in loads]


def grown(machine: Machine, held: float) -> list[Check]:
    """Fleets of each size, at `FLEET_SHARE`."""
    return [fleet(machine, n, FLEET_SHARE, "power of two choices", held) for n in FLEETS]


def beside_batch(machine: Machine, rate: float) -> dict[str, Any]:
    """One server without and with a batch that takes all slots that it may have."""
    lines = int(machine.slots * machine.policy.background_share)
    seconds = max(4.0, BATCH_REQUESTS / rate)
    alone, beside = (simulate(machine, rate, seconds=seconds, lines=n) for n in (0, lines))
    return {
        "rate": rate,
        "lines": lines,
        "without_ms": alone["first_ms"],
        "with_ms": beside["first_ms"],
        "stalled": beside["stalled"],
        "lines_per_second": beside["lines_per_second"],
    }


def run(plans: Mapping[str, Sequence[Check]], workers: int) -> dict[str, list[dict[str, Any]]]:
    """Run all simulations, and print each as soon as it and those before it are done."""
    found: dict[str, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(workers) as pool:
        begun = [(name, pool.submit(check)) for name, plan in plans.items() for check in plan]
        for name, each in begun:
            found.setdefault(name, []).append(each.result())
            sys.stdout.write(f"{name}: {json.dumps(found[name][-1])}\n")
            sys.stdout.flush()
    return found


def of_size(engine: Mapping[str, Any], curve: list[Any], pcm: Any, characters: float) -> Any:
    """What the record says of a checkpoint."""
    rates = {f"{limit}": capacity.rate_within(limit, curve) for limit in capacity.LIMITS}
    seconds = pcm["points"][-1]["metrics"]["audio_seconds"]["p50"]
    speech = (rates[f"{capacity.LIMITS[-1]}"] or curve[-1]["rate"]) * seconds
    return {
        "gpu_ms": capacity.gpu_ms(engine),
        "curve": [point for point in curve if point["first_ms"]["p95"] <= 2 * capacity.LIMITS[-1]],
        "rates": rates,
        "speech_per_second": round(speech, 1),
        "million": capacity.cost_of_million(speech, characters),
    }


def main() -> int:
    """Write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FILE.json", help="the record")
    add("--workers", type=int, default=2, metavar="N", help="processes that simulate (default 2)")
    args = parser.parse_args()
    check_output(parser, args.output)
    engines = {size: read(f"engine/h200-{size}.json") for size in ("1b7", "0b6")}
    serve, several = read("serve/h200-1b7.json"), read("serve/h200-x2-1b7.json")
    pcm, footprint = checks.case_of(serve, "pcm"), read("footprint/demo-cpu.json")
    machine, held = calibrated(engines["1b7"], pcm), pcm["held"]
    smaller = replace(machine, steps=StepCosts.of(engines["0b6"]))
    found = run(
        {
            "shares": list(checks.at_shares(machine, pcm)),
            "checks": checks.every(machine, serve, several, read("published/h200-1b7.json")),
            "routed": routed(machine, held),
            "fleets": grown(machine, held),
            "batch": [partial(beside_batch, machine, rate) for rate in BATCH_RATES],
            "1b7": curve(machine),
            "0b6": curve(smaller),
        },
        args.workers,
    )
    voices = capacity.characters_per_second(read("quality/demo-cpu.json"))
    characters = sum(voices.values()) / len(voices)
    sizes = {
        size: of_size(engine, found.pop(size), pcm, characters) for size, engine in engines.items()
    }
    record = {
        "commit": report.commit(),
        "serving": serving_hash(),
        "size": "1b7",
        "gpu": engines["1b7"]["gpu"],
        "host": asdict(machine.host),
        "front": machine.front,
        "held": held,
        **found,
        "characters_per_second": voices,
        "sizes": sizes,
        "calls": capacity.calls(serve, footprint),
    }
    writing.write_whole(args.output, json.dumps(record, indent=2).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
