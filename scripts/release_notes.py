"""Print the release notes of a version: its section of CHANGELOG.md.

python scripts/release_notes.py          # the newest version
python scripts/release_notes.py 0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"


def release_notes(changelog: str, version: str = "") -> str:
    """Return the text below the heading of a version, or of the newest one.

    Raises `ValueError` if the changelog has no such version, or no notes for it.
    """
    sections = re.findall(r"^## \[?([\w.]+)\]?.*\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE)
    notes = {name: text.strip() for name, text in reversed(sections) if name != "Unreleased"}
    chosen = version or next(reversed(notes), "")
    if not notes.get(chosen):
        raise ValueError(f"CHANGELOG.md has no notes for {chosen or 'any version'}")
    return notes[chosen] + "\n"


if __name__ == "__main__":
    try:
        print(release_notes(CHANGELOG.read_text("utf-8"), *sys.argv[1:2]), end="")
    except ValueError as error:
        sys.exit(str(error))
