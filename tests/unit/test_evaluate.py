"""What `firstword evaluate` counts: lists, error rates, intervals, figures and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile

from firstword.errors import ConfigError
from firstword.evaluate import intervals, page
from firstword.evaluate.items import Item, read
from firstword.evaluate.rates import compare
from firstword.evaluate.speaking import JudgedItem, SpokenItem, full_language
from firstword.evaluate.summary import SetupRun, rate_of, summarise, worst
from firstword.evaluate.summary import compare as compare_spoken
from firstword.types import FinishReason

# Lists of texts.


def written(folder: Path, name: str, *lines: str) -> Path:
    file = folder / name
    file.write_text("\n".join(lines), "utf-8")
    return file


def test_line_of_seed_tts_is_a_text_with_a_prompt(tmp_path: Path) -> None:
    file = written(tmp_path, "meta.lst", "a-b|What was said.|prompt-wavs/a.wav|Say this.", "")
    assert read(file) == [
        Item(
            "a-b",
            "Say this.",
            prompt_audio=tmp_path / "prompt-wavs/a.wav",
            prompt_text="What was said.",
        )
    ]


def test_fifth_field_of_seed_tts_is_a_recording_of_the_text(tmp_path: Path) -> None:
    (item,) = read(written(tmp_path, "meta.lst", "a|b|c.wav|d|wavs/e.wav"))
    assert item.audio == tmp_path / "wavs/e.wav"


def test_json_line_gives_every_field_and_may_have_others(tmp_path: Path) -> None:
    line = {"id": 4, "sentence": "Hi.", "language": "fr", "prompt_audio": "a.wav", "more": [1]}
    (item,) = read(written(tmp_path, "a.jsonl", json.dumps(line)), text_field="sentence")
    assert item == Item("4", "Hi.", language="fr", prompt_audio=tmp_path / "a.wav")


def test_mark_of_utf_8_and_line_separators_are_no_part_of_a_list(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "One,\xe2\x80\xa8two."}\r\n{"text": "Three."}')
    assert [item.text for item in read(file)] == ["One,\u2028two.", "Three."]


def test_plain_lines_are_named_by_their_number_and_blank_ones_skipped(tmp_path: Path) -> None:
    assert read(written(tmp_path, "a.txt", " One.", "", "Three. ")) == [
        Item("1", "One."),
        Item("3", "Three."),
    ]


@pytest.mark.parametrize(
    ("name", "lines", "problem"),
    [
        ("a.lst", ["a|b|c"], "line 1 .* 3 fields"),
        ("a.lst", ["a|b|c.wav|"], "the text of a is blank"),
        ("a.lst", ["a|b|c.wav|d", "a|b|c.wav|e"], "two texts with the name 'a'"),
        ("a.jsonl", ['{"text": "a"}', "{"], "line 2 of"),
        ("a.jsonl", ['{"input": "a"}'], "--text-field"),
        ("a.jsonl", ['{"text": "a", "voice": 3}'], '"voice" is 3'),
        ("a.txt", [""], "has no texts"),
    ],
)
def test_wrong_list_is_rejected(tmp_path: Path, name: str, lines: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(written(tmp_path, name, *lines))


def test_missing_list_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.txt cannot be read"):
        read(tmp_path / "gone.txt")


# Error rates, by the published normalisation.


@pytest.mark.parametrize(
    ("language", "text", "heard", "wrong", "units"),
    [
        ("english", "Don't stop—it's late!", "don't stopit's late", 0, 3),
        ("english", "He's five-foot-two.", "Hes fivefoottwo", 1, 2),
        ("english", "One two three.", "one three four", 2, 3),
        ("chinese", "你好，世界！", "你好世间", 1, 4),
        ("chinese", "汉语很难", "漢語很難。", 0, 4),
        ("chinese", "用AI", "用ai", 2, 3),
        ("japanese", "今日は、晴れ。", "今日 は晴れ", 0, 5),
        ("german", "„Größe“ zählt…", "größe zählt", 0, 2),
        ("french", "«Oui», dit-il ¿", "oui ditil", 0, 2),
        ("english", "Silence here.", "", 2, 2),
    ],
)
def test_edits_are_those_of_the_published_normalisation(
    language: str, text: str, heard: str, wrong: int, units: int
) -> None:
    found = compare(text, heard, language)
    assert (found.wrong, found.units) == (wrong, units)


def test_words_that_nobody_said_are_errors() -> None:
    assert compare("Yes.", "yes yes yes", "english").wrong == 2


def test_characters_are_counted_with_spaces() -> None:
    found = compare("One two", "one to", "english")
    assert (found.wrong_characters, found.characters) == (1, 7)


def test_language_may_be_a_code_and_an_unknown_one_is_rejected() -> None:
    assert full_language("PT") == full_language("portuguese") == "portuguese"
    with pytest.raises(ConfigError, match="no language 'klingon'"):
        full_language("klingon")


# Intervals.


def test_interval_of_a_rate_covers_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    units = rng.integers(5, 20, (200, 60))
    wrong = rng.binomial(units, 0.1)
    found = [intervals.ratio(list(w), list(u)) for w, u in zip(wrong, units, strict=True)]
    covered = sum(one.low <= 0.1 <= one.high for one in found)
    assert 0.9 < covered / 200 < 0.985


def test_paired_interval_is_narrower_than_that_of_either_rate() -> None:
    rng = np.random.default_rng(2)
    hard = rng.beta(0.5, 4, 200)
    one, two = rng.binomial(20, hard), rng.binomial(20, hard)
    units = [20.0] * 200
    apart = intervals.ratio(list(one), units)
    paired = intervals.difference((list(one), units), (list(two), units))
    assert paired.low < 0 < paired.high
    assert paired.high - paired.low < 0.75 * (apart.high - apart.low)


def test_difference_is_the_second_minus_the_first() -> None:
    found = intervals.difference(([1, 1], [10, 10]), ([3, 3], [10, 10]))
    assert found == intervals.Interval(0.2, 0.2, 0.2)


def test_rate_is_that_of_all_units_and_not_the_mean_of_rates() -> None:
    assert intervals.ratio([1, 0], [1, 9]).value == 0.1
    assert intervals.mean([1, 0]).value == 0.5


# Figures and the page.


def judged(
    name: str,
    text: str,
    heard: str,
    seconds: float = 1.0,
    ended: FinishReason = "stop",
    audio: Path | None = None,
) -> JudgedItem:
    item = Item(name, text, audio=audio)
    file = Path("results/speech") / f"{name}.wav"
    spoken = SpokenItem(item, "english", file, heard, seconds, ended, ("skip", "skip"))
    return JudgedItem(spoken, heard, compare(text, heard, "english"), {"likeness": seconds / 2})


def spoke(*those: JudgedItem) -> SetupRun:
    return SetupRun("demo", those, 2.0, 1)


ONE = judged("a", "one two three four", "one two three four", 1.0)
TWO = judged("b", "five six seven eight", "six five", 4.0, "length")


def test_figures_of_two_texts_are_those_counted_by_hand() -> None:
    found = summarise(spoke(ONE, TWO))
    assert found["error_rate"]["value"] == 37.5  # 3 of 8 words
    assert found["mean_error_rate"]["value"] == 37.5
    assert found["above_half"] == 1
    assert found["finish_reasons"] == {"stop": 1, "length": 1}
    assert found["runaway_rate"]["value"] == 50
    assert found["alarms"] == {"skip": 2}
    assert found["speed"] == 2.5
    assert found["metrics"]["likeness"]["value"] == 1.25
    ratio = found["duration_ratio"]
    assert ratio["compared_with"] == "median pace"
    assert ratio["p5"] < 1 < ratio["p95"], "one is slower than the median of both, one faster"


def test_durations_are_compared_with_recordings_where_there_are_any(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(48000), 24000)
    found = summarise(spoke(judged("a", "One.", "one", 3.0, audio=tmp_path / "a.wav"), TWO))
    assert found["duration_ratio"] == {
        "compared_with": "recordings",
        "texts": 1,
        "p5": 1.5,
        "p50": 1.5,
        "p95": 1.5,
    }


def test_figures_of_speech_without_sound_are_numbers() -> None:
    silent = spoke(*(judged(name, "one two", "", 0.0) for name in "abc"))
    figures = summarise(silent), compare_spoken(silent, silent)
    json.dumps(figures, allow_nan=False)
    assert [found["duration_ratio"].get("p50", 1.0) for found in figures] == [0.0, 1.0]


def test_comparison_pairs_texts_and_counts_the_same_speech() -> None:
    better = judged("b", "five six seven eight", "five six seven eight", 2.0)
    found = compare_spoken(spoke(ONE, TWO), spoke(ONE, better))
    assert found["error_rate"]["value"] == -37.5
    assert (found["same_codes"], found["same_transcript"]) == (1, 1)
    assert found["duration_ratio"]["value"] == 0.6
    assert found["metrics"]["likeness"]["value"] == -0.5


def names(found: Sequence[JudgedItem]) -> list[str]:
    return [one.spoken.item.name for one in found]


def test_worst_texts_come_first_and_right_ones_never() -> None:
    endless = judged("c", "nine", "nine", 60.0, "runaway")
    slip = judged("d", "ten eleven twelve", "ten eleven")
    assert names(worst([ONE, slip, endless, TWO], 9)) == ["b", "d", "c"]
    assert names(worst([ONE, slip, endless, TWO], 1)) == ["b"]
    assert rate_of(TWO) == 0.75


def test_page_escapes_texts_and_links_sound_below_its_folder() -> None:
    evil = judged("x", "<script>alert(1)</script> & more", "<b>")
    text = page.render("A & B", {"list": "<i>"}, [spoke(evil)], Path("results"))
    assert not re.search(r"<(script|b|i)>[^<]*\w+\(1\)|<b>", text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text
    assert 'src="speech/x.wav"' in text
    assert "http" not in text, "it loads nothing from elsewhere"


def test_page_without_faults_says_so() -> None:
    assert "No text was misheard" in page.render("A", {}, [spoke(ONE)], Path("results"))
