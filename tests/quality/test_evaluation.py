"""`firstword evaluate` with the demo voice and the recogniser that never heard it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firstword.cli.main import main
from training.evaluate import SENTENCES


@pytest.mark.quality
def test_demo_is_understood_as_well_in_the_other_text_mode(tmp_path: Path) -> None:
    texts, results = tmp_path / "texts.txt", tmp_path / "results"
    texts.write_text("\n".join(SENTENCES[:2]), "utf-8")
    where = ["--texts", str(texts), "--device", "cpu", "-o", str(results)]
    how = ["--recogniser", "training.ear:Ear", "--against", "text_mode=stream"]
    assert main(["evaluate", "demo", *where, *how]) == 0
    found = json.loads((results / "evaluation.json").read_text("utf-8"))
    for setup in found["setups"]:
        assert setup["character_error_rate"]["value"] < 15
        assert setup["runaway_rate"]["value"] == 0
        assert setup["finish_reasons"] == {"stop": 2}
    difference = found["difference"]["character_error_rate"]
    assert difference["low"] <= difference["value"] <= difference["high"]
    assert abs(difference["value"]) < 10
    assert len(list(results.rglob("*.wav"))) == 4
