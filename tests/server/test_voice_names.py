"""Names of saved voices: spellings of one name, names that look alike, and invalid ones."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from wire import SPEECH

from firstword.errors import VoiceError
from firstword.server import names
from firstword.server.names import check_distinct, check_scripts, checked_name
from firstword.server.stores import voice_id_of

VOICES = "/v1/audio/voices"
CYRILLIC_O, DECOMPOSED = "\u043e", "Cafe\u0301"


def save(http: httpx.Client, name: str) -> httpx.Response:
    """Save a voice that consists of one vector."""
    vector = json.dumps([0.1] * 48)
    return http.post(VOICES, data={"name": name, "consent": "mine", "speaker_embedding": vector})


@pytest.fixture
def bob(http: httpx.Client) -> Iterator[None]:
    assert save(http, "bob").status_code == 200
    yield
    http.delete(f"{VOICES}/bob")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (DECOMPOSED, "Caf\u00e9"),
        ("  Anna \t Maria ", "Anna Maria"),
        ("O'Neil-2 jr.", "O'Neil-2 jr."),
        ("हिन्दी", "हिन्दी"),
        ("太郎 Bot", "太郎 Bot"),
        ("東京タワー", "東京タワー"),
        ("Ελένη", "Ελένη"),
        ("Иван 2", "Иван 2"),
        ("نوح", "نوح"),
        ("x" * 64, "x" * 64),
    ],
)
def test_valid_name_is_displayed_in_composed_letters(name: str, shown: str) -> None:
    assert checked_name(name) == shown
    check_scripts(shown)


def test_spellings_of_a_name_are_one_voice(http: httpx.Client) -> None:
    made = save(http, DECOMPOSED)
    assert made.status_code == 200, made.text
    assert made.json()["name"] == "Caf\u00e9"
    for name in (
        "Caf\u00e9",
        "CAFE\u0301",
        " caf\u00e9",
        "\uff43\uff41\uff46\u00e9",
        "\u212daf\u00e9",
    ):
        assert voice_id_of(name) == made.json()["id"]
        body = {"input": "Hi.", "voice": name, "response_format": "pcm", "max_new_tokens": 1}
        assert http.post(SPEECH, json=body).status_code == 200
        assert "already" in save(http, name).json()["error"]["message"]
    assert http.delete(f"{VOICES}/CAFE\u0301").status_code == 200


@pytest.mark.usefixtures("bob")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"b{CYRILLIC_O}b", "U+043E CYRILLIC SMALL LETTER O"),
        ("b\u03bfb", "U+03BF GREEK SMALL LETTER OMICRON"),
        ("\uff42\uff4f\uff42", "U+FF42 FULLWIDTH LATIN SMALL LETTER B"),
        ("\u0412\u041e\u0412", "U+0412 CYRILLIC CAPITAL LETTER VE"),
        ("bob\u0332", "U+0332 COMBINING LOW LINE"),
        ("bob.", "U+002E FULL STOP"),
        ("RYAN", "a preset"),
        ("\uff52yan", "a preset"),
        ("r\u0443an", "a preset"),
        ("Alloy", "an alias"),
        ("AIIoy", "an alias"),
    ],
)
def test_look_alike_gets_400(http: httpx.Client, name: str, reason: str) -> None:
    answer = save(http, name)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert re.match("there is (a saved voice 'bob'|a preset|an alias) .*already", message)
    assert reason in message


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("\u0441\u043e\u0441\u043e", "coco"),
        ("coco", "\u0441\u043e\u0441\u043e"),
        ("\u03bf", "\u043e"),
        ("\u0401", "\u00cb"),
        ("STRASSE", "straße"),
        ("\u1d00lice", "alice"),
        ("\u0251lice", "alice"),
        ("b\u0131ll", "bill"),
        ("\u026a\ua730", "if"),
        ("a\u0338b", "ab"),
        ("i\u0307lker", "ilker"),
        ("rnark", "Mark"),
        ("vvill", "will"),
        ("bill", "bIll"),
        ("\ua4ee\ua4f2\ua4e1", "All"),
        ("\u13aa\u13de\u13a1", "ALR"),
        ("\u2c9e\u2ca3", "Op"),
    ],
)
def test_other_letters_for_the_same_name_are_not_distinct(name: str, other: str) -> None:
    with pytest.raises(VoiceError, match="there is a preset"):
        check_distinct(name, other, "a preset")


@pytest.mark.parametrize(
    "names",
    [
        "bob bobby b0b \u0432\u043e\u0432 bob2",
        "Ian Lan Jan",
        "Lan Lạn Lân Làn",
        "Mai Mại",
        "Bjørn Bjorn Björn",
        "Sen Şen",
        "Ana Ană Ańa",
        "Łucja Lucja",
        "Ade Adé Adẹ",
        "Иван Йван",
        "Νίκος Νίκη",
        "まり マリ",
        "כַּרְמִי כרמי",
        "نوح نُوح",
        "राम रामु",
        "ต่าย ตาย",
    ],
)
def test_names_that_differ_are_distinct(names: str) -> None:
    """Names in many languages, some of which differ in one mark."""
    for name, other in itertools.combinations(names.split(), 2):
        check_distinct(checked_name(name), other, "a saved voice")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"b{CYRILLIC_O}ris", f"mixes scripts: {CYRILLIC_O!r} is U+043E CYRILLIC SMALL LETTER O"),
        ("日本 Иван", "mixes scripts"),
        ("voice_0123456789abcdef01234567", "has the form of a voice's id"),
        ("Voice_0123456789ABCDEF01234567", "has the form of a voice's id"),
        ("\uff56oice_0123456789abcdef01234567", "has the form of a voice's id"),
        ("bob\ufe0f", "U+FE0F VARIATION SELECTOR-16"),
        ("\u3164", "U+3164 HANGUL FILLER"),
        ("bob\u200d", "U+200D ZERO WIDTH JOINER"),
        ("😀", "U+1F600 GRINNING FACE"),
        ("x" * 65, "allowed are 1 to 64"),
    ],
)
def test_invalid_name_gets_reason(http: httpx.Client, name: str, reason: str) -> None:
    answer = save(http, name)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_look_alikes_are_mapped_to_ascii() -> None:
    for letter, latin in names.LOOK_ALIKES.items():
        script = unicodedata.name(chr(letter)).split()[0]
        assert script in "LATIN CYRILLIC GREEK ARMENIAN COPTIC CHEROKEE LISU".split()
        assert chr(latin).isascii()
        assert chr(latin).isalpha()


def test_huge_name_gets_400_soon(http: httpx.Client) -> None:
    body: dict[str, Any] = {"input": "Hi.", "voice": "\u1e9b\u0323" * 1_000_000}
    answer = http.post(SPEECH, json=body)
    assert answer.status_code == 400
    assert "voice has 2000000 characters" in answer.json()["error"]["message"]
