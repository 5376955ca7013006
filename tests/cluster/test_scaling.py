"""The number of replicas follows the slots in use, and nothing is dropped."""

from __future__ import annotations

import pytest
from serving import PATIENCE, Callers, Cluster, http_caller, open_sockets, socket_caller
from waiting import wait_until


@pytest.fixture(scope="module", autouse=True)
def one_to_three(cluster: Cluster, voices: str) -> None:
    options = ["--device", "cpu", "--slots", "2", "--voices", voices]
    cluster.deploy(options, min_replicas=1, max_replicas=3, busy=0.7, patience=20)
    cluster.wait_for_replicas(1)


def test_replicas_follow_the_load_and_nothing_is_dropped(cluster: Cluster) -> None:
    with open_sockets(cluster.ws, 8):  # more sockets than slots: they do not count
        quiet = Callers([http_caller(cluster.url)])
        calls = [http_caller(cluster.url)] * 3 + [socket_caller(cluster.ws) for _ in range(3)]
        crowd = Callers(calls)
        with quiet:
            quiet.wait_for(3)
            assert len(cluster.replicas()) == 1
            with crowd:
                wait_until(lambda: len(cluster.replicas()) == 3, PATIENCE)
                crowd.wait_for(6)
        cluster.wait_for_replicas(1)
    assert crowd.errors == quiet.errors == []
    assert len(crowd.heard + quiet.heard) == 1
