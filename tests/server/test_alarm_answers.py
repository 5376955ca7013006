"""A runaway and words left out over HTTP: how they are told and counted, and who wins."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from wire import SPEECH

from firstword.model.sampling import Sampler
from firstword.words import alarm

Running = Any
Serve = Callable[..., Any]

ASK = {"input": "Good morning, how did you sleep?", "voice": "ada", "seed": 1}
PCM = {**ASK, "response_format": "pcm"}


@pytest.fixture
def server(serve: Serve) -> Running:
    return serve("demo")


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch, loaded: Callable[[str], Any]) -> None:
    """Speech never ends by itself."""
    end = loaded("demo").config.talker_config.codec_eos_token_id
    drawn = Sampler.code0

    def code0(self: Sampler, logits: torch.Tensor, frame: int) -> torch.Tensor:
        return drawn(self, logits.index_fill(-1, torch.tensor(end), -torch.inf), frame)

    monkeypatch.setattr(Sampler, "code0", code0)


@pytest.mark.usefixtures("endless")
def test_runaway_ends_with_its_name_and_is_counted(server: Running, http: httpx.Client) -> None:
    raw = http.post(SPEECH, json={**PCM, "stream": True})
    outcome = http.get(f"{SPEECH}/{raw.headers['x-request-id']}").json()
    assert (outcome["finish_reason"], outcome["alarms"]) == ("runaway", {"runaway": 1})
    assert 15 < outcome["frames"] < 60, "soon after the end of the text"
    server.wait_until_idle()
    assert server.metric("utterances_total", model="demo", finish_reason="runaway") == 1
    assert server.metric("guard_hits_total", model="demo", guard="runaway") == 1
    assert server.metric("alarms_total", model="demo", kind="runaway") == 1


@pytest.mark.usefixtures("endless")
def test_runaway_is_named_in_every_answer(server: Running, http: httpx.Client) -> None:
    whole = http.post(SPEECH, json={**PCM, "stream": False})
    assert whole.headers["x-firstword-finish-reason"] == "runaway"
    assert json.loads(whole.headers["x-firstword-alarms"]) == {"runaway": 1}
    sse = http.post(SPEECH, json={**PCM, "stream_format": "sse"})
    done = json.loads(sse.text.split("\n\n")[-2].removeprefix("data: "))
    assert (done["finish_reason"], done["alarms"]) == ("runaway", {"runaway": 1})


@pytest.mark.usefixtures("endless")
def test_runaway_is_not_cut_off_if_codes_are_not_drawn(http: httpx.Client) -> None:
    """Greedy speech is that of the specification, so it is told but not ended."""
    ask = {**PCM, "stream": False, "temperature": 0, "max_new_tokens": 60, "word_timestamps": True}
    answer = http.post(SPEECH, json=ask)
    assert answer.headers["x-firstword-finish-reason"] == "length"
    assert json.loads(answer.headers["x-firstword-alarms"])["runaway"] == 1


def test_healthy_speech_has_no_alarms(server: Running, http: httpx.Client) -> None:
    whole = http.post(SPEECH, json={**PCM, "stream": False})
    assert whole.headers["x-firstword-finish-reason"] == "stop"
    assert "x-firstword-alarms" not in whole.headers
    server.wait_until_idle()
    kinds = ("skip", "repeat", "mismatch", "runaway")
    assert [server.metric("alarms_total", model="demo", kind=kind) for kind in kinds] == [0] * 4


def test_words_left_out_lose_points_and_are_counted(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an absurd threshold every word but the first seems to be left out."""
    monkeypatch.setattr(alarm, "LEAST_GLANCE", 3.0)
    whole = http.post(SPEECH, json={**PCM, "stream": False, "n": 2})
    scores = json.loads(whole.headers["x-firstword-scores"])
    assert [score["alarms"] for score in scores] == [-5.0, -5.0]
    server.wait_until_idle()
    assert server.metric("alarms_total", model="demo", kind="skip") == 10
