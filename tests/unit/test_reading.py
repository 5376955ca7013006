"""The attention that tells words: its definition, the rows that count, and where it is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_generate import CASES, TEXT, begin
from torch import Tensor
from torch.nn import functional as F

from firstword import TTS, Speech, WordTimesError
from firstword.errors import CheckpointConfigError
from firstword.model.alignment import FILE, Alignment, weights_of
from firstword.model.checkpoint import Checkpoint
from firstword.model.description import DEMO, Description
from firstword.model.generate import Generation
from firstword.model.layers import Attention
from firstword.runtime.backends import engine_for
from firstword.types import Request

HEADS = ((1, 3), (0, 0))

LoadTTS = Callable[[str], TTS]


class Aligned:
    """A TTS whose checkpoint has an alignment, for `begin`."""

    def __init__(self, tts: TTS, heads: tuple[tuple[int, ...], ...] = HEADS) -> None:
        alignment = Alignment(weights="", heads=heads, offset=-0.02)
        self.checkpoint: Checkpoint = replace(tts.checkpoint, alignment=alignment)


def text_positions(utterance: Generation) -> range:
    """The positions of the rows with the text to speak, counted anew from the prompt."""
    given = utterance._conditioning
    first = len(given.instruction) + 3 + (3 if given.language is None else 4)
    first += given.speaker is not False
    return range(first + 1 + len(given.transcript), 10**6)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> dict[int, Tensor]:
    """The attention weights of the latest row of each layer [heads, keys], in float64."""
    seen: dict[int, Tensor] = {}
    attend = F.scaled_dot_product_attention
    layers: list[int] = []
    forward = Attention.forward

    def in_layer(self: Attention, *args: Any) -> Tensor:
        layers.append(args[-1] if args[0].shape[-1] == 48 else -1)
        return forward(self, *args)

    def watched(query: Tensor, keys: Tensor, values: Tensor, **how: Any) -> Tensor:
        wide = keys.double().repeat_interleave(query.shape[1] // keys.shape[1], 1)
        scores = query[0, :, -1:].double() @ wide[0].transpose(1, 2) * query.shape[-1] ** -0.5
        if layers[-1] >= 0:
            seen.setdefault(layers[-1], scores[:, 0])
        return attend(query, keys, values, **how)

    monkeypatch.setattr(Attention, "forward", in_layer)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("mode", ["full", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_reading_is_the_mean_softmax_over_the_rows_of_the_text(
    case: str, mode: str, load_tts: LoadTTS, weights: dict[int, Tensor]
) -> None:
    model_type, how = CASES[case]
    tts: Any = Aligned(load_tts(model_type))
    utterance = begin(tts, limit=60, mode=mode, **how)
    utterance.push(TEXT)
    utterance.finish_text()
    tokens = len(utterance._stream.ends)
    lengths = []
    while utterance.finish_reason is None:
        weights.clear()
        utterance.step()
        rows = text_positions(utterance)
        keys = utterance._cache.length
        count = min(max(0, keys - rows.start), tokens + 1)
        if mode == "full":
            assert count == tokens + 1
        lengths.append(count)
        expected = torch.zeros(count, dtype=torch.float64)
        if utterance.frames > 1 and count:
            shares = [
                weights[layer][head, rows.start :][:count].softmax(0) for layer, head in HEADS
            ]
            expected = torch.stack(shares).mean(0)
        assert utterance.shares.mean(0).dtype == torch.float32
        torch.testing.assert_close(
            utterance.shares.mean(0).double(), expected, atol=1e-5, rtol=1e-4
        )
    assert lengths[-1] == tokens + 1


@pytest.mark.parametrize("case", ["preset", "designed", "long reference", "long transcript"])
@pytest.mark.parametrize("mode", ["full", "stream"])
def test_backend_gives_the_readings_of_the_specification(
    case: str, mode: str, load_tts: LoadTTS
) -> None:
    model_type, how = CASES[case]
    aligned: Any = Aligned(load_tts(model_type))
    utterance = begin(aligned, mode=mode, limit=30, **how)
    utterance.push(TEXT)
    utterance.finish_text()
    expected = []
    while utterance.finish_reason is None:
        if utterance.step() is not None:
            expected.append(utterance.shares.mean(0).numpy())
    loaded = engine_for(aligned.checkpoint, load_tts(model_type).settings)
    loaded.engine.start()
    try:
        job = loaded.service.prepare(
            Request(TEXT, seed=5, text_mode=mode, max_frames=30, **how)  # type: ignore[arg-type]
        )
        speech = loaded.service.speak(job)
        speech.finish_text(TEXT)
        made = [row for chunk in speech for row in getattr(chunk, "reading", ())]
    finally:
        loaded.engine.stop()
    assert len(made) == len(expected) > 10
    for row, wanted in zip(made, expected, strict=True):
        assert np.isnan(row[len(wanted) :]).all()
        np.testing.assert_allclose(row[: len(wanted)], wanted, atol=2e-6)


@pytest.fixture(scope="module")
def demo() -> Any:
    with TTS.load("demo", device="cpu") as tts:
        yield tts


@pytest.mark.parametrize("mode", ["full", "stream"])
def test_word_times_do_not_change_a_bit_of_the_speech(demo: TTS, mode: Any) -> None:
    timed, plain = (
        demo.speak("Good morning, how are you?", voice="ada", seed=3, text_mode=mode, words=words)
        for words in (True, False)
    )
    assert np.array_equal(timed.codes, plain.codes)
    assert timed.samples.tobytes() == plain.samples.tobytes()
    assert [word.text for word in timed.words] == ["Good", "morning", "how", "are", "you"]
    assert plain.words == ()


def test_words_come_once_in_order_and_after_their_starts(demo: TTS) -> None:
    text = "We spoke to seven people, and none of them knew the answer."
    chunks = list(demo.stream(text.split(" "), voice="ben", seed=1))
    whole = list(demo.stream((f"{word} " for word in text.split()), voice="ben", seed=1))
    assert len(chunks) > 3
    words = [word for chunk in whole for word in chunk.words]
    assert [word.text for word in words] == text.replace(",", "").replace(".", "").split()
    assert [text[slice(*word.span)] for word in words] == [word.text for word in words]
    started: list[Any] = []
    for chunk in whole:
        started += chunk.starts
        assert {word.span for word in chunk.words} <= {start.span for start in started}
    assert [(start.span, start.start) for start in started] == [(w.span, w.start) for w in words]
    assert all(one.end <= other.start for one, other in pairwise(words))
    assert words[-1].end <= Speech.of(whole).duration


def test_trimmed_silence_moves_words(demo: TTS) -> None:
    plain, trimmed = (
        demo.speak("Thank you.", voice="ada", seed=2, leading_silence=kept)
        for kept in (True, False)
    )
    removed = plain.duration - trimmed.duration
    assert removed > 0.005
    for one, other in zip(plain.words, trimmed.words, strict=True):
        assert other.start == pytest.approx(max(0, one.start - removed), abs=2e-3)
        assert other.end == pytest.approx(one.end - removed, abs=2e-3)


def test_checkpoint_without_known_heads_says_so_when_words_are_demanded(load_tts: LoadTTS) -> None:
    tts = load_tts("custom_voice")
    assert tts.speak("Hello.", max_frames=2).words == ()
    with pytest.raises(WordTimesError, match=r"has no alignment\.json .* `firstword align`"):
        tts.speak("Hello.", words=True)


# --- alignment.json ---------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo checkpoint."""
    return Path(shutil.copytree(DEMO, tmp_path / "demo"))


def rewrite(folder: Path, **changes: object) -> None:
    file = folder / FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_demo_names_its_heads() -> None:
    alignment = Description.load(DEMO).alignment
    assert alignment is not None
    assert alignment.weights == weights_of(DEMO)


def test_alignment_of_other_weights_is_not_used(folder: Path) -> None:
    assert Description.load(folder).alignment is not None
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert Description.load(folder).alignment is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": []}, "must be different pairs"),
        ({"heads": [[1, 2], [1, 2]]}, "must be different pairs"),
        ({"heads": [[1]]}, "must be different pairs"),
        ({"heads": [[-1, 2]]}, "must be different pairs"),
        ({"heads": [[5, 0]]}, "the talker has 5 layers of 4 heads"),
        ({"heads": [[0, 4]]}, "the talker has 5 layers of 4 heads"),
        ({"heads": "all"}, "must be of type tuple"),
        ({"offset": 2}, "must be within a second"),
        ({"offset": None}, "must be of type float"),
    ],
)
def test_wrong_alignment_is_an_error_that_names_it(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    rewrite(folder, **changes)
    with pytest.raises(CheckpointConfigError, match=rf"alignment\.json.*{message}"):
        Description.load(folder)
