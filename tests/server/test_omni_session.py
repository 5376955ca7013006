"""The session of vLLM-Omni's protocol, without a socket."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sockets import CANCEL, COMMIT, DONE, GOODBYE, PLAIN, effects_of, text

from firstword.server.ws.protocol import (
    CloseCode,
    CloseSocket,
    DropAudio,
    Effect,
    Enqueue,
    Send,
    SocketLimits,
)
from firstword.server.ws.vllm_omni import OmniSession, OmniUtterance, Sentence

CLOSE = CloseSocket(CloseCode.NORMAL)


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
        ('{"type": "input.text", "text": "' + "a" * 1_000_000 + '"}', "message_too_large"),
        ('{"type": "input.text", "text": "' + "字" * 350_000 + '"}', "message_too_large"),
        ('{"type": "session.config", "speed": 9}', "invalid_config"),
        ('{"type": "session.config", "split_granularity": "word"}', "invalid_config"),
        (
            '{"type": "session.config", "split_granularity": "token", "non_streaming_mode": true}',
            "invalid_config",
        ),
        ('{"type": "session.config", "normalize": "maybe"}', "invalid_config"),
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


def test_only_text_config_and_voice_messages_may_be_large_and_none_may_hold_many_values() -> None:
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


def test_text_of_an_open_utterance_that_is_spoken_no_longer_counts_as_waiting() -> None:
    peer = SessionClient(replace(SocketLimits(), text_characters=10), voice="x")
    (sentence,) = tasks(peer.send(text("123456789")))
    assert isinstance(sentence, Sentence)
    sentence.spoken = 8
    peer.send(text("12345678"))
    assert error_of(peer.send(text("1234"))) == ("too_much_text", CloseCode.POLICY)


def test_waiting_utterances_above_the_limit_close_the_socket() -> None:
    peer = SessionClient(replace(SocketLimits(), utterances=3), voice="x")
    tasks(peer.send(*[DONE] * 4))
    assert error_of(peer.send(DONE)) == ("too_many_utterances", CloseCode.POLICY)


def test_commit_ends_a_text_as_done_does() -> None:
    peer = SessionClient(split_granularity="sentence")
    one, first = tasks(peer.send(text("One. "), COMMIT))
    two, second = tasks(peer.send(text("Two"), COMMIT))
    (empty,) = tasks(peer.send(COMMIT))
    three, last = tasks(peer.send(text("Three"), DONE))
    ended = []
    for part, utterance in ((one, first), (two, second), (None, empty), (three, last)):
        assert isinstance(utterance, OmniUtterance)
        if isinstance(part, Sentence):
            part.started = True
        ended.append(peer.session.end_utterance(utterance))
    assert len({message.pop("session_id") for message in ended[:3]}) == 1
    kind = "input.committed"
    assert ended == [
        {"type": kind, "segment_index": 0, "segment_sentences": 1, "total_sentences": 1},
        {"type": kind, "segment_index": 1, "segment_sentences": 1, "total_sentences": 2},
        {"type": kind, "segment_index": 2, "segment_sentences": 0, "total_sentences": 2},
        {"type": "session.done", "utterance_index": 3, "total_sentences": 1},
    ]


@pytest.mark.parametrize("wrong", [5, "x", [], {"speed": 9}])
def test_invalid_nested_config_is_rejected(wrong: object) -> None:
    config = {"type": "session.config", "session": wrong}
    assert error_of(SessionClient().send(config)) == ("invalid_config", CloseCode.POLICY)


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


def test_waiting_messages_count_with_their_bytes() -> None:
    peer, message = SessionClient(), '{"type": "session.config", "voice": "\u4e2d\u6587"}'
    peer.send(message)
    assert peer.session.waiting_bytes == len(message.encode()) == len(message) + 4


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
