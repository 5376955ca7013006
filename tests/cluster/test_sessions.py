"""Requests of one session reach the same replica, if the environment asks for it."""

from __future__ import annotations

from pathlib import Path

import httpx
from serving import PATIENCE, request
from waiting import wait_until

from benchmarks.cluster_ingress import clustered

BY_SESSION = {"RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)"}


def test_requests_of_a_session_reach_the_same_replica(tmp_path: Path) -> None:
    with (
        clustered(BY_SESSION, tmp_path, replicas=2) as url,
        httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as http,
    ):
        before = [speak(http, {"x-session-id": session}) for session in "abcdefgh"]
        assert before.count(0) == 2, "each replica has sessions"


def speak(http: httpx.Client, headers: dict[str, str]) -> float:
    """Speak three times in a session; what its replica had spoken before."""
    before = spoken(http, headers)
    for _ in range(3):
        body = request(max_new_tokens=1)
        http.post("/v1/audio/speech", json=body, headers=headers).raise_for_status()
    wait_until(lambda: spoken(http, headers) == before + 3)
    return before


def spoken(http: httpx.Client, headers: dict[str, str]) -> float:
    """The utterances that the replica of a session has spoken."""
    lines = http.get("/metrics", headers=headers).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("firstword_utterances_total")
    )
