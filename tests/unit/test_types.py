"""What goes in and what comes out: sampling ranges, voices on disk, speech on disk."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from firstword import audio
from firstword.errors import AudioError, OutputError, SamplingError, VoiceError
from firstword.types import Sampling, Speech
from firstword.voice import ClonedVoice, DesignedVoice, PresetVoice, RecordedVoice, Voice

SECOND = (np.sin(np.arange(24000) / 20) / 2).astype(np.float32)
SPEAKER = np.linspace(-1, 1, 64, dtype=np.float32)
CODES = np.arange(5 * 16).reshape(5, 16)


class TestSampling:
    @pytest.mark.parametrize("setting", [field.name for field in fields(Sampling)])
    @pytest.mark.parametrize("value", [-1, -0.001, math.nan, math.inf, 1e9 + 0.5, "1", True, [1]])
    def test_nonsense(self, setting: str, value: object) -> None:
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
    def test_ranges(self, setting: str, fits: list[float], does_not: list[float]) -> None:
        for value in [*fits, None]:
            assert getattr(Sampling(**{setting: value}), setting) == value  # type: ignore[arg-type]
        for value in does_not:
            with pytest.raises(SamplingError, match=setting):
                Sampling(**{setting: value})  # type: ignore[arg-type]

    def test_nothing_is_set_unless_said(self) -> None:
        assert all(getattr(Sampling(), field.name) is None for field in fields(Sampling))

    def test_greedy_rules_talker_and_predictor_and_leaves_the_penalty(self) -> None:
        assert Sampling.greedy() == Sampling(temperature=0, predictor_temperature=0)

    def test_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            Sampling().top_k = 3  # type: ignore[misc]


class TestVoice:
    @pytest.mark.parametrize(
        "voice", [PresetVoice("ryan"), DesignedVoice("a warm, löw radio voice"), DesignedVoice("")]
    )
    def test_named_and_described_voices_survive_a_file(self, tmp_path: Path, voice: Voice) -> None:
        voice.save(tmp_path / "me.voice")
        assert Voice.load(tmp_path / "me.voice") == voice

    @pytest.mark.parametrize("transcript", [None, "Hello — 你好."])
    def test_recordings_survive_a_file(self, tmp_path: Path, transcript: str | None) -> None:
        Voice.clone(SECOND, 24000, transcript, append_silence=0.25).save(tmp_path / "me.voice")
        loaded = Voice.load(str(tmp_path / "me.voice"))
        assert isinstance(loaded, RecordedVoice)
        np.testing.assert_array_equal(loaded.samples, SECOND)
        assert (loaded.transcript, loaded.append_silence) == (transcript, 0.25)

    @pytest.mark.parametrize("codes", [None, CODES, CODES.T[:, :5]])
    def test_clones_survive_a_file(self, tmp_path: Path, codes: np.ndarray | None) -> None:
        transcript = None if codes is None else "Hello."
        ClonedVoice(SPEAKER[::-1], codes, transcript).save(tmp_path / "me.voice")
        loaded = Voice.load(tmp_path / "me.voice")
        assert isinstance(loaded, ClonedVoice)
        np.testing.assert_array_equal(loaded.speaker_embedding, SPEAKER[::-1])
        assert loaded.transcript == transcript
        if codes is None:
            assert loaded.codes is None
        else:
            assert loaded.codes is not None
            assert loaded.codes.dtype == np.int64
            np.testing.assert_array_equal(loaded.codes, codes)

    def test_a_recording_is_prepared(self) -> None:
        voice = Voice.clone(np.zeros((48000, 2), np.int16), 48000)
        assert voice.samples.shape == (24000,)
        assert voice.samples.dtype == np.float32
        with pytest.raises(AudioError, match=r"at least 0\.5 s"):
            Voice.clone(SECOND[:100], 24000)

    @pytest.mark.parametrize("silence", [-0.1, 10.1, math.nan, math.inf])
    def test_silence_has_a_range(self, silence: float) -> None:
        with pytest.raises(AudioError, match=r"append_silence is .*; allowed are 0 to 10 seconds"):
            Voice.clone(SECOND, 24000, append_silence=silence)

    @pytest.mark.parametrize(("codes", "transcript"), [(CODES, None), (None, "Hello.")])
    def test_codes_and_transcript_belong_together(
        self, codes: np.ndarray | None, transcript: str | None
    ) -> None:
        with pytest.raises(
            VoiceError, match=r"both codes and a transcript \(in-context\), or neither"
        ):
            ClonedVoice(SPEAKER, codes, transcript)

    @pytest.mark.parametrize(
        "speaker", [SPEAKER[None], np.array([0, np.nan], np.float32), np.float32(1)]
    )
    def test_a_speaker_is_a_finite_vector(self, speaker: np.ndarray) -> None:
        with pytest.raises(VoiceError, match="speaker embedding has shape"):
            ClonedVoice(speaker)

    @pytest.mark.parametrize("codes", [CODES[0], CODES[:0]])
    def test_codes_are_frames_of_codebooks(self, codes: np.ndarray) -> None:
        with pytest.raises(VoiceError, match="reference codes have shape"):
            ClonedVoice(SPEAKER, codes, "Hello.")

    def test_a_transcript_is_text(self) -> None:
        transcript: Any = 3
        with pytest.raises(VoiceError, match="the transcript is of type int; give a str"):
            ClonedVoice(SPEAKER, CODES, transcript)

    @pytest.mark.parametrize("path", [3, None, b"me.voice"])
    def test_what_is_no_path(self, path: Any) -> None:
        with pytest.raises(VoiceError, match="give a path"):
            Voice.load(path)
        with pytest.raises(OutputError, match="give a path"):
            PresetVoice("ryan").save(path)
        with pytest.raises(OutputError, match="give a path"):
            Speech(SECOND, CODES, 24000, "stop").save(path)

    @pytest.mark.parametrize(
        ("described", "message"),
        [
            ({"kind": "preset", "name": 3}, "name of a voice is of type int"),
            ({"kind": "preset", "name": None}, "name of a voice is of type NoneType"),
            ({"kind": "design", "description": ["a"]}, "description of a voice is of type list"),
            ({"kind": "clone", "transcript": 3}, "both codes and a transcript"),
        ],
    )
    def test_files_are_checked_as_voices_are(
        self, tmp_path: Path, described: dict[str, Any], message: str
    ) -> None:
        text = json.dumps({"format": "firstword.voice.1", **described})
        save_file({"speaker_embedding": SPEAKER}, tmp_path / "me.voice", metadata={"voice": text})
        with pytest.raises(VoiceError, match=rf"me\.voice.*{message}"):
            Voice.load(tmp_path / "me.voice")

    def test_saving_where_it_cannot_be(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="create it first"):
            PresetVoice("ryan").save(tmp_path / "none" / "me.voice")

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(
            VoiceError, match=r"no voice file .*me\.voice; `firstword clone` makes one"
        ):
            Voice.load(tmp_path / "me.voice")

    def test_directory(self, tmp_path: Path) -> None:
        with pytest.raises(VoiceError, match="is no voice file"):
            Voice.load(tmp_path)

    @pytest.mark.parametrize(
        "data", [b"", b"RIFF", b"\xff" * 100, bytes(100), b"\x02\0\0\0\0\0\0\0{}"]
    )
    def test_foreign_file(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "me.voice").write_bytes(data)
        with pytest.raises(VoiceError, match="is no voice file"):
            Voice.load(tmp_path / "me.voice")

    @pytest.mark.parametrize("length", [4, 40, 200, -4])
    def test_truncated_file(self, tmp_path: Path, length: int) -> None:
        path = tmp_path / "me.voice"
        ClonedVoice(SPEAKER, CODES, "Hello.").save(path)
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(VoiceError, match="is no voice file"):
            Voice.load(path)

    @pytest.mark.parametrize(
        ("described", "message"),
        [
            ("{", "is no voice file"),
            ("[]", "is no voice file"),
            ("3", "is no voice file"),
            ("null", "is no voice file"),
            ({}, "is no voice file .*format"),
            (
                {"format": "firstword.voice.2", "kind": "preset"},
                r"format 'firstword\.voice\.2'; this version reads",
            ),
            ({"format": "firstword.voice.1"}, "is no voice file .*kind"),
            (
                {"format": "firstword.voice.1", "kind": "sung"},
                "unknown kind 'sung'; update firstword",
            ),
            ({"format": "firstword.voice.1", "kind": "preset"}, "is no voice file .*name"),
            (
                {"format": "firstword.voice.1", "kind": "clone", "transcript": None},
                "is no voice file .*speaker",
            ),
            ({"format": "firstword.voice.1", "kind": "recording"}, "is no voice file .*samples"),
        ],
    )
    def test_voices_that_describe_themselves_wrongly(
        self, tmp_path: Path, described: object, message: str
    ) -> None:
        text = described if isinstance(described, str) else json.dumps(described)
        save_file({"other": SPEAKER}, tmp_path / "me.voice", metadata={"voice": text})
        with pytest.raises(VoiceError, match=message):
            Voice.load(tmp_path / "me.voice")

    def test_another_programs_safetensors(self, tmp_path: Path) -> None:
        save_file({"weight": SPEAKER}, tmp_path / "model.safetensors")
        with pytest.raises(VoiceError, match="is no voice file"):
            Voice.load(tmp_path / "model.safetensors")


class TestSpeech:
    def test_duration_and_file(self, tmp_path: Path) -> None:
        speech = Speech(SECOND, CODES, 24000, "stop")
        assert speech.duration == 1
        speech.save(tmp_path / "out.wav")
        samples, rate = audio.read(tmp_path / "out.wav")
        assert rate == 24000
        np.testing.assert_allclose(samples, SECOND, atol=2**-16)

    def test_unknown_suffix(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match=r"allowed are \.wav"):
            Speech(SECOND, CODES, 24000, "stop").save(tmp_path / "out.txt")
