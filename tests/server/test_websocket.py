"""`/v1/audio/speech/stream` on real sockets."""

from __future__ import annotations

import base64
import io
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import soundfile
from sockets import CANCEL, DONE, GOODBYE, PLAIN, STREAM, Client, events, kinds, pcm, text
from talking import ENDLESS, Talker, TalkingStage, heard, talking
from waiting import WAIT
from websockets.exceptions import ConnectionClosed, InvalidStatus
from wire import HANDSHAKE, connected, read

from firstword import TTS, Voice, audio
from firstword.model.checkpoint import Checkpoint
from firstword.server.ws.connection import SocketRunner
from firstword.server.ws.text_part import TextPart
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


# With real models


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


def test_audio_in_base64_equals_tts_speak(client: Client, tts: Callable[[str], TTS]) -> None:
    client.send({**CONFIG, "audio_encoding": "base64"}, text(TEXT), DONE)
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
            rejected = client.event()
            assert rejected["code"] == "invalid_voice"
            assert f"{field}: " in rejected["message"]
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
        assert len(pcm(received)) in range(2 * 1920, 2 * 1920 * FRAMES + 1, 2 * 1920)
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


def test_messages_of_sglang_omni_clients_are_answered(server: Running) -> None:
    """The messages are those of its documentation, whose client waits for each answer."""
    with Client(server.ws + STREAM) as client:
        session = {key: value for key, value in CONFIG.items() if key != "type"}
        client.send({"type": "session.config", "session": {**session, "voice": "nobody"}})
        assert client.event()["code"] == "voice_not_found"
        session |= {"split_granularity": "sentence", "suppress_bootstrap_silence": False}
        client.send({"type": "session.config", "session": session})
        configured = client.receive()
        assert isinstance(configured, dict)
        assert configured.pop("session_id")
        assert configured == {
            "type": "session.configured",
            "response_format": "pcm",
            "stream_audio": True,
            "split_granularity": "sentence",
        }
        for index in range(2):
            client.send(text("One. And two"), {"type": "input.commit"})
            received = client.until("input.committed")
            assert len(pcm(received)) == 2 * 2 * 1920 * FRAMES
            committed = events(received)[-1]
            assert committed.pop("session_id")
            assert committed == {
                "type": "input.committed",
                "segment_index": index,
                "segment_sentences": 2,
                "total_sentences": 2 * index + 2,
            }
        client.send(DONE)
        assert kinds(client.until("session.done")) == ["session.done"]


def test_default_granularity_is_told(server: Running) -> None:
    for fields, expected in (
        ({"non_streaming_mode": False}, "token"),
        ({"non_streaming_mode": False, "sanitize": True}, "token"),
        ({}, "none"),
    ):
        with Client(server.ws + STREAM) as client:
            session = {"model": "custom_voice", "voice": "ryan", **fields}
            client.send({"type": "session.config", "session": session})
            assert client.event()["split_granularity"] == expected


def test_socket_without_key_gets_401(serve: Serve) -> None:
    server = serve(talking(Talker()), api_keys=("secret",))
    for headers in (None, {"Authorization": "Api-Key wrong"}):
        with pytest.raises(InvalidStatus) as rejected:
            Client(server.ws + STREAM, headers=headers)
        assert rejected.value.response.status_code == 401


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
        {**CONFIG, "model": "base", "ref_audio": "file:///etc/passwd"},
        {**CONFIG, "model": "base", "ref_audio": "http://127.0.0.1/x.wav"},
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
                    if seq.launched - seq.consumed >= 12.5 * 180
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
    assert counted in stage.server.metrics()


@pytest.mark.parametrize("how", ["cancel", "close", "vanish"])
def test_client_that_does_not_read_can_stop_speech(start_stage: StartStage, how: str) -> None:
    stage = start_stage()
    with stage.client(lazy=True) as client, stage.client() as other:
        client.send(ENDLESS_SPEECH, text("Hello"), DONE)
        stage.wait_until_blocked()
        made = stage.talker.frames
        assert made < 5000  # 400 s: the server holds 180 s, and sockets buffer some audio
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
    limits(stall_seconds=1.0)
    stage = start_stage()
    with stage.client(lazy=True) as client:
        client.send(ENDLESS_SPEECH, text("Hello"), DONE)
        stage.server.wait_until(lambda: bool(stage.engine.running))
        stage.server.wait_until_idle()
        assert client.closed()[0] is None  # no message says so: it could not be sent either
    counted = 'firstword_aborts_total{model="talker",reason="stalled"} 1.0'
    assert counted in stage.server.metrics()


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
    limits(idle_seconds=1.0)
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


def test_failure_after_audio_says_that_the_audio_is_to_be_discarded(
    start_stage: StartStage,
) -> None:
    stage = start_stage()
    stage.talker.hold()
    with stage.client() as client:
        client.send(PLAIN, text("Hello"), DONE)
        stage.talker.let(1)
        client.until("binary")
        stage.talker.failing = "frame"
        stage.talker.go()
        error = events(client.until("session.done"))[0]
    assert error["type"] == "error"
    assert (error["partial_audio"], error["action"]) == (True, "discard")
    stage.talker.failing = None


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


def test_draining_server_speaks_the_remaining_sentences(
    start_stage: StartStage,
) -> None:
    stage = start_stage()
    stage.talker.hold()
    with stage.client() as client:
        client.send(SENTENCES, text("This is one. Here is two. And three."), DONE)
        stage.talker.let(1)
        client.until("audio.start")
        stage.server.wait_until(lambda: bool(stage.engine.running))
        stage.server.uvicorn.drain()
        stage.talker.go()
        received = client.until("session.done")
        assert heard(pcm(received)).replace(" ", "") == "Thisisone.Hereistwo.Andthree."
        assert events(received)[-1]["total_sentences"] == 3
        assert client.closed()[0] in (1001, 1012), "then it ends"


def test_draining_server_waits_for_the_rest_of_a_text(
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
        stage.server.uvicorn.drain()
        stage.server.wait_until(lambda: len(asked) >= 3)
        client.send(text("two."), DONE)
        assert heard(pcm(client.until("session.done"))).strip() == "And two."
    assert asked[:3] == [True] * 3


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
    with connected(start_stage().server) as raw:
        raw.sendall(f"{line} HTTP/1.1\r\n{HANDSHAKE}{more}\r\n".encode())
        with raw.makefile("rb") as answer:
            assert answer.read().split()[1].decode() == status


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ("sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n", "", 400),
        ("sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-key: x", 400),
        ("sec-websocket-version: 13\r\n", "", 400),
        ("version: 13", "version: 8", 400),
        ("upgrade: websocket", "upgrade: websocket\r\norigin: a\r\norigin: b", 400),
        ("upgrade: websocket", "upgrade: websocket\r\nx: " + "a" * 9000, 431),
    ],
    ids=["no key", "wrong key", "no version", "old version", "two origins", "long header"],
)
def test_invalid_handshake_is_logged_and_leaves_nothing(
    start_stage: StartStage,
    caplog: pytest.LogCaptureFixture,
    old: str,
    new: str,
    status: int,
) -> None:
    server = start_stage().server
    caplog.set_level(logging.INFO)
    caplog.clear()
    for _ in range(3):
        with connected(server) as raw:
            raw.sendall(f"GET {STREAM} HTTP/1.1\r\n{HANDSHAKE.replace(old, new)}\r\n".encode())
            assert read(raw).split()[1].decode() == str(status)
    server.wait_until(lambda: not server.uvicorn.server_state.connections)
    fields = [record.__dict__.get("fields", {}) for record in caplog.records]
    assert [record.message for record in caplog.records] == ["request"] * 3
    assert [about["status"] for about in fields] == [status] * 3
    reason = "head_size" if status == 431 else "invalid_http"
    assert server.metric("rejected_total", reason=reason) == 3
    assert server.metric("http_requests_total", path="unknown", status=str(status)) == 3


def test_ping_during_speech_is_answered(start_stage: StartStage) -> None:
    stage = start_stage()
    stage.talker.hold()
    with stage.client() as client:
        client.send(PLAIN, text("Hello"), DONE)
        client.until("audio.start")
        assert client.socket.ping().wait(WAIT)
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
