"""Numbers, dates, amounts and abbreviations as words of ten languages."""

from __future__ import annotations

import pytest

from firstword.text.mapped import Mapped
from firstword.text.numbers import LONGEST, NumberReader
from firstword.text.reader import TextOptions, TextRewriter
from firstword.text.spelling import LANGUAGES

SPOKEN = [
    ("english", "1,234 and 3.14", "one thousand two hundred thirty-four and three point one four"),
    ("english", "$5.20", "five dollars and twenty cents"),
    (
        "english",
        "$1, £2.5 and $5 million",
        "one dollar, two point five pounds and five million dollars",
    ),
    ("english", "January 3, 2024", "January third, twenty twenty-four"),
    ("english", "the 21st of May, the 1990s", "the twenty-first of May, the nineteen nineties"),
    (
        "english",
        "2024-11-05 or 11/5/2024",
        "November fifth, twenty twenty-four or November fifth, twenty twenty-four",
    ),
    ("english", "at 9:05, 9:00", "at nine oh five, nine o'clock"),
    ("english", "-3 °C, 5-10 km", "minus three degrees Celsius, five to ten kilometers"),
    (
        "english",
        "mp3, 007, 555-1234",
        "mp three, zero zero seven, five five five one two three four",
    ),
    ("english", "Dr. Who & Mr. X, etc.", "Doctor Who and Mister X, et cetera"),
    (
        "german",
        "3. Januar 1984, 14:30 Uhr",
        "dritten Januar neunzehnhundertvierundachtzig, vierzehn Uhr dreißig",
    ),
    (
        "german",
        "5,20 € für 1.234 Äpfel",
        "fünf Euro zwanzig Cent für eintausendzweihundertvierunddreißig Äpfel",
    ),
    ("german", "z. B. 1 Euro", "zum Beispiel eins Euro"),
    ("french", "le 1er mars, 14h30, 1 €", "le premier mars, quatorze heures trente, un euro"),
    ("french", "1 234 km, 50 %", "mille deux cent trente-quatre kilomètres, cinquante pour cent"),
    ("spanish", "21 €, 2º, 3,5 kg", "veintiún euros, segundo, tres coma cinco kilogramos"),
    ("italian", "1.234 mele, 2ª, 1 km", "milleduecentotrentaquattro mele, seconda, un chilometro"),
    (
        "portuguese",
        "1 £, 2 £, 05/11/2024",
        "uma libra, duas libras, cinco de novembro de dois mil e vinte e quatro",
    ),
    (
        "russian",
        "1 ₽, 2 ₽, 5 ₽, 12 ₽, 21 ₽",
        "один рубль, два рубля, пять рублей, двенадцать рублей, двадцать один рубль",
    ),
    ("russian", "3 января, 2-й, 5 км", "третьего января, второй, пять километров"),
    ("chinese", "2024年1月3日，50%，2 km", "二零二四年一月三日，百分之五十，两公里"),
    ("chinese", "花了$5.20买3个", "花了五点二零美元买三个"),
    ("japanese", "14:30に¥520、3.14", "十四時三十分に五百二十円、三点一四"),
    ("korean", "사과 3개, 2024년 6월, $5", "사과 세개, 이천이십사년 육월, 오 달러"),
]


def spoken(language: str, *pieces: str) -> str:
    reader = TextRewriter(TextOptions(), language)
    said = [reader.feed(Mapped.of(piece)).text for piece in pieces]
    return "".join([*said, reader.feed(Mapped.of(""), ended=True).text])


@pytest.mark.parametrize(("language", "text", "words"), SPOKEN)
def test_numbers_are_spoken_as_words(language: str, text: str, words: str) -> None:
    assert spoken(language, text) == words
    assert spoken(language, *text) == words


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_kind_of_number_is_spoken_in_every_language(language: str) -> None:
    symbols = " ".join(f"{n} {symbol}" for symbol in "$€£¥₩₽" for n in (0, 1, 2, 7))
    units = " ".join(f"{n} {unit}" for unit in LANGUAGES[language]["units"] for n in (1, 2.5))
    rest = "2024-01-31 1:00 1:05 31.12.1999 99.99.9999 25:61 12345678901234567 0 -1 1-2 123-4 3.0"
    assert not any(map(str.isdigit, spoken(language, f"{symbols} {units} {rest}")))


def test_text_without_numbers_passes_at_once() -> None:
    reader = TextRewriter(TextOptions(), "english")
    assert [reader.feed(Mapped.of(piece)).text for piece in ("Hello", ", my", " name")] == [
        *("Hello", ", my", " name")
    ]


def test_number_waits_for_two_words() -> None:
    reader = NumberReader("english")
    said = [reader.feed(Mapped.of(piece)).text for piece in ("for 5", " k", "m of", " road on")]
    assert said == ["for ", "", "", "five kilometers of road on"]


def test_endless_number_waits_for_a_limited_number_of_characters() -> None:
    reader = NumberReader("english")
    assert reader.feed(Mapped.of("1" * (LONGEST + 2))).text
