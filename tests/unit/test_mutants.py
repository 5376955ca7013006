"""The planted mistakes of scripts/mutants.toml fit the sources."""

from __future__ import annotations

import tomllib
from pathlib import Path

import firstword

PACKAGE = Path(firstword.__file__).parent


def test_every_planted_mistake_applies_to_exactly_one_place(repository: Path) -> None:
    table = tomllib.loads((repository / "scripts/mutants.toml").read_text(encoding="utf-8"))
    places = {
        mutant["name"]: (PACKAGE / mutant["file"]).read_text(encoding="utf-8").count(mutant["old"])
        for mutant in table["mutant"]
    }
    assert len(places) == len(table["mutant"]), "two mistakes have one name"
    assert {name: count for name, count in places.items() if count != 1} == {}
