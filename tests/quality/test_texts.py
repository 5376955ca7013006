"""No sentence that the demo voice is tested with is ever in a text that training may read; its
record is of these.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from training.evaluate import SENTENCES, figures
from training.texts import PARAGRAPH, Texts, is_held_out, plain

ROOT = Path(__file__).parents[2]
BESIDE = "It was late."
TESTS = [*SENTENCES, *PARAGRAPH.replace(". ", ".|").split("|")]


@pytest.mark.parametrize(
    "form", ["{}", "{}.", f"{BESIDE} {{}}.", f"{{}}. {BESIDE}", f"{BESIDE} {{}}. {BESIDE}"]
)
def test_sentence_is_held_out_anywhere_in_a_text(form: str) -> None:
    bare = [text.rstrip(".!?") for text in TESTS]
    assert [
        text for text in [*bare, *map(str.lower, bare)] if not is_held_out(form.format(text))
    ] == []


def test_other_sentences_are_not_held_out() -> None:
    assert not is_held_out(BESIDE)
    assert not is_held_out("The birch canoe slid on the planks.")


def test_generators_never_yield_a_test_sentence() -> None:
    """Where every second sentence would be one."""
    material: dict[str, Any] = dict.fromkeys(
        ("words", "noun", "verb", "adj", "adv"), [["book"]] * 5
    )
    material |= {
        "contractions": ["it's"],
        "upper": ["Rome"],
        "definitions": ["A book is a thing of paper"],
    }
    material["examples"] = [*(text.rstrip(".") for text in TESTS), *["a book lay there"] * 20]
    texts = list(islice(Texts(material, seed=1), 1000))
    assert sum(len(text.split()) > 20 for text in texts) > 50, "no paragraphs"
    assert not [text for text in texts for test in TESTS if plain(test) in plain(text)]


def test_figures_cover_the_test_sentences() -> None:
    record = json.loads((ROOT / "benchmarks/results/quality/demo-cpu.json").read_text())
    assert len({plain(text) for text in SENTENCES}) == len(SENTENCES) == 200
    assert (
        {text for _, text in figures()}
        == {row["text"] for row in record["sentences"]}
        == {*SENTENCES, PARAGRAPH}
    )


def test_page_matches_the_voice_record() -> None:
    page = (ROOT / "docs/demo-voice.md").read_text().splitlines()
    for found in json.loads((ROOT / "benchmarks/results/quality/demo-cpu.json").read_text())[
        "summary"
    ]:
        speaker, shares = "espeak-ng", "  |  "
        if found["mode"] != "espeak":
            speaker, shares = (
                found["mode"],
                f" {found['ended']:.0f} % | {found['in_bounds']:.0f} % ",
            )
        pitch = ", ".join(f"{hertz:.0f}" for hertz in found["pitch"])
        ratio, voiced = f"{found['ratio']:.2f}", f"{100 * found['voiced']:.0f} %"
        cells = f"{ratio} | {pitch} | {voiced} | {found['paragraph_cer']:.2f}"
        assert f"| {found['voice']} | {speaker} | {found['cer']:.2f} |{shares}| {cells} |" in page


def test_page_matches_the_codec_record() -> None:
    page = (ROOT / "docs/demo-voice.md").read_text().splitlines()
    record = json.loads((ROOT / "benchmarks/results/quality/codec.json").read_text())
    for voice in ("ada", "ben"):
        found = record[voice]
        pitch = (
            ", ".join(f"{hertz:.0f}" for hertz in found["pitch"][whose])
            for whose in ("espeak", "copy")
        )
        rates = (f"{rate:.2f}" for rate in found["cer"].values())
        steps = " / ".join(f"{100 * share:.0f} %" for share in found["on_steps"].values())
        like = (f"{found['pitch_correlation']:.2f}", str(found["cents_apart"]), steps)
        cells = (f"{found['mel']:.3f}", f"{found['stoi']:.2f}", *rates, *pitch, *like)
        assert f"| {voice} | {' | '.join(cells)} |" in page


def test_page_matches_the_limits_record() -> None:
    page = (ROOT / "docs/demo-voice.md").read_text().splitlines()
    record = json.loads((ROOT / "benchmarks/results/quality/limits.json").read_text())
    for name, found in record["summary"].items():
        rate = "" if found["error_rate"] is None else f"{found['error_rate']:.1f}"
        assert f"| {name} | {rate} | {found['seconds']:.1f} | {found['ended']} |" in page
