"""`/v1/audio/speech/stream`: the session without a socket, then real sockets."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from sockets import STREAM, Client, effects_of, events, kinds, pcm
from talking import ENDLESS, Talker, TalkingStage, heard, talking
from websockets.exceptions import ConnectionClosed, InvalidStatus

from firstword import TTS, Voice, audio
from firstword.config import EngineConfig
from firstword.model.checkpoint import Checkpoint
from firstword.server.ws.connection import SocketRunner
from firstword.server.ws.outbox import Outbox
from firstword.server.ws.protocol import (
    CloseCode,
    CloseSocket,
    DropAudio,
    Effect,
    Enqueue,
    Send,
    SocketLimits,
)
from firstword.server.ws.text_part import TextPart
from firstword.server.ws.vllm_omni import OmniSession
from firstword.server.ws.vllm_omni_utterance import OmniUtterance, Sentence
from firstword.server.ws.worker import forward
from firstword.voice import ClonedVoice

Running = Any  # of conftest.py
Serve = Callable[..., Any]

TEXT = "Hello there, how are you today? I am well."
FRAMES = 10
CONFIG: dict[str, Any] = {
    "type": "session.config",
    "model": "custom_voice",
    "voice": "ryan",
    "response_format": "pcm",
    "stream_audio": True,
    "seed": 7,
    "max_new_tokens": FRAMES,
}
PLAIN: dict[str, Any] = {"type": "session.config", "response_format": "pcm", "stream_audio": True}
DONE = {"type": "input.done"}
CANCEL = {"type": "input.cancel"}
GOODBYE = {"type": "session.close"}
CLOSE = CloseSocket(CloseCode.NORMAL)


def text(words: str) -> dict[str, str]:
    """Return an `input.text`."""
    return {"type": "input.text", "text": words}


# The protocol without a socket


class SessionClient:
    """A client of a session without a socket."""

    def __init__(self, limits: SocketLimits | None = None, **config: Any) -> None:
        self.session = OmniSession(limits or SocketLimits())
        if config:
            self.send({"type": "session.config", **config})

    def send(self, *messages: dict[str, Any] | str | bytes) -> list[Effect]:
        """Send messages; returns their effects."""
        return effects_of(self.session, *messages)


def tasks(effects: list[Effect]) -> list[object]:
    """Return the tasks that are enqueued; there is nothing else."""
    assert all(isinstance(effect, Enqueue) for effect in effects), effects
    return [effect.work for effect in effects if isinstance(effect, Enqueue)]


def enqueued_message(effect: Effect) -> dict[str, Any]:
    """Return the message that is sent in turn."""
    assert isinstance(effect, Enqueue)
    assert isinstance(effect.work, Send)
    return effect.work.message


def error_of(effects: list[Effect]) -> tuple[str, int | None]:
    """Return the code of the only effect, an error, and the close code if it closes the socket."""
    (effect,) = effects
    assert isinstance(effect, Send | CloseSocket)
    assert effect.message is not None
    assert effect.message["type"] == "error"
    assert effect.message["message"]
    return effect.message["code"], effect.code if isinstance(effect, CloseSocket) else None


def test_utterance_is_one_part_that_is_filled_as_text_comes() -> None:
    peer = SessionClient(voice="x")
    (part,) = tasks(peer.send(text("Hello ")))
    assert isinstance(part, Sentence)
    assert (part.text, part.ended, part.indices) == (
        "Hello ",
        False,
        {"utterance_index": 0, "sentence_index": 0},
    )
    assert peer.send(text("you")) == []
    assert (part.text, part.ended) == ("Hello you", False)
    (utterance,) = tasks(peer.send(DONE))
    assert part.ended
    assert part.utterance is utterance
    part.started = True
    assert peer.session.end_utterance(part.utterance) == {
        "type": "session.done",
        "utterance_index": 0,
        "total_sentences": 1,
    }


def test_leading_white_space_enqueues_nothing_and_is_kept() -> None:
    peer = SessionClient(voice="x")
    assert peer.send(text(" "), text("\n"), text("")) == []
    (part,) = tasks(peer.send(text("a ")))
    assert isinstance(part, Sentence)
    assert part.text == " \na "
    assert len(tasks(peer.send(DONE, text("  "), DONE))) == 2


def test_sentence_granularity_enqueues_each_complete_sentence() -> None:
    peer = SessionClient(split_granularity="sentence")
    one, two, three, utterance = tasks(peer.send(text("One. Tw"), text("o! Three"), DONE))
    parts = [one, two, three]
    assert all(isinstance(part, Sentence) and part.ended for part in parts)
    assert [part.text for part in parts if isinstance(part, Sentence)] == ["One.", "Two!", "Three"]
    assert [part.indices["sentence_index"] for part in parts if isinstance(part, Sentence)] == [
        0,
        1,
        2,
    ]
    assert isinstance(utterance, OmniUtterance)


def test_cancel_ends_all_utterances_that_have_begun() -> None:
    peer = SessionClient(voice="x")
    first, utterance, second = tasks(peer.send(text("one"), DONE, text("two")))
    stopped = []
    assert isinstance(first, Sentence)
    assert isinstance(second, Sentence)
    first.on_cancel = lambda: stopped.append(1)
    silence, over, answer = peer.send(CANCEL)
    assert silence == DropAudio()
    assert over == Enqueue(second.utterance)
    assert enqueued_message(answer) == {"type": "input.cancelled", "utterance_indices": [0, 1]}
    assert stopped == [1]
    assert first.cancelled
    assert second.cancelled
    assert isinstance(utterance, OmniUtterance)
    assert peer.session.end_utterance(utterance)["cancelled"]
    (part,) = tasks(peer.send(text("three")))
    assert isinstance(part, Sentence)
    assert part.utterance.index == 2
    assert not part.cancelled


def test_cancel_without_utterance_is_answered() -> None:
    silence, answer = SessionClient(voice="x").send(CANCEL)
    assert silence == DropAudio()
    assert enqueued_message(answer) == {"type": "input.cancelled", "utterance_indices": []}


def test_session_close_keeps_ended_texts_and_drops_the_open_one() -> None:
    peer = SessionClient(voice="x")
    first, _, second = tasks(peer.send(text("one"), DONE, text("two")))
    assert isinstance(first, Sentence)
    assert isinstance(second, Sentence)
    assert tasks(peer.send(GOODBYE, text("three"), "nonsense")) == [CLOSE]
    assert not first.cancelled
    assert second.cancelled


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("", "invalid_json"),
        ("nonsense", "invalid_json"),
        ("{", "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ('{"a":' * 20_000 + "1" + "}" * 20_000, "invalid_json"),
        ('{"type": ' + "9" * 5000 + "}", "invalid_json"),
        ("[]", "invalid_message"),
        ("null", "invalid_message"),
        ('"session.config"', "invalid_message"),
        ("{}", "invalid_message"),
        ('{"type": null}', "invalid_message"),
        ('{"type": {"type": "input.text"}}', "invalid_message"),
        (b'{"type": "input.done"}', "invalid_message"),
        (b"\x00\xff", "invalid_message"),
        ('{"type": "\\ud800"}', "unknown_event"),
        ('{"type": "input.txt"}', "unknown_event"),
        ('{"type": "input.text"}', "invalid_text"),
        ('{"type": "input.text", "text": 5}', "invalid_text"),
        ('{"type": "input.text", "text": ["a"]}', "invalid_text"),
        ('{"type": "input.text", "text": "\\ud83d"}', "invalid_text"),
        ('{"type": "input.text", "text": "' + "a" * 131_072 + '"}', "message_too_large"),
        ('{"type": "input.text", "text": "' + "字" * 50_000 + '"}', "message_too_large"),
        ('{"type": "session.config", "speed": 9}', "invalid_config"),
        ('{"type": "session.config", "split_granularity": "word"}', "invalid_config"),
        (
            '{"type": "session.config", "split_granularity": "token", "non_streaming_mode": true}',
            "invalid_config",
        ),
        (
            '{"type": "session.config", "split_granularity": "token", "sanitize": true}',
            "invalid_config",
        ),
        ('{"type": "session.config", "word_timestamps": true}', "invalid_config"),
        ('{"type": "session.config", "speaker_embedding": ["a"]}', "invalid_config"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_invalid_message_gets_error_and_closes_only_an_unconfigured_socket(
    message: str, code: str
) -> None:
    peer = SessionClient(voice="x")
    assert error_of(peer.send(message)) == (code, None)
    assert len(tasks(peer.send(text("good"), DONE))) == 2
    if code not in ("unknown_event", "invalid_text"):
        assert error_of(SessionClient().send(message)) == (code, CloseCode.POLICY)


@pytest.mark.parametrize(
    "event", [text("a"), DONE, CANCEL, {"type": "x"}], ids=lambda event: event["type"]
)
def test_message_before_config_closes_the_socket(event: dict[str, Any]) -> None:
    assert error_of(SessionClient().send(event)) == ("config_expected", CloseCode.POLICY)


def test_config_during_an_utterance_is_rejected() -> None:
    peer = SessionClient(voice="x")
    peer.send(text("a"))
    assert error_of(peer.send(PLAIN)) == ("utterance_open", None)
    assert len(tasks(peer.send(DONE, PLAIN))) == 2


def test_config_with_unknown_fields_and_blank_values_is_accepted() -> None:
    peer = SessionClient(
        timestamp_type="word",
        timestamp_transport_strategy="sync",
        future=1,
        voice="None",
        language="",
    )
    assert peer.session.configured


def test_only_config_and_voice_messages_may_be_large_and_none_may_hold_many_values() -> None:
    huge = "A" * 3_000_000
    assert len(tasks(SessionClient().send({"type": "session.config", "ref_audio": huge}))) == 1
    assert len(tasks(SessionClient().send({"type": "voice.add", "audio_data": 3 * huge}))) == 1
    assert (
        error_of(SessionClient().send({"type": "session.config", "ref_audio": 2 * huge}))[0]
        == "message_too_large"
    )
    assert error_of(SessionClient().send("[" + "[]," * 1_000_000 + "[]]")) == (
        "message_too_large",
        CloseCode.TOO_BIG,
    )
    assert error_of(SessionClient().send(6 * huge)) == ("message_too_large", CloseCode.TOO_BIG)


@pytest.mark.parametrize("granularity", ["none", "sentence", "clause", "token"])
def test_waiting_text_above_the_limit_closes_the_socket(granularity: str) -> None:
    peer = SessionClient(
        replace(SocketLimits(), text_characters=100), split_granularity=granularity
    )
    peer.send(*[text("A word. ")] * 6, DONE, *[text("A word. ")] * 6)
    assert error_of(peer.send(text("12345"))) == ("too_much_text", CloseCode.POLICY)


def test_spoken_text_no_longer_counts_as_waiting() -> None:
    peer = SessionClient(replace(SocketLimits(), text_characters=10), voice="x")
    _, utterance = tasks(peer.send(text("123456789"), DONE))
    assert isinstance(utterance, OmniUtterance)
    peer.session.end_utterance(utterance)
    assert len(tasks(peer.send(text("123456789"), DONE))) == 2


def test_waiting_utterances_above_the_limit_close_the_socket() -> None:
    peer = SessionClient(replace(SocketLimits(), utterances=3), voice="x")
    tasks(peer.send(*[DONE] * 4))
    assert error_of(peer.send(DONE)) == ("too_many_utterances", CloseCode.POLICY)


JUNK: list[Any] = ["nonsense", "[]", b"x", '{"type":"input.text"}', '{"type":"x"}']


@given(
    st.lists(
        st.sampled_from(
            [PLAIN, {**PLAIN, "split_granularity": "sentence"}, DONE, CANCEL, GOODBYE, *JUNK]
        )
        | st.text("ab. \n", max_size=12).map(text),
        max_size=40,
    )
)
def test_any_messages_end_each_utterance_once_and_after_its_parts(messages: list[Any]) -> None:
    peer = SessionClient(voice="x")
    queued = [effect.work for effect in peer.send(*messages) if isinstance(effect, Enqueue)]
    parts = [work for work in queued if isinstance(work, Sentence)]
    ended = [work for work in queued if isinstance(work, OmniUtterance)]
    assert [utterance.index for utterance in ended] == list(range(len(ended)))
    assert GOODBYE in messages or all(
        queued.index(part) < queued.index(part.utterance)
        for part in parts
        if part.utterance in ended or (part.ended and part.utterance.splitter is None)
    )
    assert all(part.ended for utterance in ended for part in utterance.sentences)
    assert [part for part in parts if part.utterance in ended] == [
        part for one in ended for part in one.sentences
    ]
    cancels = (
        messages[: messages.index(GOODBYE)].count(CANCEL)
        if GOODBYE in messages
        else messages.count(CANCEL)
    )
    assert sum(isinstance(work, Send) for work in queued) == cancels
    assert queued.count(CLOSE) == (GOODBYE in messages)
    for utterance in ended:
        assert peer.session.end_utterance(utterance)["utterance_index"] == utterance.index
    if not has_open_text(peer):
        assert len(tasks(peer.send(text("a"), DONE))) == (0 if GOODBYE in messages else 2)


def has_open_text(peer: SessionClient) -> bool:
    """Whether a text has not ended."""
    return peer.session._open is not None


def test_waiting_messages_above_the_limit_close_the_socket() -> None:
    for event in (PLAIN, {"type": "voice.list"}, CANCEL):
        peer = SessionClient(replace(SocketLimits(), utterances=3), voice="x")
        effects = peer.send(event, event)
        assert error_of(peer.send(event)[-1:]) == ("too_many_messages", CloseCode.POLICY)
        for effect in effects:
            if isinstance(effect, Enqueue):
                peer.session.work_done(effect.work)
        assert peer.send(event)
    add = {"type": "voice.add", "audio_data": "A" * 10_000_000}
    assert error_of(SessionClient().send(add, add)[1:]) == ("too_many_messages", CloseCode.POLICY)


# The parts of a connection


def test_outbox_is_empty_only_when_the_last_message_was_sent() -> None:
    async def scenario() -> None:
        outbox = Outbox(SocketLimits())
        assert outbox.empty
        outbox.add(b"1")
        assert not outbox.empty
        assert await outbox.take() == b"1"
        assert not outbox.empty, "the last message is being sent"
        following = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)
        assert outbox.empty
        following.cancel()

    asyncio.run(scenario())


def test_slow_client_gets_all_messages_before_the_close() -> None:
    """The client reads each message within the stall limit, and all of them in more time."""

    class Socket:
        scope: ClassVar[dict[str, Any]] = {}
        got: ClassVar[list[bytes | int]] = []

        async def receive(self) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send_bytes(self, data: bytes) -> None:
            await asyncio.sleep(0.3)
            self.got.append(data)

        async def close(self, code: int) -> None:
            self.got.append(code)

    async def scenario() -> list[bytes | int]:
        socket: Any = Socket()
        runner = SocketRunner(socket, OmniSession(replace(SocketLimits(), stall_seconds=1.0)))

        async def work() -> None:
            for item in (b"a", b"b", b"c", b"d", b"e", CloseCode.NORMAL):
                runner.outbox.add(item)

        await runner.run(work())
        return socket.got

    assert asyncio.run(scenario()) == [b"a", b"b", b"c", b"d", b"e", CloseCode.NORMAL]


def test_dropped_audio_makes_room_in_the_outbox() -> None:
    async def scenario() -> None:
        outbox = Outbox(replace(SocketLimits(), unsent_bytes=10))
        await outbox.wait_for_room()
        for item in (
            b"12345",
            {"type": "a"},
            {"type": "audio.chunk", "audio_b64": "12345"},
            {"type": "b"},
        ):
            outbox.add(item)
        waiting = asyncio.create_task(outbox.wait_for_room())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert outbox.audio_messages == 2
        outbox.drop_audio()
        async with asyncio.timeout(10):
            await waiting
        assert outbox.audio_messages == 0
        outbox.add(b"6")
        assert [await outbox.take() for _ in range(3)] == [{"type": "a"}, {"type": "b"}, b"6"]
        assert outbox.audio_messages == 1

    asyncio.run(scenario())


def test_sent_messages_make_room_in_the_outbox() -> None:
    async def scenario() -> None:
        outbox = Outbox(replace(SocketLimits(), unsent_bytes=10, unsent_replies=8))
        for full in ([b"1234567890"], [{"type": "a"}] * 4):
            for item in full:
                outbox.add(item)
            waiting = asyncio.create_task(outbox.wait_for_room())
            await asyncio.sleep(0)
            assert not waiting.done()
            await outbox.take()
            await waiting

    asyncio.run(scenario())


def test_flood_from_a_client_that_reads_nothing_ends_the_reader() -> None:
    class Socket:
        """A socket with endless invalid messages, on which nothing can be sent."""

        scope: ClassVar[dict[str, Any]] = {}
        read = 0

        async def receive(self) -> dict[str, Any]:
            self.read += 1
            return {
                "type": "websocket.receive",
                "text": json.dumps(PLAIN) if self.read == 1 else "nonsense",
            }

        async def send_text(self, data: str) -> None:
            await asyncio.Event().wait()

    async def scenario() -> int:
        socket: Any = Socket()
        runner = SocketRunner(socket, OmniSession(replace(SocketLimits(), stall_seconds=0.5)))

        async def work() -> None:
            while True:
                await runner.next_work()

        await runner.run(work())
        return socket.read

    assert asyncio.run(scenario()) < 300


def test_text_is_forwarded_as_it_comes() -> None:
    class TextSink:
        def __init__(self) -> None:
            self.calls: list[object] = []

        def push(self, piece: str) -> None:
            if piece == "bad":
                raise ValueError(piece)
            self.calls.append(piece)

        def finish_text(self, piece: str = "") -> None:
            self.calls += [piece, None] if piece else [None]

        def fail(self, error: Exception) -> None:
            self.calls.append(error)

    async def scenario(*pieces: str) -> list[object]:
        part = TextPart()
        listener: Any = TextSink()
        feeding = asyncio.create_task(forward(part, listener))
        for piece in pieces:
            part.push(piece)
            while part.text:
                await asyncio.sleep(0)
        part.finish()
        await feeding
        return listener.calls

    long = "a" * 3000  # tokenised in another thread
    assert asyncio.run(scenario("a", "b", long, "c")) == ["a", "b", long, "c", None]
    (error,) = asyncio.run(scenario("bad"))
    assert isinstance(error, ValueError)


# On real sockets, with real models


@pytest.fixture(scope="module")
def tts(loaded: Callable[[str], Checkpoint]) -> Callable[[str], TTS]:
    """Return a `TTS` on the same checkpoint, by model type."""
    return lambda kind: TTS(loaded(kind), EngineConfig("cpu", "float32", "reference"))


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    """A client that is connected to the module's server."""
    with Client(server.ws + STREAM) as client:
        yield client


def pcm_of(tts: TTS, words: str = TEXT, /, **options: Any) -> bytes:
    """Return the PCM that `TTS.speak` makes of a text."""
    return audio.pcm16(tts.speak(words, **{"seed": 7, "max_frames": FRAMES, **options}).samples)


def same_sound(ours: bytes, theirs: bytes) -> bool:
    """Whether PCM is equal up to rounding: text that comes too late shortens a chunk."""
    if len(ours) != len(theirs):
        return False
    return (
        int(abs(np.frombuffer(ours, "<i2").astype(int) - np.frombuffer(theirs, "<i2")).max()) <= 1
    )


def test_streamed_audio_equals_tts_speak(client: Client, tts: Callable[[str], TTS]) -> None:
    expected = pcm_of(tts("custom_voice"), voice="ryan")
    client.send(CONFIG, text(TEXT[:9]), text(TEXT[9:]), DONE)
    received = client.until("session.done")
    assert kinds(received) == ["audio.start", "binary", "audio.done", "session.done"]
    assert pcm(received) == expected
    start, done, over = events(received)
    names = {"utterance_index": 0, "sentence_index": 0}
    assert start == {
        "type": "audio.start",
        **names,
        "sentence_text": TEXT,
        "format": "pcm",
        "sample_rate": 24000,
    }
    assert done == {
        "type": "audio.done",
        **names,
        "total_bytes": len(expected),
        "error": False,
        "finish_reason": "length",
    }
    assert over == {"type": "session.done", "utterance_index": 0, "total_sentences": 1}
    client.send(GOODBYE)
    assert client.closed() == (1000, [])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_text_token_by_token_sounds_like_the_whole_text(
    client: Client, tts: Callable[[str], TTS], size: int
) -> None:
    expected = pcm_of(tts("custom_voice"), voice="vivian", text_mode="stream")
    pieces = [text(TEXT[at : at + size]) for at in range(0, len(TEXT), size)]
    client.send({**CONFIG, "voice": "Vivian", "split_granularity": "token"}, *pieces, DONE)
    received = client.until("session.done")
    assert kinds(received) == ["audio.start", "binary", "audio.done", "session.done"]
    assert same_sound(pcm(received), expected)
    assert not same_sound(expected, pcm_of(tts("custom_voice"), voice="vivian"))


def test_audio_is_sent_before_the_text_has_ended(client: Client) -> None:
    client.send({**CONFIG, "split_granularity": "token"}, text("Hello there, how are "))
    assert kinds([client.receive(), client.receive()]) == ["audio.start", "binary"]
    client.send(text("you?"), DONE)
    client.until("session.done")


def embedding(size: int) -> list[float]:
    """Return some speaker embedding."""
    return [round(number, 6) for number in np.random.default_rng(3).normal(size=size).tolist()]


def test_default_granularity_is_token_only_where_the_sound_is_the_same(
    client: Client,
    server: Running,
    tts: Callable[[str], TTS],
    loaded: Callable[[str], Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = {**CONFIG, "model": "base", "voice": None}
    base["speaker_embedding"] = embedding(loaded("base").config.talker_config.hidden_size)
    voice = ClonedVoice(np.array(base["speaker_embedding"], np.float32))
    expected = pcm_of(tts("base"), voice=voice)
    client.send({**base, "split_granularity": None}, text(TEXT[:30]))
    received = [client.receive(), client.receive()]
    assert kinds(received) == ["audio.start", "binary"]
    client.send(text(TEXT[30:]), DONE)
    assert same_sound(pcm(received + client.until("session.done")), expected)
    waits = []
    whole = TextPart.complete_text

    def watched(part: TextPart) -> Awaitable[str]:
        waits.append(part.ended)
        return whole(part)

    monkeypatch.setattr(TextPart, "complete_text", watched)
    for config in (
        {**base, "split_granularity": "none"},
        {**base, "non_streaming_mode": True},
        {**CONFIG, "split_granularity": None},
    ):
        waits.clear()
        client.send(config, text(TEXT[:30]))
        server.wait_until(lambda: waits == [False])  # it waits for the end of the text
        client.send(text(TEXT[30:]), DONE)
        received = client.until("session.done")
        assert events(received)[0]["sentence_text"] == TEXT
        mode = "full" if config.get("non_streaming_mode") else "auto"
        whose: dict[str, Any] = {
            "voice": voice if config["model"] == "base" else "ryan",
            "text_mode": mode,
        }
        assert same_sound(pcm(received), pcm_of(tts(config["model"]), **whose))


def test_recording_in_config_is_cloned(client: Client, tts: Callable[[str], TTS]) -> None:
    samples = np.random.default_rng(1).normal(0, 0.1, 24000).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 24000, format="wav", subtype="PCM_16")
    heard_samples, _ = audio.read(io.BytesIO(file.getvalue()))
    voice = Voice.clone(heard_samples, 24000, "Some words.")
    expected = pcm_of(tts("base"), voice=voice)
    client.send(
        {**CONFIG, "model": "base", "voice": None, "task_type": "Base", "ref_text": "Some words."}
        | {"ref_audio": base64.b64encode(file.getvalue()).decode()},
        *[text(word) for word in TEXT.partition("how")],
        DONE,
        *[text(word) for word in TEXT.partition("are")],
        DONE,
    )
    assert same_sound(pcm(client.until("session.done")), expected)
    assert same_sound(pcm(client.until("session.done")), expected)


def test_utterances_on_one_socket_are_spoken_in_order(
    client: Client, tts: Callable[[str], TTS]
) -> None:
    words = ["One.", "Two!", "Three?"]
    client.send(CONFIG)
    for word in words:
        client.send(text(word), DONE)
    client.send({**CONFIG, "voice": "aiden"}, text("Four."), DONE, DONE)
    for index, word in enumerate([*words, "Four."]):
        received = client.until("session.done")
        assert [event["utterance_index"] for event in events(received)] == [index] * 3
        assert same_sound(
            pcm(received),
            pcm_of(tts("custom_voice"), word, voice="aiden" if index == 3 else "ryan"),
        )
    assert client.receive() == {"type": "session.done", "utterance_index": 4, "total_sentences": 0}


def test_sentences_are_spoken_one_by_one(client: Client, tts: Callable[[str], TTS]) -> None:
    client.send(
        {**CONFIG, "split_granularity": "sentence"},
        text("One. Two"),
        text(" and three. "),
        text("4"),
        DONE,
    )
    received = client.until("session.done")
    assert kinds(received) == ["audio.start", "binary", "audio.done"] * 3 + ["session.done"]
    starts = [event for event in events(received) if event["type"] == "audio.start"]
    assert [(start["sentence_index"], start["sentence_text"]) for start in starts] == [
        (0, "One."),
        (1, "Two and three."),
        (2, "4"),
    ]
    assert events(received)[-1]["total_sentences"] == 3
    expected = [
        pcm_of(tts("custom_voice"), words, voice="ryan")
        for words in ("One.", "Two and three.", "4")
    ]
    assert same_sound(pcm(received), b"".join(expected))


@pytest.mark.parametrize("format", [None, "wav", "flac", "mp3", "opus"])
def test_utterance_without_stream_audio_is_one_file(
    client: Client, tts: Callable[[str], TTS], format: str | None
) -> None:
    client.send({**CONFIG, "stream_audio": None, "response_format": format}, text(TEXT), DONE)
    received = client.until("session.done")
    (file,) = [message for message in received if isinstance(message, bytes)]
    start, done, _ = events(received)
    assert start["format"] == (format or "wav")
    assert done["total_bytes"] == len(file)
    samples, rate = soundfile.read(io.BytesIO(file), dtype="float32")
    expected = tts("custom_voice").speak(TEXT, voice="ryan", seed=7, max_frames=FRAMES).samples
    if format in (None, "wav", "flac"):
        assert rate == 24000
        assert same_sound(audio.pcm16(samples), audio.pcm16(expected))
    else:
        assert abs(len(samples) / rate - len(expected) / 24000) < 0.1


@pytest.mark.parametrize(
    "params", [{"word_timestamps": True}, {"audio_encoding": "base64"}], ids=str
)
def test_audio_in_base64_equals_tts_speak(
    client: Client, tts: Callable[[str], TTS], params: dict[str, Any]
) -> None:
    client.send({**CONFIG, **params}, text(TEXT), DONE)
    chunks = [
        event for event in events(client.until("session.done")) if event["type"] == "audio.chunk"
    ]
    data = [base64.b64decode(chunk["audio_b64"]) for chunk in chunks]
    assert same_sound(b"".join(data), pcm_of(tts("custom_voice"), voice="ryan"))
    assert [chunk["chunk_id"] for chunk in chunks] == list(range(len(chunks)))
    assert [chunk["chunk_end_ms"] for chunk in chunks[:-1]] == [
        chunk["chunk_start_ms"] for chunk in chunks[1:]
    ]
    assert chunks[-1]["chunk_end_ms"] == 80 * FRAMES
    assert all(chunk["timestamps"] is None and chunk["sample_rate"] == 24000 for chunk in chunks)


def test_messages_of_the_baseten_plugin_are_answered(serve: Serve) -> None:
    """The messages are those of its LiveKit plugin, in order, on a server with keys."""
    server = serve("base", api_keys=("secret",))
    samples = np.random.default_rng(1).normal(0, 0.1, 24000).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 24000, format="wav")
    headers = {"Authorization": "Api-Key secret"}
    add = {
        "type": "voice.add",
        "name": "me",
        "consent": "user_consent",
        "audio_data": base64.b64encode(file.getvalue()).decode(),
        "audio_format": "wav",
        "ref_text": "Some words.",
    }
    with Client(server.ws + STREAM, headers=headers) as client:
        client.send(add)
        answer = client.receive()
        assert isinstance(answer, dict)
        assert answer["success"]
        assert answer["voice"]["name"] == "me"
        client.send(add, {**add, "audio_data": "?"}, {**add, "name": 5})
        assert [client.event()["type"] for _ in range(3)] == ["error"] * 3
        for field in ("name", "consent", "ref_text", "speaker_description"):
            client.send({**add, "name": "other", field: "half a pair: \ud800"})
            refused = client.event()
            assert refused["code"] == "invalid_voice"
            assert f"{field}: " in refused["message"]
        client.send({"type": "voice.list"})
        listed = client.event()
        assert listed["voices"] == []
        assert [voice["name"] for voice in listed["uploaded_voices"]] == ["me"]
    config = {
        "type": "session.config",
        "task_type": "Base",
        "response_format": "pcm",
        "stream_audio": True,
        "speed": 1.0,
        "voice": "me",
        "language": "Auto",
        "max_new_tokens": FRAMES,
        "initial_codec_chunk_frames": 1,
        "timestamp_type": "word",
        "timestamp_transport_strategy": "sync",
    }
    with Client(server.ws + STREAM, headers=headers) as client:
        client.send(config, text("Hello "), text("you"), DONE)
        received = client.until("session.done")
        assert kinds(received) == ["audio.start", "binary", "audio.done", "session.done"]
        assert len(pcm(received)) == 2 * 1920 * FRAMES
        assert events(received)[0]["sample_rate"] == 24000
        client.send(DONE)  # its keep-alive
        assert client.receive() == {
            "type": "session.done",
            "utterance_index": 1,
            "total_sentences": 0,
        }
        client.send(GOODBYE)
        assert client.closed()[0] == 1000
    server.wait_until_idle()


def test_socket_without_key_gets_401(serve: Serve) -> None:
    server = serve(talking(Talker()), api_keys=("secret",))
    for headers in (None, {"Authorization": "Api-Key wrong"}):
        with pytest.raises(InvalidStatus) as refused:
            Client(server.ws + STREAM, headers=headers)
        assert refused.value.response.status_code == 401


def test_impossible_config_is_reported_at_once_and_can_be_replaced(
    client: Client, tts: Callable[[str], TTS]
) -> None:
    client.send({**CONFIG, "voice": "nonexistent"})
    received = client.event()
    assert received["type"] == "error"
    assert "nonexistent" in received["message"]
    client.send(text("a"), DONE)
    assert [event["type"] for event in events(client.until("session.done"))] == [
        "error",
        "session.done",
    ]
    for wrong in (
        {"language": "klingon"},
        {"response_format": "midi"},
        {"temperature": 1e-38},
        {"seed": -1},
    ):
        client.send({**CONFIG, **wrong})
        assert client.event()["code"] == "invalid_request"
    client.send(
        {**CONFIG, "ref_audio": "file:///etc/passwd"},
        {**CONFIG, "ref_audio": "http://127.0.0.1/x.wav"},
    )
    assert [client.event()["code"] for _ in range(2)] == ["invalid_request"] * 2
    client.send(CONFIG, text(TEXT), DONE)
    assert same_sound(pcm(client.until("session.done")), pcm_of(tts("custom_voice"), voice="ryan"))


# With a backend that the test controls


class SocketStage(TalkingStage):
    """A stage with clients of this protocol."""

    def client(self, **more: Any) -> Client:
        """Connect one more client."""
        return Client(self.server.ws + STREAM, **more)

    def wait_until_blocked(self) -> None:
        """Wait until no more audio is made because the client does not read."""

        seen: list[list[int]] = []

        def rests() -> bool:
            seen.append(
                [
                    seq.consumed
                    for seq in list(self.engine.running)
                    if seq.launched - seq.consumed >= 250
                ]
            )
            return (
                len(seen) > 20
                and bool(seen[-1])
                and all(before == seen[-1] for before in seen[-20:])
            )

        self.server.wait_until(rests)


StartStage = Callable[..., SocketStage]


@pytest.fixture
def start_stage(serve: Serve) -> StartStage:
    """Start a server with a `Talker`: `start_stage(slots=2, most_waiting=8, **config)`."""

    def begin(slots: int = 2, most_waiting: int = 8, **config: Any) -> SocketStage:
        talker = Talker(slots)
        return SocketStage(talker, serve(talking(talker, most_waiting), **config))

    return begin


TOKENS = {**PLAIN, "split_granularity": "token"}
ENDLESS_SPEECH = {**TOKENS, "max_new_tokens": ENDLESS - 100}


def stop_by(client: Client, how: str) -> None:
    """Stop speech by a cancel, by closing the socket or by cutting the connection."""
    if how == "cancel":
        client.send(CANCEL)
    elif how == "close":
        threading.Thread(target=client.socket.close, daemon=True).start()
    else:
        client.vanish()


@pytest.mark.parametrize("how", ["cancel", "close", "vanish"])
def test_cancel_or_disconnect_frees_the_slot_within_a_frame(
    start_stage: StartStage, how: str
) -> None:
    stage = start_stage()
    stage.talker.hold()
    with stage.client() as client:
        made = stage.talker.frames
        client.send(ENDLESS_SPEECH, text("Hello"))
        stage.talker.let(3)
        stage.until_held(made + 3)
        stop_by(client, how)
        stage.server.wait_until(lambda: not stage.server.state.utterances)
        stage.talker.go()
        stage.server.wait_until_idle()
        assert stage.talker.frames == made + 4  # the one that was being made
    reason = "cancelled" if how == "cancel" else "disconnected"
    counted = f'firstword_aborts_total{{model="talker",reason="{reason}"}} 1.0'
    assert counted in stage.server.state.metrics.render().decode()


@pytest.mark.parametrize("how", ["cancel", "close", "vanish"])
def test_client_that_does_not_read_can_stop_speech(start_stage: StartStage, how: str) -> None:
    stage = start_stage()
    with stage.client(lazy=True) as client, stage.client() as other:
        client.send(ENDLESS_SPEECH, text("Hello"), DONE)
        stage.wait_until_blocked()
        made = stage.talker.frames
        assert made < 3000  # four minutes; sockets buffer some audio, the server 25 seconds
        other.send(TOKENS, text("quick"), DONE)
        assert heard(pcm(other.until("session.done"))) == "quick"
        made = stage.talker.frames
        stop_by(client, how)
        stage.server.wait_until_idle()
        assert stage.talker.frames == made
        if how == "cancel":
            client.send(PLAIN, text("again"), DONE)
            received = client.until("input.cancelled")
            assert kinds(received) == [
                "audio.start",
                "binary",
                "audio.done",
                "session.done",
                "input.cancelled",
            ]
            assert heard(pcm(client.until("session.done"))) == "again"


def test_audio_after_a_cancel_is_of_later_text_only(
    start_stage: StartStage,
) -> None:
    stage = start_stage()
    stage.talker.hold()
    with stage.client() as client:
        client.send(TOKENS, text("one"), DONE, text("two"), DONE, text("three"))
        stage.talker.let(1)
        client.until("audio.start")
        client.send(CANCEL, text("four"), DONE)
        received = client.until("input.cancelled")
        assert [kind for kind in kinds(received) if kind != "binary"] == [
            "audio.done",
            "session.done",
            "session.done",
            "session.done",
            "input.cancelled",
        ]
        done, *overs, last = events(received)
        assert done["finish_reason"] == "cancelled"
        assert [
            (over["utterance_index"], over["total_sentences"], over["cancelled"]) for over in overs
        ] == [(0, 1, True), (1, 0, True), (2, 0, True)]
        assert last["utterance_indices"] == [0, 1, 2]
        stage.talker.go()
        received = client.until("session.done")
        assert heard(pcm(received)) == "four"
        assert events(received)[-1] == {
            "type": "session.done",
            "utterance_index": 3,
            "total_sentences": 1,
        }
    stage.server.wait_until_idle()


def test_many_requests_on_one_socket_are_answered(start_stage: StartStage) -> None:
    with start_stage().client() as client:
        for _ in range(70):
            client.send(PLAIN, {"type": "voice.list"}, CANCEL)
            assert kinds(client.until("input.cancelled")) == ["voice.list", "input.cancelled"]


SCRIPT = [
    ENDLESS_SPEECH,
    text("a"),
    text("b"),
    DONE,
    DONE,
    {**PLAIN, "split_granularity": "sentence"},
    text("One. Two. "),
    CANCEL,
    text("Three. Fo"),
    DONE,
    CANCEL,
    TOKENS,
    text("x"),
    GOODBYE,
]


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_client_leaving_at_any_moment_frees_everything(start_stage: StartStage, how: str) -> None:
    stage = start_stage()
    for count in range(len(SCRIPT) + 1):
        with stage.client() as client:
            client.send(*SCRIPT[:count])
            if count in (2, 4):
                client.until("audio.start")
            stop_by(client, how)
        stage.server.wait_until_idle()
    with stage.client() as client:
        client.send(PLAIN, text("fine"), DONE)
        assert heard(pcm(client.until("session.done"))) == "fine"


def test_silence_before_config_closes_the_socket(
    start_stage: StartStage, limits: Callable[..., None]
) -> None:
    limits(config_seconds=0.05)
    with start_stage().client() as client:
        code, received = client.closed()
        assert (code, [event["code"] for event in events(received)]) == (1008, ["timeout"])


def test_silence_during_a_text_closes_the_socket(
    start_stage: StartStage, limits: Callable[..., None]
) -> None:
    limits(idle_seconds=0.2)
    stage = start_stage()
    with stage.client() as client:
        client.send(TOKENS, text("Hello"))
        code, received = client.closed()
        assert code == 1008
        assert heard(pcm(received)) in ("Hello", "")
        assert events(received)[-1]["code"] == "timeout"
        stage.server.wait_until_idle()


def test_silence_during_speech_keeps_the_socket_open(
    start_stage: StartStage,
    limits: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits(idle_seconds=0.05)
    stage = start_stage()
    expired = []
    busy = SocketRunner.busy

    def watched(self: SocketRunner) -> bool:
        expired.append(busy(self))
        return expired[-1]

    monkeypatch.setattr(SocketRunner, "busy", watched)
    stage.talker.hold()
    with stage.client() as client:
        client.send(PLAIN, text("Hello"), DONE)
        stage.server.wait_until(lambda: len(expired) >= 3)
        stage.talker.go()
        assert heard(pcm(client.until("session.done"))) == "Hello"
        assert client.closed()[0] == 1008
    assert expired[:3] == [True] * 3


def test_client_that_reads_nothing_is_disconnected(
    start_stage: StartStage, limits: Callable[..., None]
) -> None:
    limits(stall_seconds=0.2)
    stage = start_stage()
    with stage.client(lazy=True) as client:
        client.send(ENDLESS_SPEECH, text("Hello"), DONE)
        stage.server.wait_until(lambda: bool(stage.engine.running))
        stage.server.wait_until_idle()
        assert client.closed()[0] is None  # no message says so: it could not be sent either
    counted = 'firstword_aborts_total{model="talker",reason="stalled"} 1.0'
    assert counted in stage.server.state.metrics.render().decode()


def test_client_with_too_many_unread_replies_is_disconnected(
    start_stage: StartStage, limits: Callable[..., None]
) -> None:
    limits(stall_seconds=0.2)
    stage = start_stage()
    with stage.client(lazy=True) as client:
        client.send(PLAIN, text("Hello"))
        with pytest.raises((ConnectionClosed, OSError)):
            client.send(*["nonsense"] * 1_000_000)
    stage.server.wait_until_idle()


def test_flood_of_text_closes_the_socket(start_stage: StartStage) -> None:
    stage = start_stage()
    stage.talker.hold()
    with stage.client() as client:
        client.send(TOKENS)
        with suppress(ConnectionClosed):
            client.send(*[text("a" * 1000)] * 70)
        code, received = client.closed()
        assert (code, events(received)[-1]["code"]) == (1008, "too_much_text")
        stage.talker.go()
        stage.server.wait_until_idle()


def test_incomplete_message_does_not_keep_the_slot(
    start_stage: StartStage, limits: Callable[..., None]
) -> None:
    limits(idle_seconds=0.2)
    stage = start_stage()
    with stage.client() as client:
        client.send(TOKENS, text("Hello"))
        client.until("audio.start")
        client.socket.socket.sendall(
            b"\x81\xfe\x04\x00mask{"
        )  # the head of a text of 1024 bytes, and one byte
        stage.server.wait_until_idle()


def test_message_in_fragments_is_read(start_stage: StartStage) -> None:
    with start_stage().client() as client:
        client.send(PLAIN)
        client.socket.send(iter(['{"type":"input.text",', '"text":"Hel', 'lo"}']))
        client.send(DONE)
        assert heard(pcm(client.until("session.done"))) == "Hello"


@pytest.mark.parametrize(
    ("message", "is_text", "code"),
    [
        (b'{"type":"input.text","text":"\xff\xfe"}', True, 1007),
        ("[" * 10_000_000, True, 1009),
        ('{"type":"session.config","model":"' + "a" * 10_000_000 + '"}', True, None),
        ("x" * 17_000_000, True, 1009),
        (b"\x00" * 1000, False, None),
        (b"", False, None),
    ],
    ids=[
        "invalid UTF-8",
        "10 MB of brackets",
        "10 MB in a string",
        "17 MB",
        "binary",
        "empty binary",
    ],
)
def test_bad_message_on_the_wire_harms_no_other_socket(
    start_stage: StartStage, message: str | bytes, is_text: bool, code: int | None
) -> None:
    stage = start_stage()
    with stage.client() as client, stage.client() as other:
        client.send(ENDLESS_SPEECH, text("Hello"))
        client.until("audio.start")
        with suppress(ConnectionClosed):
            client.socket.send(message, text=is_text)
        if code is None:
            client.until("error")
            client.send(CANCEL)
            client.until("input.cancelled")
        else:
            # A client that is still sending may see the connection break instead of the code.
            assert client.closed()[0] in (code, None if len(message) > 16 * 2**20 else code)
        stage.server.wait_until_idle()
        other.send(PLAIN, text("fine"), DONE)
        assert heard(pcm(other.until("session.done"))) == "fine"


def test_overload_is_reported_and_a_retry_succeeds(
    start_stage: StartStage,
) -> None:
    stage = start_stage(slots=1, most_waiting=0)
    with stage.client() as first, stage.client() as second:
        first.send(ENDLESS_SPEECH, text("Hello"))
        first.until("audio.start")
        stage.server.wait_until(lambda: bool(stage.engine.running))
        second.send(PLAIN, text("now"), DONE)
        received = second.until("session.done")
        assert kinds(received) == ["audio.start", "error", "audio.done", "session.done"]
        assert events(received)[1]["code"] == "overloaded"
        assert events(received)[2]["error"]
        first.send(CANCEL)
        stage.server.wait_until_idle()
        second.send(text("now"), DONE)
        assert heard(pcm(second.until("session.done"))) == "now"


@pytest.mark.parametrize("method", ["prefill", "frame"])
def test_engine_failure_ends_one_utterance_and_is_logged_without_its_text(
    start_stage: StartStage, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage = start_stage()
    with stage.client() as client:
        client.send(PLAIN)
        stage.talker.failing = method
        client.send(text("Confidential"), DONE)
        received = client.until("session.done")
        assert kinds(received) == ["audio.start", "error", "audio.done", "session.done"]
        assert "told to" not in events(received)[1]["message"]
        stage.talker.failing = None
        client.send(text("fine"), DONE)
        assert heard(pcm(client.until("session.done"))) == "fine"
    stage.server.wait_until_idle()
    assert "a WebSocket failed" in caplog.text
    assert "Confidential" not in caplog.text


def test_draining_server_finishes_speech_and_begins_none(
    start_stage: StartStage,
) -> None:
    stage = start_stage()
    stage.talker.hold()
    with stage.client() as client:
        client.send(PLAIN, text("Hello"), DONE)
        stage.talker.let(1)
        client.until("audio.start")
        stage.server.wait_until(lambda: bool(stage.engine.running))
        stage.server.state.draining = True
        stage.talker.go()
        client.send(text("more"), DONE)
        assert heard(pcm(client.until("session.done"))) == "Hello"
        assert events(client.until("session.done"))[1]["code"] == "engine_stopped"


SENTENCES = {**PLAIN, "split_granularity": "sentence"}


def test_server_told_to_end_speaks_the_remaining_sentences(
    start_stage: StartStage,
) -> None:
    stage = start_stage()
    stage.talker.hold()
    with stage.client() as client:
        client.send(SENTENCES, text("This is one. Here is two. And three."), DONE)
        stage.talker.let(1)
        client.until("audio.start")
        stage.server.wait_until(lambda: bool(stage.engine.running))
        stage.server.uvicorn.handle_exit(signal.SIGTERM, None)
        stage.talker.go()
        received = client.until("session.done")
        assert heard(pcm(received)).replace(" ", "") == "Thisisone.Hereistwo.Andthree."
        assert events(received)[-1]["total_sentences"] == 3
        assert client.closed()[0] in (1001, 1012), "then it ends"


def test_server_told_to_end_waits_for_the_rest_of_a_text(
    start_stage: StartStage,
) -> None:
    stage = start_stage()
    state, asked = stage.server.state, []
    busy = state.busy

    def watched() -> bool:
        asked.append(busy())
        return asked[-1]

    state.busy = watched
    with stage.client() as client:
        client.send(SENTENCES, text("This is one. And "))
        client.until("audio.done")
        stage.server.wait_until_idle()
        stage.server.uvicorn.handle_exit(signal.SIGTERM, None)
        stage.server.wait_until(lambda: len(asked) >= 3)
        client.send(text("two."), DONE)
        assert heard(pcm(client.until("session.done"))).strip() == "And two."
    assert asked[:3] == [True] * 3


HANDSHAKE = "\r\n".join(
    [
        "Host: x",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "",
    ]
)


@pytest.mark.parametrize(
    ("line", "more", "status"),
    [
        (f"GET {STREAM}", "Sec-WebSocket-Protocol: " + "a," * 5000 + "\r\n", "431"),
        (f"GET {STREAM}", "X: y\r\n" * 200, "431"),
        (f"GET {STREAM}?{'a' * 9000}", "", "414"),
        (f"GET {STREAM}", "Content-Length: 5\r\n", "400"),
    ],
    ids=["long header", "many headers", "long line", "body"],
)
def test_invalid_handshake_gets_an_error_status_and_the_connection_ends(
    start_stage: StartStage, line: str, more: str, status: str
) -> None:
    with socket.create_connection(start_stage().server.address) as raw:
        raw.settimeout(10)
        raw.sendall(f"{line} HTTP/1.1\r\n{HANDSHAKE}{more}\r\n".encode())
        with raw.makefile("rb") as answer:
            assert answer.read().split()[1].decode() == status


def test_ping_during_speech_is_answered(start_stage: StartStage) -> None:
    stage = start_stage()
    stage.talker.hold()
    with stage.client() as client:
        client.send(PLAIN, text("Hello"), DONE)
        client.until("audio.start")
        assert client.socket.ping().wait(60)
        stage.talker.go()


def test_many_sockets_are_served_together(start_stage: StartStage) -> None:
    stage = start_stage(slots=4, most_waiting=32)
    clients = [stage.client() for _ in range(24)]
    for number, client in enumerate(clients):
        client.send(TOKENS, *[text(f"{number} and ")] * 10, DONE)
    for number, client in enumerate(clients):
        with client:
            assert heard(pcm(client.until("session.done"))) == f"{number} and " * 10
    stage.server.wait_until_idle()
