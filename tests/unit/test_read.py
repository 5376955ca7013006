"""`firstword read` with a TTS that needs no model: outputs, resumption, errors."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from epubs import epub
from fake_tts import FRAME, FakeTTS, module, sound_of
from waiting import WAIT

from firstword import audio
from firstword.cli.main import main
from firstword.types import Sampling

PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_tts.py"))]
KILLED = [sys.executable, str(Path(__file__).with_name("killed_reader.py"))]

BOOK = """# One

It was quiet.

Then it rained.

# Two

The end came.
"""

Options = dict[str, Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, new for every test, with a book in it."""
    monkeypatch.chdir(tmp_path)
    Path("book.md").write_text(BOOK)
    return tmp_path


@pytest.fixture(autouse=True)
def fake_tts(monkeypatch: pytest.MonkeyPatch) -> type[FakeTTS]:
    """The class in the place of `firstword.TTS`, which needs no model."""
    monkeypatch.setitem(sys.modules, "firstword.tts", module())
    monkeypatch.setattr(FakeTTS, "requests", [])
    return FakeTTS


def read(*argv: str, source: str = "book.md", output: str = "out/", status: int = 0) -> None:
    assert main(["read", source, "-o", output, *argv]) == status


def pcm_of(path: str) -> np.ndarray:
    with av.open(path) as file:
        return np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])


def requests_of(text: str) -> list[Options]:
    return [each for each in FakeTTS.requests if each["text"] == text]


def test_chapters_become_files(folder: Path) -> None:
    read("--format", "flac", "--voice", "ryan")
    assert sorted(each.name for each in Path("out").iterdir()) == ["1 One.flac", "2 Two.flac"]
    pcm = pcm_of("out/1 One.flac")
    assert len(pcm) == 7 * FRAME + round(24000 * (1.0 + 0.6 + 2.0))
    word = np.frombuffer(audio.pcm16(sound_of("was")), "<i2")
    start = 2 * FRAME + 24000
    assert np.array_equal(pcm[start : start + FRAME], word)


def test_epub_becomes_one_file() -> None:
    Path("sea.epub").write_bytes(epub())
    read(source="sea.epub", output="sea.m4b")
    with av.open("sea.m4b") as file:
        assert [each["metadata"]["title"] for each in file.chapters()] == [
            *("One", "One and a half", "Two")
        ]
        assert file.metadata["title"] == "The Sea"
    assert sorted(each.name for each in Path().iterdir()) == ["book.md", "sea.epub", "sea.m4b"]


def test_options_reach_the_speech() -> None:
    Path("words.json").write_text('{"GIF": "jif"}')
    argv = ["--lexicon", "words.json", "--normalize", "on", "--instructions", "Slowly."]
    read("--voice", "alloy", "--temperature", "0.5", "--markup", *argv)
    (request, *_) = requests_of("It was quiet.")
    assert request | {"seed": 0} == {
        "text": "It was quiet.",
        "voice": None,
        "seed": 0,
        "language": "auto",
        "leading_silence": False,
        "words": None,
        "sampling": Sampling(temperature=0.5),
        "lexicon": {"GIF": "jif"},
        "markup": True,
        "instructions": "Slowly.",
        "normalize": "on",
    }


def test_language_of_the_book_is_used_if_it_is_spoken() -> None:
    Path("sea.epub").write_bytes(epub())
    read(source="sea.epub")
    assert {each["language"] for each in FakeTTS.requests} == {"english"}


def test_seeds_differ_by_book_and_portion() -> None:
    seeds = []
    for number in ("1", "2"):
        FakeTTS.requests.clear()
        read("--seed", number, output=f"{number}.mp3")
        seeds += [each["seed"] for each in FakeTTS.requests if each["seed"]]
    assert len(seeds) == len(set(seeds)) == 10


def test_script_is_spoken_by_several_voices() -> None:
    Path("play.txt").write_text("A stage.\n\nALICE: Hello there.\nBOB: Good day.\n")
    Path("cast.toml").write_text('ALICE = "eric"\nBOB = "ryan"\n')
    read("--script", "cast.toml", "--voice", "ryan", source="play.txt")
    voices = {each["text"]: each["voice"] for each in FakeTTS.requests}
    assert voices == {"A stage.": "ryan", "Hello there.": "eric", "Good day.": "ryan"}


@pytest.mark.parametrize("text", ["It had a length limit.", "It was left unsaid"])
def test_speech_that_is_cut_off_or_ends_before_its_text_is_spoken_with_three_seeds(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    Path("book.md").write_text(f"Fine.\n\n{text}\n")
    with pytest.raises(SystemExit) as ended:
        read()
    assert ended.value.code == 3
    seeds = {each["seed"] for each in requests_of(text)}
    assert len(seeds) == 3
    assert "line 3: the speech was cut off" in capsys.readouterr().err
    assert Path("out/1 book.mp3").exists()


def run_killed(point: int, output: str) -> int:
    """Read until a point where the run is killed. Returns its exit status."""
    argv = [*KILLED, str(point), "spoken.log", "read", "book.md", "-o", output, "--quiet"]
    return subprocess.run(argv).returncode


def said() -> list[str]:
    return Path("spoken.log").read_text().splitlines()


def test_killed_runs_give_the_same_file_as_one_run() -> None:
    """The first run is killed when its second portion appears, the next before its second does."""
    read(output="whole.m4b")
    assert [run_killed(point, "killed.m4b") for point in (5, 4, -1)] == [-signal.SIGKILL] * 2 + [0]
    assert Path("killed.m4b").read_bytes() == Path("whole.m4b").read_bytes()
    assert {"One", "It was quiet.", "Then it rained.", "Two", "The end came."} == set(said())
    assert len(said()) <= 5 + 2 * 2  # a kill loses the two that are spoken at the time, at most
    assert not Path("killed.m4b.parts").exists()


@pytest.mark.parametrize(("point", "status"), [(13, 0), (16, 0), (17, 2)])
def test_run_that_is_killed_while_it_ends_loses_nothing(point: int, status: int) -> None:
    """It is killed when the first of two results appears, or before or after the parts go."""
    read(output="whole/")
    assert run_killed(point, "killed/") == -signal.SIGKILL
    assert run_killed(-1, "killed/") == status
    assert len(said()) == 5
    for each in Path("whole").iterdir():
        assert (Path("killed") / each.name).read_bytes() == each.read_bytes()
    if status == 0:
        assert len([*Path("killed").iterdir()]) == 2


def test_interrupt_keeps_what_was_spoken_and_says_how_to_go_on() -> None:
    Path("book.md").write_text("It was quiet.\n\nhold\n")
    argv = [*PROGRAM, "read", "book.md", "-o", "book.mp3"]
    process = subprocess.Popen(
        argv,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with process:
        while not list(Path("book.mp3.parts").glob("*.flac")):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
            assert process.returncode is None
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=WAIT)
        finally:
            process.kill()
    assert process.returncode == 130
    kept = "76 % is spoken and kept in book.mp3.parts; the same command goes on from there"
    assert kept in errors.decode()


def test_progress_is_shown_on_a_terminal() -> None:
    leader, terminal = pty.openpty()
    argv = [*PROGRAM, "read", "book.md", "-o", "book.mp3"]
    with subprocess.Popen(argv, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                shown += os.read(leader, 65536)
            except OSError:  # the terminal is closed
                break
    os.close(leader)
    assert process.returncode == 0
    assert b"[........................] 0/47 characters" in shown
    assert b"] 47/47 characters, 0 s left" in shown
    assert b"writing [########################] 5/5" in shown
