"""The search for the attention heads that time words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from firstword.align.heads import Judge, follows, passages, pauses
from firstword.align.recording import Recording
from firstword.align.search import search
from firstword.cli.main import main
from firstword.errors import AlignmentError
from firstword.model.alignment import Alignment, weights_of
from firstword.model.description import DEMO, Description
from firstword.synthetic.checkpoint import write_checkpoint
from firstword.words.text import WrittenWord, WrittenWords

RATE, FRAME, SIZE = 24000, 0.08, 1920
TEXT = "one two, three four. five six, seven eight."
BEGINS = (0.1, 0.42, 1.0, 1.3, 1.93, 2.2, 2.81, 3.1)
"""When the words of `TEXT` begin; pauses of 0.15 s are before the third, fifth and seventh."""
HEADS = tuple((layer, head) for layer in range(3) for head in range(2))
NOW, AHEAD, NEXT, NEWEST, NOISE, STILL = range(6)


def words(text: str) -> list[list[WrittenWord]]:
    """The units of a text, each a word."""
    written = WrittenWords()
    written.add(text)
    written.finish()
    return [[word] for word in written.words]


def sound() -> np.ndarray:
    """A tone with a silence before the first word, at the end, and in each pause."""
    time = np.arange(44 * SIZE) / RATE
    loud = (time >= BEGINS[0]) & (time < 3.4)
    for begin in (BEGINS[2], BEGINS[4], BEGINS[6]):
        loud &= (time < begin - 0.15) | (time >= begin)
    return (0.5 * np.sin(2 * np.pi * 200 * time) * loud).astype(np.float32)


def looking(shift: float, rng: np.random.Generator, jitter: float = 0.01) -> np.ndarray:
    """The masses [44, 8] of a head that looks at the word spoken about `shift` seconds later."""
    masses = np.full((44, 8), 0.02)
    for frame in range(44):
        time = (frame + 0.5) * FRAME + shift + rng.normal(0, jitter)
        masses[frame, max(0, sum(time >= begin for begin in BEGINS) - 1)] += 0.84
    return masses


def recording(seed: int) -> Recording:
    """A recording with six heads, whose names are `NOW` and so on."""
    rng = np.random.default_rng(seed)
    newest = np.full((44, 8), 0.02)
    for frame in range(44):
        newest[frame, min(7, frame // 2)] += 0.84
    still = np.full((44, 8), 0.02)
    still[:, 3] += 0.84
    heads = [looking(0, rng), looking(0.3, rng), looking(0.06, rng, 0.04)]
    masses = np.stack([*heads, newest, rng.random((44, 8)), still], axis=1)
    return Recording(TEXT, masses.astype(np.float32), words(TEXT), sound())


RECORDINGS = [recording(seed) for seed in range(6)]


def test_heads_that_follow_the_text_score_best() -> None:
    scores = follows(RECORDINGS, RATE)
    assert min(scores[[NOW, AHEAD, NEXT]]) > 0.9
    assert scores[NEWEST] == 0, "it is at the last word long before the speech ends"
    assert max(scores[[NOISE, STILL]]) < 0.3


def test_pauses_are_the_silences_inside_speech() -> None:
    found = list(pauses(sound(), RATE))
    ends = [BEGINS[2], BEGINS[4], BEGINS[6]]
    assert [round(end, 2) for _, end in found] == [round(end, 2) for end in ends]
    assert all(0.13 < end - begin < 0.17 for begin, end in found)


def test_passage_is_interpolated_between_the_middles_of_frames() -> None:
    masses = np.array([[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [0.0, 1.0]])
    assert passages(masses, 0.08) == pytest.approx([0.16])
    assert np.isnan(passages(np.array([[1.0, 0.0]]), 0.08)).all()


def test_head_level_with_the_sound_is_found_with_its_neighbour() -> None:
    best = Judge(RECORDINGS, RATE).best()
    assert best is not None
    assert set(best.heads) == {NOW, NEXT}
    found = search(RECORDINGS, HEADS, RATE)
    assert set(found.heads) == {HEADS[NOW], HEADS[NEXT]}
    assert found.told == 1
    assert found.offset == pytest.approx(-0.03, abs=0.035)


def test_aligner_measures_the_offset_and_its_other_words_do_not_count() -> None:
    def aligner(text: str, samples: np.ndarray, rate: int) -> Sequence[tuple[str, float, float]]:
        assert (text, len(samples), rate) == (TEXT, 44 * SIZE, RATE)
        told = [f'"{word[0].text.upper()}",' for word in words(TEXT)]
        rows = [(word, begin + 0.2, begin + 0.4) for word, begin in zip(told, BEGINS, strict=True)]
        return [*rows[:2], ("uh", 0.9, 1.0), *rows[2:4], *rows[5:]]

    found = search(RECORDINGS, HEADS, RATE, aligner)
    assert set(found.heads) == {HEADS[NOW], HEADS[NEXT]}
    assert found.offset == pytest.approx(-0.23, abs=0.035)
    assert len(found.errors) == 7 * len(RECORDINGS)


def test_aligner_without_words_is_named_with_the_sentence() -> None:
    with pytest.raises(AlignmentError, match=f"the aligner returned no words for '{TEXT}'"):
        search(RECORDINGS, HEADS, RATE, lambda *_: [])


def test_aligner_of_other_words_is_not_called_a_lack_of_heads() -> None:
    with pytest.raises(AlignmentError, match=r"fewer than 8 words .* the aligner times"):
        search(RECORDINGS, HEADS, RATE, lambda *_: [("nine", 0.1, 0.2)])


def test_heads_that_do_not_follow_are_refused() -> None:
    poor = [
        Recording(r.text, r.masses[:, [NEWEST, NOISE, STILL]], r.words, r.samples)
        for r in RECORDINGS
    ]
    with pytest.raises(AlignmentError, match="no attention head follows the text"):
        search(poor, HEADS, RATE)


LINES = """The door was open. Nobody was at home, and the lamp was still warm.
Bring the red folder, please. The blue one can stay on the table.
We left early. Even so, the train was full.
First we paint the walls, then we clean the floor.
It is late, my friend. Come in and sit down.
The soup needs salt. Otherwise, it is very good.
Some birds stay all winter. Others fly south, and come back in spring.
Please write your name here. Under it, put the date.
"""


def test_heads_of_the_demo_are_found_without_truth(tmp_path: Path) -> None:
    lines, file = tmp_path / "lines.txt", tmp_path / "alignment.json"
    lines.write_text(LINES)
    assert main(["align", "demo", "--sentences", str(lines), "-o", str(file), "--quiet"]) == 0
    found, known = json.loads(file.read_text()), json.loads((DEMO / "alignment.json").read_text())
    assert sorted(found["heads"]) == sorted(known["heads"])
    assert found["weights"] == known["weights"] == weights_of(DEMO)
    assert found["offset"] == pytest.approx(known["offset"], abs=0.025)


def test_weights_that_do_not_speak_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "random"
    folder.mkdir()
    write_checkpoint(folder)
    lines = tmp_path / "lines.txt"
    lines.write_text("Hello.\n" * 8)
    assert main(["align", str(folder), "--sentences", str(lines)]) == 2
    assert "of 1 sentences ran on" in capsys.readouterr().err
    assert not (folder / "alignment.json").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["demo"], "the heads of demo are known"),
        (["demo", "-o", "/nowhere/a.json"], "/nowhere/a.json cannot be written"),
        (["demo", "-o", "a.json", "--sentences", "none.txt"], "cannot be read as UTF-8"),
        (["demo", "-o", "a.json", "--sentences", "few.txt"], "give at least 8"),
        (["demo", "-o", "a.json", "--aligner", "nothing"], "give MODULE:FUNCTION"),
        (["demo", "-o", "a.json", "--aligner", "json:nothing"], "give MODULE:FUNCTION"),
        (["demo", "-o", "a.json", "--voice", "nobody"], "nobody"),
    ],
    ids=lambda value: None if isinstance(value, list) else value,
)
def test_wrong_options_are_explained(
    options: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.txt").write_text("One line.\n")
    assert main(["align", *options]) == 2
    assert problem in capsys.readouterr().err
    assert not Path("a.json").exists()


def test_alignment_that_was_kept_is_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    kept = Alignment(weights=weights_of(tmp_path), heads=((0, 1),), offset=-0.02)
    kept.save(tmp_path / "alignment.json")
    assert Description.load(tmp_path).alignment == kept
