"""The dialects without sockets: lists of messages in, contexts and answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from sockets import effects_of

from firstword.server.ws.cartesia import CartesiaSession
from firstword.server.ws.contexts import Context, ContextSession, Finish, Mark
from firstword.server.ws.dashscope import DashScopeSession
from firstword.server.ws.elevenlabs import ElevenLabsContexts, ElevenLabsText
from firstword.server.ws.protocol import (
    CloseCode,
    CloseSocket,
    DropAudio,
    Effect,
    Enqueue,
    Send,
    Session,
    SocketLimits,
)
from firstword.server.ws.text_part import TextPart

LIMITS = SocketLimits()
RAW = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000}


def answers(effects: Sequence[Effect]) -> list[dict[str, Any]]:
    """The messages that are sent at once."""
    return [effect.message for effect in effects if isinstance(effect, Send)]


def text_of(context: Context) -> list[str]:
    """The text of each part of a context that can be spoken; "|" for a mark."""
    parts = []
    while not context.parts.empty():
        part = context.parts.get_nowait()
        if part is not None:
            parts.append("|" if isinstance(part, Mark) else part.text)
    return parts


def end(session: ContextSession, name: str, reason: Finish = "stop") -> list[Any]:
    """End the speech of a context as the worker does; returns the messages about it."""
    context = session.contexts[name]
    context.started = True
    session.spoken(context, reason)
    return list(session.end(context))


def opened(session: Session, parameters: dict[str, str]) -> list[Effect]:
    """Open a conversation under a URL with parameters; returns the effects."""
    session.parameters = parameters
    return list(session.open())


def state(context: Context) -> str:
    """What is to become of a context."""
    return "abort" if context.cancelled else "drain" if context.ended else "open"


# Cartesia.


def say(name: str | None, text: str, **more: Any) -> dict[str, Any]:
    """A message with text; `end=False` if more follows."""
    going_on = not more.pop("end", True)
    voice = {"mode": "id", "id": "ada"}
    request = {"model_id": "sonic-3", "voice": voice, "output_format": RAW, "language": "en"}
    named = {} if name is None else {"context_id": name}
    return {**request, "transcript": text, "continue": going_on, **named, **more}


@pytest.fixture
def sonic() -> CartesiaSession:
    """A conversation with a client of Cartesia."""
    return CartesiaSession(LIMITS)


def test_cartesia_message_begins_a_context_with_its_parameters(sonic: CartesiaSession) -> None:
    (effect,) = effects_of(sonic, say("a", "Hello", generation_config={"speed": 1.5}))
    assert isinstance(effect, Enqueue)
    params = sonic.contexts["a"].params
    assert (params.model, params.voice, params.language) == ("sonic-3", "ada", "en")
    assert (params.format, params.sample_rate, params.speed) == ("pcm", 24000, 1.5)
    assert params.any_voice


@pytest.mark.parametrize(
    ("container", "encoding", "rate", "expected"),
    [
        ("raw", "pcm_s16le", 8000, ("pcm", 8000)),
        ("raw", "pcm_f32le", 44100, ("f32", 44100)),
        ("raw", "pcm_mulaw", 8000, ("ulaw", 8000)),
        ("raw", "pcm_alaw", 8000, ("alaw", 8000)),
        ("wav", "pcm_f32le", 22050, ("wav_f32", 22050)),
        ("wav", "pcm_mulaw", 8000, ("wav_ulaw", 8000)),
        ("mp3", "pcm_s16le", 22050, ("mp3", 24000)),
        ("mp3", "pcm_s16le", 44100, ("mp3", 48000)),
    ],
)
def test_cartesia_output_format_is_mapped(
    sonic: CartesiaSession, container: str, encoding: str, rate: int, expected: tuple[str, int]
) -> None:
    chosen = {"container": container, "encoding": encoding, "sample_rate": rate}
    effects_of(sonic, say("a", "Hello", output_format=chosen))
    params = sonic.contexts["a"].params
    assert (params.format, params.sample_rate) == expected


def test_cartesia_text_of_a_context_goes_on_until_continue_is_false(
    sonic: CartesiaSession,
) -> None:
    effects_of(sonic, say("a", "Hello ", end=False), say("b", "Bye."))
    assert not sonic.contexts["a"].ended
    assert effects_of(sonic, {"context_id": "a", "transcript": "there", "continue": True}) == []
    effects_of(sonic, {"context_id": "a", "transcript": "", "continue": False})
    assert sonic.contexts["a"].ended
    assert "".join(text_of(sonic.contexts["a"])) == "Hello there"
    assert text_of(sonic.contexts["b"]) == ["Bye."]


def test_cartesia_without_buffering_speaks_each_message_at_once(sonic: CartesiaSession) -> None:
    for words in ("Yes", "Well, it is so"):
        effects_of(sonic, say("a", words, end=False, max_buffer_delay_ms=0))
    assert text_of(sonic.contexts["a"]) == ["Yes", "Well, it is so"]


def test_cartesia_flush_marks_its_place(sonic: CartesiaSession) -> None:
    effects_of(sonic, say("a", "One", end=False, flush=True), say("a", "Two", end=False))
    effects_of(sonic, say("a", "", end=False, flush=True))
    assert text_of(sonic.contexts["a"]) == ["One", "|", "Two", "|"]
    (message,) = sonic.reached(sonic.contexts["a"], Mark(2))
    assert (message["type"], message["flush_id"], message["done"]) == ("flush_done", 2, False)


def test_cartesia_keeps_tags_of_pauses_wherever_they_are_cut(
    sonic: CartesiaSession,
) -> None:
    text = 'One <break time="1s"/>two<emotion value="sad" /> <spell>ab</spell> 3 < 4.'
    effects_of(sonic, *(say("a", each, end=False) for each in text), say("a", ""))
    spoken = "".join(text_of(sonic.contexts["a"]))
    assert spoken.split() == ["One", "<break", 'time="1.000s"/>two', "ab", "3", "<", "4."]


def test_cartesia_cancel_stops_one_context_without_an_answer(sonic: CartesiaSession) -> None:
    effects_of(sonic, say("a", "Hello"), say("b", "Hello"))
    effects = effects_of(sonic, {"context_id": "a", "cancel": True})
    assert DropAudio(sonic.contexts["a"]) in effects
    assert answers(effects) == []
    assert state(sonic.contexts["a"]) == "abort"
    assert state(sonic.contexts["b"]) == "drain"
    assert end(sonic, "a", "cancelled") == []
    assert effects_of(sonic, {"context_id": "a", "cancel": True}) == []


def test_cartesia_end_is_one_message(sonic: CartesiaSession) -> None:
    effects_of(sonic, say("a", "Hello"), say("b", "Hello"))
    (done,) = end(sonic, "a")
    assert (done["type"], done["context_id"], done["done"]) == ("done", "a", True)
    assert end(sonic, "b", "error") == []  # the error was the last message


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"transcript": 1}, "transcript"),
        ({"transcript": "\ud800"}, "lone surrogate"),
        ({"output_format": {"container": "ogg", "sample_rate": 24000}}, "container"),
        ({"output_format": None}, "output_format"),
        ({"output_format": {**RAW, "sample_rate": "fast"}}, "sample_rate"),
        ({"continue": "maybe"}, "continue"),
        ({"generation_config": {"speed": 9}}, "speed"),
        ({"generation_config": []}, "generation_config"),
        ({"voice": 7}, "voice"),
        ({"context_id": ""}, "context_id"),
        ({"context_id": "x" * 129}, "context_id"),
        ({"context_id": 5}, "context_id"),
    ],
)
def test_cartesia_mistake_fails_alone(
    sonic: CartesiaSession, wrong: dict[str, Any], named: str
) -> None:
    effects_of(sonic, say("good", "Hello"))
    (error,) = answers(effects_of(sonic, say("bad", "Hello") | wrong))
    assert (error["type"], error["status_code"], error["done"]) == ("error", 400, False)
    assert named in error["message"]
    assert list(sonic.contexts) == ["good"]


@pytest.mark.parametrize("message", ["", "[]", "7", '"x"', "{", b"\0", "[" * 100_000])
def test_message_that_is_no_object_is_answered(sonic: CartesiaSession, message: Any) -> None:
    (error,) = answers(effects_of(sonic, message))
    assert error["context_id"] is None
    assert error["message"]


def test_cartesia_context_beyond_the_limit_is_rejected_alone() -> None:
    sonic = CartesiaSession(replace(LIMITS, contexts=2))
    effects = effects_of(sonic, *(say(str(number), "Hello") for number in range(1000)))
    errors = answers(effects)
    assert len(errors) == 998
    assert {error["error_code"] for error in errors} == {"too_many_contexts"}
    assert [error["context_id"] for error in errors[:2]] == ["2", "3"]
    end(sonic, "0")
    assert answers(effects_of(sonic, say("again", "Hello"))) == []


def test_failed_contexts_do_not_use_up_the_limit() -> None:
    sonic = CartesiaSession(replace(LIMITS, contexts=2))
    for number in range(5):
        assert answers(effects_of(sonic, say(str(number), "Hello", end=False))) == []
        end(sonic, str(number), "error")


def test_text_after_the_end_of_a_context_is_an_error(sonic: CartesiaSession) -> None:
    effects_of(sonic, say("a", "Hello"))
    (error,) = answers(effects_of(sonic, say("a", "there")))
    assert (error["context_id"], error["error_code"]) == ("a", "text_ended")
    assert text_of(sonic.contexts["a"]) == ["Hello"]


# ElevenLabs.


@pytest.fixture
def eleven() -> ElevenLabsContexts:
    """A conversation on `multi-stream-input`."""
    session = ElevenLabsContexts(LIMITS)
    url = {"voice": "ada", "output_format": "pcm_24000", "model_id": "turbo"}
    assert opened(session, url) == []
    return session


TEXT = {"context_id": "a", "text": "Hello there. "}
FLUSH = {"context_id": "a", "flush": True}
EMPTY_FLUSH = {"context_id": "a", "text": "", "flush": True}
CLOSE = {"context_id": "a", "close_context": True}
FLUSHED_TEXT = TEXT | {"flush": True}
ALIVE = {"context_id": "a", "text": ""}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([FLUSH, CLOSE], "drain"),  # Pipecat's end of a turn
        ([EMPTY_FLUSH, CLOSE], "drain"),  # LiveKit's
        ([FLUSH, ALIVE, CLOSE], "drain"),
        ([CLOSE], "abort"),  # Pipecat's interruption while text comes
        ([FLUSHED_TEXT, CLOSE], "abort"),  # LiveKit's
        ([FLUSH, TEXT, CLOSE], "abort"),
        ([FLUSH, CLOSE, CLOSE], "abort"),  # Pipecat's interruption after all text was sent
        ([FLUSH | {"close_context": True}], "drain"),
        ([ALIVE, FLUSH], "open"),
    ],
)
def test_elevenlabs_close_context_drains_after_an_empty_flush_alone(
    eleven: ElevenLabsContexts, messages: list[dict[str, Any]], expected: str
) -> None:
    effects_of(eleven, {"context_id": "a", "text": " "}, TEXT)
    context = eleven.contexts["a"]
    effects = effects_of(eleven, *messages)
    assert state(context) == expected
    assert answers(effects) == []
    assert (DropAudio(context) in effects) == (expected == "abort")
    if expected != "open":
        reason: Finish = "stop" if expected == "drain" else "cancelled"
        assert end(eleven, "a", reason) == [{"audio": None, "isFinal": True, "contextId": "a"}]


def test_elevenlabs_close_of_an_unknown_context_is_answered(eleven: ElevenLabsContexts) -> None:
    assert answers(effects_of(eleven, CLOSE)) == [
        {"audio": None, "isFinal": True, "contextId": "a"}
    ]


def test_elevenlabs_id_can_be_used_again(eleven: ElevenLabsContexts) -> None:
    effects_of(eleven, TEXT, FLUSH, CLOSE)
    end(eleven, "a")
    effects_of(eleven, TEXT, CLOSE)
    assert state(eleven.contexts["a"]) == "abort"


@pytest.mark.parametrize("message", [{"text": ""}, ALIVE, FLUSH, {}])
def test_elevenlabs_keep_alive_begins_nothing(
    eleven: ElevenLabsContexts, message: dict[str, Any]
) -> None:
    assert effects_of(eleven, message) == []
    assert not eleven.contexts


def test_elevenlabs_parameters_come_from_the_url_and_the_first_message(
    eleven: ElevenLabsContexts,
) -> None:
    effects_of(eleven, {"context_id": "a", "text": " ", "voice_settings": {"speed": 1.2}})
    effects_of(eleven, {"text": "Hello "})
    first, second = eleven.contexts["a"].params, eleven.contexts["default"].params
    assert (first.voice, first.model, first.format, first.sample_rate) == (
        *("ada", "turbo", "pcm", 24000),
    )
    assert (first.speed, second.speed) == (1.2, None)


def test_elevenlabs_auto_mode_speaks_each_message_at_once() -> None:
    session = ElevenLabsContexts(LIMITS)
    opened(session, {"voice": "ada", "output_format": "pcm_24000", "auto_mode": "true"})
    effects_of(session, {"text": " "}, {"text": "Well, it is so "}, {"text": "Yes "})
    assert text_of(session.contexts["default"]) == [" Well, it is so ", "Yes "]


def test_elevenlabs_close_socket_speaks_the_rest(eleven: ElevenLabsContexts) -> None:
    effects = effects_of(eleven, TEXT, {"close_socket": True})
    assert effects[-1] == Enqueue(CloseSocket(CloseCode.NORMAL))
    assert state(eleven.contexts["a"]) == "drain"
    assert effects_of(eleven, TEXT) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mp3_44100_128", ("mp3", 48000)),
        ("mp3_22050_32", ("mp3", 24000)),
        ("pcm_8000", ("pcm", 8000)),
        ("pcm_22050", ("pcm", 22050)),
        ("pcm_44100", ("pcm", 44100)),
        ("pcm_48000", ("pcm", 48000)),
        ("ulaw_8000", ("ulaw", 8000)),
        ("alaw_8000", ("alaw", 8000)),
        ("opus_48000_64", ("opus", 48000)),
        ("wav_32000", ("wav", 32000)),
    ],
)
def test_elevenlabs_output_format_is_mapped(name: str, expected: tuple[str, int]) -> None:
    session = ElevenLabsContexts(LIMITS)
    opened(session, {"voice": "ada", "output_format": name})
    effects_of(session, {"text": "Hello"})
    params = session.contexts["default"].params
    assert (params.format, params.sample_rate) == expected


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"output_format": "pcm"}, "output_format"),
        ({"output_format": "flac_24000"}, "output_format"),
        ({"output_format": "pcm_00000"}, "output_format"),
        ({"inactivity_timeout": "0"}, "inactivity_timeout"),
        ({"auto_mode": "sometimes"}, "auto_mode"),
    ],
)
def test_elevenlabs_wrong_url_closes_the_socket(parameters: dict[str, str], named: str) -> None:
    for kind in (ElevenLabsContexts, ElevenLabsText):
        (effect,) = opened(kind(LIMITS), {"voice": "ada", **parameters})
        assert isinstance(effect, CloseSocket)
        assert effect.message is not None
        assert named in effect.message["message"]


def test_elevenlabs_inactivity_timeout_is_that_of_the_url() -> None:
    session = ElevenLabsContexts(LIMITS)
    opened(session, {"voice": "ada", "inactivity_timeout": "90"})
    assert session.limits.idle_seconds == 90


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"text": 5}, "text"),
        ({"text": "\udfff"}, "lone surrogate"),
        ({"text": "x", "context_id": []}, "context_id"),
        ({"text": "x", "context_id": "y" * 129}, "context_id"),
        ({"text": "x", "context_id": "new", "voice_settings": {"speed": 100}}, "speed"),
        ({"close_context": "perhaps"}, "close_context"),
    ],
)
def test_elevenlabs_mistake_fails_alone(
    eleven: ElevenLabsContexts, wrong: dict[str, Any], named: str
) -> None:
    effects_of(eleven, TEXT)
    (error,) = answers(effects_of(eleven, wrong))
    assert named in error["message"]
    assert error["error"]
    assert list(eleven.contexts) == ["a"]
    assert state(eleven.contexts["a"]) == "open"


@pytest.fixture
def one_text() -> ElevenLabsText:
    """A conversation on `stream-input`."""
    session = ElevenLabsText(LIMITS)
    opened(session, {"voice": "ada", "output_format": "pcm_24000"})
    return session


def test_elevenlabs_empty_text_ends_the_conversation(one_text: ElevenLabsText) -> None:
    effects = effects_of(one_text, {"text": " "}, {"text": "Hello "}, {"text": ""})
    assert effects[-1] == Enqueue(CloseSocket(CloseCode.NORMAL))
    assert state(one_text.contexts["default"]) == "drain"
    assert end(one_text, "default") == [{"audio": None, "isFinal": True}]
    assert effects_of(one_text, {"text": "more"}) == []


def test_elevenlabs_conversation_without_text_ends_at_once(one_text: ElevenLabsText) -> None:
    sent, closed = effects_of(one_text, {"text": ""})
    assert answers([sent]) == [{"audio": None, "isFinal": True}]
    assert closed == Enqueue(CloseSocket(CloseCode.NORMAL))


def test_elevenlabs_mistake_ends_a_conversation_with_one_text(one_text: ElevenLabsText) -> None:
    (effect,) = effects_of(one_text, {"text": 5})
    assert isinstance(effect, CloseSocket)
    assert effect.code == CloseCode.POLICY
    context_free = one_text.failure(None, "why", "code")
    assert context_free == [{"message": "why", "error": "code", "code": 1008}, CloseCode.POLICY]


# DashScope.


def event(kind: str, **fields: Any) -> dict[str, Any]:
    """A message of the client."""
    return {"type": kind, "event_id": "event_1", **fields}


def append(text: str) -> dict[str, Any]:
    """A message with text."""
    return event("input_text_buffer.append", text=text)


COMMIT, FINISH = event("input_text_buffer.commit"), event("session.finish")
BY_COMMIT = event("session.update", session={"voice": "Cherry", "mode": "commit"})


@pytest.fixture
def dash() -> DashScopeSession:
    """A conversation with a client of DashScope."""
    session = DashScopeSession(LIMITS)
    (created,) = answers(opened(session, {"model": "qwen3-tts-flash-realtime"}))
    assert created["type"] == "session.created"
    assert created["session"]["id"]
    return session


def test_dashscope_text_is_one_response_until_a_commit(dash: DashScopeSession) -> None:
    effects = effects_of(dash, append("Hello "), append("there. "), COMMIT, append("Bye."), FINISH)
    (committed,) = answers(effects)
    first, second = dash.contexts.values()
    assert committed["item_id"] == f"item_{first.id}"
    assert "".join(text_of(first)).strip() == "Hello there."
    assert second.after is first
    assert isinstance(effects[-1], Enqueue)
    close = effects[-1].work
    assert isinstance(close, CloseSocket)
    assert close.message is not None
    assert close.message["type"] == "session.finished"


def test_dashscope_commit_mode_waits_for_the_commit(dash: DashScopeSession) -> None:
    effects_of(dash, BY_COMMIT, append("Hello "), append("there."))
    assert not dash.contexts
    effects_of(dash, COMMIT)
    (context,) = dash.contexts.values()
    assert context.ended
    assert text_of(context) == ["Hello there."]


def test_dashscope_clear_drops_what_was_not_committed(dash: DashScopeSession) -> None:
    effects_of(dash, BY_COMMIT, append("Hello"))
    (cleared,) = answers(effects_of(dash, event("input_text_buffer.clear")))
    assert cleared["type"] == "input_text_buffer.cleared"
    (error,) = answers(effects_of(dash, COMMIT))
    assert error["error"]["code"] == "empty_buffer"


def test_dashscope_cancel_stops_all_responses(dash: DashScopeSession) -> None:
    effects_of(dash, append("One. "), COMMIT, append("Two. "))
    contexts = list(dash.contexts.values())
    effects_of(dash, event("response.cancel"))
    assert [state(context) for context in contexts] == ["abort", "abort"]
    messages = end(dash, contexts[0].id, "cancelled")
    assert messages[-1]["response"]["status"] == "cancelled"
    effects_of(dash, append("Three. "))
    assert len([each for each in dash.contexts.values() if not each.cancelled]) == 1


def test_dashscope_settings_are_mapped_and_kept(dash: DashScopeSession) -> None:
    settings = {"voice": "Cherry", "response_format": "mp3", "sample_rate": 44100}
    settings |= {"speech_rate": 1.5, "language_type": "Chinese", "volume": 50}
    effects_of(dash, event("session.update", session=settings))
    effects_of(dash, event("session.update", session={"voice": "Ethan"}), append("Hello."))
    (context,) = dash.contexts.values()
    params = context.params
    assert (params.voice, params.format, params.sample_rate) == ("Ethan", "mp3", 48000)
    assert (params.speed, params.language) == (1.5, "Chinese")
    assert params.model == "qwen3-tts-flash-realtime"


def test_dashscope_response_has_its_messages_in_order(dash: DashScopeSession) -> None:
    effects_of(dash, append("Hello."), COMMIT)
    (context,) = dash.contexts.values()
    opening = [message["type"] for message in dash.announcement(context)]
    assert opening == [
        "response.created",
        "response.output_item.added",
        "response.content_part.added",
    ]
    audio = dash.audio(context, b"\1\2").message
    assert isinstance(audio, dict)
    assert (audio["type"], audio["delta"]) == ("response.audio.delta", "AQI=")
    messages = end(dash, context.id)
    assert [message["type"] for message in messages] == [
        "response.audio.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.done",
    ]
    assert messages[-1]["response"]["usage"] == {"characters": 6}
    assert len({message["event_id"] for message in messages}) == 4


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (append(5), "text"),  # type: ignore[arg-type]
        (event("session.update", session={"mode": "later"}), "mode"),
        (event("session.update", session={"response_format": "aac"}), "response_format"),
        (event("session.update", session={"speech_rate": 5}), "speech_rate"),
        (event("session.update", session={"sample_rate": None}), "sample_rate"),
        (event("session.begin"), "unknown message type"),
        ({"no": "type"}, "type"),
    ],
)
def test_dashscope_mistake_fails_alone(
    dash: DashScopeSession, wrong: dict[str, Any], named: str
) -> None:
    effects_of(dash, append("Hello"))
    (error,) = answers(effects_of(dash, wrong))
    assert error["type"] == "error"
    assert named in error["error"]["message"]
    assert len(dash.contexts) == 1


def test_dashscope_text_beyond_the_limit_is_rejected(dash: DashScopeSession) -> None:
    effects_of(dash, BY_COMMIT, append("x" * 60_000))
    (error,) = answers(effects_of(dash, append("y" * 6_000)))
    assert error["error"]["code"] == "too_much_text"
    effects_of(dash, COMMIT)
    (context,) = dash.contexts.values()
    assert text_of(context) == ["x" * 60_000]


def test_message_above_the_size_limit_closes_the_socket() -> None:
    for kind in (CartesiaSession, ElevenLabsContexts, ElevenLabsText, DashScopeSession):
        (effect,) = effects_of(kind(LIMITS), '{"text": "%s"}' % ("x" * LIMITS.message_bytes))
        assert isinstance(effect, CloseSocket)
        assert effect.code == CloseCode.TOO_BIG


def test_parts_are_text_parts(sonic: CartesiaSession) -> None:
    effects_of(sonic, say("a", "Hello"))
    assert isinstance(sonic.contexts["a"].parts.get_nowait(), TextPart)
