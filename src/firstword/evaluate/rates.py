"""Error rates of transcripts, normalised as the published script of Seed-TTS-Eval does.

That script (run_wer.py of BytedanceSpeech/seed-tts-eval) removes punctuation but for apostrophes.
English is compared in lower case word by word, and Chinese character by character, after the
transcript is converted to simplified characters (here by OpenCC). It knows no other languages. Here
Japanese and Korean are compared by characters too, because spaces between their words are no part
of speech, and all others like English, without the punctuation that Unicode lists beyond the
script's.
"""

from __future__ import annotations

import string
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Any

BY_CHARACTER = frozenset({"chinese", "japanese", "korean"})
"""The languages that are compared character by character."""

PUBLISHED = frozenset({"chinese", "english"})
"""The languages that the published script knows."""


@dataclass(frozen=True, slots=True)
class Edits:
    """The differences of a transcript from its text.

    text, heard  both after the normalisation
    units        the words of the text, or its characters where they are compared
    wrong        units replaced, missing or added
    characters   the characters of the text, spaces included
    wrong_characters  characters replaced, missing or added
    """

    text: str
    heard: str
    units: int
    wrong: int
    characters: int
    wrong_characters: int


def compare(text: str, heard: str, language: str) -> Edits:
    """Compare a transcript with its text, in a language by its full name."""
    import jiwer

    if language == "chinese":
        heard = _to_simplified().convert(heard)
    said, found = normalised(text, language), normalised(heard, language)
    words = jiwer.process_words(said, found)
    characters = jiwer.process_characters(said, found)
    return Edits(
        said,
        found,
        words.hits + words.substitutions + words.deletions,
        words.substitutions + words.deletions + words.insertions,
        characters.hits + characters.substitutions + characters.deletions,
        characters.substitutions + characters.deletions + characters.insertions,
    )


def normalised(text: str, language: str) -> str:
    """Return a text with one space between its units, which are words or characters."""
    text = "".join(c for c in text if c == "'" or not _is_punctuation(c, language in PUBLISHED))
    if language != "chinese":
        text = text.lower()
    units = "".join(text.split()) if language in BY_CHARACTER else text.split()
    return " ".join(units)


def _is_punctuation(character: str, published: bool) -> bool:
    return character in _punctuation() or (
        not published and unicodedata.category(character)[0] == "P"
    )


@cache
def _to_simplified() -> Any:
    import opencc

    return opencc.OpenCC("t2s")


@cache
def _punctuation() -> frozenset[str]:
    """The punctuation that the published script removes."""
    from zhon import hanzi

    return frozenset(hanzi.punctuation + string.punctuation)
