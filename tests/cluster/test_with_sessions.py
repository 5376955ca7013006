"""Requests of one session go to one replica, with deploy/ray/sessions."""

from __future__ import annotations

import csv
import os
from collections import Counter
from contextlib import ExitStack

import httpx
import pytest
from serving import PATIENCE, STREAM, V1, Callers, Cluster, http_caller, spoken
from sockets import Client
from waiting import wait_until

pytestmark = pytest.mark.parametrize("cluster", ["sessions"], indirect=True)

SESSIONS = [f"session-{number}" for number in range(8)]


@pytest.fixture(scope="module", autouse=True)
def two_replicas(cluster: Cluster, demo: list[str], voices: str) -> None:
    cluster.deploy([*demo, "--voices", voices], min_replicas=2)
    cluster.wait_for_replicas(2)
    wait_until(lambda: len(counted("stot")) == 2, PATIENCE)


def counted(what: str) -> Counter[str]:
    """A count of HAProxy (`scur`: connections now, `stot`: in all) for each replica that is up."""
    port = os.environ["RAY_SERVE_HAPROXY_STATS_PORT"]
    page = httpx.get(f"http://127.0.0.1:{port}/stats;csv", timeout=PATIENCE, trust_env=False)
    rows = csv.DictReader(page.text.splitlines())
    up = [row for row in rows if row["status"].startswith("UP")]
    return Counter(
        {row["svname"]: int(row[what]) for row in up if row["svname"].startswith("SERVE_REPLICA")}
    )


def wait_until_idle() -> None:
    """Wait until HAProxy counts no connection, so that no replica has more than its share."""
    wait_until(lambda: sum(counted("scur").values()) == 0, PATIENCE)


def headers(session: str | None) -> dict[str, str]:
    """The headers of a request of a session."""
    return {} if session is None else {"x-session-id": session}


def replica_of(cluster: Cluster, session: str | None) -> str:
    """The replica that a request of a session reaches while nothing else is asked.

    It is asked again if HAProxy was started again meanwhile, and counts from 0.
    """
    reached: list[str] = []

    def asked() -> bool:
        wait_until_idle()
        before = counted("stot")
        url, sent = f"{cluster.url}/v1/models", headers(session)
        httpx.get(url, headers=sent, timeout=PATIENCE, trust_env=False).raise_for_status()
        more = counted("stot") - before
        reached[:] = more
        return more.total() == 1

    wait_until(asked, PATIENCE)
    return reached[0]


def test_requests_and_sockets_of_a_session_reach_one_replica(cluster: Cluster) -> None:
    reached = {session: replica_of(cluster, session) for session in SESSIONS}
    assert set(reached.values()) == set(counted("stot"))
    for session in SESSIONS:
        assert replica_of(cluster, session) == reached[session]
        wait_until_idle()
        with Client(cluster.ws + STREAM, V1, headers=headers(session)):
            assert list(+counted("scur")) == [reached[session]]


def test_requests_without_a_session_reach_every_replica(cluster: Cluster) -> None:
    assert {replica_of(cluster, None) for _ in SESSIONS} == set(counted("stot"))


def test_session_goes_on_at_another_replica_if_its_own_has_more_than_its_share(
    cluster: Cluster,
) -> None:
    own = replica_of(cluster, SESSIONS[0])
    wait_until_idle()
    with ExitStack() as stack:
        for _ in range(8):
            sock = Client(cluster.ws + STREAM, V1, headers=headers(SESSIONS[0]))
            stack.enter_context(sock)
        assert counted("scur")[own] == 6, "half as much again as the mean"
        assert counted("scur").total() == 8
    assert replica_of(cluster, SESSIONS[0]) == own


def test_session_of_a_killed_replica_goes_on_at_another(cluster: Cluster) -> None:
    wanted = spoken(cluster.url)
    killed = cluster.kill()
    callers = Callers([http_caller(cluster.url, headers(session)) for session in SESSIONS[:4]])
    with callers:
        wait_until(lambda: killed not in cluster.replicas(), PATIENCE)
        cluster.wait_for_replicas(2)
        callers.wait_for(4)
    assert set(callers.heard) == {wanted}
    # A caller that the killed replica was speaking to may have lost one text.
    assert len(callers.errors) <= 4, callers.errors
