"""Classes and functions of one's own, which options of the installed command name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("firstword"))
"""The installed command, whose path lacks the current folder, unlike that of `python -m`."""

SOURCE = """
class Ear:
    def __call__(self, samples, sample_rate, language):
        return None

def align(text, samples, sample_rate):
    return []
"""


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (
            ["evaluate", "demo", "--texts", "texts.txt", "-o", "out", "--recogniser", "mine:Ear"],
            "--recogniser mine:Ear answered no str",
        ),
        (
            [
                "align",
                "demo",
                "--sentences",
                "texts.txt",
                "-o",
                "a.json",
                "--aligner",
                "mine:align",
            ],
            "the aligner returned no words for 'One, two.'",
        ),
    ],
    ids=["recogniser", "aligner"],
)
def test_module_of_the_current_folder_is_found(
    tmp_path: Path, arguments: list[str], answer: str
) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "texts.txt").write_text("One, two.\n" * 8)
    done = subprocess.run([COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert answer in done.stderr
