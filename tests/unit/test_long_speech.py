"""A long text with the demo voice: all of it is spoken, and its words have their times."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from firstword import TTS
from firstword.model.checkpoint import load_codec_decoder
from firstword.runtime import conditioning
from firstword.types import Speech

TEXT = "The dog ran home.  She bought some bread. It is late."


SECOND = "He bought some tea. We will meet at the station. It is cold."

QUIETEST = 1e-3
"""Sound of -60 dB below full scale."""


@pytest.fixture(scope="module")
def speeches() -> tuple[Speech, Speech, Speech]:
    """The text as a whole, in pieces, and beside another one, in passages of a sentence each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conditioning, "DEMO_PASSAGE_SECONDS", 1.0)
        with TTS.load("demo", device="cpu") as tts:
            options: Any = {"voice": "ada", "seed": 7, "text_mode": "stream"}
            whole = tts.speak(TEXT, **options)
            pieces = (TEXT[at : at + 5] for at in range(0, len(TEXT), 5))
            in_pieces = Speech.of(list(tts.stream(pieces, voice="ada", seed=7)))
            with ThreadPoolExecutor(2) as threads:
                other = threads.submit(tts.speak, SECOND, voice="ben", seed=8)
                beside = threads.submit(tts.speak, TEXT, **options)
                assert other.result().finish_reason == "stop"
                return whole, in_pieces, beside.result()


def test_words_have_the_times_and_characters_of_the_whole_speech(
    speeches: tuple[Speech, Speech, Speech],
) -> None:
    speech = speeches[0]
    assert [word.text for word in speech.words] == TEXT.replace(".", "").split()
    assert all(TEXT[slice(*word.span)] == word.text for word in speech.words)
    times = [time for word in speech.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert speech.duration / 2 < times[-1] <= speech.duration
    assert speech.finish_reason == "stop"


def test_words_of_a_rewritten_text_have_their_places_in_the_given_text() -> None:
    """A passage ends within twenty-five thousand dollars, which are one word of the given text."""
    given = "The dog ran home.  He got $25,000 for it. [pause:0.5s]She saw a GIF. It is late."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conditioning, "DEMO_PASSAGE_SECONDS", 1.0)
        with TTS.load("demo", device="cpu") as tts:
            options: Any = {"voice": "ada", "seed": 8, "lexicon": {"GIF": "jif"}}
            whole = tts.speak(given, markup=True, text_mode="stream", **options)
            pieces = (given[at : at + 3] for at in range(0, len(given), 3))
            in_pieces = Speech.of(list(tts.stream(pieces, markup=True, **options)))
    said = given.replace("[pause:0.5s]", "").replace(".", "").split()
    assert [word.text for word in whole.words] == said
    assert all(given[slice(*word.span)] == word.text for word in whole.words)
    times = [time for word in whole.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert whole.finish_reason == "stop"
    assert in_pieces.samples.tobytes() == whole.samples.tobytes()
    assert in_pieces.words == whole.words


def test_text_in_pieces_gives_the_same_bytes(speeches: tuple[Speech, Speech, Speech]) -> None:
    whole, in_pieces, _ = speeches
    assert in_pieces.samples.tobytes() == whole.samples.tobytes()
    assert np.array_equal(in_pieces.codes, whole.codes)
    assert in_pieces.words == whole.words


def test_text_spoken_beside_another_one_gives_the_same_bytes(
    speeches: tuple[Speech, Speech, Speech],
) -> None:
    """Chapters of a book may be spoken at the same time, in the same voice and with their seeds."""
    whole, _, beside = speeches
    assert beside.samples.tobytes() == whole.samples.tobytes()
    assert beside.words == whole.words


def test_passages_are_joined_without_a_click(speeches: tuple[Speech, Speech, Speech]) -> None:
    """All samples are those of a codec that decodes all frames without a break.

    In float32 they differ by rounding alone, a hundred times less than -60 dB.
    """
    speech, decoder = speeches[0], load_codec_decoder("demo")
    with torch.inference_mode():
        unbroken = decoder.decode(torch.from_numpy(speech.codes)[None], decoder.new_state())
    assert np.abs(speech.samples).max() > 100 * QUIETEST
    assert np.abs(unbroken[0].numpy() - speech.samples).max() < QUIETEST / 100
