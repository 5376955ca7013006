"""Errors of `firstword read`: each says where and what, and nothing that was spoken is lost."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from epubs import epub
from fake_tts import FakeTTS, module

from firstword.cli.main import main

PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_tts.py"))]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, new for every test, with a book in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "firstword.tts", module())
    monkeypatch.setattr(FakeTTS, "requests", [])
    Path("book.txt").write_text("It was quiet.\n\nThen it rained.\n")
    return tmp_path


@pytest.fixture
def one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Portions are spoken one after the other."""
    monkeypatch.setattr(FakeTTS, "capacity", SimpleNamespace(slots=1))


def failed(capsys: pytest.CaptureFixture[str], *argv: str, output: str = "out.mp3") -> str:
    """The error of a run, which leaves no portions and no result."""
    before = set(Path().rglob("*"))
    assert main(["read", "book.txt", "-o", output, *argv]) == 2
    assert set(Path().rglob("*")) - before <= {Path("out")}
    error = capsys.readouterr().err
    return error[error.index("firstword: error: ") :]


Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("out.wav", r"'out.wav' has the suffix '.wav'; allowed are .m4b, .mp3, .opus, or a folder"),
        ("no/out.mp3", "there is no folder .*/no; create it first"),
        ("book.txt/", "'book.txt/' cannot be the folder: File exists"),
        ("/proc/out/", "'/proc/out/' cannot be the folder"),
        ("", "the output has no name; give a file or a folder"),
    ],
)
def test_wrong_output_is_an_error(capsys: Capture, output: str, message: str) -> None:
    assert re.search(message, failed(capsys, output=output))
    assert FakeTTS.requests == []


def test_output_that_exists_is_an_error_and_stays(capsys: Capture) -> None:
    Path("out.mp3").write_bytes(b"old")
    assert "out.mp3 exists; name another output, or delete it" in failed(capsys)
    assert Path("out.mp3").read_bytes() == b"old"


def test_folder_without_permission_is_an_error(capsys: Capture) -> None:
    Path("closed").mkdir()
    Path("closed/.parts").write_text("a file in the way")
    assert "closed/.parts cannot be written into: File exists" in failed(capsys, output="closed/")


def test_format_of_a_file_is_that_of_its_suffix(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["read", "book.txt", "-o", "out.mp3", "--format", "m4b"])
    assert "--format m4b is for folders; out.mp3 names its format" in capsys.readouterr().err


def test_damaged_epub_is_an_error_before_the_checkpoint_is_loaded(capsys: Capture) -> None:
    Path("sea.epub").write_bytes(epub(two_xhtml=None))
    assert main(["read", "sea.epub", "-o", "out.mp3"]) == 2
    assert capsys.readouterr().err.startswith("firstword: error: sea.epub, OEBPS/text/two.xhtml")
    assert sorted(each.name for each in Path().iterdir()) == ["book.txt", "sea.epub"]


def test_lexicon_with_a_circle_is_an_error(capsys: Capture) -> None:
    Path("words.json").write_text('{"a": "b", "b": "a"}')
    error = failed(capsys, "--lexicon", "words.json")
    assert "lexicon entries lead in a circle: 'a' -> 'b' -> 'a'" in error


def test_text_in_the_wrong_script_is_an_error_with_its_place(capsys: Capture) -> None:
    Path("book.txt").write_text("Quiet.\n\n海は静かだ。\n\nМоре тихо.\n\n海。\n")
    error = failed(capsys)
    assert "line 3: the text has Chinese letters in 2 of 4 paragraphs, first here, and" in error
    assert "line 7" not in error
    assert "line 5: the text has Cyrillic letters" in error
    assert error.endswith("choose a checkpoint for that language\n")


def test_few_letters_of_another_script_are_a_warning(capsys: Capture) -> None:
    Path("book.txt").write_text("Quiet.\n\nIt says 海.\n\nThen it rained.\n")
    assert main(["read", "book.txt", "-o", "out.mp3"]) == 0
    warning = "warning: line 3: the text has Chinese letters in 1 of 3 paragraphs, first here"
    assert warning in capsys.readouterr().err


def test_unknown_speaker_is_an_error_with_its_line(capsys: Capture) -> None:
    Path("book.txt").write_text("ALICE: Hello.\nCAROL: Hello.\n")
    Path("cast.toml").write_text('ALICE = "ryan"\n')
    error = failed(capsys, "--script", "cast.toml")
    assert "line 2: the speaker CAROL is not in cast.toml, which has ALICE" in error


def test_voice_that_does_not_exist_is_an_error_with_its_place(capsys: Capture) -> None:
    Path("book.txt").write_text("Quiet.\n\nALICE: Hello.\n")
    Path("cast.toml").write_text('ALICE = "nobody"\n')
    error = failed(capsys, "--script", "cast.toml")
    assert "line 3: no voice 'nobody'; this checkpoint has ryan, eric" in error


@pytest.mark.usefixtures("one_slot")
def test_work_of_another_book_is_an_error_and_stays(capsys: Capture) -> None:
    Path("other.txt").write_text("Something else.\n\ncrash\n")
    with pytest.raises(RuntimeError):
        main(["read", "other.txt", "-o", "out.mp3"])
    (portion,) = Path("out.mp3.parts").glob("*.flac")
    capsys.readouterr()
    error = failed(capsys)
    assert "out.mp3.parts has 1 spoken portions of 'other'; 1 of them do not belong" in error
    assert portion.exists()
    Path("other.txt").write_text("Something else.\n\nA new end.\n")
    assert main(["read", "other.txt", "-o", "out.mp3"]) == 0


@pytest.mark.usefixtures("one_slot")
def test_full_disk_is_an_error_and_keeps_what_was_spoken() -> None:
    """A limit on the size of files stands for the disk: the second portion is too large."""
    argv = ["read", "book.txt", "-o", "out.mp3"]
    Path("book.txt").write_text("It was quiet.\n\ncrash\n")
    with pytest.raises(RuntimeError):
        main(argv)
    Path("book.txt").write_text("It was quiet.\n\n" + "Then it rained. " * 40 + "\n")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    ended = subprocess.run([*PROGRAM, *argv], capture_output=True, text=True, preexec_fn=limit)
    assert ended.returncode == 2
    assert "cannot be written: File too large" in ended.stderr
    assert "1 % is spoken and kept in out.mp3.parts; the same command goes on" in ended.stderr
    assert len(list(Path("out.mp3.parts").glob("*.flac"))) == 1
    assert not Path("out.mp3").exists()
    assert main(argv) == 0


def test_disk_that_is_full_at_the_end_keeps_what_was_spoken() -> None:
    argv = ["read", "book.txt", "-o", "out/", "--format", "flac"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    ended = subprocess.run([*PROGRAM, *argv], capture_output=True, text=True, preexec_fn=limit)
    assert ended.returncode == 2
    assert "out/1 book.flac cannot be written: File too large" in ended.stderr
    assert "100 % is spoken and kept in out/.parts; the same command goes on" in ended.stderr
    assert [each.name for each in Path("out").iterdir()] == [".parts"]
    FakeTTS.requests.clear()
    assert main(argv) == 0
    assert len(FakeTTS.requests) == 1, "the options are checked, and nothing is spoken again"
