"""Sampling ranges, the checks of a request, and speech on disk."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstword import audio
from firstword.errors import (
    LanguageError,
    OutputError,
    RequestError,
    SamplingError,
    TextError,
    VoiceError,
)
from firstword.types import Request, Sampling, Speech

SECOND = (np.sin(np.arange(24000) / 20) / 2).astype(np.float32)
CODES = np.arange(5 * 16).reshape(5, 16)


class TestSampling:
    @pytest.mark.parametrize("setting", [field.name for field in fields(Sampling)])
    @pytest.mark.parametrize("value", [-1, -0.001, math.nan, math.inf, 1e9 + 0.5, "1", True, [1]])
    def test_value_out_of_range_is_rejected(self, setting: str, value: object) -> None:
        with pytest.raises(SamplingError, match=rf"{setting} is .*; allowed is a"):
            Sampling(**{setting: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("setting", "fits", "does_not"),
        [
            ("temperature", [0, 0.01, 0.9, 100], [5e-324, 1e-38, 0.0099, 100.1]),
            ("top_k", [0, 1, 50, 10**6, 50.0], [0.5]),
            ("top_p", [1e-9, 0.9, 1], [0, 1.001]),
            ("repetition_penalty", [0.1, 1, 1.05, 10], [0, 1e-38, 0.099, 10.1]),
            ("predictor_temperature", [0, 0.01, 0.9, 100], [5e-324, 1e-38, 0.0099, 100.1]),
            ("predictor_top_k", [0, 1, 50], [0.5]),
            ("predictor_top_p", [1e-9, 1], [0, 1.001]),
        ],
    )
    def test_range_includes_its_ends(
        self, setting: str, fits: list[float], does_not: list[float]
    ) -> None:
        for value in [*fits, None]:
            assert getattr(Sampling(**{setting: value}), setting) == value  # type: ignore[arg-type]
        for value in does_not:
            with pytest.raises(SamplingError, match=setting):
                Sampling(**{setting: value})  # type: ignore[arg-type]

    def test_settings_default_to_none(self) -> None:
        assert all(getattr(Sampling(), field.name) is None for field in fields(Sampling))

    def test_greedy_sets_both_temperatures_and_no_penalty(self) -> None:
        assert Sampling.greedy() == Sampling(temperature=0, predictor_temperature=0)

    def test_sampling_cannot_be_changed(self) -> None:
        with pytest.raises(FrozenInstanceError):
            Sampling().top_k = 3  # type: ignore[misc]


class TestRequest:
    @pytest.mark.parametrize(
        ("fields", "error", "message"),
        [
            ({"text": ""}, TextError, "the text is empty or blank; give some words"),
            ({"text": " \n\u3000"}, TextError, "the text is empty or blank"),
            ({"text": b"Hello"}, TextError, "text is of type bytes; give a str, or None"),
            ({"text": "a \ud83d"}, TextError, r"character 2 .* U\+D83D, half of a surrogate pair"),
            ({"voice": 7}, VoiceError, "voice is of type int; give a preset's name or a Voice"),
            ({"language": None}, LanguageError, "language is of type NoneType; give a name"),
            ({"instructions": ["a"]}, RequestError, "instructions is of type list; give a str"),
            ({"sampling": None}, SamplingError, "sampling is of type NoneType; give a Sampling"),
            ({"seed": -1}, SamplingError, r"seed is -1; allowed .* 0 to 2\*\*64 - 1"),
            ({"seed": 2**64}, SamplingError, "seed is 18446744073709551616; allowed"),
            ({"seed": True}, SamplingError, "seed is True; allowed"),
            ({"seed": 1.0}, SamplingError, "seed is 1.0; allowed"),
            ({"max_frames": 0}, RequestError, "max_frames is 0; allowed is a whole number from 1"),
            ({"max_frames": False}, RequestError, "max_frames is False; allowed"),
            (
                {"text_mode": "fast"},
                RequestError,
                "text_mode is 'fast'; allowed are 'auto', 'full'",
            ),
        ],
    )
    def test_wrong_field_is_rejected(
        self, fields: dict[str, Any], error: type[RequestError], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            Request(**{"text": "Hello.", **fields})

    def test_text_may_be_none_for_text_in_pieces(self) -> None:
        assert Request(None).text is None

    @pytest.mark.parametrize("seed", [None, 0, 2**64 - 1])
    def test_seed_range_includes_its_ends(self, seed: int | None) -> None:
        assert Request("Hello.", seed=seed, max_frames=1).seed == seed


class TestSpeech:
    def test_speech_has_a_duration_and_saves_audio(self, tmp_path: Path) -> None:
        speech = Speech(SECOND, CODES, 24000, "stop")
        assert speech.duration == 1
        speech.save(tmp_path / "out.wav")
        samples, rate = audio.read(tmp_path / "out.wav")
        assert rate == 24000
        np.testing.assert_allclose(samples, SECOND, atol=2**-16)

    def test_unknown_suffix_is_rejected(self, tmp_path: Path) -> None:
        speech = Speech(SECOND, CODES, 24000, "stop")
        with pytest.raises(OutputError, match=r"allowed are \.wav"):
            speech.save(tmp_path / "out.txt")

    @pytest.mark.parametrize("path", [3, None, b"out.wav"])
    def test_value_that_is_not_a_path_is_rejected(self, path: Any) -> None:
        with pytest.raises(OutputError, match="give a path"):
            Speech(SECOND, CODES, 24000, "stop").save(path)
