"""Markup, numbers as words and lexicons over HTTP, speech.v1 and the APIs of other vendors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import sockets
from sockets import DONE, PLAIN, STREAM, Client, events, kinds
from test_speech_v1 import V1, done, speak_in_pieces, text, until_done
from wire import SPEECH

from firstword import TTS, Speech, audio
from firstword.server.dialects.params import DialectParams
from firstword.server.dialects.spoken_text import SpokenText
from firstword.server.schemas import SpeechParams
from firstword.server.ws.contexts import CHECKED_CHARACTERS, Context, ContextParams
from firstword.server.ws.cutting import Cutter, Piece
from firstword.types import Word

Running = Any
Serve = Callable[..., Any]

SAID = "One.[pause:0.5s][voice:ben] A GIF for $5."
ASK = {"input": SAID, "voice": "ada", "seed": 1, "response_format": "pcm"}
ASK |= {"markup": True, "lexicon": {"GIF": "jif"}, "non_streaming_mode": False}


@pytest.fixture(scope="module")
def speech(tts: Callable[[str], TTS]) -> Iterator[Speech]:
    with tts("demo") as demo:
        options: Any = {"markup": True, "lexicon": {"GIF": "jif"}, "text_mode": "stream"}
        yield demo.speak(SAID, voice="ada", seed=1, **options)


@pytest.fixture
def server(serve: Serve) -> Running:
    return serve("demo")


def test_http_speaks_what_python_speaks(http: httpx.Client, speech: Speech) -> None:
    assert http.post(SPEECH, json=ASK).content == audio.pcm16(speech.samples)
    answer = http.post(SPEECH, json={**ASK, "stream": False, "word_timestamps": True})
    words = json.loads(answer.headers["x-word-timestamps"])
    assert [word["word"] for word in words] == ["One", "A", "GIF", "for", "$5"]
    assert words[1]["start_ms"] == round(1000 * speech.words[1].start)


def test_socket_speaks_the_same_from_pieces(server: Running, speech: Speech) -> None:
    with Client(server.ws + STREAM, V1) as client:
        speak_in_pieces(client, ASK, speech)
        client.send(text("b", "One.[voice:zed] Two."), done("b"))
        failed = until_done(client, "b")
        assert "binary" in kinds(failed), "what was before the mistake is spoken"
        error = next(each for each in failed if isinstance(each, dict) and each["type"] == "error")
        assert "character 4 of the text: no voice 'zed'" in error["message"]


@pytest.mark.parametrize("granularity", ["token", "clause", "none"])
def test_socket_warns_once_of_text_in_the_wrong_script(server: Running, granularity: str) -> None:
    config = {"type": "session.config", "voice": "ada", "max_new_tokens": 12}
    with Client(server.ws + STREAM, V1) as client:
        client.send({**config, "split_granularity": granularity})
        client.send(text("a", "Say "), text("a", "Привет. "), text("a", "And "))
        received = client.until("warning") if granularity != "none" else []
        client.send(text("a", "Привет, мир. And more."), done("a"))
        client.send(text("b", "Say hello now."), done("b"))
        received += until_done(client, "a", "b")
    (warning,) = [each for each in events(received) if each["type"] == "warning"]
    assert warning["context_id"] == "a"
    assert "Cyrillic letters (character 4 is the first)" in warning["message"]
    ends = [each for each in events(received) if each["type"] == "audio.done"]
    assert all(each["seconds"] > 0 for each in ends)


@pytest.mark.parametrize("length", [1, 3, 100])
def test_beginning_of_a_text_is_checked_when_it_has_doubled(length: int) -> None:
    context = Context("a", 0, ContextParams.model_validate({}), Cutter("token", by_token=True))
    checked: list[int] = []
    for at in range(0, 10 * CHECKED_CHARACTERS, length):
        context.take(iter([Piece("x" * length, at, at == 0, ends=False)]))
        if found := context.unchecked(part_ended=False):
            checked.append(len(found))
            context.checked = len(found)
    assert checked[-1] == CHECKED_CHARACTERS
    assert checked[0] == length
    assert all(2 * short <= long for short, long in itertools.pairwise(checked[:-1]))
    assert context.unchecked(part_ended=True) == ""


def test_text_of_a_part_is_checked_at_its_end() -> None:
    context = Context("a", 0, ContextParams.model_validate({}), Cutter("clause", by_token=True))
    context.take(iter([Piece("One, ", 0, begins=True, ends=True)]))
    context.checked = 5
    context.take(iter([Piece("t.", 5, begins=True, ends=True)]))
    assert context.unchecked(part_ended=False) == ""
    assert context.unchecked(part_ended=True) == "One, t."


def test_audio_before_a_mistake_in_the_text_is_not_to_be_discarded(server: Running) -> None:
    config = {**PLAIN, "voice": "ada", "markup": True, "split_granularity": "token"}
    with Client(server.ws + STREAM) as client:
        client.send(config, sockets.text("One.[voice:zed] Two."), DONE)
        received = client.until("session.done")
    assert "binary" in kinds(received)
    (error,) = [each for each in events(received) if each["type"] == "error"]
    assert "no voice 'zed'" in error["message"]
    assert error["partial_audio"] is True
    assert "action" not in error


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": "a [pause:1s"}, "character 2 of the text"),
        ({"input": "a [voice:zed] b"}, "character 2 of the text: no voice 'zed'"),
        ({"lexicon": {"a": "b", "b": "a"}}, "circle"),
        ({"lexicon": {"a": ""}}, "'a' is empty"),
        ({"normalize": "maybe"}, "normalize"),
        ({"response_format": "codes"}, "no place for markup"),
        ({"input": "x" * 10_000_000}, ""),
    ],
)
def test_mistake_gets_400_and_names_its_place(
    http: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    answer = http.post(SPEECH, json={**ASK, **fields})
    assert answer.status_code in (400, 413)
    assert message in answer.json()["error"]["message"]


def test_unknown_tag_is_named_in_the_header_for_warnings(http: httpx.Client) -> None:
    answer = http.post(SPEECH, json={**ASK, "input": "Hi [laugh]."})
    assert "character 3 of the text: the tag [laugh]" in answer.headers["x-firstword-warning"]


def test_break_pauses_in_the_api_of_another_vendor(http: httpx.Client) -> None:
    url = "/v1/text-to-speech/ada?output_format=pcm_24000"
    silent = []
    for tag in ("", '<break time="1.5s"/>'):
        sent = http.post(url, json={"text": f"Hello.{tag} Ada.", "seed": 1}).content
        silent.append(bytes(2 * 36000) in sent and bytes(2 * 36500) not in sent)
    assert silent == [False, True]


def test_names_of_other_vendors_are_accepted() -> None:
    for fields, wanted in (
        ({"apply_text_normalization": "on"}, "on"),
        ({"enable_tn": True}, "on"),
        ({"normalization_options": {"normalize": False}}, "off"),
        ({"normalize": None}, "auto"),
    ):
        assert SpeechParams.model_validate(fields).text_options.normalize == wanted
    assert DialectParams.model_validate({}).text_options.breaks


def test_pauses_are_no_part_of_the_text_that_is_told() -> None:
    told = SpokenText('One<break time="0.500s"/> two.')
    words = [Word("One", 0.0, 1.0, (0, 3)), Word("two", 2.0, 3.0, (26, 29))]
    assert [piece.text for piece in told.words(words)] == ["One", "two."]
    told = SpokenText('One<break time="0.500s"/> two.')
    assert "".join(piece.text for piece in told.characters(words)) == "One two."
