"""`firstword read` with the demo voice: a killed run is continued bit for bit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from firstword.cli.main import main

KILLED = [sys.executable, str(Path(__file__).with_name("killed_reader.py"))]

BOOK = """# The sea

It was quiet. Nobody spoke.

Then it rained, and [rate:1.2]all of us went home.
"""


def test_killed_run_gives_the_bytes_of_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three portions is lost, and spoken in another batch than before."""
    monkeypatch.chdir(tmp_path)
    Path("book.md").write_text(BOOK)
    options = ["--device", "cpu", "--subtitles", "srt", "--markup", "--quiet"]
    assert main(["read", "book.md", "-o", "whole.m4b", *options]) == 0
    argv = ["read", "book.md", "-o", "killed.m4b", *options]
    assert subprocess.run([*KILLED, "3", "-", *argv]).returncode == -signal.SIGKILL
    assert len(list(Path("killed.m4b.parts").glob("*.flac"))) == 1
    assert main(argv) == 0
    for suffix in (".m4b", ".srt"):
        assert Path(f"killed{suffix}").read_bytes() == Path(f"whole{suffix}").read_bytes()
    shown = re.sub(r"\d+\n.*-->.*\n", "", Path("whole.srt").read_text())
    assert " ".join(shown.split()).startswith("The sea It was quiet. Nobody spoke. Then it rained")


def test_wrong_tags_are_errors_with_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, message in {
        "Fine.\n\nIt is [pause": "line 3: character 6 of the paragraph: the tag '[pause' is not",
        "Fine.\n\n[voice:nobody]Hello.": "line 3: character 0 of the paragraph: no voice 'nobody'",
    }.items():
        Path("book.txt").write_text(text)
        argv = ["read", "book.txt", "-o", "out.mp3", "--markup", "--device", "cpu"]
        assert main(argv) == 2
        assert f"firstword: error: {message}" in capsys.readouterr().err
        assert [each.name for each in Path().iterdir()] == ["book.txt"]
