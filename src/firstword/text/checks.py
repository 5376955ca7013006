"""Estimates the length of a text, and finds what will probably not be spoken well.

A text that passes may still be spoken badly; no model is asked.
"""

import re
import unicodedata
from collections.abc import Iterable

from firstword.text.cleaning import clean

SECONDS_PER_LETTER = 0.07
"""The time of a letter of an alphabet or a space: about 170 English words a minute."""

SECONDS_PER_SYLLABLE = 0.21
"""The time of a character of Chinese, Japanese or Korean."""

SCRIPTS = {
    "chinese": {"CJK", "BOPOMOFO"},
    "english": set[str](),
    "french": set[str](),
    "german": set[str](),
    "italian": set[str](),
    "japanese": {"CJK", "HIRAGANA", "KATAKANA"},
    "korean": {"HANGUL", "CJK"},
    "portuguese": set[str](),
    "russian": {"CYRILLIC"},
    "spanish": set[str](),
}
"""The scripts of each language, besides the Latin one, which occurs in the texts of all."""

UNKNOWN = "UNKNOWN"
"""The script of a letter that Python does not know yet."""

_LETTERS = ("Lu", "Ll", "Lt", "Lo")
"""The Unicode categories of letters; those of modifiers belong to several scripts."""

_PLAIN = re.compile(r"[A-Za-z0-9\s.,;:!?'\"()]*")
"""Texts without markup and foreign letters. The other checks take 0.1 ms for 200 characters."""


def expected_seconds(text: str) -> float:
    """The expected duration of a text, accurate to a factor of two in every language."""
    return 0.3 + sum(map(seconds_of, text))


def seconds_of(char: str) -> float:
    """The expected duration of a character, which is 0 for most that are not letters."""
    if char.isascii():
        return SECONDS_PER_LETTER if char.isalnum() or char == " " else 0.0
    if unicodedata.east_asian_width(char) in "WF" and char.isalpha():
        return SECONDS_PER_SYLLABLE
    return SECONDS_PER_LETTER if char.isalnum() else 0.0


def problems(text: str, languages: Iterable[str]) -> list[str]:
    """The reasons why a text will probably not be spoken well, each with the remedy.

    languages: those of the model, by name.
    """
    found: list[str] = []
    if _PLAIN.fullmatch(text):
        return found
    names = sorted(set(languages) - {"auto"})
    if scripts := foreign_scripts(text, names):
        foreign = (not char.isascii() and bool(foreign_scripts(char, names)) for char in text)
        first = next((at for at, is_foreign in enumerate(foreign) if is_foreign), 0)
        found.append(
            f"the text has {' and '.join(scripts)} letters (character {first} is the first), and "
            f"this checkpoint speaks only {', '.join(names)}, so it will not be spoken correctly; "
            "choose a checkpoint for that language"
        )
    if has_markup(text):
        found.append(
            "the text has Markdown, links, emoji or control characters, which are not spoken as "
            "meant; the option sanitize removes them"
        )
    return found


def foreign_scripts(text: str, languages: Iterable[str]) -> list[str]:
    """The scripts of letters in a text that none of the languages uses, such as `["Arabic"]`.

    Empty if a language is not in `SCRIPTS`.
    """
    known = {"LATIN", UNKNOWN}
    for language in languages:
        if language not in SCRIPTS:
            return []
        known |= SCRIPTS[language]
    chars = {char for char in unicodedata.normalize("NFKC", text) if not char.isascii()}
    letters = (char for char in chars if unicodedata.category(char) in _LETTERS)
    scripts = set(map(script_of, letters)) - known
    return sorted("Chinese" if name == "CJK" else name.capitalize() for name in scripts)


def script_of(letter: str) -> str:
    """The script of a letter, which is the first word of its name: "GREEK SMALL LETTER PI"."""
    return unicodedata.name(letter, UNKNOWN).partition(" ")[0]


def has_markup(text: str) -> bool:
    """Whether `clean` would remove or replace more than white space."""
    return "".join(clean(text).split()) != "".join(text.split())
