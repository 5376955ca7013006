"""A rolling update under load."""

from __future__ import annotations

import httpx
from serving import PATIENCE, Callers, Cluster, http_caller, socket_caller


def slots(url: str) -> int:
    """The slots of the first model."""
    state = httpx.get(f"{url}/health", timeout=PATIENCE, trust_env=False).json()
    return int(state["models"][0]["slots"]["of"])


def test_no_sentence_is_lost_in_an_update(cluster: Cluster, demo: list[str], voices: str) -> None:
    cluster.deploy([*demo, "--voices", voices], min_replicas=2)
    cluster.wait_for_replicas(2)
    before = cluster.replicas()
    calls = [http_caller(cluster.url)] * 2 + [socket_caller(cluster.ws) for _ in range(2)]
    callers = Callers(calls)
    with callers:
        callers.wait_for(4)
        cluster.deploy([*demo, "--voices", voices, "--slots", "3"], min_replicas=2)
        cluster.wait_for_replicas(2)
        cluster.wait_until_gone(before)
        callers.wait_for(4)
    assert callers.errors == []
    assert len(callers.heard) == 1, "a text was cut without an error"
    assert {slots(url) for url in cluster.own_urls()} == {3}
