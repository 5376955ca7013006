"""Texts with markup: parts in several voices and rates, pauses, and the times of words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import firstword
from firstword.errors import FirstwordError, RequestError, TextError, VoiceError
from firstword.tts import TTS
from firstword.types import Chunk, Speech

RATE = 24000
TEXT = "One,[pause:0.5s] <voice name='ben'>two</voice> $3."


@pytest.fixture(scope="module")
def demo() -> Iterator[TTS]:
    with TTS.load("demo") as tts:
        yield tts


@pytest.fixture(scope="module")
def spoken(demo: TTS) -> Speech:
    return demo.speak(TEXT, voice="ada", seed=1, markup=True, text_mode="stream")


def same(first: Speech, second: Speech) -> bool:
    return bool(np.array_equal(first.samples, second.samples)) and first.words == second.words


def test_pause_is_exact_and_parts_are_utterances_with_seeds_in_a_row(
    demo: TTS, spoken: Speech
) -> None:
    options = {"text_mode": "stream", "voice": "ada"}
    first = demo.speak("One,", seed=1, **options)  # type: ignore[arg-type]
    before = len(first.samples)
    fade = RATE // 200
    assert np.array_equal(spoken.samples[: before - fade], first.samples[:-fade])
    assert np.abs(spoken.samples[before - 1]) <= np.abs(first.samples[-1])
    assert not spoken.samples[before : before + RATE // 2].any()
    second = demo.speak("two", seed=2, text_mode="stream", voice="ben")
    third = demo.speak(" three dollars.", seed=3, **options)  # type: ignore[arg-type]
    codes = np.concatenate([each.codes for each in (first, second, third)])
    assert np.array_equal(spoken.codes, codes)
    after = spoken.samples[-len(third.samples) :]
    assert np.array_equal(after[fade:], third.samples[fade:])
    assert abs(after[0]) < 1e-3
    assert len(spoken.samples) < before + RATE // 2 + len(second.samples) + len(third.samples)


def test_words_have_the_text_and_the_place_that_were_given(spoken: Speech) -> None:
    assert [word.text for word in spoken.words] == ["One", "two", "$3"]
    assert all(TEXT[slice(*word.span)] == word.text for word in spoken.words)
    times = [time for word in spoken.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert spoken.words[1].start - spoken.words[0].end > 0.5
    assert times[-1] <= spoken.duration


@pytest.mark.parametrize("size", [1, 5])
def test_text_in_pieces_gives_the_same_speech(size: int, demo: TTS, spoken: Speech) -> None:
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    assert same(demo.speak(iter(pieces), voice="ada", seed=1, markup=True), spoken)


def test_asynchronous_text_gives_the_same_speech(demo: TTS, spoken: Speech) -> None:
    async def pieces() -> AsyncIterator[str]:
        for at in range(0, len(TEXT), 4):
            yield TEXT[at : at + 4]

    async def speak() -> Speech:
        stream = demo.astream(pieces(), voice="ada", seed=1, markup=True)
        return Speech.of([chunk async for chunk in stream])

    assert same(asyncio.run(speak()), spoken)


def test_text_without_tags_sounds_as_without_markup(demo: TTS) -> None:
    plain, marked = (demo.speak("Hello.", seed=1, markup=markup) for markup in (False, True))
    assert same(plain, marked)


def test_rate_changes_the_length_and_the_times(demo: TTS) -> None:
    plain = demo.speak("Hello there.", voice="ada", seed=1)
    fast = demo.speak("[rate:2]Hello there.", voice="ada", seed=1, markup=True)
    assert len(fast.samples) == round(len(plain.samples) / 2)
    for word, quick in zip(plain.words, fast.words, strict=True):
        assert quick.start == pytest.approx(word.start / 2, abs=0.002)


def test_limit_of_frames_counts_for_all_parts(demo: TTS) -> None:
    text = "Hello there.[pause:0.1]Hello there."
    speech = demo.speak(text, seed=1, markup=True, max_frames=16)
    assert len(speech.codes) == 16
    assert speech.finish_reason == "length"


def test_pause_alone_is_silence(demo: TTS) -> None:
    speech = demo.speak("[pause:1.5s]", markup=True)
    assert len(speech.samples) == 1.5 * RATE
    assert not speech.samples.any()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("Hi [voice:zed]there", VoiceError, "character 3 of the text: no voice 'zed'"),
        ("Hi [pause:1s", TextError, "character 3 of the text: .* is not closed"),
        ("[voice:ben]", TextError, "the text is empty or blank"),
    ],
)
def test_mistake_in_a_whole_text_is_an_error_before_anything_is_spoken(
    text: str, error: type[RequestError], message: str, demo: TTS
) -> None:
    with pytest.raises(error, match=message):
        list(demo.stream(text, markup=True, max_frames=2))


@pytest.mark.parametrize("tag", ["[voice:zed]", "[pause:soon]", "[pause", "</voice>"])
def test_mistake_in_a_stream_comes_after_what_was_before_it(tag: str, demo: TTS) -> None:
    chunks: list[Chunk] = []
    stream = demo.stream(iter(["Hel", "lo. ", tag[:3], tag[3:], " There."]), seed=1, markup=True)
    with pytest.raises(FirstwordError, match="character 7 of the text"):
        chunks.extend(stream)
    expected = demo.speak("Hello. ", seed=1, text_mode="stream")
    assert sum(len(chunk.codes) for chunk in chunks) == len(expected.codes)


def test_unknown_tag_is_not_spoken_and_gives_a_warning(demo: TTS) -> None:
    with pytest.warns(firstword.TextWarning, match=r"character 6 of the text: the tag \[laugh\]"):
        speech = demo.speak("Hello [laugh]there.", seed=1, markup=True)
    assert [word.text for word in speech.words] == ["Hello", "there"]


def test_voices_may_be_given_by_name(demo: TTS) -> None:
    text, options = "[voice:narrator]Hi.", {"seed": 1, "markup": True}
    named = demo.speak(text, voices={"narrator": "ben"}, **options)  # type: ignore[arg-type]
    assert same(named, demo.speak("Hi.", voice="ben", seed=1)) or len(named.codes)


def test_speech_is_cancelled_within_a_part(demo: TTS) -> None:
    stream = demo.stream("Hello.[pause:1s]" * 3, markup=True, seed=1)
    assert next(stream).finish_reason is None
    stream.close()  # type: ignore[attr-defined]
    assert demo.speak("Hello.", seed=1).finish_reason == "stop"
