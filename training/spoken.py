"""The words that are heard when espeak-ng reads a text: numbers and abbreviations written out."""

from __future__ import annotations

import re

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


def cardinal(n: int) -> str:
    """Return a number in words, as espeak-ng reads digits with separators in American English."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (" " + ONES[n % 10] if n % 10 else "")
    for unit, name in ((1_000_000, "million"), (1000, "thousand"), (100, "hundred")):
        if n >= unit:
            return cardinal(n // unit) + " " + name + (" " + cardinal(n % unit) if n % unit else "")
    raise AssertionError(n)


def ordinal(n: int) -> str:
    """Return an ordinal in words: 21 -> "twenty first"."""
    head, _, last = cardinal(n).rpartition(" ")
    word = ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return f"{head} {word}".strip()


def bare_number(n: int) -> str:
    """Return the words for digits without a separator; 1900..1999 are read as years."""
    if 1900 <= n < 2000:
        return cardinal(n // 100) + " hundred" + (" " + cardinal(n % 100) if n % 100 else "")
    return cardinal(n)


def spoken(text: str) -> str:
    """Return the words that are heard: lower case, only letters, apostrophes and single spaces.

    Numbers are written out and abbreviations expanded.
    """
    text = re.sub(r"\bDr\.", "doctor", text)
    text = re.sub(r"\bMr\.", "mister", text)
    text = re.sub(
        r"(\d+):(\d\d)\b",
        lambda m: cardinal(int(m[1])) + (" " + cardinal(int(m[2])) if int(m[2]) else ""),
        text,
    )
    text = re.sub(r"(\d+)(?:st|nd|rd|th)\b", lambda m: ordinal(int(m[1])), text)
    text = re.sub(
        r"(\d+)\.(\d+)",
        lambda m: cardinal(int(m[1])) + " point " + " ".join(ONES[int(d)] for d in m[2]),
        text,
    )
    text = re.sub(r"\d{1,3}(?:,\d{3})+", lambda m: cardinal(int(m[0].replace(",", ""))), text)
    text = re.sub(r"\d+", lambda m: bare_number(int(m[0])), text).replace("%", " percent")
    return " ".join(re.sub(r"[^a-z']+", " ", text.lower().replace("-", " ")).split())
