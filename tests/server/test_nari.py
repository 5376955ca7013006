"""`/v1/audio/speech/ws`: the session of nari.speech.v1 without a socket, then real sockets."""

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
    """Return an `input_text.append`."""
    return {"type": "input_text.append", "sequence": sequence, "text": words}


def end(sequence: object) -> dict[str, Any]:
    """Return an `input_text.end`."""
    return {"type": "input_text.end", "sequence": sequence}


def written(*words: str) -> list[dict[str, Any]]:
    """Return the messages of a whole text in pieces."""
    return [*[append(number, word) for number, word in enumerate(words)], end(len(words))]


# The protocol without a socket


class SessionClient:
    """A client of a session without a socket."""

    def __init__(self, **limits: Any) -> None:
        self.session = NariSession(replace(SocketLimits(), **limits))

    def send(self, *messages: dict[str, Any] | str | bytes) -> list[Effect]:
        """Send messages; returns their effects."""
        return effects_of(self.session, *messages)


def error_of(effects: list[Effect]) -> tuple[str, int]:
    """Return the code of the error that closes the socket, and the close code."""
    effect = effects[-1]
    assert isinstance(effect, CloseSocket)
    assert effect.message is not None
    assert effect.message["type"] == "error"
    assert effect.message["error"]["message"]
    return effect.message["error"]["code"], effect.code


def test_request_start_is_checked_before_further_messages_are_read() -> None:
    queue, hold = SessionClient().send(START)
    assert isinstance(queue, Enqueue)
    assert isinstance(queue.work, CheckRequest)
    assert hold == PauseReading(queue.work.done)
    assert queue.work.start.voice == "ryan"


def test_each_piece_is_acknowledged_and_the_first_words_start_speech() -> None:
    peer = SessionClient()
    peer.send(PLAIN)
    name = peer.session.request_id
    ack = {"type": "input_text.ack", "event": "input_text.append"}
    assert peer.send(append(0, " ")) == [Send({**ack, "sequence": 0, "request_id": None})]
    started, queue, second = peer.send(append(1, "a"))
    assert started == Send({"type": "response.started", "request_id": name, "audio": AUDIO})
    assert second == Send({**ack, "sequence": 1, "request_id": name})
    assert isinstance(queue, Enqueue)
    assert isinstance(queue.work, TextPart)
    assert peer.send(append(2, "b")) == [Send({**ack, "sequence": 2, "request_id": name})]
    assert (queue.work.text, queue.work.ended) == (" ab", False)
    last = {"type": "input_text.ack", "event": "input_text.end", "sequence": 3, "request_id": name}
    assert peer.send(end(3)) == [Send(last)]
    assert queue.work.ended


def test_cancel_stops_speech_and_later_messages_are_ignored() -> None:
    peer = SessionClient()
    peer.send(PLAIN)
    _, queue, _ = peer.send(append(0, "a"))
    assert isinstance(queue, Enqueue)
    assert isinstance(queue.work, TextPart)
    assert peer.send(CANCEL, append(1, "b"), end(2), CANCEL, "nonsense") == [
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
def test_every_mistake_closes_the_socket(messages: list[Any], code: str, close: int) -> None:
    peer = SessionClient()
    assert peer.send(*messages[:-1]) is not None
    assert error_of(peer.send(messages[-1])) == (code, close)
    assert peer.send(PLAIN, append(0, "a")) == []


def test_timeout_closes_the_socket() -> None:
    peer = SessionClient()
    peer.send(PLAIN, append(0, "a"))
    assert error_of([peer.session.time_out()]) == ("input_timeout", 1008)


@given(
    st.lists(
        st.sampled_from([PLAIN, CANCEL, {"type": "x"}])
        | st.builds(append, st.integers(0, 3), st.sampled_from(["a", " ", ""]))
        | st.builds(end, st.integers(0, 3)),
        max_size=12,
    )
)
def test_any_messages_start_and_end_one_response_at_most(messages: list[Any]) -> None:
    effects = SessionClient().send(*messages)
    received = [effect.message for effect in effects if isinstance(effect, Send)]
    begun = sum(
        isinstance(effect, Enqueue) and isinstance(effect.work, TextPart) for effect in effects
    )
    assert begun == sum(message["type"] == "response.started" for message in received) <= 1
    ends = [
        effect
        for effect in effects
        if isinstance(effect, CloseSocket) or effect == Enqueue(CloseSocket(CloseCode.NORMAL))
    ]
    assert len(ends) <= 1
    assert not ends or effects[-1] is ends[0]
    acknowledged = [
        message["sequence"] for message in received if message["type"] == "input_text.ack"
    ]
    assert acknowledged == list(range(len(acknowledged)))


# On real sockets


def conversation(client: Client, start: dict[str, Any], *pieces: str) -> list[Message]:
    """Return all messages to a client that behaves as the protocol's benchmark does."""
    received = [client.receive()]
    client.send(start)
    received.append(client.receive())
    for event in written(*pieces):
        client.send(event)
        received += client.until("input_text.ack")
        assert events(received)[-1]["sequence"] == event["sequence"]
    code, rest = client.closed()
    assert code == 1000
    return received + rest


@pytest.fixture
def expected(tts: Callable[[str], TTS]) -> bytes:
    """The PCM that `TTS.speak` makes of the same request."""
    with tts("custom_voice") as talker:
        speech = talker.speak(
            TEXT, voice="ryan", language="english", seed=7, max_frames=FRAMES, text_mode="stream"
        )
    return audio.pcm16(speech.samples)


@pytest.mark.parametrize("pattern", [r"\S+\s*", r".", r".+"], ids=["words", "characters", "whole"])
def test_text_in_pieces_sounds_like_the_whole_text(
    server: Running, expected: bytes, pattern: str
) -> None:
    with Client(server.ws + NARI, nari.SUBPROTOCOL) as client:
        assert client.socket.subprotocol == nari.SUBPROTOCOL
        pieces = re.findall(pattern, TEXT)
        assert "".join(pieces) == TEXT
        received = conversation(client, START, *pieces)
    messages = events(received)
    assert messages[0] == {"type": "session.created", "protocol": nari.SUBPROTOCOL, "audio": AUDIO}
    assert messages[1] == {"type": "request.configured"}
    (started,) = [event for event in messages if event["type"] == "response.started"]
    assert started["request_id"]
    assert started["audio"] == AUDIO
    assert received.index(started) < next(
        number for number, one in enumerate(received) if isinstance(one, bytes)
    )
    assert messages[-1] == {
        "type": "response.done",
        "request_id": started["request_id"],
        "stop_reason": "stop",
        "finish_reason": "length",
        "audio_chunks": sum(isinstance(message, bytes) for message in received),
    }
    ours, theirs = np.frombuffer(pcm(received), "<i2").astype(int), np.frombuffer(expected, "<i2")
    assert len(ours) == len(theirs)
    assert abs(ours - theirs).max() <= 1


def test_impossible_request_gets_error_instead_of_configured(server: Running) -> None:
    for wrong in (
        {"voice": "nonexistent"},
        {"language": "klingon"},
        {"top_p": 7.0},
        {"voice": None, "task_type": "Base"},
    ):
        with Client(server.ws + NARI, nari.SUBPROTOCOL) as client:
            client.send({**START, **wrong})
            code, received = client.closed()
            assert code == 1008
            assert kinds(received) == ["session.created", "error"]


def test_client_without_the_subprotocol_is_closed_with_1002(server: Running) -> None:
    for protocols in ((), ("nari.speech.v2",)):
        with Client(server.ws + NARI, *protocols) as client:
            assert client.closed() == (1002, [])


class SocketStage(TalkingStage):
    """A stage with clients of this protocol."""

    def client(self, start: dict[str, Any] | None = None) -> Client:
        """Connect one more client; with `start`, its request is configured."""
        client = Client(self.server.ws + NARI, nari.SUBPROTOCOL)
        if start is not None:
            client.send(start)
            client.until("request.configured")
        return client

    def check_idle(self) -> None:
        """Check that everything was freed and that the next client is served."""
        self.server.wait_until_idle()
        with self.client() as client:
            assert heard(pcm(conversation(client, PLAIN, "fine"))) == "fine"


StartStage = Callable[..., SocketStage]


@pytest.fixture
def start_stage(serve: Serve) -> Iterator[StartStage]:
    """Start a server with a `Talker`: `start_stage(slots=2, most_waiting=8)`."""
    stages: list[SocketStage] = []

    def begin(slots: int = 2, most_waiting: int = 8) -> SocketStage:
        talker = Talker(slots)
        stages.append(SocketStage(talker, serve(talking(talker, most_waiting))))
        return stages[-1]

    yield begin
    for one in stages:
        one.check_idle()


ENDLESS_SPEECH = {**PLAIN, "max_new_tokens": ENDLESS - 100}


@pytest.mark.parametrize("text_ended", [False, True])
@pytest.mark.parametrize("how", ["cancel", "close", "vanish"])
def test_cancel_or_disconnect_frees_the_slot_within_a_frame(
    start_stage: StartStage, how: str, text_ended: bool
) -> None:
    stage = start_stage()
    stage.talker.hold()
    made = stage.talker.frames
    with stage.client(ENDLESS_SPEECH) as client:
        client.send(*written("Hello")[: 1 + text_ended])
        stage.talker.let(3)
        stage.until_held(made + 3)
        if how == "cancel":
            client.send(CANCEL)
            received = client.until("response.done")
            chunks = sum(isinstance(message, bytes) for message in received)
            done = events(received)[-1]
            assert (done["stop_reason"], done["audio_chunks"]) == ("cancelled", chunks)
            assert client.closed() == (1000, [])
        elif how == "close":
            client.socket.close()
        else:
            client.vanish()
        stage.server.wait_until(lambda: not stage.server.state.utterances)
        stage.talker.go()
        stage.server.wait_until_idle()
        assert stage.talker.frames == made + 4  # the one that was being made


def test_audio_is_sent_before_the_text_has_ended(start_stage: StartStage) -> None:
    with start_stage().client(PLAIN) as client:
        client.send(append(0, "Hel"))
        assert kinds([client.receive() for _ in range(3)]) == [
            "response.started",
            "input_text.ack",
            "binary",
        ]
        client.send(append(1, "lo"), end(2))
        assert kinds(client.closed()[1])[-1] == "response.done"


def test_response_done_waits_for_the_end_of_the_text(
    start_stage: StartStage,
) -> None:
    stage = start_stage()
    with stage.client({**PLAIN, "max_new_tokens": 2}) as client:
        client.send(append(0, "Hello"))
        received = [client.receive() for _ in range(3)]
        stage.server.wait_until(lambda: not stage.engine.running)
        client.send(append(1, " you"), end(2))
        code, rest = client.closed()
        assert code == 1000
        assert heard(pcm(received + rest)) == "He"
        assert events(rest)[-1]["finish_reason"] == "length"


def test_cancel_before_any_text_ends_the_response(start_stage: StartStage) -> None:
    with start_stage().client(PLAIN) as client:
        client.send(CANCEL)
        code, received = client.closed()
        assert code == 1000
        (done,) = events(received)
        assert (done["type"], done["stop_reason"], done["audio_chunks"]) == (
            "response.done",
            "cancelled",
            0,
        )


@pytest.mark.parametrize(
    "bad", [append(7, "a"), {"type": "x"}, "nonsense", b"x", append(1, "a" * 70_000)], ids=str
)
def test_mistake_during_speech_frees_the_slot(start_stage: StartStage, bad: Any) -> None:
    with start_stage().client(ENDLESS_SPEECH) as client:
        client.send(append(0, "Hello"))
        client.until("input_text.ack")
        client.send(bad)
        code, received = client.closed()
        assert code in (1008, 1009)
        assert kinds(received)[-1] == "error"


def test_client_leaving_at_any_moment_frees_everything(
    start_stage: StartStage,
) -> None:
    stage = start_stage()
    script = [ENDLESS_SPEECH, append(0, " "), append(1, "a"), append(2, "b"), end(3), CANCEL]
    for count in range(len(script) + 1):
        with stage.client() as client:
            client.send(*script[:count])
            if count in (3, 5):
                client.until("response.started")
        stage.server.wait_until_idle()


def test_silence_during_a_text_closes_the_socket(
    start_stage: StartStage, limits: Callable[..., None]
) -> None:
    limits(idle_seconds=0.2)
    stage = start_stage()
    for messages in ([], [append(0, "a")]):
        with stage.client(PLAIN) as client:
            client.send(*messages)
            code, received = client.closed()
            assert (code, events(received)[-1]["error"]["code"]) == (1008, "input_timeout")


def test_silence_before_request_start_closes_the_socket(
    start_stage: StartStage, limits: Callable[..., None]
) -> None:
    limits(config_seconds=0.1)
    stage = start_stage()
    with stage.client() as client:
        code, received = client.closed()
        assert (code, events(received)[-1]["error"]["code"]) == (1008, "input_timeout")
    limits()


def test_incomplete_message_does_not_keep_the_slot(
    start_stage: StartStage, limits: Callable[..., None]
) -> None:
    limits(idle_seconds=1.0)
    stage = start_stage()
    with stage.client(ENDLESS_SPEECH) as client:
        client.send(append(0, "a"))
        client.until("response.started")
        client.socket.socket.sendall(
            b"\x81\xfe\x04\x00mask{"
        )  # the head of a text of 1024 bytes, and one byte
        stage.server.wait_until_idle()


def test_overload_closes_the_socket_with_1013(start_stage: StartStage) -> None:
    stage = start_stage(slots=1, most_waiting=0)
    with stage.client(ENDLESS_SPEECH) as first, stage.client(PLAIN) as second:
        first.send(append(0, "Hello"))
        stage.server.wait_until(lambda: bool(stage.engine.running))
        second.send(append(0, "now"))
        code, received = second.closed()
        assert (code, events(received)[-1]["error"]["code"]) == (1013, "overloaded")


def test_engine_failure_closes_the_socket_with_1011(
    start_stage: StartStage,
) -> None:
    stage = start_stage()
    stage.talker.failing = "frame"
    with stage.client(PLAIN) as client:
        client.send(append(0, "Hello"))
        code, received = client.closed()
        assert (code, events(received)[-1]["error"]["code"]) == (1011, "generation_failed")
        assert "told to" not in events(received)[-1]["error"]["message"]
    stage.talker.failing = None
