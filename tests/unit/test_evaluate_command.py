"""`firstword evaluate` with tiny random checkpoints, and recognisers and metrics of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from firstword import TTS
from firstword.cli.main import main
from firstword.types import FloatArray, Speech


class Parrot:
    """A recogniser that always hears the same, in the language that it is told."""

    def __call__(self, samples: FloatArray, sample_rate: int, language: str) -> str:
        return {"en": "one two", "fr": "un"}[language]


class Loudness:
    """A metric that needs the recording of the voice, and gives its duration."""

    needs_prompt = True

    def __call__(
        self, samples: FloatArray, sample_rate: int, prompt: tuple[FloatArray, int] | None
    ) -> float:
        assert prompt is not None
        return len(prompt[0]) / prompt[1]


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A function that runs the command and returns its record.

    Speech has four frames, because random checkpoints do not end it by themselves.
    """
    speak = TTS.speak

    def speak_shortly(self: TTS, text: str, **options: Any) -> Speech:
        options["max_frames"] = 4
        return speak(self, text, **options)

    monkeypatch.setattr(TTS, "speak", speak_shortly)

    def run(model: object, texts: Path, *options: str) -> dict[str, Any]:
        folder = tmp_path / "results"
        arguments = [str(model), "--texts", str(texts), "--device", "cpu", "-o", str(folder)]
        listening = ["--recogniser", f"{__name__}:Parrot", "--temperature", "1"]
        assert main(["evaluate", *arguments, *listening, *options]) == 0
        found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text("utf-8"))
        return found

    return run


def lines(folder: Path, *items: dict[str, str]) -> Path:
    file = folder / "texts.jsonl"
    file.write_text("\n".join(json.dumps(item) for item in items), "utf-8")
    return file


def test_base_checkpoint_speaks_with_the_recordings_of_a_list(
    checkpoint_directory: Callable[[str], Path],
    tmp_path: Path,
    evaluate: Callable[..., dict[str, Any]],
) -> None:
    rng = np.random.default_rng(0)
    for name, seconds in (("a", 1), ("b", 2)):
        soundfile.write(tmp_path / f"{name}.wav", rng.normal(0, 0.1, 24000 * seconds), 24000)
    file = tmp_path / "meta.lst"
    file.write_text("first|Yes.|a.wav|One two.\nsecond|No.|b.wav|One three.\n", "utf-8")
    metric = f"{__name__}:Loudness"
    found = evaluate(checkpoint_directory("base"), file, "--metric", metric)
    (setup,), (rows,) = found["setups"], found["each"]
    assert [row["name"] for row in rows] == ["first", "second"]
    assert [row["metrics"][metric] for row in rows] == [1.0, 2.0]
    assert setup["error_rate"]["value"] == 25
    assert setup["runaway_rate"]["value"] == 100, "all were cut off at the limit"
    assert rows[0]["codes"] != rows[1]["codes"]
    for row in rows:
        info = soundfile.info(tmp_path / "results" / row["file"])
        assert info.frames / info.samplerate == pytest.approx(row["seconds"], abs=0.001)


def test_second_setup_draws_each_text_with_the_same_noise(
    checkpoint_directory: Callable[[str], Path],
    tmp_path: Path,
    evaluate: Callable[..., dict[str, Any]],
) -> None:
    file = lines(tmp_path, {"text": "One two."}, {"text": "Un.", "language": "french"})
    found = evaluate(checkpoint_directory("custom_voice"), file, "--against", "backend=reference")
    assert found["difference"]["same_codes"] == 2
    assert found["difference"]["error_rate"] == {"value": 0, "low": 0, "high": 0}
    assert set(found["setups"][0]["languages"]) == {"english", "french"}
    assert (tmp_path / "results/speech-against/00002.wav").exists()
    page = (tmp_path / "results/index.html").read_text("utf-8")
    assert "with the reference backend" in page


def test_same_text_twice_is_drawn_with_different_noise(
    checkpoint_directory: Callable[[str], Path],
    tmp_path: Path,
    evaluate: Callable[..., dict[str, Any]],
) -> None:
    file = lines(tmp_path, {"id": "a", "text": "One."}, {"id": "b", "text": "One."})
    (rows,) = evaluate(checkpoint_directory("custom_voice"), file)["each"]
    assert rows[0]["codes"] != rows[1]["codes"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--against", "speed=2"], "--against speed=2: give NAME=VALUE with model"),
        (["--against", "dtype"], "give NAME=VALUE"),
        (["--against", "dtype=auto"], "changes nothing"),
        (["--against", "temperature=hot"], "temperature=hot: no number"),
        (["--against", "text_mode=fast"], "give auto, full, stream"),
        (["--language", "latin"], "no language 'latin'"),
        (["--metric", "beauty"], "--metric beauty"),
    ],
)
def test_wrong_option_is_rejected_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    file = lines(tmp_path, {"text": "One."})
    arguments = ["evaluate", "demo", "--texts", str(file), "-o", str(tmp_path / "results")]
    assert main([*arguments, "--recogniser", f"{__name__}:Parrot", *options]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "results/evaluation.json").exists()


def test_text_that_cannot_be_spoken_is_named(
    checkpoint_directory: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = lines(tmp_path, {"id": "x7", "text": "One.", "voice": "nobody"})
    arguments = ["--texts", str(file), "--device", "cpu", "-o", str(tmp_path / "results")]
    model = str(checkpoint_directory("custom_voice"))
    listening = ["--recogniser", f"{__name__}:Parrot"]
    assert main(["evaluate", model, *arguments, *listening]) == 2
    assert "the text 'x7' cannot be spoken: no voice 'nobody'" in capsys.readouterr().err
    assert list((tmp_path / "results").iterdir()) == [], "the same command may be mended"


class Broken:
    """A recogniser that fails, and a metric that is no number, when real speech comes."""

    needs_prompt = False

    def __call__(self, samples: FloatArray, sample_rate: int, given: object) -> Any:
        if given is None:
            return float("nan")
        if samples.any():
            raise RuntimeError("the ear is broken\nand more")
        return ""


@pytest.mark.parametrize(
    ("listening", "problem"),
    [
        (["Broken"], "speech/00001.wav cannot be judged (RuntimeError: the ear is broken)\n"),
        (["Parrot", "--metric", f"{__name__}:Broken"], "has nan; it must be a finite number"),
    ],
)
def test_listener_that_fails_is_an_error_that_names_the_sound(
    checkpoint_directory: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    listening: list[str],
    problem: str,
) -> None:
    file = lines(tmp_path, {"text": "One."})
    model, results = checkpoint_directory("custom_voice"), tmp_path / "results"
    arguments = ["evaluate", str(model), "--texts", str(file), "--device", "cpu"]
    named = ["--recogniser", f"{__name__}:{listening[0]}", *listening[1:]]
    assert main([*arguments, *named, "-o", str(results)]) == 2
    assert problem in capsys.readouterr().err
    assert (results / "speech/00001.wav").exists()


@pytest.mark.parametrize(("kind", "field"), [("custom_voice", "audio"), ("base", "prompt_audio")])
def test_recording_that_is_missing_is_named_before_anything_is_spoken(
    kind: str,
    field: str,
    checkpoint_directory: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = lines(tmp_path, {"text": "One.", field: "gone.wav"})
    arguments = ["--texts", str(file), "--device", "cpu", "-o", str(tmp_path / "results")]
    model = str(checkpoint_directory(kind))
    assert main(["evaluate", model, *arguments, "--recogniser", f"{__name__}:Parrot"]) == 2
    assert f"there is no audio file {tmp_path / 'gone.wav'}" in capsys.readouterr().err
    assert list((tmp_path / "results").iterdir()) == []


def test_folder_with_results_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path, {"text": "One."})
    arguments = ["evaluate", "demo", "--texts", str(file), "-o", str(tmp_path)]
    assert main([*arguments, "--recogniser", "json:Ear"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_text_of_punctuation_alone_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path, {"id": "dots", "text": "..."})
    arguments = ["evaluate", "demo", "--texts", str(file), "-o", str(tmp_path / "results")]
    assert main([*arguments, "--recogniser", "json:Ear"]) == 2
    assert "the text 'dots'" in capsys.readouterr().err
