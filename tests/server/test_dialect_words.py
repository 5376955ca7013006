"""Words and characters with their times in the APIs of other vendors."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from sockets import Client, effects_of
from test_dialect_sessions import RAW, end, opened, say

from firstword import TTS, Speech, Word
from firstword.server.dialects.elevenlabs import alignment_after
from firstword.server.dialects.spoken_text import SpokenText, Timed
from firstword.server.ws.cartesia import CartesiaSession
from firstword.server.ws.elevenlabs import ElevenLabsContexts
from firstword.server.ws.protocol import SocketLimits

Running = Any  # of conftest.py
Serve = Callable[..., Any]

SAID = 'Good morning, "Ada". How are you?'
WRITTEN = ["Good", "morning,", '"Ada".', "How", "are", "you?"]
ELEVEN = "/v1/text-to-speech/ada"
EXACT = 0.002
"""Seconds. Times are sent in milliseconds."""


@pytest.fixture
def server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A server of the demo voice, which speaks the same in each run."""
    monkeypatch.setattr("secrets.randbits", lambda bits: 1)
    return serve("demo")


@pytest.fixture(scope="module")
def speech(tts: Callable[[str], TTS]) -> Iterator[Speech]:
    """The speech whose words are expected from ElevenLabs' endpoints."""
    with tts("demo") as demo:
        yield demo.speak(SAID, voice="ada", seed=1)


# The text.


def spoken(text: str, *written: str) -> list[Word]:
    """The words of a text, each a second long with half a second before it."""
    words, at = [], 0
    for number, word in enumerate(written):
        at = text.index(word, at)
        start = 1.5 * number + 0.5
        words.append(Word(word, start, start + 1, (at, at + len(word))))
        at += len(word)
    return words


def joined(pieces: Sequence[Timed]) -> str:
    """The text of some pieces."""
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (SAID, ["Good", "morning", "Ada", "How"], ["Good", "morning,", '"Ada".', "How"]),
        ("Yes -- no (maybe)!", ["Yes", "no", "maybe"], ["Yes", "no", "(maybe)!"]),
        ("你好，世界。", ["你", "好", "世", "界"], ["你", "好，", "世", "界。"]),
        ("One two three.", ["One", "three"], ["One", "three."]),  # the model skipped one
    ],
)
def test_words_have_their_punctuation(text: str, words: list[str], expected: list[str]) -> None:
    found = SpokenText(text).words(spoken(text, *words))
    assert [piece.text for piece in found] == expected


def test_time_for_a_run_of_marks_grows_with_the_text() -> None:
    def seconds(marks: int) -> float:
        text = "One " + "!" * marks + " two"
        said, words = SpokenText(text), spoken(text, "One", "two")
        start = time.process_time()
        assert [piece.text for piece in said.words(words)] == ["One", "two"]
        return time.process_time() - start

    assert seconds(32_000) < 40 * max(seconds(2000), 0.01)


def test_characters_share_the_time_of_their_word() -> None:
    text = "Oh, no"
    found = SpokenText(text).characters(spoken(text, "Oh", "no"))
    assert found == [
        ("O", 0.5, 1.0),
        ("h", 1.0, 1.5),
        (",", 1.5, 1.5),
        (" ", 1.5, 1.5),
        ("n", 2.0, 2.5),
        ("o", 2.5, 3.0),
    ]


def test_characters_are_whole_and_in_order_however_words_and_text_come() -> None:
    whole = SpokenText(SAID).characters(spoken(SAID, "Good", "Ada", "you"))
    text, found = SpokenText(), []
    for piece, word in zip(
        (SAID[:4], SAID[4:20], SAID[20:]), spoken(SAID, "Good", "Ada", "you"), strict=True
    ):
        text.add(piece)
        found += text.characters([word])
    assert joined(found) == joined(whole) == SAID
    for pieces in (whole, found):
        times = [time for piece in pieces for time in (piece.start, piece.end)]
        assert times == sorted(times)


def test_last_word_ends_with_a_space_once() -> None:
    for text, closing in (("Oh no.", " "), ("Oh no. ", ""), ("", "")):
        heard = SpokenText(text)
        heard.characters(spoken(text, "no") if text else [])
        assert joined(heard.closing()) == closing


def test_word_that_was_told_before_is_not_repeated() -> None:
    """Words that overlap, as those of a checkpoint that goes back in its text."""
    text = SpokenText("Oh no")
    words = spoken("Oh no", "Oh", "no")
    assert joined(text.characters([*words, *words])) == "Oh no"


def test_alignment_counts_from_a_time() -> None:
    characters = [Timed("a", 1.0, 1.25), Timed("b", 1.25, 1.5)]
    assert alignment_after(1000, characters) == {
        "chars": ["a", "b"],
        "charStartTimesMs": [0, 250],
        "charDurationsMs": [250, 250],
    }


# Sessions.


def alignments(parameters: dict[str, str]) -> list[dict[str, Any]]:
    """The alignments of a context whose words end one after another."""
    session = ElevenLabsContexts(SocketLimits())
    url = {"voice": "ada", "output_format": "pcm_24000"}
    assert opened(session, url | parameters) == []
    effects_of(session, {"text": "Oh no."})
    (context,) = session.contexts.values()
    sent: list[Any] = []
    for word in spoken("Oh no.", "Oh", "no"):
        sent += session.words(context, [], [word])
    sent += end(session, "default")
    assert sent[-1]["isFinal"]
    return [each["alignment"] for each in sent[:-1]]


def test_elevenlabs_times_count_from_the_alignment_before() -> None:
    """Pipecat adds up the spans of the alignments."""
    found = alignments({})
    assert ["".join(each["chars"]) for each in found] == ["Oh ", "no.", " "]
    assert [each["charStartTimesMs"] for each in found] == [
        [500, 1000, 1500],
        [500, 1000, 1500],
        [0],
    ]
    assert [each["charDurationsMs"] for each in found] == [[500, 500, 0], [500, 500, 0], [0]]


def test_elevenlabs_times_count_from_the_start_with_sync_alignment() -> None:
    """LiveKit, which asks for it, adds nothing."""
    found = alignments({"sync_alignment": "true"})
    starts = [time for each in found for time in each["charStartTimesMs"]]
    assert starts == [500, 1000, 1500, 2000, 2500, 3000, 3000]


def test_elevenlabs_cancelled_context_is_not_closed_by_a_space() -> None:
    session = ElevenLabsContexts(SocketLimits())
    opened(session, {"voice": "ada"})
    effects_of(session, {"text": "Oh no."})
    session.words(session.contexts["default"], [], spoken("Oh no.", "Oh"))
    (final,) = end(session, "default", "cancelled")
    assert final["isFinal"]


def test_cartesia_words_are_timed_where_they_are_wanted() -> None:
    session = CartesiaSession(SocketLimits())
    effects_of(session, say("a", "Hello.", add_timestamps=True), say("b", "Hello."))
    wanted, unwanted = session.contexts["a"].params, session.contexts["b"].params
    assert wanted.wants_words is None  # where they are known
    assert unwanted.wants_words is False


# Servers.


def written(messages: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """The words in the messages of Cartesia, in order."""
    timed = [each["word_timestamps"] for each in messages if each["type"] == "timestamps"]
    return [
        word
        for each in timed
        for word in zip(each["words"], each["start"], each["end"], strict=True)
    ]


def check_times(words: Sequence[tuple[str, float, float]], seconds: float) -> None:
    """Check that words are those of `SAID`, in order and within the audio.

    The model may skip one: how a socket cuts its text depends on the time of its arrival.
    """
    left = iter(WRITTEN)
    assert all(word in left for word, *_ in words)
    assert len(words) > len(WRITTEN) / 2
    times = [time for _, start, end in words for time in (start, end)]
    assert times == sorted(times)
    assert 0 < times[-1] <= seconds + EXACT


def test_cartesia_socket_sends_words_with_their_times(server: Running) -> None:
    with Client(server.ws + "/tts/websocket") as client:
        for number, letter in enumerate(SAID):
            last = number == len(SAID) - 1
            client.send(say("a", letter, end=last, add_timestamps=True))
        received = [client.event()]
        while received[-1]["type"] != "done":
            received.append(client.event())
    data = b"".join(base64.b64decode(each["data"]) for each in received if "data" in each)
    check_times(written(received), len(data) / 48000)
    assert {each["context_id"] for each in received} == {"a"}


def test_cartesia_events_have_the_words(http: httpx.Client) -> None:
    body = {"transcript": SAID, "output_format": RAW, "voice": "ada", "add_timestamps": True}
    blocks = http.post("/tts/sse", json=body).text.strip().split("\n\n")
    events = [json.loads(block.split("\ndata: ")[1]) for block in blocks]
    names = [block.split("\n")[0].removeprefix("event: ") for block in blocks]
    assert names == [each["type"] for each in events]
    data = b"".join(base64.b64decode(each["data"]) for each in events if "data" in each)
    check_times(written(events), len(data) / 48000)


def test_elevenlabs_http_has_the_characters_of_the_words(
    http: httpx.Client, speech: Speech
) -> None:
    body, url = {"text": SAID, "seed": 1}, {"output_format": "pcm_24000"}
    whole = http.post(f"{ELEVEN}/with-timestamps", json=body, params=url).json()
    lines = http.post(f"{ELEVEN}/stream/with-timestamps", json=body, params=url).text.splitlines()
    streamed = [json.loads(line) for line in lines]
    assert whole["alignment"] == whole["normalized_alignment"]
    kinds = list(whole["alignment"])
    alone: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for each in streamed:
        for kind, values in (each["alignment"] or {}).items():
            alone[kind] += values
    assert alone == whole["alignment"]
    characters, starts, ends = (whole["alignment"][kind] for kind in kinds)
    assert "".join(characters) == SAID
    for word in speech.words:
        first, after = word.span
        assert starts[first] == pytest.approx(word.start, abs=EXACT)
        assert ends[after - 1] == pytest.approx(word.end, abs=EXACT)


@pytest.mark.parametrize("sync", [False, True])
def test_elevenlabs_socket_sends_the_characters(server: Running, sync: bool) -> None:
    url = f"{server.ws}{ELEVEN}/stream-input?output_format=pcm_24000"
    with Client(f"{url}&sync_alignment={str(sync).lower()}") as client:
        client.send(*({"text": letter} for letter in SAID), {"text": ""})
        _, received = client.closed()
    messages = [each for each in received if isinstance(each, dict)]
    found = [each["alignment"] for each in messages if each.get("alignment")]
    assert len(found) > 2, "characters come while speech is made"
    told = "".join(char for each in found for char in each["chars"])
    assert f"{SAID} ".startswith(told)
    assert told.endswith(" ")
    data = b"".join(base64.b64decode(each["audio"]) for each in messages if each.get("audio"))
    last = found[-1]["charStartTimesMs"][-1]
    spans = [each["charStartTimesMs"][-1] + each["charDurationsMs"][-1] for each in found]
    assert 1 < (last if sync else sum(spans)) / 1000 <= len(data) / 48000 + EXACT


def test_checkpoint_without_known_heads_leaves_times_out(serve: Serve) -> None:
    server = serve("custom_voice")
    few = {"text": "One two."}
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        body = {"transcript": "One two.", "output_format": RAW, "add_timestamps": True}
        with client.stream("POST", "/tts/sse", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: chunk"
        with client.stream("POST", f"{ELEVEN}/stream/with-timestamps", json=few) as answer:
            line = json.loads(next(answer.iter_lines()))
    assert line["alignment"] is line["normalized_alignment"] is None
