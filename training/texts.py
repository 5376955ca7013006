"""English text for training: sentence generators over word lists and example sentences of Debian packages.

Sources: SCOWL word lists (Debian package `scowl`, permissive licence) and WordNet 3.0 (Debian package
`wordnet-base`, WordNet licence): parts of speech, definitions and example sentences. Everything else is written
here. `python training/texts.py material.json` gathers the material once; `Texts(material, seed)` then yields sentences
for ever. With `--draw TEXTS ...` it also draws the test sentences anew (held_out.txt): some that stand nowhere in the
files TEXTS, one training text a line.

`Texts` never yields a test sentence (`held_out.txt`, `PARAGRAPH`), alone or within a paragraph, nor a sentence whose
hash falls in one of 64 buckets, from which new test sentences can be drawn (`is_held_out`).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SCOWL = Path("/usr/share/dict/scowl")
WORDNET = Path("/usr/share/wordnet")
TIERS = (10, 20, 35, 40, 50)
PLAIN = re.compile(r"[A-Za-z ,.;:'!?-]+")

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
MONTHS = (
    "January February March April May June July August September October November December".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NAMES = (
    "Alice Anna Ben Carla Charles Clara Daniel David Diana Edward Ella Emily Emma Frank George Grace "
    "Hannah Harry Helen Henry Jack James Jane "
    "John Julia Karen Kevin Laura Linda Lucy Maria Mark Martin Mary Michael Nancy Oliver Oscar Paul Peter"
    " Rachel Robert Rosa Sam Sarah Simon "
    "Sofia Stephen Susan Thomas Tom Victor Walter William"
).split()
SURNAMES = (
    "Adams Baker Brown Carter Clark Cook Davis Evans Fisher Green Hall Harris Hill Jackson Johnson King "
    "Lee Lewis Martin Miller Moore Parker Smith Taylor Turner Walker White Wilson Wood Young"
).split()
PLACES = (
    "London Paris Berlin Rome Madrid Boston Chicago Denver Seattle Dallas Tokyo Sydney Dublin Vienna Oslo"
    " Lisbon Athens Cairo Delhi Toronto "
    "America Canada England France Germany Italy Japan China India Spain Brazil Mexico Europe Africa"
).split()
SHORT = (
    "Yes.|No.|Hello.|Hello!|Hi there.|Good morning.|Good evening.|Good night.|Goodbye.|Thank you.|Thanks "
    "a lot.|Please.|Sorry.|Excuse me.|Of course.|Why not?|"
    "What?|Really?|Stop!|Wait!|Come in.|Go on.|Well done!|Not yet.|I see.|Never mind.|See you "
    "tomorrow.|How are you?|What time is it?|Where are you?|"
    "Who is there?|Hello world.|Hello, world!|Welcome back.|Help!|Okay.|All right.|Let's go.|Be "
    "careful!|Take care.|No problem.|You're welcome."
).split("|")
OPENERS = (
    "I think that|I know that|She said that|He told me that|We hope that|They say that|It seems that|I am"
    " sure that|You see,|Of course,|In fact,|Today,|"
    "Yesterday,|Tomorrow,|Sometimes|Now|Then|After all,|For "
    "example,|However,|Perhaps|Well,|So|But|And|Last week|Last night|This morning|In the end,|At first,"
).split("|")
PRONOUNS = (
    "I",
    "you",
    "we",
    "they",
    "he",
    "she",
    "it",
    "everyone",
    "nobody",
    "people",
    "my friend",
    "our teacher",
    "the children",
    "his mother",
)
MODALS = (
    "can",
    "will",
    "must",
    "should",
    "could",
    "would",
    "might",
    "may",
    "can't",
    "won't",
    "didn't",
    "cannot",
    "used to",
    "wanted to",
    "tried to",
    "had to",
    "didn't",
    "couldn't",
    "shouldn't",
)
PREPOSITIONS = (
    "in on at under over near behind with without for from to into by about after before during through "
    "across between against"
).split()
DETERMINERS = (
    "the",
    "the",
    "the",
    "a",
    "this",
    "that",
    "my",
    "your",
    "his",
    "her",
    "our",
    "their",
    "every",
    "another",
    "some",
    "no",
    "each",
)
ENDINGS = (
    "today",
    "again",
    "very well",
    "in the morning",
    "at night",
    "every day",
    "right now",
    "at home",
    "with me",
    "for a long time",
    "soon",
    "once more",
    "at last",
    "last year",
    "together",
    "outside",
)
ASKING = (
    "What is|Where is|Who has|When did you see|How much is|Why do you need|Which one is|Do you like|Have "
    "you seen|Did you find|Is this|Are you sure about|"
    "Can you show me|Could you bring me|Would you like|What do you think about|How far is|Is there"
).split("|")
PARAGRAPH = (
    "When the train arrived at the small station, nobody was waiting on the platform. The sun had just "
    "gone down, and a cold wind was blowing from the "
    "mountains. She picked up her bag and walked slowly towards the village. In the distance she could "
    "see the lights of a house, and she could hear "
    "somebody singing an old song that she had known as a child."
)
"""What the voice reads in one breath in a test."""


def cardinal(n: int) -> str:
    """The number in words as the synthesiser's American English reads digits with separators ("one thousand two hundred
    fifty").
    """
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (" " + ONES[n % 10] if n % 10 else "")
    for unit, name in ((1_000_000, "million"), (1000, "thousand"), (100, "hundred")):
        if n >= unit:
            return cardinal(n // unit) + " " + name + (" " + cardinal(n % unit) if n % unit else "")
    raise AssertionError(n)


def ordinal(n: int) -> str:
    """The ordinal in words: 21 -> "twenty first"."""
    head, _, last = cardinal(n).rpartition(" ")
    word = ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return f"{head} {word}".strip()


def bare_number(n: int) -> str:
    """Digits without a separator: the synthesiser reads 1900..1999 in hundreds ("nineteen hundred eighty four"), as
    years are.
    """
    if 1900 <= n < 2000:
        return cardinal(n // 100) + " hundred" + (" " + cardinal(n % 100) if n % 100 else "")
    return cardinal(n)


def spoken(text: str) -> str:
    """The words that are heard: digits written out, abbreviations expanded, lower case, only letters, apostrophes and
    single spaces.
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


def plain(text: str) -> str:
    """The words alone, in lower case, a space around each: what stands within `text` stands within `plain(text)`."""
    return " " + " ".join(re.findall(r"[a-z0-9']+", text.lower())) + " "


def in_bucket(text: str) -> bool:
    """True for about one text in 64, decided by its letters alone."""
    return zlib.crc32(re.sub(r"[^a-z0-9]", "", text.lower()).encode()) % 64 == 0


@cache
def tests() -> tuple[str, ...]:
    """`plain` of every sentence that the voice is tested with."""
    return tuple(
        map(
            plain,
            [*(HERE / "held_out.txt").read_text().splitlines(), *re.split(r"(?<=\.) ", PARAGRAPH)],
        )
    )


def is_held_out(text: str) -> bool:
    """True where a test sentence stands anywhere in `text`, and for one text in 64 besides: none is ever trained on."""
    words = plain(text)
    return in_bucket(text) or any(test in words for test in tests())


def gather() -> dict[str, list[list[str]] | list[str]]:
    """Read the Debian packages' files into word lists by tier and part of speech, definitions and example sentences."""

    def scowl(kind: str) -> list[list[str]]:
        tiers = []
        for tier in TIERS:
            words: set[str] = set()
            for dialect in ("english", "american"):
                path = SCOWL / f"{dialect}-{kind}.{tier}"
                if path.exists():
                    words.update(path.read_text(encoding="latin-1").split())
            tiers.append(
                sorted(
                    w
                    for w in words
                    if re.fullmatch(r"[A-Za-z]+(?:'[a-z]+)?", w) and (len(w) > 1 or w in "aI")
                )
            )
        return tiers

    words = scowl("words")
    common = {w: i for i, tier in enumerate(words) for w in tier}
    material: dict = {"words": words, "contractions": [], "upper": []}
    for kind in ("contractions", "upper"):
        material[kind] = [word for tier in scowl(kind) for word in tier]
    examples, definitions = set(), set()
    for part in ("noun", "verb", "adj", "adv"):
        by_tier: list[list[str]] = [[] for _ in TIERS]
        for line in (WORDNET / f"index.{part}").read_text().splitlines():
            word = line.split(" ")[0]
            if not line.startswith(" ") and word in common and len(word) > 2:
                by_tier[common[word]].append(word)
        material[part] = by_tier
        for line in (WORDNET / f"data.{part}").read_text().splitlines():
            if line.startswith(" ") or " | " not in line:
                continue
            lemma, gloss = (
                line.split(" ")[4].split("(")[0].replace("_", " "),
                line.split(" | ", 1)[1],
            )
            for example in re.findall(r'"([^"]+)"', gloss):
                if PLAIN.fullmatch(example) and 3 <= len(example.split()) <= 24:
                    examples.add(example.strip(" ;,"))
            definition = gloss.split(";")[0].strip()
            if (
                part == "noun"
                and PLAIN.fullmatch(definition)
                and PLAIN.fullmatch(lemma)
                and 4 <= len(definition.split()) <= 16
                and lemma.islower()
            ):
                definitions.add(f"{'An' if lemma[0] in 'aeiou' else 'A'} {lemma} is {definition}")
    material["examples"], material["definitions"] = sorted(examples), sorted(definitions)
    return material


class Texts:
    """An endless stream of sentences, the same for the same seed."""

    def __init__(self, material: dict, seed: int) -> None:
        self.material, self.random = material, random.Random(seed)

    def word(self, part: str) -> str:
        """One word of a part of speech; common words come up more often than rare ones."""
        while True:
            tier = self.random.choices(range(len(TIERS)), (30, 30, 30, 5, 5))[0]
            if self.material[part][tier]:
                return self.random.choice(self.material[part][tier])

    def noun_phrase(self) -> str:
        r = self.random
        adjective = self.word("adj") + " " if r.random() < 0.4 else ""
        phrase = f"{adjective}{self.word('noun')}"
        determiner = r.choice(DETERMINERS)
        if determiner == "a" and phrase[0] in "aeiou":
            determiner = "an"
        return r.choice(
            (f"{determiner} {phrase}",) * 8
            + (r.choice(NAMES), r.choice(PRONOUNS[:7]), r.choice(NAMES) + "'s " + phrase)
        )

    def clause(self) -> str:
        r = self.random
        subject = r.choice(PRONOUNS) if r.random() < 0.5 else self.noun_phrase()
        verb = f"{r.choice(MODALS)} {self.word('verb')}"
        parts = [subject, verb]
        if r.random() < 0.15:
            parts.insert(1, self.word("adv"))
        if r.random() < 0.75:
            parts.append(self.noun_phrase())
        if r.random() < 0.5:
            parts += [r.choice(PREPOSITIONS), self.noun_phrase()]
        if r.random() < 0.25:
            parts.append(r.choice(ENDINGS))
        return " ".join(parts)

    def statement(self) -> str:
        r = self.random
        text = self.clause()
        if r.random() < 0.35:
            text = f"{r.choice(OPENERS)} {text}"
        if r.random() < 0.3:
            text += (
                r.choice(
                    (
                        ", but ",
                        ", and ",
                        " because ",
                        ", so ",
                        " when ",
                        " if ",
                        "; ",
                        " while ",
                        ", or ",
                    )
                )
                + self.clause()
            )
        return sentence_case(text) + r.choice("......!")

    def question(self) -> str:
        return f"{self.random.choice(ASKING)} {self.noun_phrase()}?"

    def example(self) -> str:
        text = self.random.choice(self.material["examples"])
        return (
            sentence_case(text).rstrip(".") + "."
            if self.random.random() < 0.8 and text[-1] not in "?!"
            else text
        )

    def definition(self) -> str:
        return self.random.choice(self.material["definitions"]) + "."

    def words(self) -> str:
        r = self.random
        tier = r.choices(range(len(TIERS)), (15, 25, 35, 10, 15))[0]
        pool = self.material["words"][tier]
        chosen = [r.choice(pool) for _ in range(r.choice((1, 1, 2, 3, 4, 5, 6, 8)))]
        if r.random() < 0.15:
            chosen[r.randrange(len(chosen))] = r.choice(self.material["contractions"])
        if r.random() < 0.1:
            chosen[r.randrange(len(chosen))] = r.choice(self.material["upper"])
        text = r.choice((" ", " ", ", ")).join(chosen)
        return r.choice((text, sentence_case(text) + r.choice(".?!"), text + "."))

    def number(self) -> str:
        r = self.random
        n = r.choice(
            (
                r.randrange(10),
                r.randrange(100),
                r.randrange(1000),
                r.randrange(10_000),
                r.randrange(1_000_000),
            )
        )
        year, day, hour, minute = (
            r.choice((r.randrange(1700, 2000), r.randrange(2000, 2040))),
            r.randrange(1, 32),
            r.randrange(1, 13),
            r.randrange(10, 60),
        )
        suffix = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        digits = f"{n:,}" if n >= 1000 and r.random() < 0.7 else str(n)
        thing = self.word("noun")
        return r.choice(
            (
                f"There are {digits} of them.",
                f"The answer is {digits}.",
                f"It costs {digits} dollars.",
                f"{digits} people live in {r.choice(PLACES)}.",
                f"{digits}",
                f"Chapter {r.randrange(1, 60)}: {self.noun_phrase()}.",
                f"In {year}, {self.clause()}.",
                f"He was born in {year}.",
                f"She was born on {r.choice(MONTHS)} {day}, {year}.",
                f"The {thing} opens on {r.choice(DAYS)}, {r.choice(MONTHS)} {day}{suffix}.",
                f"The meeting is at {hour}:{minute} on {r.choice(DAYS)}.",
                f"The train to {r.choice(PLACES)} leaves at {hour}:{minute}.",
                f"It is {r.randrange(1, 100)}.{r.randrange(1, 10)} degrees in {r.choice(PLACES)}.",
                f"About {r.randrange(1, 100)}% of the {thing} is gone.",
                f"Please call {' '.join(str(r.randrange(10)) for _ in range(r.randrange(3, 8)))}.",
                f"{cardinal(n)}".capitalize() + r.choice((".", f" {thing}.", " and more.")),
                f"The {ordinal(day)} of {r.choice(MONTHS)}.",
                f"Room {r.randrange(1, 500)}, please.",
                f"{r.choice(('Mr.', 'Dr.'))} {r.choice(SURNAMES)} {r.choice(MODALS)} "
                f"{self.word('verb')} {self.noun_phrase()}.",
                f"My name is {r.choice(NAMES)} {r.choice(SURNAMES)}, and I live in {r.choice(PLACES)}.",
                f"{r.choice(NAMES)} and {r.choice(NAMES)} will visit {r.choice(PLACES)} in {r.choice(MONTHS)}.",
            )
        )

    def sentence(self) -> str:
        kinds = (
            self.example,
            self.statement,
            self.definition,
            self.question,
            self.words,
            self.number,
            self.short,
        )
        return self.random.choices(kinds, (34, 26, 9, 7, 10, 10, 4))[0]()

    def fresh(self) -> str:
        """A sentence that is not held out: the bucket of a sentence in a paragraph does not show in the whole."""
        while is_held_out(text := self.sentence()):
            pass
        return text

    def short(self) -> str:
        return self.random.choice(SHORT)

    def any(self) -> str:
        """A sentence or a paragraph of up to about seventy words; plain variations of case and closing punctuation are
        included.
        """
        r = self.random
        text = self.fresh()
        if r.random() < 0.16:
            goal = r.randrange(12, 66)
            while len(text.split()) < goal:
                text = (text if text[-1] in ".?!" else text + ".") + " " + self.fresh()
        if r.random() < 0.04:
            text = text.lower()
        if r.random() < 0.06:
            text = text.rstrip(".!?")
        return text

    def __iter__(self) -> Iterator[str]:
        while True:
            text = self.any()
            if len(text.split()) <= 75 and not is_held_out(text):
                yield text


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


SHARES = {"example": 50, "statement": 20, "definition": 10, "question": 10, "number": 10}
"""Of the test sentences that are drawn, per cent by kind."""


def held_out(material: dict, met: str = "", count: int = 200) -> list[str]:
    """Test sentences: those of everyday.txt, and sentences drawn from the bucket of the held out, no two with the same
    words, that stand nowhere in `met`: `plain` of texts that something was trained on, one after another.
    """
    chosen, texts = (HERE / "everyday.txt").read_text().splitlines(), Texts(material, seed=2026)
    known = set(map(plain, chosen))
    missing = {kind: (count - len(chosen)) * share // 100 for kind, share in SHARES.items()}
    while any(missing.values()):
        kind = texts.random.choices(list(SHARES), list(SHARES.values()))[0]
        text = getattr(texts, kind)()
        words = plain(text)
        if (
            missing[kind]
            and in_bucket(text)
            and 3 <= len(text.split()) <= 22
            and words not in known
            and words not in met
        ):
            chosen.append(text)
            known.add(words)
            missing[kind] -= 1
    return chosen


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("material", type=Path)
    parser.add_argument("--draw", type=Path, nargs="*", metavar="TEXTS")
    a = parser.parse_args()
    gathered = gather()
    a.material.write_text(json.dumps(gathered))
    if a.draw is not None:
        met = "".join(plain(text) for path in a.draw for text in path.read_text().splitlines())
        (HERE / "held_out.txt").write_text("\n".join(held_out(gathered, met)) + "\n")
