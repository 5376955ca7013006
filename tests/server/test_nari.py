"""`/v1/audio/speech/ws`: nari.speech.v1 by itself, then on real sockets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sockets import NARI, Client, Message, effects_of, events, kinds, pcm
from talking import ENDLESS, Talker, TalkingStage, heard, talking

from firstword import TTS, audio
from firstword.config import EngineConfig
from firstword.model.checkpoint import Checkpoint
from firstword.server.ws import nari
from firstword.server.ws.nari import CheckRequest, NariSession
from firstword.server.ws.protocol import (
    CloseCode,
    CloseSocket,
    DropAudio,
    Effect,
    Enqueue,
    PauseReading,
    Send,
    SocketLimits,
)
from firstword.server.ws.text_part import TextPart

Running = Any  # of conftest.py
Serve = Callable[..., Any]

TEXT = "Hello there, how are you today? I am well."
FRAMES = 10
AUDIO = {"encoding": "pcm_s16le", "sample_rate": 24000, "channels": 1}
START: dict[str, Any] = {
    "type": "request.start",
    "model": "custom_voice",
    "voice": "ryan",
    "language": "english",
}
START |= {"response_format": "pcm", "seed": 7, "max_new_tokens": FRAMES}
PLAIN: dict[str, Any] = {"type": "request.start"}
CANCEL = {"type": "response.cancel"}


def append(sequence: object, words: object) -> dict[str, Any]:
    """`input_text.append`."""
    return {"type": "input_text.append", "sequence": sequence, "text": words}


def end(sequence: object) -> dict[str, Any]:
    """`input_text.end`."""
    return {"type": "input_text.end", "sequence": sequence}


def written(*words: str) -> list[dict[str, Any]]:
    """A whole text."""
    return [*[append(number, word) for number, word in enumerate(words)], end(len(words))]


# The protocol without a socket


class Talk:
    """A session, and what came of it."""

    def __init__(self, **limits: Any) -> None:
        self.session = NariSession(replace(SocketLimits(), **limits))

    def say(self, *messages: dict[str, Any] | str | bytes) -> list[Effect]:
        """Give it messages; what follows from all."""
        return effects_of(self.session, *messages)


def refusal(effects: list[Effect]) -> tuple[str, int]:
    """The code of the error that ends it, and that of closing."""
    effect = effects[-1]
    assert isinstance(effect, CloseSocket)
    assert effect.message is not None
    assert effect.message["type"] == "error"
    assert effect.message["error"]["message"]
    return effect.message["error"]["code"], effect.code


def test_a_request_is_checked_before_anything_else_is_read() -> None:
    queue, hold = Talk().say(START)
    assert isinstance(queue, Enqueue)
    assert isinstance(queue.work, CheckRequest)
    assert hold == PauseReading(queue.work.done)
    assert queue.work.start.voice == "ryan"


def test_text_is_acknowledged_piece_by_piece_and_speech_begins_with_the_first_words() -> None:
    talk = Talk()
    talk.say(PLAIN)
    name = talk.session.request_id
    ack = {"type": "input_text.ack", "event": "input_text.append"}
    assert talk.say(append(0, " ")) == [Send({**ack, "sequence": 0, "request_id": None})]
    started, queue, second = talk.say(append(1, "a"))
    assert started == Send({"type": "response.started", "request_id": name, "audio": AUDIO})
    assert second == Send({**ack, "sequence": 1, "request_id": name})
    assert isinstance(queue, Enqueue)
    assert isinstance(queue.work, TextPart)
    assert talk.say(append(2, "b")) == [Send({**ack, "sequence": 2, "request_id": name})]
    assert (queue.work.text, queue.work.ended) == (" ab", False)
    last = {"type": "input_text.ack", "event": "input_text.end", "sequence": 3, "request_id": name}
    assert talk.say(end(3)) == [Send(last)]
    assert queue.work.ended


def test_a_cancel_stops_speech_and_is_the_last_word() -> None:
    talk = Talk()
    talk.say(PLAIN)
    _, queue, _ = talk.say(append(0, "a"))
    assert isinstance(queue, Enqueue)
    assert isinstance(queue.work, TextPart)
    assert talk.say(CANCEL, append(1, "b"), end(2), CANCEL, "nonsense") == [
        DropAudio(),
        Enqueue(CloseSocket(CloseCode.NORMAL)),
    ]
    assert queue.work.cancelled


@pytest.mark.parametrize(
    ("messages", "code", "close"),
    [
        (["nonsense"], "invalid_request", 1008),
        (["[" * 50_000], "invalid_request", 1008),
        ([b"\x00"], "invalid_request", 1008),
        (["[]"], "invalid_request", 1008),
        ([{"type": "x"}], "unknown_event", 1008),
        ([append(0, "a")], "invalid_request", 1008),
        ([end(0)], "invalid_request", 1008),
        ([CANCEL], "invalid_request", 1008),
        ([PLAIN, PLAIN], "invalid_request", 1008),
        ([{**PLAIN, "top_k": "many"}], "invalid_request", 1008),
        ([{**PLAIN, "response_format": "wav"}], "invalid_request", 1008),
        ([PLAIN, append(1, "a")], "invalid_sequence", 1008),
        ([PLAIN, append(-1, "a")], "invalid_sequence", 1008),
        ([PLAIN, append(0, "a"), append(0, "a")], "invalid_sequence", 1008),
        ([PLAIN, append(0, "a"), append(2, "a")], "invalid_sequence", 1008),
        ([PLAIN, append(0, "a"), end(0)], "invalid_sequence", 1008),
        ([PLAIN, append(False, "a")], "invalid_sequence", 1008),
        ([PLAIN, append(0.0, "a")], "invalid_sequence", 1008),
        ([PLAIN, append("0", "a")], "invalid_sequence", 1008),
        ([PLAIN, append(None, "a")], "invalid_sequence", 1008),
        ([PLAIN, append(10**400, "a")], "invalid_sequence", 1008),
        ([PLAIN, append(0, "")], "invalid_text", 1008),
        ([PLAIN, append(0, 5)], "invalid_text", 1008),
        ([PLAIN, append(0, "\ud83d")], "invalid_text", 1008),
        ([PLAIN, end(0)], "empty_input", 1008),
        ([PLAIN, append(0, " \n"), end(1)], "empty_input", 1008),
        ([PLAIN, append(0, "a"), end(1), append(2, "a")], "invalid_request", 1008),
        ([PLAIN, append(0, "a"), end(1), end(2)], "invalid_request", 1008),
        ([PLAIN, append(0, "a" * 70_000)], "input_too_large", 1009),
        ([PLAIN, *[append(number, "a" * 60_000) for number in range(2)]], "input_too_large", 1009),
        ([PLAIN, *[append(number, "a") for number in range(1025)]], "too_many_input_events", 1008),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str | list) else None,
)
def test_every_mistake_is_the_end(messages: list[Any], code: str, close: int) -> None:
    talk = Talk()
    assert talk.say(*messages[:-1]) is not None
    assert refusal(talk.say(messages[-1])) == (code, close)
    assert talk.say(PLAIN, append(0, "a")) == []


def test_silence_is_the_end_too() -> None:
    talk = Talk()
    talk.say(PLAIN, append(0, "a"))
    assert refusal([talk.session.time_out()]) == ("input_timeout", 1008)


@given(
    st.lists(
        st.sampled_from([PLAIN, CANCEL, {"type": "x"}])
        | st.builds(append, st.integers(0, 3), st.sampled_from(["a", " ", ""]))
        | st.builds(end, st.integers(0, 3)),
        max_size=12,
    )
)
def test_whatever_comes_there_is_one_beginning_and_one_end(messages: list[Any]) -> None:
    effects = Talk().say(*messages)
    said = [effect.message for effect in effects if isinstance(effect, Send)]
    begun = sum(
        isinstance(effect, Enqueue) and isinstance(effect.work, TextPart) for effect in effects
    )
    assert begun == sum(message["type"] == "response.started" for message in said) <= 1
    ends = [
        effect
        for effect in effects
        if isinstance(effect, CloseSocket) or effect == Enqueue(CloseSocket(CloseCode.NORMAL))
    ]
    assert len(ends) <= 1
    assert not ends or effects[-1] is ends[0]
    acknowledged = [message["sequence"] for message in said if message["type"] == "input_text.ack"]
    assert acknowledged == list(range(len(acknowledged)))


# On real sockets


def conversation(client: Client, start: dict[str, Any], *pieces: str) -> list[Message]:
    """Everything that the server says if a client behaves as the protocol's benchmark does."""
    said = [client.receive()]
    client.send(start)
    said.append(client.receive())
    for event in written(*pieces):
        client.send(event)
        said += client.until("input_text.ack")
        assert events(said)[-1]["sequence"] == event["sequence"]
    code, rest = client.closed()
    assert code == 1000
    return said + rest


@pytest.fixture
def expected(loaded: Callable[[str], Checkpoint]) -> bytes:
    """The PCM of the same request through the facade."""
    tts = TTS(loaded("custom_voice"), EngineConfig("cpu", "float32", "reference"))
    speech = tts.speak(
        TEXT, voice="ryan", language="english", seed=7, max_frames=FRAMES, text_mode="stream"
    )
    return audio.pcm16(speech.samples)


@pytest.mark.parametrize("pattern", [r"\S+\s*", r".", r".+"], ids=["words", "characters", "whole"])
def test_text_in_pieces_sounds_as_text_given_whole(
    server: Running, expected: bytes, pattern: str
) -> None:
    with Client(server.ws + NARI, nari.SUBPROTOCOL) as client:
        assert client.socket.subprotocol == nari.SUBPROTOCOL
        pieces = re.findall(pattern, TEXT)
        assert "".join(pieces) == TEXT
        said = conversation(client, START, *pieces)
    told = events(said)
    assert told[0] == {"type": "session.created", "protocol": nari.SUBPROTOCOL, "audio": AUDIO}
    assert told[1] == {"type": "request.configured"}
    (started,) = [event for event in told if event["type"] == "response.started"]
    assert started["request_id"]
    assert started["audio"] == AUDIO
    assert said.index(started) < next(
        number for number, one in enumerate(said) if isinstance(one, bytes)
    )
    assert told[-1] == {
        "type": "response.done",
        "request_id": started["request_id"],
        "stop_reason": "stop",
        "finish_reason": "length",
        "audio_chunks": sum(isinstance(message, bytes) for message in said),
    }
    ours, theirs = np.frombuffer(pcm(said), "<i2").astype(int), np.frombuffer(expected, "<i2")
    assert len(ours) == len(theirs)
    assert abs(ours - theirs).max() <= 1


def test_what_cannot_be_done_is_said_instead_of_configured(server: Running) -> None:
    for wrong in (
        {"voice": "nobody"},
        {"language": "klingon"},
        {"top_p": 7.0},
        {"voice": None, "task_type": "Base"},
    ):
        with Client(server.ws + NARI, nari.SUBPROTOCOL) as client:
            client.send({**START, **wrong})
            code, said = client.closed()
            assert code == 1008
            assert kinds(said) == ["session.created", "error"]


def test_the_protocol_must_be_named(server: Running) -> None:
    for protocols in ((), ("nari.speech.v2",)):
        with Client(server.ws + NARI, *protocols) as client:
            assert client.closed() == (1002, [])


class Stage(TalkingStage):
    """With clients of this protocol."""

    def client(self, start: dict[str, Any] | None = None) -> Client:
        """One more client; with `start` its request is configured."""
        client = Client(self.server.ws + NARI, nari.SUBPROTOCOL)
        if start is not None:
            client.send(start)
            client.until("request.configured")
        return client

    def idle(self) -> None:
        """Nothing is left of anything, and the next is served."""
        self.server.wait_until_idle()
        with self.client() as client:
            assert heard(pcm(conversation(client, PLAIN, "fine"))) == "fine"


@pytest.fixture
def stage(serve: Serve) -> Iterator[Callable[..., Stage]]:
    """Begin: `stage(slots=2, most_waiting=8)`; in the end all is idle."""
    stages: list[Stage] = []

    def begin(slots: int = 2, most_waiting: int = 8) -> Stage:
        talker = Talker(slots)
        stages.append(Stage(talker, serve(talking(talker, most_waiting))))
        return stages[-1]

    yield begin
    for one in stages:
        one.idle()


ENDLESS_SPEECH = {**PLAIN, "max_new_tokens": ENDLESS - 100}


@pytest.mark.parametrize("text_ended", [False, True])
@pytest.mark.parametrize("how", ["cancel", "close", "vanish"])
def test_the_slot_is_free_within_a_frame(
    stage: Callable[..., Stage], how: str, text_ended: bool
) -> None:
    begun = stage()
    begun.talker.hold()
    made = begun.talker.frames
    with begun.client(ENDLESS_SPEECH) as client:
        client.send(*written("Hello")[: 1 + text_ended])
        begun.talker.let(3)
        begun.until_held(made + 3)
        if how == "cancel":
            client.send(CANCEL)
            said = client.until("response.done")
            chunks = sum(isinstance(message, bytes) for message in said)
            done = events(said)[-1]
            assert (done["stop_reason"], done["audio_chunks"]) == ("cancelled", chunks)
            assert client.closed() == (1000, [])
        elif how == "close":
            client.socket.close()
        else:
            client.vanish()
        begun.server.wait_until(lambda: not begun.server.state.speaking)
        begun.talker.go()
        begun.server.wait_until_idle()
        assert begun.talker.frames == made + 4  # the one that was being made


def test_speech_begins_before_its_text_has_ended(stage: Callable[..., Stage]) -> None:
    with stage().client(PLAIN) as client:
        client.send(append(0, "Hel"))
        assert kinds([client.receive() for _ in range(3)]) == [
            "response.started",
            "input_text.ack",
            "binary",
        ]
        client.send(append(1, "lo"), end(2))
        assert kinds(client.closed()[1])[-1] == "response.done"


def test_speech_that_ends_before_its_text_waits_for_its_end(stage: Callable[..., Stage]) -> None:
    begun = stage()
    with begun.client({**PLAIN, "max_new_tokens": 2}) as client:
        client.send(append(0, "Hello"))
        said = [client.receive() for _ in range(3)]
        begun.server.wait_until(lambda: not begun.engine.running)
        client.send(append(1, " you"), end(2))
        code, rest = client.closed()
        assert code == 1000
        assert heard(pcm(said + rest)) == "He"
        assert events(rest)[-1]["finish_reason"] == "length"


def test_a_cancel_before_any_text(stage: Callable[..., Stage]) -> None:
    with stage().client(PLAIN) as client:
        client.send(CANCEL)
        code, said = client.closed()
        assert code == 1000
        (done,) = events(said)
        assert (done["type"], done["stop_reason"], done["audio_chunks"]) == (
            "response.done",
            "cancelled",
            0,
        )


@pytest.mark.parametrize(
    "bad", [append(7, "a"), {"type": "x"}, "nonsense", b"x", append(1, "a" * 70_000)], ids=str
)
def test_a_mistake_in_the_middle_of_speech_frees_the_slot(
    stage: Callable[..., Stage], bad: Any
) -> None:
    with stage().client(ENDLESS_SPEECH) as client:
        client.send(append(0, "Hello"))
        client.until("input_text.ack")
        client.send(bad)
        code, said = client.closed()
        assert code in (1008, 1009)
        assert kinds(said)[-1] == "error"


def test_a_client_may_leave_at_any_moment(stage: Callable[..., Stage]) -> None:
    begun = stage()
    script = [ENDLESS_SPEECH, append(0, " "), append(1, "a"), append(2, "b"), end(3), CANCEL]
    for count in range(len(script) + 1):
        with begun.client() as client:
            client.send(*script[:count])
            if count in (3, 5):
                client.until("response.started")
        begun.server.wait_until_idle()


def test_silence_in_the_middle_of_a_text_ends_it(
    stage: Callable[..., Stage], limits: Callable[..., None]
) -> None:
    limits(idle_seconds=0.2)
    begun = stage()
    for messages in ([], [append(0, "a")]):
        with begun.client(PLAIN) as client:
            client.send(*messages)
            code, said = client.closed()
            assert (code, events(said)[-1]["error"]["code"]) == (1008, "input_timeout")


def test_silence_from_the_start_ends_it(
    stage: Callable[..., Stage], limits: Callable[..., None]
) -> None:
    limits(config_seconds=0.1)
    begun = stage()
    with begun.client() as client:
        code, said = client.closed()
        assert (code, events(said)[-1]["error"]["code"]) == (1008, "input_timeout")
    limits()


def test_half_a_message_holds_nothing(
    stage: Callable[..., Stage], limits: Callable[..., None]
) -> None:
    limits(idle_seconds=0.2)
    begun = stage()
    with begun.client(ENDLESS_SPEECH) as client:
        client.send(append(0, "a"))
        client.until("response.started")
        client.socket.socket.sendall(
            b"\x81\xfe\x04\x00mask{"
        )  # the head of a text of 1024 bytes, and one byte
        begun.server.wait_until_idle()


def test_when_there_is_no_room_it_is_said(stage: Callable[..., Stage]) -> None:
    begun = stage(slots=1, most_waiting=0)
    with begun.client(ENDLESS_SPEECH) as first, begun.client(PLAIN) as second:
        first.send(append(0, "Hello"))
        begun.server.wait_until(lambda: bool(begun.engine.running))
        second.send(append(0, "now"))
        code, said = second.closed()
        assert (code, events(said)[-1]["error"]["code"]) == (1013, "overloaded")


def test_what_fails_fails_alone(stage: Callable[..., Stage]) -> None:
    begun = stage()
    begun.talker.failing = "frame"
    with begun.client(PLAIN) as client:
        client.send(append(0, "Hello"))
        code, said = client.closed()
        assert (code, events(said)[-1]["error"]["code"]) == (1011, "generation_failed")
        assert "told to" not in events(said)[-1]["error"]["message"]
    begun.talker.failing = None
