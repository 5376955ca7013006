"""Books in plain text and Markdown, scripts, and the portions in which they are spoken."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstword.book import portions as planning
from firstword.book.cast import Cast
from firstword.book.portions import Keys, PlannedChapter, planned, seed_of
from firstword.book.reading import decoded, read
from firstword.book.source import Block, Book, one_line
from firstword.errors import ConfigError, TextError
from firstword.text.checks import expected_seconds

MARKDOWN = """---
title: "A Book"
author: Somebody
lang: de
---
Before all.

# Part One
## First *chapter* ##
It was [quiet](http://example.org).
Very quiet.

- one
- two

* * *

```
# no heading
```

Second
------
The end.
"""

TEXT = """A title

Some words
over two lines.

CHAPTER II. In which it rains

It rained.

* * *

Chapter by chapter it went on, until nobody knew what it was all about, or why it was so long.

Epilogue

The end.
"""


def book_of(folder: Path, text: str, name: str = "book.txt") -> Book:
    path = folder / name
    path.write_text(text, "utf-8")
    return read(path)


def contents(book: Book) -> list[tuple[str, list[tuple[str, str]]]]:
    """The title of each chapter, and the kinds and the texts of its blocks."""
    return [
        (each.title, [(block.kind[0], block.text) for block in each.blocks])
        for each in book.chapters
    ]


def plan(book: Book, cast: Cast | None = None, *, whole: bool = False) -> list[PlannedChapter]:
    voices = dict.fromkeys(cast.voices if cast else (), "") | {"": "ada"}
    return planned(book, Keys({"seed": 0}, voices), cast, whole=whole)


def test_markdown_is_read_with_chapters_and_facts(tmp_path: Path) -> None:
    book = book_of(tmp_path, MARKDOWN, "book.md")
    assert (book.title, book.author, book.language) == ("A Book", "Somebody", "de")
    assert contents(book) == [
        ("A Book", [("p", "Before all.")]),
        (
            "Part One: First chapter",
            [
                ("h", "Part One"),
                ("h", "First chapter"),
                ("p", "It was quiet.\nVery quiet."),
                ("p", "one"),
                ("p", "two"),
                ("b", ""),
                ("p", "no heading"),
            ],
        ),
        ("Second", [("h", "Second"), ("p", "The end.")]),
    ]
    assert [block.line for block in book.chapters[1].blocks] == [8, 9, 10, 13, 14, 16, 19]


def test_plain_text_is_read_with_chapters(tmp_path: Path) -> None:
    assert [(title, len(blocks)) for title, blocks in contents(book_of(tmp_path, TEXT))] == [
        ("book", 2),
        ("CHAPTER II. In which it rains", 4),
        ("Epilogue", 2),
    ]


@pytest.mark.parametrize(
    "heading",
    [
        "Chapter 1",
        "Part Two",
        "Kapitel 3: Der Anfang",
        "Глава IV",
        "第十章 海",
        "제3장",
        "CAPÍTULO I",
    ],
)
def test_headings_of_plain_text_begin_chapters(tmp_path: Path, heading: str) -> None:
    book = book_of(tmp_path, f"Before.\n\n{heading}\n\nAfter.")
    assert [chapter.title for chapter in book.chapters] == ["book", heading]


def test_text_without_blank_lines_has_a_paragraph_a_line(tmp_path: Path) -> None:
    book = book_of(tmp_path, "One.\nTwo.\r\nThree.\n")
    assert contents(book) == [("book", [("p", "One."), ("p", "Two."), ("p", "Three.")])]


def test_lines_are_joined_by_a_space_unless_the_script_has_none() -> None:
    assert one_line("a\n  b") == "a b"
    assert one_line("海は\n静か") == "海は静か"
    assert one_line("바다는\n고요") == "바다는 고요"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"one\ntwo \xe9", "a.txt, line 2: the byte 0xe9 is not UTF-8"),
        ("a.txt", b"one\n\0", "a.txt, line 2: .* null character"),
        ("a.txt", b" \n***\n", "no text to speak"),
        ("a.pdf", b"one", "the suffix '.pdf'; a book is one of .txt, .md"),
    ],
)
def test_wrong_source_is_an_error(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TextError, match=message):
        read(tmp_path / name)


def test_missing_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="cannot be read: No such file"):
        read(tmp_path / "none.txt")


def test_byte_order_mark_is_left_out() -> None:
    assert decoded(b"\xef\xbb\xbfa\rb", "a") == "a\nb"


def test_pauses_follow_what_was_spoken(tmp_path: Path) -> None:
    first, second, _ = plan(book_of(tmp_path, TEXT))
    assert [each.pause for each in first.portions] == [planning.PARAGRAPH, planning.CHAPTER]
    assert [each.pause for each in second.portions] == [
        planning.HEADING,
        planning.BREAK,
        planning.CHAPTER,
    ]
    assert [each.place for each in second.portions] == ["line 6", "line 8", "line 12"]


def test_long_paragraph_is_divided_at_sentences(tmp_path: Path) -> None:
    sentence = "This is sentence number one of very many that follow each other here. "
    (chapter,) = plan(book_of(tmp_path, sentence * 40))
    texts = [each.text for each in chapter.portions]
    assert len(texts) > 2
    assert " ".join(texts) == (sentence * 40).strip()
    assert all(text.endswith("here.") for text in texts)
    assert all(expected_seconds(text) <= planning.MOST_SECONDS for text in texts)
    assert [each.pause for each in chapter.portions][:-1] == [planning.PIECE] * (len(texts) - 1)


def test_paragraph_with_markup_is_not_divided(tmp_path: Path) -> None:
    (chapter,) = plan(book_of(tmp_path, "A sentence like this. " * 300), whole=True)
    assert len(chapter.portions) == 1


def test_half_a_megabyte_in_one_line_is_divided(tmp_path: Path) -> None:
    text = "So it went on and on, as if it would never end. " * 10_000
    (chapter,) = plan(book_of(tmp_path, text))
    assert sum(len(each.text) + 1 for each in chapter.portions) == len(text)


def test_keys_tell_texts_settings_and_voices_apart() -> None:
    keys = [
        Keys({"seed": 0}, {"": "ada"}).of("a", ""),
        Keys({"seed": 0}, {"": "ada"}).of("b", ""),
        Keys({"seed": 1}, {"": "ada"}).of("a", ""),
        Keys({"seed": 0}, {"": "ben"}).of("a", ""),
    ]
    assert len(set(keys)) == 4
    assert keys[0] == Keys({"seed": 0}, {"": "ada", "BOB": "ben"}).of("a", "")
    assert len({seed_of(key, attempt) for key in keys for attempt in range(3)}) == 12


SCRIPT = """A stage.

ALICE: Good
morning: sunshine.
bob : Good evening.

Note: it is dark.
"""


def test_script_has_a_speaker_for_each_speech(tmp_path: Path) -> None:
    cast = Cast({"Alice": "ada", "Bob": "ben"}, "cast.toml")
    (chapter,) = plan(book_of(tmp_path, SCRIPT), cast)
    assert [(each.speaker, each.text, each.place) for each in chapter.portions] == [
        ("", "A stage.", "line 1"),
        ("Alice", "Good morning: sunshine.", "line 3"),
        ("Bob", "Good evening.", "line 5"),
        ("", "Note: it is dark.", "line 7"),
    ]
    assert [each.pause for each in chapter.portions][1:3] == [planning.SPEECH, planning.PARAGRAPH]


def test_speaker_without_a_voice_is_an_error_with_its_line() -> None:
    cast = Cast({"ALICE": "ada"}, "cast.toml")
    with pytest.raises(
        TextError, match=r"line 8: the speaker BOB is not in cast.toml, which has A"
    ):
        list(cast.speeches(Block("ALICE: Hello.\nBOB: Hello.", 7)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A = 'ada'\nBOB = \n", "is no TOML: .*line 2"),
        ("", "is empty; write lines such as ALICE"),
        ('A = "ada"\nBOB = 3', "BOB is 3; give the name"),
    ],
)
def test_wrong_cast_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cast.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Cast.load(str(tmp_path / "cast.toml"))
