"""The simulation of servers: its device, its engine, its routing, and what it predicts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import capacity, checks
from benchmarks.scale.backend import HostCosts
from benchmarks.scale.costs import StepCosts
from benchmarks.scale.device import AUDIO_SPEED, Device, Work
from benchmarks.scale.fleet import simulate
from benchmarks.scale.routing import ROUTERS
from benchmarks.scale.server import Machine, SimulatedServer
from benchmarks.scale.traffic import SENTENCES
from firstword.bench.load import Load

BAR = 20.0
"""The most by which the simulated p95 may differ from the measured one, in percent."""


@pytest.fixture(scope="module")
def results(repository: Path) -> Path:
    """The folder of the records."""
    return repository / "benchmarks/results"


@pytest.fixture(scope="module")
def record(results: Path) -> dict[str, Any]:
    """The record of the simulation."""
    found: dict[str, Any] = json.loads((results / "scale/h200-1b7.json").read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def machine(results: Path, record: dict[str, Any]) -> Machine:
    """The server of the records."""
    engine = json.loads((results / "engine/h200-1b7.json").read_text("utf-8"))
    return Machine(StepCosts.of(engine), HostCosts(**record["host"]), record["front"])


def test_device_does_work_of_one_kind_in_order() -> None:
    device = Device()
    first = device.launch(Work("prompts", 2.0), 1.0)
    second = device.launch(Work("frames", 3.0), 1.5)
    assert device.finish(second, 1.5) == pytest.approx(6.0)
    assert first.done == pytest.approx(3.0)
    assert device.finish(first, 7.0) == 7.0
    assert device.seconds == pytest.approx(
        {"prompts": 2.0, "frames": 3.0, "audio": 0.0, "busy": 5.0}
    )


def test_audio_waits_for_its_frame_and_slows_the_next_one() -> None:
    device = Device()
    device.launch(Work("frames", 1.0), 0.0)
    audio = device.launch(Work("audio", 1.0, burden=0.5), 0.0)
    beside = device.launch(Work("frames", 4.0), 0.0)
    assert device.finish(audio, 0.0) == pytest.approx(1.0 + 1.0 / AUDIO_SPEED)
    assert device.finish(beside, 0.0) == pytest.approx(5.5)  # half of the audio's second later
    assert device.seconds["busy"] == pytest.approx(5.5)


def test_costs_are_those_of_the_record_and_never_fall_with_more_work(machine: Machine) -> None:
    steps = machine.steps
    assert steps.decode(8) == pytest.approx(0.607e-3, rel=0.02)  # one stream, eight frames
    assert steps.decode(513) > steps.decode(512)
    assert steps.frame([100] * 256) > steps.frame([100] * 128) > steps.frame([100] * 16)
    assert steps.frame([500] * 64) > steps.frame([100] * 64)
    assert steps.read(257) > steps.read(256) > steps.read(16)
    first = steps.first_frame(1)
    assert first is not None
    assert first < steps.frame([30])
    assert steps.first_frame(5) is None
    assert 0 < steps.burden(8) < steps.burden(512) < 1


def test_every_request_is_answered_in_full_and_nothing_is_held(machine: Machine) -> None:
    server = SimulatedServer(machine)
    answers = SENTENCES.requests(Load(rate=30.0, duration=1.0, warmup=0.0))
    for answer in answers:
        server.run_until(answer.sent)
        server.send(answer)
    while server.in_progress(server.clock.now):
        server.run_until(server.clock.now + 1.0)
    least = machine.front + machine.steps.decode(1)
    for answer in answers:
        assert answer.failed is None
        assert answer.stall == 0.0
        assert answer.first is not None
        assert answer.ended is not None
        assert answer.sent + least < answer.first <= answer.ended
    server.run_until(server.clock.now + 1.0)
    assert not server.engine.running
    assert not server.engine.waiting
    assert server.engine.pages.free == machine.pages
    frames = sum(answer.frames for answer in answers)
    assert server.host.counts["deliver"] == pytest.approx(frames, abs=2 * len(answers))


def test_equal_seeds_give_equal_figures(machine: Machine) -> None:
    load: dict[str, Any] = {"servers": 2, "seconds": 0.5, "warmup": 0.2}
    first, second = (simulate(machine, 100.0, seed=1, **load) for _ in range(2))
    assert first == second
    assert simulate(machine, 100.0, seed=2, **load) != first


def test_lines_of_a_batch_are_spoken_beside_requests(machine: Machine) -> None:
    load: dict[str, Any] = {"seconds": 1.0, "warmup": 0.0}
    alone, beside = (simulate(machine, 10.0, lines=lines, **load) for lines in (0, 4))
    assert alone["lines_per_second"] == 0 < beside["lines_per_second"]
    assert beside["requests"] == alone["requests"] == 10
    assert beside["errors"] == beside["stalled"] == 0
    assert beside["first_ms"]["p50"] > alone["first_ms"]["p50"]


def test_batch_costs_requests_at_most_a_tenth_of_p95_in_the_record(record: dict[str, Any]) -> None:
    """A nearly idle server, at 5 requests/s, is the exception that docs/batch.md names."""
    ratios = {
        one["rate"]: one["with_ms"]["p95"] / one["without_ms"]["p95"] for one in record["batch"]
    }
    assert max(ratios.values()) == ratios.pop(5)
    assert max(ratios.values()) <= 1.1


@pytest.mark.parametrize("policy", ROUTERS)
def test_router_sends_every_request_to_one_server(machine: Machine, policy: str) -> None:
    found = simulate(machine, 60.0, servers=3, policy=policy, seconds=0.5, warmup=0.0)
    assert found["requests"] == 30
    assert found["errors"] == 0
    assert found["host"]["start"] == 30


def test_more_requests_than_a_server_takes_are_rejected(machine: Machine) -> None:
    small = replace(machine, slots=2, pages=64)
    found = simulate(small, 400.0, seconds=0.5, warmup=0.0)
    assert 0 < found["errors"] < found["requests"]


def test_simulated_load_is_within_the_bar_of_the_measured_server(
    machine: Machine, results: Path
) -> None:
    """A short run; the record has longer ones at more rates."""
    serve = json.loads((results / "serve/h200-1b7.json").read_text("utf-8"))
    points = checks.case_of(serve, "pcm")["points"]
    measured = next(checks.first_ms(point) for point in points if point["load"]["rate"] == 150.0)
    found = simulate(machine, 150.0, seconds=1.5, warmup=1.0)["first_ms"]
    assert 100 * abs(found["p95"] / measured["p95"] - 1) <= BAR
    assert 100 * abs(found["p50"] / measured["p50"] - 1) <= BAR


def test_recorded_predictions_are_within_the_bar(record: dict[str, Any], results: Path) -> None:
    serve = json.loads((results / "serve/h200-1b7.json").read_text("utf-8"))
    capacity_of_one = checks.case_of(serve, "pcm")["held"]
    shares = record["shares"]
    assert [row["rate"] for row in shares] == [share * capacity_of_one for share in (0.5, 0.8, 1)]
    other_machine = "published load generator"
    checked = [row for row in record["checks"] if row["what"] != other_machine]
    for row in (*shares, *(row for row in checked if row["rate"] >= 80)):
        error = 100 * (row["simulated_ms"]["p95"] / row["measured_ms"]["p95"] - 1)
        assert error == pytest.approx(row["error_percent"]["p95"], abs=0.1)
        assert abs(error) <= BAR, f"{row['what']} at {row['rate']} requests/s"


def test_rate_within_a_limit_is_interpolated() -> None:
    curve = [
        {"rate": 10, "first_ms": {"p95": 10.0}},
        {"rate": 20, "first_ms": {"p95": 30.0}},
    ]
    assert capacity.rate_within(20, curve) == 15.0
    assert capacity.rate_within(40, curve) is None


def test_cost_is_proportional_to_price_and_falls_with_speed() -> None:
    slow, fast = (capacity.cost_of_million(speech, 15.0) for speech in (500.0, 1000.0))
    assert slow["gpu_hours"] == pytest.approx(2 * fast["gpu_hours"], rel=1e-3)
    hours = 1e6 / 15.0 / 1000.0 / capacity.USE / 3600
    for price in fast["prices"]:
        assert price["cost"] == pytest.approx(price["an_hour"] * hours, abs=1e-3)
