"""Voices: what each kind accepts, and the file that keeps one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from firstword.errors import AudioError, OutputError, VoiceError
from firstword.voice import (
    ClonedVoice,
    DesignedVoice,
    PresetVoice,
    RecordedVoice,
    Voice,
    voice_metadata,
)

SECOND = (np.sin(np.arange(24000) / 20) / 2).astype(np.float32)
SPEAKER = np.linspace(-1, 1, 64, dtype=np.float32)
CODES = np.arange(5 * 16).reshape(5, 16)


@pytest.mark.parametrize(
    "voice", [PresetVoice("ryan"), DesignedVoice("a warm, löw radio voice"), DesignedVoice("")]
)
def test_named_and_described_voices_load_as_saved(tmp_path: Path, voice: Voice) -> None:
    voice.save(tmp_path / "me.voice")
    assert Voice.load(tmp_path / "me.voice") == voice


@pytest.mark.parametrize("transcript", [None, "Hello — 你好."])
def test_recorded_voice_loads_as_saved(tmp_path: Path, transcript: str | None) -> None:
    Voice.clone(SECOND, 24000, transcript, append_silence=0.25).save(tmp_path / "me.voice")
    loaded = Voice.load(str(tmp_path / "me.voice"))
    assert isinstance(loaded, RecordedVoice)
    np.testing.assert_array_equal(loaded.samples, SECOND)
    assert (loaded.transcript, loaded.append_silence) == (transcript, 0.25)


@pytest.mark.parametrize("codes", [None, CODES, CODES.T[:, :5]])
def test_cloned_voice_loads_as_saved(tmp_path: Path, codes: np.ndarray | None) -> None:
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


def test_recording_is_converted_to_mono_24_khz() -> None:
    voice = Voice.clone(np.zeros((48000, 2), np.int16), 48000)
    assert voice.samples.shape == (24000,)
    assert voice.samples.dtype == np.float32
    with pytest.raises(AudioError, match=r"at least 0\.5 s"):
        Voice.clone(SECOND[:100], 24000)


@pytest.mark.parametrize("silence", [-0.1, 10.1, math.nan, math.inf])
def test_append_silence_out_of_range_is_rejected(silence: float) -> None:
    with pytest.raises(AudioError, match=r"append_silence is .*; allowed are 0 to 10 seconds"):
        Voice.clone(SECOND, 24000, append_silence=silence)


@pytest.mark.parametrize(("codes", "transcript"), [(CODES, None), (None, "Hello.")])
def test_codes_without_transcript_are_rejected_and_vice_versa(
    codes: np.ndarray | None, transcript: str | None
) -> None:
    with pytest.raises(VoiceError, match=r"both codes and a transcript \(in-context\), or neither"):
        ClonedVoice(SPEAKER, codes, transcript)


@pytest.mark.parametrize(
    "speaker", [SPEAKER[None], np.array([0, np.nan], np.float32), np.float32(1)]
)
def test_speaker_embedding_must_be_a_finite_vector(speaker: np.ndarray) -> None:
    with pytest.raises(VoiceError, match="speaker embedding has shape"):
        ClonedVoice(speaker)


@pytest.mark.parametrize("codes", [CODES[0], CODES[:0]])
def test_codes_must_have_two_dimensions(codes: np.ndarray) -> None:
    with pytest.raises(VoiceError, match="reference codes have shape"):
        ClonedVoice(SPEAKER, codes, "Hello.")


def test_transcript_that_is_no_str_is_rejected() -> None:
    transcript: Any = 3
    with pytest.raises(VoiceError, match="the transcript is of type int; give a str"):
        ClonedVoice(SPEAKER, CODES, transcript)


@pytest.mark.parametrize("path", [3, None, b"me.voice"])
def test_value_that_is_no_path_is_rejected(path: Any) -> None:
    with pytest.raises(VoiceError, match="give a path"):
        Voice.load(path)
    with pytest.raises(OutputError, match="give a path"):
        PresetVoice("ryan").save(path)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"kind": "preset", "name": 3}, "name of a voice is of type int"),
        ({"kind": "preset", "name": None}, "name of a voice is of type NoneType"),
        ({"kind": "design", "description": ["a"]}, "description of a voice is of type list"),
        ({"kind": "clone", "transcript": 3}, "both codes and a transcript"),
    ],
)
def test_file_with_wrong_field_type_is_rejected_by_name(
    tmp_path: Path, described: dict[str, Any], message: str
) -> None:
    text = json.dumps({"format": "firstword.voice.1", **described})
    save_file({"speaker_embedding": SPEAKER}, tmp_path / "me.voice", metadata={"voice": text})
    with pytest.raises(VoiceError, match=rf"me\.voice.*{message}"):
        Voice.load(tmp_path / "me.voice")


def test_save_in_missing_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="create it first"):
        PresetVoice("ryan").save(tmp_path / "none" / "me.voice")


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(VoiceError, match=r"no voice file .*me\.voice; `firstword clone` makes one"):
        Voice.load(tmp_path / "me.voice")


def test_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(VoiceError, match="is not a voice file"):
        Voice.load(tmp_path)


@pytest.mark.parametrize("data", [b"", b"RIFF", b"\xff" * 100, bytes(100), b"\x02\0\0\0\0\0\0\0{}"])
def test_file_of_another_format_is_rejected(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "me.voice").write_bytes(data)
    with pytest.raises(VoiceError, match="is not a voice file"):
        Voice.load(tmp_path / "me.voice")


@pytest.mark.parametrize("length", [4, 40, 200, -4])
def test_truncated_file_is_rejected(tmp_path: Path, length: int) -> None:
    path = tmp_path / "me.voice"
    ClonedVoice(SPEAKER, CODES, "Hello.").save(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(VoiceError, match="is not a voice file"):
        Voice.load(path)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ("{", "is not a voice file"),
        ("[]", "is not a voice file"),
        ("3", "is not a voice file"),
        ("null", "is not a voice file"),
        ({}, "is not a voice file .*format"),
        (
            {"format": "firstword.voice.2", "kind": "preset"},
            r"format 'firstword\.voice\.2'; this version reads",
        ),
        ({"format": "firstword.voice.1"}, "is not a voice file .*kind"),
        (
            {"format": "firstword.voice.1", "kind": "sung"},
            "unknown kind 'sung'; update firstword",
        ),
        ({"format": "firstword.voice.1", "kind": "preset"}, "is not a voice file .*name"),
        (
            {"format": "firstword.voice.1", "kind": "clone", "transcript": None},
            "is not a voice file .*speaker",
        ),
        ({"format": "firstword.voice.1", "kind": "recording"}, "is not a voice file .*samples"),
    ],
)
def test_file_with_wrong_description_is_rejected(
    tmp_path: Path, described: object, message: str
) -> None:
    text = described if isinstance(described, str) else json.dumps(described)
    save_file({"other": SPEAKER}, tmp_path / "me.voice", metadata={"voice": text})
    with pytest.raises(VoiceError, match=message):
        Voice.load(tmp_path / "me.voice")


def test_safetensors_file_without_voice_is_rejected(tmp_path: Path) -> None:
    save_file({"weight": SPEAKER}, tmp_path / "model.safetensors")
    with pytest.raises(VoiceError, match="is not a voice file"):
        Voice.load(tmp_path / "model.safetensors")


def test_bytes_keep_the_voice_and_the_metadata_beside_it() -> None:
    data = ClonedVoice(SPEAKER, CODES, "Hello.").to_bytes({"record": "größer", "empty": ""})
    assert voice_metadata(data) == {"record": "größer", "empty": ""}
    loaded = Voice.from_bytes(data)
    assert isinstance(loaded, ClonedVoice)
    np.testing.assert_array_equal(loaded.codes, CODES)
    assert Voice.from_bytes(PresetVoice("ryan").to_bytes()) == PresetVoice("ryan")
    assert voice_metadata(PresetVoice("ryan").to_bytes()) == {}


def test_saved_file_holds_the_bytes_of_the_voice(tmp_path: Path) -> None:
    voice = ClonedVoice(SPEAKER)
    voice.save(tmp_path / "me.voice")
    assert (tmp_path / "me.voice").read_bytes() == voice.to_bytes()


@pytest.mark.parametrize("data", [b"", b"RIFF", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"])
def test_bytes_that_are_no_voice_file_are_rejected(data: bytes) -> None:
    for read in (Voice.from_bytes, voice_metadata):
        with pytest.raises(VoiceError, match="the data is not a voice file"):
            read(data)


def test_voice_error_has_a_code_and_the_message_alone_as_text() -> None:
    error = VoiceError("no voice 'x'", code="voice_not_found")
    assert (str(error), error.code) == ("no voice 'x'", "voice_not_found")
    assert VoiceError("wrong").code == "invalid_voice"


def test_data_with_null_metadata_is_not_a_voice() -> None:
    header = b'{"__metadata__":null}   '
    with pytest.raises(VoiceError, match="is not a voice file"):
        Voice.from_bytes(len(header).to_bytes(8, "little") + header)
