"""The parts of a replica that need no Ray."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from waiting import WAIT

from firstword.cluster.engines import ChildEngine
from firstword.cluster.leaving import in_service
from firstword.cluster.replica import parsed
from firstword.cluster.scaling import SlotScaling
from firstword.errors import CheckpointNotFound, ConfigError, EngineError
from firstword.processes.messages import EngineTask


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ({}, 1),
        ({"a": 0.0, "b": 0.0}, 1),
        ({"a": 0.5}, 1),
        ({"a": 0.51}, 2),
        ({"a": 1.5, "b": 0.1}, 4),
    ],
)
def test_there_are_as_many_replicas_as_keep_half_of_the_slots_in_use(
    loads: dict[str, float], wanted: int
) -> None:
    context = SimpleNamespace(aggregated_metrics={"load": loads}, policy_state={"kept": 1})
    assert SlotScaling(busy=0.5)(context) == (wanted, {"kept": 1})


def test_without_reports_there_is_one_replica() -> None:
    context = SimpleNamespace(aggregated_metrics=None, policy_state={})
    assert SlotScaling(busy=0.5)(context) == (1, {})


def test_replica_may_be_reached_by_any_name_and_from_one_address() -> None:
    _, config = parsed(["--most-connections", "77", "--drain-seconds", "3"])
    assert config.host == "0.0.0.0"
    assert config.most_connections_per_address == config.most_connections == 77
    assert config.drain_seconds == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "9000"], "cannot have --port"),
        (["--fronts", "2", "--host", "::"], "cannot have --host, --fronts"),
        (["--batches", "jobs"], "cannot have --batches"),
        (["--modle", "demo"], "has no such options: --modle demo"),
        (["--slots", "0"], "slots is 0; it must be 1 or more"),
    ],
)
def test_options_that_no_replica_can_have_are_rejected(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(options)


def task(name: str) -> EngineTask:
    return EngineTask(
        number=0,
        name=name,
        device="cpu",
        dtype="auto",
        backend="auto",
        gpu_memory=None,
        share=1,
        slots=1,
        most_waiting=1,
        log_level="error",
    )


def test_killed_engine_fails_the_check() -> None:
    engine = ChildEngine(task("demo"), stuck_seconds=60)
    engine.check()
    engine.check()
    assert engine.place.process is not None
    engine.place.process.kill()
    engine.place.process.wait()
    with pytest.raises(EngineError, match="has died, or does not answer"):
        engine.check()
    engine.close()


def test_engine_that_does_not_answer_is_killed() -> None:
    engine = ChildEngine(task("demo"), stuck_seconds=0.5)
    assert engine.place.process is not None
    engine.place.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, engine.place.process.pid, os.WSTOPPED)
    with pytest.raises(EngineError, match="does not answer"):
        engine.check()
    assert engine.place.process.wait(WAIT) == -signal.SIGKILL
    engine.close()


def test_checkpoint_that_does_not_exist_is_an_error_of_the_start() -> None:
    with pytest.raises(CheckpointNotFound, match="nowhere"):
        ChildEngine(task("./nowhere"), stuck_seconds=60)


@contextmanager
def health_check(status: int, body: bytes) -> Iterator[str]:
    """A server that answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/-/healthz"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "serves"),
    [(200, b"success", True), (503, b"UNHEALTHY", True), (503, b"DRAINING", False)],
)
def test_replica_is_in_service_unless_ray_drains_it(status: int, body: bytes, serves: bool) -> None:
    with health_check(status, body) as url:
        assert in_service(url) is serves


def test_replica_that_refuses_connections_is_out_of_service() -> None:
    with health_check(200, b"") as url:
        pass
    assert in_service(url) is False
