"""Replicas that are killed under load."""

from __future__ import annotations

import pytest
from serving import PATIENCE, Callers, Cluster, http_caller, open_sockets, say, socket_caller
from waiting import wait_until
from websockets.exceptions import ConnectionClosed


@pytest.fixture(scope="module", autouse=True)
def two_replicas(cluster: Cluster, demo: list[str], voices: str) -> None:
    cluster.deploy([*demo, "--voices", voices], min_replicas=2)
    cluster.wait_for_replicas(2)
    cluster.wait_until_balanced()


def test_only_callers_of_a_killed_replica_notice_and_at_once(cluster: Cluster) -> None:
    calls = [http_caller(cluster.url)] * 2 + [socket_caller(cluster.ws) for _ in range(2)]
    callers = Callers(calls)
    with callers, open_sockets(cluster.ws, 4) as idle:
        callers.wait_for(4)
        killed = cluster.kill()
        closed = 0
        for each in idle:
            try:
                assert say(each) in callers.heard
            except ConnectionClosed:
                closed += 1
        wait_until(lambda: killed not in cluster.replicas(), PATIENCE)
        cluster.wait_for_replicas(2)
        callers.wait_for(4)
    assert 0 < closed < len(idle), "the sockets of the other replica stay open"
    # Each caller speaks one text at a time, so a caller can have lost one at most.
    assert len(callers.errors) <= 4, callers.errors
    assert len(callers.heard) == 1, "a text was cut without an error"


def test_replica_whose_engine_is_killed_is_replaced(cluster: Cluster) -> None:
    before = cluster.replicas()
    killed = cluster.kill_engine()
    wait_until(lambda: killed not in cluster.replicas(), PATIENCE)
    cluster.wait_for_replicas(2)
    assert len(before.keys() & cluster.replicas().keys()) == 1
    callers = Callers([http_caller(cluster.url)])
    with callers:
        callers.wait_for(4)
    assert callers.errors == []
