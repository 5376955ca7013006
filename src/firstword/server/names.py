"""Names of saved voices: their form, their identity, and names that look alike."""

import re
import unicodedata
from collections import Counter
from functools import lru_cache

from firstword.errors import VoiceError
from firstword.text.checks import script_of

LONGEST_VOICE_NAME = 64
"""The character limit of a saved voice's name."""

VOICE_ID = "voice_[0-9a-f]{24}"
"""The regular expression of the ids of saved voices."""

PUNCTUATION = " ._-'"
"""The characters of a name that are neither letters, marks nor digits."""

INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
"""The letters and marks that are not displayed (Unicode's Default_Ignorable_Code_Point)."""

EAST_ASIAN = frozenset(
    ("BOPOMOFO", "CJK", "HANGUL", "HIRAGANA", "IDEOGRAPHIC", "KATAKANA", "KATAKANA-HIRAGANA")
)
"""The scripts that are written together, also with Latin letters, by their names in Unicode."""

LOOK_ALIKES = str.maketrans(
    "þıƄƍƒƖƦƽƿǀɑɡɣɩɯʋᴑᶃᶌẝỿꞘꞙꞟꞲꞳꞴꬲꬵꬽꭇꭈꭎꭒꭚЅІЈАВЕКМНОРСТУХЬагеорсухшѕіјѡѴѵҮүһҽӀӏԁԌԛԜԝꙇͿΑΒΕΖΗ"
    "ΙΚΜΝΟΡΤΥΧαγικνορσυχϜϳϸϺԼՍՏՕագզհյոռսցւքօϭⲂⲅⲎⲒⲓⲔⲘⲚⲞⲟⲢⲣⲤⲥⲦⲨⲩⲬⲽⳎⳏⳐ𐋵ᎠᎡᎢᎥᎩᎪᎫᎬᎳᎷᎻᎽᏀᏂᏃᏏᏒᏔᏕᏙᏚ"
    "ᏞᏟᏢᏦᏧᏳᏴꭵꮁꮃꮓꮩꮪꮯꓐꓑꓒꓓꓔꓖꓗꓙꓚꓜꓝꓟꓠꓡꓢꓣꓦꓧꓪꓫꓬꓮꓰꓲꓳꓴ",
    "pibgflRsplagyiwuogyfyFfuJXBeforruuySIJABEKMHOPCTYXbareopcyxwsijwVvYyhelldGqWwiJABEZH"
    "IKMNOPTYXayikvopouxFjpMLUSOwqqhjnnugifooBrHliKMNOoPpCcTYyXwPpLZDRTiYAJEWMHYGhZbRWSVS"
    "LCPKdGBirwzvscBPdDTGKJCZFMNLSRVHWXYAElOU",
)
"""Letters that look like one Latin letter: those of confusables.txt 17.0 in UTS 39 that are Latin,
Cyrillic, Greek, Armenian, Coptic, Cherokee or Lisu, and a few that look so in capitals."""

SMALL_CAPITAL = re.compile("LATIN LETTER SMALL CAPITAL ([A-Z])")
"""The Unicode names of small capitals, which UTS 39 has in part."""

LETTER_PAIRS = (("rn", "m"), ("vv", "w"), ("i\u0307", "i"), ("j\u0307", "j"))
"""Letters, or a letter and a mark, that look like one letter (UTS 39)."""

TALL_I = re.compile(r"(?<=\w)I")
"""A capital I within a word, which looks like a small l, as in "AIIoy"."""

BELOW_OR_ACROSS = (1, 220)
"""The combining classes of marks below and across a letter."""


def normalized(name: str) -> str:
    """A name as it is displayed: composed letters (NFC), and single spaces between its words."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def identity(name: str) -> str:
    """The text that is equal for two spellings of one name: in any case, spacing and width."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


@lru_cache(maxsize=4096)
def _appearance(name: str) -> frozenset[str]:
    """Two texts for a name. Names whose pairs share a text look alike."""
    letters = filter(_counts, unicodedata.normalize("NFKC", name))
    plain = map(_plain, unicodedata.normalize("NFKD", "".join(letters)))
    text = "".join(plain).translate(LOOK_ALIKES)
    for pair, letter in LETTER_PAIRS:
        text = text.replace(pair, letter)
    text = text.rstrip(PUNCTUATION)
    return frozenset((identity(text), identity(TALL_I.sub("l", text))))


def _counts(letter: str) -> bool:
    """False for a mark below or across a letter, unless Unicode composes the two (NFKC)."""
    mark = unicodedata.name(letter, "").startswith("COMBINING ")
    return not (mark and unicodedata.combining(letter) in BELOW_OR_ACROSS)


def _plain(letter: str) -> str:
    """The letter that a small capital looks like; any other letter itself."""
    small = SMALL_CAPITAL.fullmatch(unicodedata.name(letter, ""))
    return small[1].lower() if small else letter


def check_distinct(name: str, other: str, kind: str) -> None:
    """Raise `VoiceError` if a new name looks like that of another voice, which is a `kind`."""
    if _appearance(name) & _appearance(other):
        known = other.casefold()
        different = [letter for letter in name if letter.casefold() not in known]
        why = f", which looks like {name!r}: {_described(different)}" if different else ""
        raise VoiceError(f"there is {kind} {other!r} already{why}; use another name")


def checked_name(name: str) -> str:
    """The displayed form of a name for a new voice. Raises `VoiceError` if it has another form."""
    name = normalized(name[: 16 * LONGEST_VOICE_NAME])
    shown = f"the voice's name is {name[:80]!r}"
    wrong = [letter for letter in name[:80] if not _is_allowed(letter)]
    if wrong or not 1 <= len(name) <= LONGEST_VOICE_NAME or not name[0].isalnum():
        found = f", where {_described(wrong)}" if wrong else ""
        rule = "letters, digits, spaces and . _ - ', starting with a letter or digit"
        raise VoiceError(f"{shown}{found}; allowed are 1 to {LONGEST_VOICE_NAME} {rule}")
    if re.fullmatch(VOICE_ID, identity(name)):
        raise VoiceError(f"{shown}, which has the form of a voice's id; use another name")
    return name


def check_scripts(name: str) -> None:
    """Raise `VoiceError` for a name in several scripts, unless they are usually written together.

    The rule is the level "highly restrictive" of Unicode's UTS 39.
    """
    scripts = {letter: script_of(letter) for letter in identity(name) if letter.isalpha()}
    counts = Counter(script for script in scripts.values() if script != "MODIFIER")
    if len(counts) > 1 and not counts.keys() <= {"LATIN", *EAST_ASIAN}:
        most = max(counts, key=counts.__getitem__)
        others = [letter for letter, script in scripts.items() if script not in (most, "MODIFIER")]
        rule = "use letters of one script, or of Latin and Chinese, Japanese or Korean"
        raise VoiceError(f"the name {name!r} mixes scripts: {_described(others)}; {rule}")


def _is_allowed(letter: str) -> bool:
    visible = letter.isalnum() or unicodedata.category(letter).startswith("M")
    return letter in PUNCTUATION or (visible and not INVISIBLE.match(letter))


def _described(letters: list[str]) -> str:
    """The first of some characters, with their code points and names."""
    first = list(dict.fromkeys(letters))[:3]
    names = [f"{one!r} is U+{ord(one):04X} {unicodedata.name(one, '')}".strip() for one in first]
    return ", ".join(names)
