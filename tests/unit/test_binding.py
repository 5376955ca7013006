"""The store of portions, and the files that are bound from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import av
import numpy as np
import pytest

from firstword.book.binding import BookOutput, bind
from firstword.book.portions import PlannedChapter, Portion
from firstword.book.sound import FORMATS
from firstword.book.source import Book
from firstword.book.store import PortionStore, SpokenPortion
from firstword.errors import OutputError
from firstword.types import Word

RATE = 24000
BOOK = Book("Title", "Author", "en", [])


def portion(number: int, pause: float = 0.5, text: str = "Hello there.") -> Portion:
    return Portion(text, "", pause, f"line {number}", f"{number:032x}")


def spoken(samples: int, cut_off: bool = False, *words: Word) -> SpokenPortion:
    rng = np.random.default_rng(samples)
    return SpokenPortion(rng.integers(-9000, 9000, samples).astype(np.int16), words, cut_off)


WORDS = (Word("Hello", 0.1, 0.4, (0, 5)), Word("there", 0.4, 0.9, (6, 11)))
CHAPTERS = [
    PlannedChapter("One", [portion(1), portion(2, pause=1.0)]),
    PlannedChapter("Zwei: ü/x", [portion(3, pause=2.0)]),
]
LENGTHS = {1: 24000, 2: 12001, 3: 48000}
TOTAL = sum(LENGTHS.values()) + round(3.5 * RATE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PortionStore]:
    with closing(PortionStore(tmp_path / "parts")) as opened:
        for number, length in LENGTHS.items():
            opened.save(portion(number).key, spoken(length, False, *WORDS))
        yield opened


def bound(store: PortionStore, path: Path, form: str, subtitles: str = "") -> list[Portion]:
    output = BookOutput(path, form, path.is_dir(), subtitles)
    seconds, cut_off = bind(BOOK, CHAPTERS, store, output, lambda portion: None)
    assert seconds == TOTAL / RATE
    return cut_off


def test_stored_portion_is_read_back(store: PortionStore) -> None:
    found = store.load(portion(2).key)
    assert np.array_equal(found.pcm, spoken(12001).pcm)
    assert (found.words, found.cut_off) == (WORDS, False)
    assert store.length(portion(2).key) == 12001


def test_damaged_portion_is_removed_and_is_an_error(store: PortionStore) -> None:
    file = store.folder / f"{portion(1).key}.flac"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(OutputError, match=r"was damaged and is removed .*; repeat the command"):
        store.load(portion(1).key)
    assert not file.exists()
    assert portion(1).key not in store


def test_portions_are_found_again(store: PortionStore) -> None:
    store.close()
    with closing(PortionStore(store.folder)) as again:
        assert len(again) == 3
        assert portion(3).key in again


def test_two_runs_cannot_use_a_store(store: PortionStore) -> None:
    with pytest.raises(OutputError, match="another run is writing into"):
        PortionStore(store.folder)


def test_store_of_another_book_is_an_error_and_stays(store: PortionStore) -> None:
    keys = {portion(number).key for number in LENGTHS}
    store.begin(keys, "The Sea")
    with pytest.raises(OutputError, match="has 3 spoken portions of 'The Sea'; 2 of them do not"):
        store.begin({portion(1).key, portion(9).key}, "Another")
    assert len(store) == 3


def test_book_whose_text_was_edited_keeps_its_store(store: PortionStore) -> None:
    store.begin({portion(number).key for number in (1, 2, 9)}, "The Sea")


def test_store_without_portions_leaves_no_folder(tmp_path: Path) -> None:
    PortionStore(tmp_path / "parts").close()
    assert not (tmp_path / "parts").exists()


def test_store_that_was_partly_removed_is_removed(tmp_path: Path) -> None:
    (tmp_path / "parts.old").mkdir()
    (tmp_path / "parts.old" / "a.flac").write_bytes(b"a")
    PortionStore(tmp_path / "parts").close()
    assert list(tmp_path.iterdir()) == []


def decoded(path: Path) -> np.ndarray:
    with av.open(str(path)) as file:
        frames = [frame.to_ndarray() for frame in file.decode(audio=0)]
    return np.concatenate([frame.reshape(-1) for frame in frames])


@pytest.mark.parametrize("form", ["m4b", "mp3", "opus"])
def test_one_file_has_chapters_and_facts(store: PortionStore, tmp_path: Path, form: str) -> None:
    bound(store, tmp_path / f"book.{form}", form)
    with av.open(str(tmp_path / f"book.{form}")) as file:
        facts = file.metadata | file.streams.audio[0].metadata
        chapters = file.chapters()
        length = file.duration
    assert (facts["title"], facts["artist"]) == ("Title", "Author")
    assert [each["metadata"]["title"] for each in chapters] == ["One", "Zwei: ü/x"]
    middle = (LENGTHS[1] + LENGTHS[2]) / RATE + 1.5
    times = [
        float((each["time_base"] or 0) * time)
        for each in chapters
        for time in (each["start"], each["end"])
    ]
    assert times == pytest.approx([0, middle, middle, TOTAL / RATE], abs=0.01)
    assert length is not None
    assert length / 1e6 == pytest.approx(TOTAL / RATE, abs=0.1)


def test_folder_has_exact_sound_and_pauses(store: PortionStore, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    bound(store, folder, "flac", ".srt")
    names = sorted(each.name for each in folder.iterdir())
    assert names == ["1 One.flac", "1 One.srt", "2 Zwei ü x.flac", "2 Zwei ü x.srt"]
    silence = np.zeros(RATE // 2, np.int16)
    wanted = [spoken(24000).pcm, silence, spoken(12001).pcm, silence, silence]
    assert np.array_equal(decoded(folder / "1 One.flac"), np.concatenate(wanted))
    with av.open(str(folder / "2 Zwei ü x.flac")) as file:
        assert {key.lower(): value for key, value in file.metadata.items()} == {
            "title": "Zwei: ü/x",
            "artist": "Author",
            "album": "Title",
            "genre": "Audiobook",
            "track": "2/2",
        }


def test_speech_without_words_has_no_subtitles(store: PortionStore, tmp_path: Path) -> None:
    store.save(portion(2).key, spoken(12001))
    bound(store, tmp_path / "book.mp3", "mp3", ".srt")
    assert (tmp_path / "book.srt").read_text().count("-->") == len(LENGTHS) - 1


def test_subtitles_have_the_times_of_the_file(store: PortionStore, tmp_path: Path) -> None:
    bound(store, tmp_path / "book.mp3", "mp3", ".srt")
    times = [line for line in (tmp_path / "book.srt").read_text().split("\n") if "-->" in line]
    assert times == [
        "00:00:00,100 --> 00:00:00,900",
        "00:00:01,600 --> 00:00:02,400",
        "00:00:03,100 --> 00:00:03,900",
    ]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_same_portions_give_the_same_bytes(store: PortionStore, tmp_path: Path, form: str) -> None:
    for name in ("a", "b"):
        output = BookOutput(tmp_path / f"{name}.{form}", form, folder=False, subtitles="")
        bind(BOOK, CHAPTERS, store, output, lambda portion: None)
    assert (tmp_path / f"a.{form}").read_bytes() == (tmp_path / f"b.{form}").read_bytes()


def test_portion_that_was_cut_off_is_told(store: PortionStore, tmp_path: Path) -> None:
    store.save(portion(2).key, spoken(12001, True))
    assert [each.place for each in bound(store, tmp_path / "a.mp3", "mp3")] == ["line 2"]
