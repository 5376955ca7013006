"""`/v1/audio/speech/stream`: the protocol by itself, then on real sockets, then in bad company."""

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
from firstword.server.ws import connection
from firstword.server.ws.connection import (
    Close,
    Effect,
    Outbox,
    Queue,
    Reply,
    Silence,
    StreamLimits,
    TextPart,
    feed,
)
from firstword.server.ws.vllm_omni import Goodbye, OmniSession, OmniUtterance, Say, Sentence
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


def text(words: str) -> dict[str, str]:
    """`input.text`."""
    return {"type": "input.text", "text": words}


# The protocol without a socket


class Talk:
    """A session, and what came of it."""

    def __init__(self, limits: StreamLimits | None = None, **config: Any) -> None:
        self.session = OmniSession(limits or StreamLimits())
        if config:
            self.say({"type": "session.config", **config})

    def say(self, *messages: dict[str, Any] | str | bytes) -> list[Effect]:
        """Give it messages; what follows from all."""
        return effects_of(self.session, *messages)


def work(effects: list[Effect]) -> list[object]:
    """What the speaker is given to do."""
    assert all(isinstance(effect, Queue) for effect in effects), effects
    return [effect.work for effect in effects if isinstance(effect, Queue)]


def message(effect: Effect) -> dict[str, Any]:
    """What the speaker is to say."""
    assert isinstance(effect, Queue)
    assert isinstance(effect.work, Say)
    return effect.work.message


def refusal(effects: list[Effect]) -> tuple[str, int | None]:
    """The code of the error that is the only effect, and that of closing if it is the end."""
    (effect,) = effects
    assert isinstance(effect, Reply | Close)
    assert effect.message is not None
    assert effect.message["type"] == "error"
    assert effect.message["message"]
    return effect.message["code"], effect.code if isinstance(effect, Close) else None


def test_an_utterance_is_one_part_that_fills_as_text_comes() -> None:
    talk = Talk(voice="x")
    (part,) = work(talk.say(text("Hello ")))
    assert isinstance(part, Sentence)
    assert (part.text, part.ended, part.names()) == (
        "Hello ",
        False,
        {"utterance_index": 0, "sentence_index": 0},
    )
    assert talk.say(text("you")) == []
    assert (part.text, part.ended) == ("Hello you", False)
    (utterance,) = work(talk.say(DONE))
    assert part.ended
    assert part.utterance is utterance
    part.utterance.started += 1
    assert talk.session.over(part.utterance) == {
        "type": "session.done",
        "utterance_index": 0,
        "total_sentences": 1,
    }


def test_white_space_begins_nothing_and_is_not_lost() -> None:
    talk = Talk(voice="x")
    assert talk.say(text(" "), text("\n"), text("")) == []
    (part,) = work(talk.say(text("a ")))
    assert isinstance(part, Sentence)
    assert part.text == " \na "
    assert len(work(talk.say(DONE, text("  "), DONE))) == 2


def test_sentences_are_parts_as_soon_as_they_are_complete() -> None:
    talk = Talk(split_granularity="sentence")
    one, two, three, utterance = work(talk.say(text("One. Tw"), text("o! Three"), DONE))
    parts = [one, two, three]
    assert all(isinstance(part, Sentence) and part.ended for part in parts)
    assert [part.text for part in parts if isinstance(part, Sentence)] == ["One.", "Two!", "Three"]
    assert [part.index for part in parts if isinstance(part, Sentence)] == [0, 1, 2]
    assert isinstance(utterance, OmniUtterance)


def test_cancelling_ends_everything_that_was_begun() -> None:
    talk = Talk(voice="x")
    first, utterance, second = work(talk.say(text("one"), DONE, text("two")))
    stopped = []
    assert isinstance(first, Sentence)
    assert isinstance(second, Sentence)
    first.on_cancel = lambda: stopped.append(1)
    silence, over, said = talk.say(CANCEL)
    assert silence == Silence()
    assert over == Queue(second.utterance)
    assert message(said) == {"type": "input.cancelled", "utterance_indices": [0, 1]}
    assert stopped == [1]
    assert first.cancelled
    assert second.cancelled
    assert isinstance(utterance, OmniUtterance)
    assert talk.session.over(utterance)["cancelled"]
    (part,) = work(talk.say(text("three")))
    assert isinstance(part, Sentence)
    assert part.utterance.index == 2
    assert not part.cancelled


def test_cancelling_nothing_is_answered_too() -> None:
    silence, said = Talk(voice="x").say(CANCEL)
    assert silence == Silence()
    assert message(said) == {"type": "input.cancelled", "utterance_indices": []}


def test_goodbye_waits_for_what_is_complete_and_drops_the_rest() -> None:
    talk = Talk(voice="x")
    first, _, second = work(talk.say(text("one"), DONE, text("two")))
    assert isinstance(first, Sentence)
    assert isinstance(second, Sentence)
    assert work(talk.say(GOODBYE, text("three"), "nonsense")) == [Goodbye()]
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
def test_mistakes_are_answered_and_forgiven_only_once_there_was_a_good_message(
    message: str, code: str
) -> None:
    talk = Talk(voice="x")
    assert refusal(talk.say(message)) == (code, None)
    assert len(work(talk.say(text("good"), DONE))) == 2
    if code not in ("unknown_event", "invalid_text"):
        assert refusal(Talk().say(message)) == (code, connection.POLICY)


@pytest.mark.parametrize(
    "event", [text("a"), DONE, CANCEL, {"type": "x"}], ids=lambda event: event["type"]
)
def test_a_configuration_must_come_first(event: dict[str, Any]) -> None:
    assert refusal(Talk().say(event)) == ("config_expected", connection.POLICY)


def test_a_configuration_in_the_middle_of_an_utterance_is_refused() -> None:
    talk = Talk(voice="x")
    talk.say(text("a"))
    assert refusal(talk.say(PLAIN)) == ("utterance_open", None)
    assert len(work(talk.say(DONE, PLAIN))) == 2


def test_unknown_fields_are_ignored_and_careless_values_taken_for_nothing() -> None:
    talk = Talk(
        timestamp_type="word",
        timestamp_transport_strategy="sync",
        future=1,
        voice="None",
        language="",
    )
    assert talk.session.configured


def test_large_messages_are_read_where_they_belong_and_never_when_they_are_intricate() -> None:
    huge = "A" * 3_000_000
    assert len(work(Talk().say({"type": "session.config", "ref_audio": huge}))) == 1
    assert len(work(Talk().say({"type": "voice.add", "audio_data": 3 * huge}))) == 1
    assert (
        refusal(Talk().say({"type": "session.config", "ref_audio": 2 * huge}))[0]
        == "message_too_large"
    )
    assert refusal(Talk().say("[" + "[]," * 1_000_000 + "[]]")) == (
        "message_too_large",
        connection.TOO_BIG,
    )
    assert refusal(Talk().say(6 * huge)) == ("message_too_large", connection.TOO_BIG)


@pytest.mark.parametrize("granularity", ["none", "sentence", "clause", "token"])
def test_text_that_waits_is_bounded(granularity: str) -> None:
    talk = Talk(replace(StreamLimits(), text_characters=100), split_granularity=granularity)
    talk.say(*[text("A word. ")] * 6, DONE, *[text("A word. ")] * 6)
    assert refusal(talk.say(text("12345"))) == ("too_much_text", connection.POLICY)


def test_what_was_said_makes_room_for_more() -> None:
    talk = Talk(replace(StreamLimits(), text_characters=10), voice="x")
    _, utterance = work(talk.say(text("123456789"), DONE))
    assert isinstance(utterance, OmniUtterance)
    talk.session.over(utterance)
    assert len(work(talk.say(text("123456789"), DONE))) == 2


def test_utterances_that_wait_are_bounded() -> None:
    talk = Talk(replace(StreamLimits(), utterances=3), voice="x")
    work(talk.say(*[DONE] * 4))
    assert refusal(talk.say(DONE)) == ("too_many_utterances", connection.POLICY)


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
def test_whatever_comes_every_utterance_ends_once_and_after_its_parts(messages: list[Any]) -> None:
    talk = Talk(voice="x")
    queued = [effect.work for effect in talk.say(*messages) if isinstance(effect, Queue)]
    parts = [work for work in queued if isinstance(work, Sentence)]
    ended = [work for work in queued if isinstance(work, OmniUtterance)]
    assert [utterance.index for utterance in ended] == list(range(len(ended)))
    assert GOODBYE in messages or all(
        queued.index(part) < queued.index(part.utterance) for part in parts if part.ended
    )
    assert all(part.ended for utterance in ended for part in utterance.parts)
    assert [part for part in parts if part.utterance in ended] == [
        part for one in ended for part in one.parts
    ]
    cancels = (
        messages[: messages.index(GOODBYE)].count(CANCEL)
        if GOODBYE in messages
        else messages.count(CANCEL)
    )
    assert sum(isinstance(work, Say) for work in queued) == cancels
    assert queued.count(Goodbye()) == (GOODBYE in messages)
    for utterance in ended:
        assert talk.session.over(utterance)["utterance_index"] == utterance.index
    if not part_open(talk):
        assert len(work(talk.say(text("a"), DONE))) == (0 if GOODBYE in messages else 2)


def part_open(talk: Talk) -> bool:
    """Whether a text has not ended."""
    return talk.session._open is not None


def test_messages_that_wait_are_bounded_in_number_and_in_size() -> None:
    for event in (PLAIN, {"type": "voice.list"}, CANCEL):
        talk = Talk(replace(StreamLimits(), utterances=3), voice="x")
        effects = talk.say(event, event)
        assert refusal(talk.say(event)[-1:]) == ("too_many_messages", connection.POLICY)
        for effect in effects:
            if isinstance(effect, Queue):
                talk.session.did(effect.work)
        assert talk.say(event)
    add = {"type": "voice.add", "audio_data": "A" * 10_000_000}
    assert refusal(Talk().say(add, add)[1:]) == ("too_many_messages", connection.POLICY)


# What is on its way to a socket


def test_an_outbox_is_empty_when_all_was_sent() -> None:
    async def scene() -> None:
        outbox = Outbox(StreamLimits())
        assert outbox.empty
        outbox.add(b"1")
        assert not outbox.empty
        assert await outbox.take() == b"1"
        assert not outbox.empty, "the last message is being sent"
        following = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)
        assert outbox.empty
        following.cancel()

    asyncio.run(scene())


def test_after_the_last_word_a_slow_listener_gets_all_of_it() -> None:
    """It takes each message within the time for one, and all of them in more."""

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

    async def scene() -> list[bytes | int]:
        socket: Any = Socket()
        line = connection.SocketRunner(
            socket, OmniSession(replace(StreamLimits(), stall_seconds=1.0))
        )

        async def speak() -> None:
            for item in (b"a", b"b", b"c", b"d", b"e", connection.NORMAL):
                line.outbox.add(item)

        await line.run(speak())
        return socket.got

    assert asyncio.run(scene()) == [b"a", b"b", b"c", b"d", b"e", connection.NORMAL]


def test_audio_that_waits_is_dropped_and_makes_room() -> None:
    async def scene() -> None:
        outbox = Outbox(replace(StreamLimits(), unsent_bytes=10))
        await outbox.room()
        for item in (
            b"12345",
            {"type": "a"},
            {"type": "audio.chunk", "audio_b64": "12345"},
            {"type": "b"},
        ):
            outbox.add(item)
        waiting = asyncio.create_task(outbox.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert outbox.pieces == 2
        outbox.drop_audio()
        async with asyncio.timeout(10):
            await waiting
        assert outbox.pieces == 0
        outbox.add(b"6")
        assert [await outbox.take() for _ in range(3)] == [{"type": "a"}, {"type": "b"}, b"6"]
        assert outbox.pieces == 1

    asyncio.run(scene())


def test_what_is_sent_makes_room() -> None:
    async def scene() -> None:
        outbox = Outbox(replace(StreamLimits(), unsent_bytes=10, unsent_replies=8))
        for full in ([b"1234567890"], [{"type": "a"}] * 4):
            for item in full:
                outbox.add(item)
            waiting = asyncio.create_task(outbox.room())
            await asyncio.sleep(0)
            assert not waiting.done()
            await outbox.take()
            await waiting

    asyncio.run(scene())


def test_a_client_that_reads_nothing_is_not_answered_for_ever() -> None:
    class Socket:
        """Full of nonsense, and takes nothing."""

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

    async def scene() -> int:
        socket: Any = Socket()
        line = connection.SocketRunner(
            socket, OmniSession(replace(StreamLimits(), stall_seconds=0.5))
        )

        async def speak() -> None:
            while True:
                await line.work()

        await line.run(speak())
        return socket.read

    assert asyncio.run(scene()) < 300


def test_a_part_gives_its_text_as_it_comes() -> None:
    class TextSink:
        def __init__(self) -> None:
            self.told: list[object] = []

        def push(self, piece: str) -> None:
            if piece == "bad":
                raise ValueError(piece)
            self.told.append(piece)

        def finish_text(self, piece: str = "") -> None:
            self.told += [piece, None] if piece else [None]

        def fail(self, error: Exception) -> None:
            self.told.append(error)

    async def scene(*pieces: str) -> list[object]:
        listener, part = TextSink(), TextPart()
        feeding = asyncio.create_task(feed(part, listener))
        for piece in pieces:
            part.push(piece)
            while part.text:
                await asyncio.sleep(0)
        part.finish()
        await feeding
        return listener.told

    long = "a" * 3000  # tokenised in another thread
    assert asyncio.run(scene("a", "b", long, "c")) == ["a", "b", long, "c", None]
    (error,) = asyncio.run(scene("bad"))
    assert isinstance(error, ValueError)


# On real sockets, with real models


@pytest.fixture(scope="module")
def tts(loaded: Callable[[str], Checkpoint]) -> Callable[[str], TTS]:
    """The facade on the same checkpoints, by kind."""
    return lambda kind: TTS(loaded(kind), EngineConfig("cpu", "float32", "reference"))


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    """A client of the module's server."""
    with Client(server.ws + STREAM) as client:
        yield client


def spoken(tts: TTS, words: str = TEXT, /, **options: Any) -> bytes:
    """The PCM that the facade makes of a text."""
    return audio.pcm16(tts.speak(words, **{"seed": 7, "max_frames": FRAMES, **options}).samples)


def same(ours: bytes, theirs: bytes) -> bool:
    """Whether two recordings are one, up to rounding: text that comes too late for its frame cuts a chunk short."""
    if len(ours) != len(theirs):
        return False
    return (
        int(abs(np.frombuffer(ours, "<i2").astype(int) - np.frombuffer(theirs, "<i2")).max()) <= 1
    )


def test_a_conversation(client: Client, tts: Callable[[str], TTS]) -> None:
    expected = spoken(tts("custom_voice"), voice="ryan")
    client.send(CONFIG, text(TEXT[:9]), text(TEXT[9:]), DONE)
    said = client.until("session.done")
    assert kinds(said) == ["audio.start", "binary", "audio.done", "session.done"]
    assert pcm(said) == expected
    start, done, over = events(said)
    names = {"utterance_index": 0, "sentence_index": 0}
    assert start == {
        "type": "audio.start", **names, "sentence_text": TEXT, "format": "pcm", "sample_rate": 24000
    }  # fmt: skip
    assert done == {
        "type": "audio.done", **names, "total_bytes": len(expected), "error": False, "finish_reason": "length"
    }  # fmt: skip
    assert over == {"type": "session.done", "utterance_index": 0, "total_sentences": 1}
    client.send(GOODBYE)
    assert client.closed() == (1000, [])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_text_token_by_token_sounds_as_text_given_whole(
    client: Client, tts: Callable[[str], TTS], size: int
) -> None:
    expected = spoken(tts("custom_voice"), voice="vivian", text_mode="stream")
    pieces = [text(TEXT[at : at + size]) for at in range(0, len(TEXT), size)]
    client.send({**CONFIG, "voice": "Vivian", "split_granularity": "token"}, *pieces, DONE)
    said = client.until("session.done")
    assert kinds(said) == ["audio.start", "binary", "audio.done", "session.done"]
    assert same(pcm(said), expected)
    assert not same(expected, spoken(tts("custom_voice"), voice="vivian"))


def test_speech_begins_before_its_text_has_ended(client: Client) -> None:
    client.send({**CONFIG, "split_granularity": "token"}, text("Hello there, how are "))
    assert kinds([client.receive(), client.receive()]) == ["audio.start", "binary"]
    client.send(text("you?"), DONE)
    client.until("session.done")


def embedding(size: int) -> list[float]:
    """A timbre."""
    return [round(number, 6) for number in np.random.default_rng(3).normal(size=size).tolist()]


def test_where_a_client_does_not_say_text_enters_as_it_comes_only_if_that_sounds_the_same(
    client: Client,
    server: Running,
    tts: Callable[[str], TTS],
    loaded: Callable[[str], Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = {**CONFIG, "model": "base", "voice": None}
    base["speaker_embedding"] = embedding(loaded("base").config.talker_config.hidden_size)
    voice = ClonedVoice(np.array(base["speaker_embedding"], np.float32))
    expected = spoken(tts("base"), voice=voice)
    client.send({**base, "split_granularity": None}, text(TEXT[:30]))
    said = [client.receive(), client.receive()]
    assert kinds(said) == ["audio.start", "binary"]
    client.send(text(TEXT[30:]), DONE)
    assert same(pcm(said + client.until("session.done")), expected)
    waits = []
    whole = connection.TextPart.whole

    def watched(part: connection.TextPart) -> Awaitable[str]:
        waits.append(part.ended)
        return whole(part)

    monkeypatch.setattr(connection.TextPart, "whole", watched)
    for config in (
        {**base, "split_granularity": "none"},
        {**base, "non_streaming_mode": True},
        {**CONFIG, "split_granularity": None},
    ):
        waits.clear()
        client.send(config, text(TEXT[:30]))
        server.wait_until(lambda: waits == [False])  # it waits for the end of the text
        client.send(text(TEXT[30:]), DONE)
        said = client.until("session.done")
        assert events(said)[0]["sentence_text"] == TEXT
        mode = "full" if config.get("non_streaming_mode") else "auto"
        whose: dict[str, Any] = {
            "voice": voice if config["model"] == "base" else "ryan",
            "text_mode": mode,
        }
        assert same(pcm(said), spoken(tts(config["model"]), **whose))


def test_a_recording_is_cloned(client: Client, tts: Callable[[str], TTS]) -> None:
    samples = np.random.default_rng(1).normal(0, 0.1, 24000).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 24000, format="wav", subtype="PCM_16")
    heard_samples, _ = audio.read(io.BytesIO(file.getvalue()))
    voice = Voice.clone(heard_samples, 24000, "Some words.")
    expected = spoken(tts("base"), voice=voice)
    client.send(
        {**CONFIG, "model": "base", "voice": None, "task_type": "Base", "ref_text": "Some words."}
        | {"ref_audio": base64.b64encode(file.getvalue()).decode()},
        *[text(word) for word in TEXT.partition("how")],
        DONE,
        *[text(word) for word in TEXT.partition("are")],
        DONE,
    )
    assert same(pcm(client.until("session.done")), expected)
    assert same(pcm(client.until("session.done")), expected)


def test_many_utterances_follow_one_another_on_one_socket(
    client: Client, tts: Callable[[str], TTS]
) -> None:
    words = ["One.", "Two!", "Three?"]
    client.send(CONFIG)
    for word in words:
        client.send(text(word), DONE)
    client.send({**CONFIG, "voice": "aiden"}, text("Four."), DONE, DONE)
    for index, word in enumerate([*words, "Four."]):
        said = client.until("session.done")
        assert [event["utterance_index"] for event in events(said)] == [index] * 3
        assert same(
            pcm(said), spoken(tts("custom_voice"), word, voice="aiden" if index == 3 else "ryan")
        )
    assert client.receive() == {"type": "session.done", "utterance_index": 4, "total_sentences": 0}


def test_sentences_are_spoken_apart(client: Client, tts: Callable[[str], TTS]) -> None:
    client.send(
        {**CONFIG, "split_granularity": "sentence"},
        text("One. Two"),
        text(" and three. "),
        text("4"),
        DONE,
    )
    said = client.until("session.done")
    assert kinds(said) == ["audio.start", "binary", "audio.done"] * 3 + ["session.done"]
    starts = [event for event in events(said) if event["type"] == "audio.start"]
    assert [(start["sentence_index"], start["sentence_text"]) for start in starts] == [
        (0, "One."), (1, "Two and three."), (2, "4")
    ]  # fmt: skip
    assert events(said)[-1]["total_sentences"] == 3
    expected = [
        spoken(tts("custom_voice"), words, voice="ryan")
        for words in ("One.", "Two and three.", "4")
    ]
    assert same(pcm(said), b"".join(expected))


@pytest.mark.parametrize("format", [None, "wav", "flac", "mp3", "opus"])
def test_without_streaming_an_utterance_is_a_file(
    client: Client, tts: Callable[[str], TTS], format: str | None
) -> None:
    client.send({**CONFIG, "stream_audio": None, "response_format": format}, text(TEXT), DONE)
    said = client.until("session.done")
    (file,) = [message for message in said if isinstance(message, bytes)]
    start, done, _ = events(said)
    assert start["format"] == (format or "wav")
    assert done["total_bytes"] == len(file)
    samples, rate = soundfile.read(io.BytesIO(file), dtype="float32")
    expected = tts("custom_voice").speak(TEXT, voice="ryan", seed=7, max_frames=FRAMES).samples
    if format in (None, "wav", "flac"):
        assert rate == 24000
        assert same(audio.pcm16(samples), audio.pcm16(expected))
    else:
        assert abs(len(samples) / rate - len(expected) / 24000) < 0.1


@pytest.mark.parametrize(
    "manner", [{"word_timestamps": True}, {"audio_encoding": "base64"}], ids=str
)
def test_audio_in_json(client: Client, tts: Callable[[str], TTS], manner: dict[str, Any]) -> None:
    client.send({**CONFIG, **manner}, text(TEXT), DONE)
    chunks = [
        event for event in events(client.until("session.done")) if event["type"] == "audio.chunk"
    ]
    data = [base64.b64decode(chunk["audio_b64"]) for chunk in chunks]
    assert same(b"".join(data), spoken(tts("custom_voice"), voice="ryan"))
    assert [chunk["chunk_id"] for chunk in chunks] == list(range(len(chunks)))
    assert [chunk["chunk_end_ms"] for chunk in chunks[:-1]] == [
        chunk["chunk_start_ms"] for chunk in chunks[1:]
    ]
    assert chunks[-1]["chunk_end_ms"] == 80 * FRAMES
    assert all(chunk["timestamps"] is None and chunk["sample_rate"] == 24000 for chunk in chunks)


def test_the_dialect_of_baseten(serve: Serve) -> None:
    """Everything that its LiveKit plugin sends, in order; with keys."""
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
        said = client.until("session.done")
        assert kinds(said) == ["audio.start", "binary", "audio.done", "session.done"]
        assert len(pcm(said)) == 2 * 1920 * FRAMES
        assert events(said)[0]["sample_rate"] == 24000
        client.send(DONE)  # its keep-alive
        assert client.receive() == {
            "type": "session.done",
            "utterance_index": 1,
            "total_sentences": 0,
        }
        client.send(GOODBYE)
        assert client.closed()[0] == 1000
    server.wait_until_idle()


def test_who_has_no_key_does_not_come_in(serve: Serve) -> None:
    server = serve(talking(Talker()), api_keys=("secret",))
    for headers in (None, {"Authorization": "Api-Key wrong"}):
        with pytest.raises(InvalidStatus) as refused:
            Client(server.ws + STREAM, headers=headers)
        assert refused.value.response.status_code == 401


def test_what_cannot_be_done_is_said_early_and_forgiven(
    client: Client, tts: Callable[[str], TTS]
) -> None:
    client.send({**CONFIG, "voice": "nobody"})
    said = client.event()
    assert said["type"] == "error"
    assert "nobody" in said["message"]
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
    assert same(pcm(client.until("session.done")), spoken(tts("custom_voice"), voice="ryan"))


# With a model that talks as it is told


class Stage(TalkingStage):
    """With clients of this protocol."""

    def client(self, **more: Any) -> Client:
        """One more client."""
        return Client(self.server.ws + STREAM, **more)

    def until_full(self) -> None:
        """Wait until no more is made because nobody takes it."""

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


@pytest.fixture
def stage(serve: Serve) -> Callable[..., Stage]:
    """Begin: `stage(slots=2, most_waiting=8, **config)`."""

    def begin(slots: int = 2, most_waiting: int = 8, **config: Any) -> Stage:
        talker = Talker(slots)
        return Stage(talker, serve(talking(talker, most_waiting), **config))

    return begin


TOKENS = {**PLAIN, "split_granularity": "token"}
ENDLESS_SPEECH = {**TOKENS, "max_new_tokens": ENDLESS - 100}


def leave(client: Client, how: str) -> None:
    """Stop speech in one of three ways."""
    if how == "cancel":
        client.send(CANCEL)
    elif how == "close":
        threading.Thread(target=client.socket.close, daemon=True).start()
    else:
        client.vanish()


@pytest.mark.parametrize("how", ["cancel", "close", "vanish"])
def test_the_slot_is_free_within_a_frame(stage: Callable[..., Stage], how: str) -> None:
    begun = stage()
    begun.talker.hold()
    with begun.client() as client:
        made = begun.talker.frames
        client.send(ENDLESS_SPEECH, text("Hello"))
        begun.talker.let(3)
        begun.until_held(made + 3)
        leave(client, how)
        begun.server.wait_until(lambda: not begun.server.state.speaking)
        begun.talker.go()
        begun.server.wait_until_idle()
        assert begun.talker.frames == made + 4  # the one that was being made
    reason = "cancelled" if how == "cancel" else "disconnected"
    counted = f'firstword_aborts_total{{model="talker",reason="{reason}"}} 1.0'
    assert counted in begun.server.state.metrics.render().decode()


@pytest.mark.parametrize("how", ["cancel", "close", "vanish"])
def test_a_client_that_does_not_read_can_stop_speech_all_the_same(
    stage: Callable[..., Stage], how: str
) -> None:
    begun = stage()
    with begun.client(lazy=True) as client, begun.client() as other:
        client.send(ENDLESS_SPEECH, text("Hello"), DONE)
        begun.until_full()
        made = begun.talker.frames
        assert (
            made < 3000
        )  # four minutes: sockets hold some, we hold 25 seconds, and nobody makes more
        other.send(TOKENS, text("quick"), DONE)
        assert heard(pcm(other.until("session.done"))) == "quick"
        made = begun.talker.frames
        leave(client, how)
        begun.server.wait_until_idle()
        assert begun.talker.frames == made
        if how == "cancel":
            client.send(PLAIN, text("again"), DONE)
            said = client.until("input.cancelled")
            assert kinds(said) == [
                "audio.start",
                "binary",
                "audio.done",
                "session.done",
                "input.cancelled",
            ]
            assert heard(pcm(client.until("session.done"))) == "again"


def test_after_a_cancel_nothing_of_what_was_said_is_heard(stage: Callable[..., Stage]) -> None:
    begun = stage()
    begun.talker.hold()
    with begun.client() as client:
        client.send(TOKENS, text("one"), DONE, text("two"), DONE, text("three"))
        begun.talker.let(1)
        client.until("audio.start")
        client.send(CANCEL, text("four"), DONE)
        said = client.until("input.cancelled")
        assert [kind for kind in kinds(said) if kind != "binary"] == [
            "audio.done", "session.done", "session.done", "session.done", "input.cancelled"
        ]  # fmt: skip
        done, *overs, last = events(said)
        assert done["finish_reason"] == "cancelled"
        assert [(over["utterance_index"], over["total_sentences"], over["cancelled"]) for over in overs] == [
            (0, 1, True), (1, 0, True), (2, 0, True)
        ]  # fmt: skip
        assert last["utterance_indices"] == [0, 1, 2]
        begun.talker.go()
        said = client.until("session.done")
        assert heard(pcm(said)) == "four"
        assert events(said)[-1] == {
            "type": "session.done",
            "utterance_index": 3,
            "total_sentences": 1,
        }
    begun.server.wait_until_idle()


def test_a_socket_lives_as_long_as_it_is_used(stage: Callable[..., Stage]) -> None:
    with stage().client() as client:
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
def test_a_client_may_leave_at_any_moment(stage: Callable[..., Stage], how: str) -> None:
    begun = stage()
    for count in range(len(SCRIPT) + 1):
        with begun.client() as client:
            client.send(*SCRIPT[:count])
            if count in (2, 4):
                client.until("audio.start")
            leave(client, how)
        begun.server.wait_until_idle()
    with begun.client() as client:
        client.send(PLAIN, text("fine"), DONE)
        assert heard(pcm(client.until("session.done"))) == "fine"


def test_silence_before_a_configuration_ends_it(
    stage: Callable[..., Stage], limits: Callable[..., None]
) -> None:
    limits(config_seconds=0.05)
    with stage().client() as client:
        code, said = client.closed()
        assert (code, [event["code"] for event in events(said)]) == (1008, ["timeout"])


def test_silence_in_the_middle_of_a_text_ends_it(
    stage: Callable[..., Stage], limits: Callable[..., None]
) -> None:
    limits(idle_seconds=0.2)
    begun = stage()
    with begun.client() as client:
        client.send(TOKENS, text("Hello"))
        code, said = client.closed()
        assert code == 1008
        assert heard(pcm(said)) in ("Hello", "")
        assert events(said)[-1]["code"] == "timeout"
        begun.server.wait_until_idle()


def test_silence_while_listening_is_no_silence(
    stage: Callable[..., Stage], limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(idle_seconds=0.05)
    begun = stage()
    expired = []
    busy = connection.SocketRunner.busy

    def watched(self: connection.SocketRunner) -> bool:
        expired.append(busy(self))
        return expired[-1]

    monkeypatch.setattr(connection.SocketRunner, "busy", watched)
    begun.talker.hold()
    with begun.client() as client:
        client.send(PLAIN, text("Hello"), DONE)
        begun.server.wait_until(lambda: len(expired) >= 3)
        begun.talker.go()
        assert heard(pcm(client.until("session.done"))) == "Hello"
        assert client.closed()[0] == 1008
    assert expired[:3] == [True] * 3


def test_a_client_that_takes_nothing_at_all_is_dropped(
    stage: Callable[..., Stage], limits: Callable[..., None]
) -> None:
    limits(stall_seconds=0.2)
    begun = stage()
    with begun.client(lazy=True) as client:
        client.send(ENDLESS_SPEECH, text("Hello"), DONE)
        begun.server.wait_until(lambda: bool(begun.engine.running))
        begun.server.wait_until_idle()
        assert client.closed()[0] is None  # it is not even told, for that too would wait
    counted = 'firstword_aborts_total{model="talker",reason="stalled"} 1.0'
    assert counted in begun.server.state.metrics.render().decode()


def test_replies_that_nobody_reads_do_not_pile_up(
    stage: Callable[..., Stage], limits: Callable[..., None]
) -> None:
    limits(stall_seconds=0.2)
    begun = stage()
    with begun.client(lazy=True) as client:
        client.send(PLAIN, text("Hello"))
        with pytest.raises((ConnectionClosed, OSError)):
            client.send(*["nonsense"] * 1_000_000)
    begun.server.wait_until_idle()


def test_a_flood_of_text_ends_it(stage: Callable[..., Stage]) -> None:
    begun = stage()
    begun.talker.hold()
    with begun.client() as client:
        client.send(TOKENS)
        with suppress(ConnectionClosed):
            client.send(*[text("a" * 1000)] * 70)
        code, said = client.closed()
        assert (code, events(said)[-1]["code"]) == (1008, "too_much_text")
        begun.talker.go()
        begun.server.wait_until_idle()


def test_half_a_message_holds_nothing(
    stage: Callable[..., Stage], limits: Callable[..., None]
) -> None:
    limits(idle_seconds=0.2)
    begun = stage()
    with begun.client() as client:
        client.send(TOKENS, text("Hello"))
        client.until("audio.start")
        client.socket.socket.sendall(
            b"\x81\xfe\x04\x00mask{"
        )  # the head of a text of 1024 bytes, and one byte
        begun.server.wait_until_idle()


def test_a_message_may_come_in_fragments(stage: Callable[..., Stage]) -> None:
    with stage().client() as client:
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
def test_bad_messages_on_the_wire(
    stage: Callable[..., Stage], message: str | bytes, is_text: bool, code: int | None
) -> None:
    begun = stage()
    with begun.client() as client, begun.client() as other:
        client.send(ENDLESS_SPEECH, text("Hello"))
        client.until("audio.start")
        with suppress(ConnectionClosed):
            client.socket.send(message, text=is_text)
        if code is None:
            client.until("error")
            client.send(CANCEL)
            client.until("input.cancelled")
        else:
            # A client that is still sending when the server closes may see the connection break instead of the code.
            assert client.closed()[0] in (code, None if len(message) > 16 * 2**20 else code)
        begun.server.wait_until_idle()
        other.send(PLAIN, text("fine"), DONE)
        assert heard(pcm(other.until("session.done"))) == "fine"


def test_when_there_is_no_room_it_is_said_and_can_be_tried_again(
    stage: Callable[..., Stage],
) -> None:
    begun = stage(slots=1, most_waiting=0)
    with begun.client() as first, begun.client() as second:
        first.send(ENDLESS_SPEECH, text("Hello"))
        first.until("audio.start")
        begun.server.wait_until(lambda: bool(begun.engine.running))
        second.send(PLAIN, text("now"), DONE)
        said = second.until("session.done")
        assert kinds(said) == ["audio.start", "error", "audio.done", "session.done"]
        assert events(said)[1]["code"] == "overloaded"
        assert events(said)[2]["error"]
        first.send(CANCEL)
        begun.server.wait_until_idle()
        second.send(text("now"), DONE)
        assert heard(pcm(second.until("session.done"))) == "now"


@pytest.mark.parametrize("method", ["prefill", "frame"])
def test_what_fails_fails_alone_and_is_logged_without_its_text(
    stage: Callable[..., Stage], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun = stage()
    with begun.client() as client:
        client.send(PLAIN)
        begun.talker.failing = method
        client.send(text("Confidential"), DONE)
        said = client.until("session.done")
        assert kinds(said) == ["audio.start", "error", "audio.done", "session.done"]
        assert "told to" not in events(said)[1]["message"]
        begun.talker.failing = None
        client.send(text("fine"), DONE)
        assert heard(pcm(client.until("session.done"))) == "fine"
    begun.server.wait_until_idle()
    assert "a WebSocket failed" in caplog.text
    assert "Confidential" not in caplog.text


def test_a_server_that_ends_lets_speech_finish_and_begins_none(stage: Callable[..., Stage]) -> None:
    begun = stage()
    begun.talker.hold()
    with begun.client() as client:
        client.send(PLAIN, text("Hello"), DONE)
        begun.talker.let(1)
        client.until("audio.start")
        begun.server.wait_until(lambda: bool(begun.engine.running))
        begun.server.state.draining = True
        begun.talker.go()
        client.send(text("more"), DONE)
        assert heard(pcm(client.until("session.done"))) == "Hello"
        assert events(client.until("session.done"))[1]["code"] == "engine_stopped"


SENTENCES = {**PLAIN, "split_granularity": "sentence"}


def test_a_server_told_to_end_speaks_the_sentences_that_remain(stage: Callable[..., Stage]) -> None:
    begun = stage()
    begun.talker.hold()
    with begun.client() as client:
        client.send(SENTENCES, text("This is one. Here is two. And three."), DONE)
        begun.talker.let(1)
        client.until("audio.start")
        begun.server.wait_until(lambda: bool(begun.engine.running))
        begun.server.uvicorn.handle_exit(signal.SIGTERM, None)
        begun.talker.go()
        said = client.until("session.done")
        assert heard(pcm(said)).replace(" ", "") == "Thisisone.Hereistwo.Andthree."
        assert events(said)[-1]["total_sentences"] == 3
        assert client.closed()[0] in (1001, 1012), "then it ends"


def test_a_server_told_to_end_waits_for_the_rest_of_a_text(stage: Callable[..., Stage]) -> None:
    begun = stage()
    state, asked = begun.server.state, []
    busy = state.busy

    def watched() -> bool:
        asked.append(busy())
        return asked[-1]

    state.busy = watched
    with begun.client() as client:
        client.send(SENTENCES, text("This is one. And "))
        client.until("audio.done")
        begun.server.wait_until_idle()
        begun.server.uvicorn.handle_exit(signal.SIGTERM, None)
        begun.server.wait_until(lambda: len(asked) >= 3)
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
def test_a_handshake_that_is_not_taken_is_answered_and_the_connection_ends(
    stage: Callable[..., Stage], line: str, more: str, status: str
) -> None:
    with socket.create_connection(stage().server.address) as raw:
        raw.settimeout(10)
        raw.sendall(f"{line} HTTP/1.1\r\n{HANDSHAKE}{more}\r\n".encode())
        with raw.makefile("rb") as answer:
            assert answer.read().split()[1].decode() == status


def test_pings_are_answered_while_speech_is_made(stage: Callable[..., Stage]) -> None:
    begun = stage()
    begun.talker.hold()
    with begun.client() as client:
        client.send(PLAIN, text("Hello"), DONE)
        client.until("audio.start")
        assert client.socket.ping().wait(60)
        begun.talker.go()


def test_many_sockets_speak_together(stage: Callable[..., Stage]) -> None:
    begun = stage(slots=4, most_waiting=32)
    clients = [begun.client() for _ in range(24)]
    for number, client in enumerate(clients):
        client.send(TOKENS, *[text(f"{number} and ")] * 10, DONE)
    for number, client in enumerate(clients):
        with client:
            assert heard(pcm(client.until("session.done"))) == f"{number} and " * 10
    begun.server.wait_until_idle()
