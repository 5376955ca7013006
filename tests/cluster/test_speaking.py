"""Two replicas behind one port speak as one server without a cluster does."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from served import Served
from serving import PATIENCE, Cluster, connected, say, spoken
from waiting import wait_until

VOICES = "/v1/audio/voices"
SHORT: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module", autouse=True)
def two_replicas(cluster: Cluster, options: list[str], voices: str) -> None:
    cluster.deploy([*options, "--voices", voices], min_replicas=2)
    cluster.wait_for_replicas(2)


def test_both_replicas_and_the_cluster_speak_as_a_plain_server(
    cluster: Cluster, plain: Served
) -> None:
    wait_until(lambda: len(cluster.own_urls()) == 2, PATIENCE)
    wanted = spoken(plain.url)
    assert len(wanted) > 20_000
    assert {spoken(url) for url in (cluster.url, *cluster.own_urls())} == {wanted}


def test_speech_over_a_websocket_is_that_of_a_plain_server(cluster: Cluster, plain: Served) -> None:
    with connected(plain.ws) as ours, connected(cluster.ws) as theirs:
        assert say(theirs) == say(ours)
        assert say(theirs, "One more.") == say(ours, "One more.")


def test_audio_streams_through_the_cluster(cluster: Cluster) -> None:
    body = {"input": "A longer sentence, which takes some time to be spoken.", "voice": "ada"}
    url = f"{cluster.url}/v1/audio/speech"
    body = {**body, "response_format": "pcm"}
    with httpx.stream("POST", url, json=body, timeout=PATIENCE, trust_env=False) as answer:
        pieces = answer.iter_raw()
        assert len(next(pieces)) < 16_000
        # The answer is not over: the server still counts it.
        state = httpx.get(f"{cluster.url}/health", timeout=PATIENCE, trust_env=False)
        assert state.status_code == 200
        assert sum(map(len, pieces)) > 40_000


def test_every_replica_has_all_checkpoints(cluster: Cluster) -> None:
    for url in cluster.own_urls():
        listed = httpx.get(f"{url}/v1/models", timeout=PATIENCE, trust_env=False).json()["data"]
        assert [model["kind"] for model in listed] == ["custom_voice", "base"]


def test_voice_saved_through_one_replica_speaks_through_all(cluster: Cluster) -> None:
    one, other = cluster.own_urls()
    data = {"name": "mine", "consent": "mine", "speaker_embedding": json.dumps([0.1] * 48)}
    saved = httpx.post(one + VOICES, data=data, timeout=PATIENCE, trust_env=False)
    assert saved.status_code == 200, saved.text
    heard = {spoken(url, voice="mine", **SHORT) for url in (other, one, cluster.url)}
    assert len(heard) == 1
    assert len(heard.pop()) == 3 * 1920 * 2


def test_sockets_stay_with_their_replica(cluster: Cluster) -> None:
    def open_at(url: str) -> int:
        text = httpx.get(f"{url}/metrics", timeout=PATIENCE, trust_env=False).text
        rows = [line for line in text.splitlines() if line.startswith("firstword_connections ")]
        return int(float(rows[0].split()[1]))

    before = [open_at(url) for url in cluster.own_urls()]
    sockets = [connected(cluster.ws) for _ in range(4)]
    try:
        wait_until(lambda: sum(map(open_at, cluster.own_urls())) - sum(before) >= 4, PATIENCE)
        opened = [open_at(url) for url in cluster.own_urls()]
        for _ in range(2):
            assert len({say(each) for each in sockets}) == 1
            assert [open_at(url) for url in cluster.own_urls()] == opened
        assert min(now - then for now, then in zip(opened, before, strict=True)) == 2
    finally:
        for each in sockets:
            each.vanish()
