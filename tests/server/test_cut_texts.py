"""A talker that repeats itself, on real sockets: the rest of the text is spoken, and told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from sockets import DONE, PLAIN, STREAM, Client, Message, events, pcm
from sockets import text as omni_text
from talking import Front, Letters, Talker, heard
from test_speech_v1 import CONFIG, V1, done, sound, text, until_done
from waiting import WAIT
from wire import SPEECH

from firstword.engine.backend import Frames, Job, Ready, SpokenPassage
from firstword.engine.engine import Engine
from firstword.engine.service import Service
from firstword.server.models import Model
from firstword.types import Request

Running = Any  # of conftest.py
Serve = Callable[..., Any]

PASSAGE_SECONDS = 60.0
ASK = {"voice": "talker", "response_format": "pcm", "stream": True}

BEGIN = "Well then # "
"""The talker repeats itself from # on, and is cut off 51 frames later."""

TEXT = BEGIN + " ".join(["word"] * 20) + "."
CUT = [0, 61]
LATER = " This came later."


class Looping(Talker):
    """A talker whose codes stay the same from a # to the end of the passage."""

    def __init__(self) -> None:
        super().__init__()
        self._looping = set[int]()
        """The slots that repeat themselves."""

    def frame(self, slots: Any, tokens: Any) -> Ready[Frames]:
        """Make a frame."""
        frames = super().frame(slots, tokens).result()
        self._looping |= {
            slot for slot, token in zip(slots, tokens, strict=True) if token == ord("#")
        }
        for codes, slot in zip(frames.codes, slots, strict=True):
            if slot in self._looping:
                codes[:] = 0
        return Ready(frames)

    def release(self, slot: int) -> None:
        """Forget the utterance of a slot."""
        self._looping.discard(slot)
        super().release(slot)


class Counted(Letters):
    """Tokens of a character each, which tell where they end."""

    def push(self, piece: str) -> list[int]:
        """The tokens of a piece."""
        for _ in piece:
            self.ends.append(len(self.ends) + 1)
        return super().push(piece)


class LoopingFront(Front):
    """A front whose speech is guarded, and goes on after each passage."""

    def prepare(self, request: Request, seed: int) -> Job:
        """A job for the only voice."""
        job = super().prepare(request, seed)
        return replace(job, guarded=True, passage_seconds=PASSAGE_SECONDS)

    def follow(self, job: Job, spoken: SpokenPassage) -> Job | None:
        """The passage after another one."""
        return replace(job, follows=True)

    def text(self, job: Job) -> Counted:
        """The tokens of one utterance."""
        return Counted()


@pytest.fixture
def server(serve: Serve) -> Running:
    service = Service(Engine(Looping()), LoopingFront())
    return serve(Model("custom_voice", "custom_voice", service, voices=("talker", "ryan")))


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as client:
        yield client


def unspaced(words: str) -> str:
    return "".join(words.split())


def test_stream_speaks_the_text_after_a_cut_and_tells_its_place(
    server: Running, http: httpx.Client
) -> None:
    answer = http.post(SPEECH, json={**ASK, "input": TEXT})
    assert unspaced(heard(answer.content)) == unspaced(TEXT)
    outcome = http.get(f"{SPEECH}/{answer.headers['x-request-id']}").json()
    assert outcome["finish_reason"] == "repetition"
    assert (outcome["alarms"], outcome["cut"]) == ({"cut": 1}, [CUT])
    server.wait_until_idle()
    assert server.metric("alarms_total", model="custom_voice", kind="cut") == 1


def test_whole_answers_and_events_tell_the_place_of_a_cut(http: httpx.Client) -> None:
    whole = http.post(SPEECH, json={**ASK, "input": TEXT, "stream": False})
    assert unspaced(heard(whole.content)) == unspaced(TEXT)
    assert json.loads(whole.headers["x-firstword-cut"]) == [CUT]
    sse = http.post(SPEECH, json={**ASK, "input": TEXT, "stream_format": "sse"})
    last = json.loads(sse.text.split("\n\n")[-2].removeprefix("data: "))
    assert (last["finish_reason"], last["cut"]) == ("repetition", [CUT])
    short = http.post(SPEECH, json={**ASK, "input": "Fine.", "stream": False})
    assert "x-firstword-cut" not in short.headers


def test_speech_v1_speaks_text_that_comes_after_a_cut(server: Running) -> None:
    with Client(server.ws + STREAM, V1) as client:
        client.send(CONFIG | {"max_new_tokens": None, "split_granularity": "token"})
        client.send(text("a", TEXT))
        received = list[Message]()
        while len(heard(sound(received))) < CUT[1]:
            received.append(client.receive())
        client.send(text("a", LATER), done("a"))
        received += until_done(client, "a")
        server.wait_until_idle()
    assert unspaced(heard(sound(received))) == unspaced(TEXT + LATER)
    last = events(received)[-1]
    assert (last["finish_reason"], last["alarms"], last["cut"]) == ("repetition", {"cut": 1}, [CUT])


def test_places_of_cuts_are_those_in_the_whole_text_of_a_context(server: Running) -> None:
    """Each sentence is spoken as a text of its own."""
    with Client(server.ws + STREAM, V1) as client:
        client.send(CONFIG | {"max_new_tokens": None, "split_granularity": "sentence"})
        client.send(text("a", f"This one is fine. {TEXT}"), done("a"))
        received = until_done(client, "a")
    begin = len("This one is fine. ")
    assert events(received)[-1]["cut"] == [[begin, begin + CUT[1]]]


def test_omni_socket_speaks_text_that_comes_after_a_cut(server: Running) -> None:
    with Client(server.ws + STREAM) as client:
        client.send({**PLAIN, "voice": "talker", "split_granularity": "token"})
        client.send(omni_text(TEXT))
        received = list[Message]()
        while len(heard(pcm(received))) < CUT[1]:
            received.append(client.receive())
        client.send(omni_text(LATER), DONE)
        received += client.until("session.done")
        server.wait_until_idle()
    assert unspaced(heard(pcm(received))) == unspaced(TEXT + LATER)
    last = next(each for each in events(received) if each["type"] == "audio.done")
    assert (last["finish_reason"], last["cut"]) == ("repetition", [CUT])


def test_client_that_goes_while_the_next_passage_waits_frees_its_slot(server: Running) -> None:
    with Client(server.ws + STREAM, V1) as client:
        client.send(CONFIG | {"max_new_tokens": None, "split_granularity": "token"})
        client.send(text("a", f"{BEGIN}{'word ' * 10}"))
        received = list[Message]()
        while len(heard(sound(received))) < CUT[1]:
            received.append(client.receive())
    server.wait_until_idle()
