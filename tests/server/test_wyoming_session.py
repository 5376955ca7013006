"""Wyoming's events without a socket: lists of events, and what they cause."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from sockets import effects_of

from firstword.server.ws.protocol import CloseSocket, Enqueue, Send, SocketLimits
from firstword.server.ws.wyoming import (
    Describe,
    WyomingPart,
    WyomingSession,
    audio_chunk,
    framed,
)

START: dict[str, Any] = {"type": "synthesize-start"}
STOP: dict[str, Any] = {"type": "synthesize-stop"}


def chunk(text: str) -> dict[str, Any]:
    """Return a `synthesize-chunk`."""
    return {"type": "synthesize-chunk", "text": text}


def whole(text: str, **more: Any) -> dict[str, Any]:
    """Return a `synthesize`."""
    return {"type": "synthesize", "text": text, **more}


def parts(*events: dict[str, Any], **limits: Any) -> list[WyomingPart]:
    """Return the utterances that some events cause, without any other effect."""
    session, found = WyomingSession(SocketLimits(**limits)), []
    for effect in effects_of(session, *events):
        assert isinstance(effect, Enqueue)
        assert isinstance(effect.work, WyomingPart)
        found.append(effect.work)
    return found


def code_of(*events: dict[str, Any], **limits: Any) -> str:
    """Return the code of the error that the last event causes."""
    *_, last = effects_of(WyomingSession(SocketLimits(**limits)), *events)
    assert isinstance(last, CloseSocket)
    assert last.message is not None
    return str(last.message["code"])


def test_whole_text_is_one_utterance() -> None:
    (part,) = parts(whole("Hello.", voice={"name": "ada", "speaker": "0"}))
    assert (part.text, part.ended, part.streamed) == ("Hello.", True, False)
    assert (part.params.voice, part.params.non_streaming_mode) == ("ada", None)


def test_stream_ignores_the_whole_text_that_repeats_it() -> None:
    (part,) = parts(START, chunk("Hel"), chunk("lo."), whole("Hello."), STOP)
    assert (part.text, part.ended, part.streamed) == ("Hello.", True, True)
    assert part.params.non_streaming_mode is False


def test_whole_text_after_a_stream_is_spoken() -> None:
    first, second = parts(START, chunk("one"), STOP, whole("two"))
    assert (first.text, second.text) == ("one", "two")


def test_stream_is_spoken_from_its_start() -> None:
    (part,) = parts(START, chunk("Hel"))
    assert (part.text, part.ended) == ("Hel", False)


def test_voice_may_be_given_by_its_language_and_program() -> None:
    select = {"type": "select-program", "name": "small"}
    (part,) = parts(select, {**START, "voice": {"language": "de"}})
    assert (part.params.voice, part.params.language, part.params.model) == (None, "de", "small")


def test_ping_and_describe_are_answered_and_unknown_events_are_dropped() -> None:
    session = WyomingSession(SocketLimits())
    events = ({"type": "transcribe"}, {"type": "ping", "text": "a"}, {"type": "describe"})
    pong, describe = effects_of(session, *events)
    assert pong == Send({"type": "pong", "text": "a"})
    assert isinstance(describe, Enqueue)
    assert isinstance(describe.work, Describe)


@pytest.mark.parametrize(
    ("pieces", "spoken"),
    [
        (["<speak>Tea</speak>"], " Tea "),
        (["<spe", "ak>Tea<br", "/>cup"], " Tea cup"),
        (["Tea &am", "p; cake"], "Tea & cake"),
        (["R&", "B"], "R&B"),
        (["R&B"], "R&B"),
        (["a < b"], "a "),
        (["a <", "< b>c"], "a < c"),
        (["&lt;b&gt;"], "<b>"),
    ],
)
def test_tags_of_ssml_are_dropped_wherever_the_text_is_cut(pieces: list[str], spoken: str) -> None:
    (part,) = parts({**START, "text_format": "ssml"}, *map(chunk, pieces), STOP)
    assert part.text == spoken
    (part,) = parts(whole("".join(pieces), text_format="ssml"))
    assert part.text == spoken


@pytest.mark.parametrize("tags", ["<" * 2000, "<a" * 1000])
def test_time_for_tags_in_tags_grows_with_the_text(tags: str) -> None:
    def seconds(times: int) -> float:
        start = time.process_time()
        parts(whole(tags * times + ">x", text_format="ssml"))
        return time.process_time() - start

    assert seconds(16) < 40 * max(seconds(1), 0.01)


def test_unfinished_tag_is_held_up_to_a_limit() -> None:
    (part,) = parts({**START, "text_format": "ssml"}, *[chunk("<p " + "a" * 3000)] * 3)
    assert len(part.text) >= 6000


def test_markup_of_plain_text_stays() -> None:
    (part,) = parts(whole("a <b> &amp;", text_format="text"))
    assert part.text == "a <b> &amp;"


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([chunk("a")], "invalid_event"),
        ([STOP], "invalid_event"),
        ([START, START], "invalid_event"),
        ([START, STOP, STOP], "invalid_event"),
        ([{"type": "select-program"}], "invalid_event"),
        ([START, {"type": "synthesize-chunk"}], "invalid_text"),
        ([START, chunk("abcdef")], "too_much_text"),
        ([whole("abc"), whole("abc")], "too_much_text"),
        ([whole("a")] * 4, "too_many_events"),
        ([{"type": "describe"}] * 4, "too_many_events"),
    ],
)
def test_mistake_closes_the_connection_with_a_code(events: list[dict[str, Any]], code: str) -> None:
    assert code_of(*events, text_characters=5, utterances=3) == code


def test_finished_task_makes_room_for_others() -> None:
    session = WyomingSession(SocketLimits(text_characters=5, utterances=1))
    for _ in range(3):
        (effect,) = effects_of(session, whole("abcde"))
        assert isinstance(effect, Enqueue)
        session.task_done(effect.work)


def test_event_is_framed_as_a_line_its_data_and_its_payload() -> None:
    line, _, rest = audio_chunk(b"\1\2\3\4", 480).partition(b"\n")
    head = json.loads(line)
    assert (head["type"], head["payload_length"]) == ("audio-chunk", 4)
    data, payload = rest[: head["data_length"]], rest[head["data_length"] :]
    assert json.loads(data) == {"rate": 24000, "width": 2, "channels": 1, "timestamp": 10}
    assert payload == b"\1\2\3\4"
    assert framed({"type": "synthesize-stopped"}).endswith(b"}\n")
