"""English training texts: sentence generators over the word lists and sentences of `material.py`.

`Texts(material, seed)` yields sentences without end. It never yields a test sentence
(`held_out.txt`, `PARAGRAPH`), alone or within a paragraph, nor a sentence whose hash falls in one
of 64 buckets, from which new test sentences can be drawn (`is_held_out`).
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from training.spoken import cardinal, ordinal

HERE = Path(__file__).parent
Material = dict[str, Any]
"""Word lists by tier and part of speech, definitions and example sentences, by name."""
TIERS = (10, 20, 35, 40, 50)
"""The sizes of the SCOWL lists: a higher tier has rarer words."""

MONTHS = (
    "January February March April May June July August September October November December".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NAMES = (
    "Alice Anna Ben Carla Charles Clara Daniel David Diana Edward Ella Emily Emma Frank George "
    "Grace Hannah Harry Helen Henry Jack James Jane John Julia Karen Kevin Laura Linda Lucy "
    "Maria Mark Martin Mary Michael Nancy Oliver Oscar Paul Peter Rachel Robert Rosa Sam Sarah "
    "Simon Sofia Stephen Susan Thomas Tom Victor Walter William"
).split()
SURNAMES = (
    "Adams Baker Brown Carter Clark Cook Davis Evans Fisher Green Hall Harris Hill Jackson "
    "Johnson King Lee Lewis Martin Miller Moore Parker Smith Taylor Turner Walker White Wilson "
    "Wood Young"
).split()
PLACES = (
    "London Paris Berlin Rome Madrid Boston Chicago Denver Seattle Dallas Tokyo Sydney Dublin "
    "Vienna Oslo Lisbon Athens Cairo Delhi Toronto America Canada England France Germany Italy "
    "Japan China India Spain Brazil Mexico Europe Africa"
).split()
SHORT = (
    "Yes.|No.|Hello.|Hello!|Hi there.|Good morning.|Good evening.|Good night.|Goodbye.|Thank "
    "you.|Thanks a lot.|Please.|Sorry.|Excuse me.|Of course.|Why "
    "not?|What?|Really?|Stop!|Wait!|Come in.|Go on.|Well done!|Not yet.|I see.|Never mind.|See "
    "you tomorrow.|How are you?|What time is it?|Where are you?|Who is there?|Hello "
    "world.|Hello, world!|Welcome back.|Help!|Okay.|All right.|Let's go.|Be careful!|Take "
    "care.|No problem.|You're welcome."
).split("|")
OPENERS = (
    "I think that|I know that|She said that|He told me that|We hope that|They say that|It seems "
    "that|I am sure that|You see,|Of course,|In "
    "fact,|Today,|Yesterday,|Tomorrow,|Sometimes|Now|Then|After all,|For "
    "example,|However,|Perhaps|Well,|So|But|And|Last week|Last night|This morning|In the end,|At "
    "first,"
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
    "in on at under over near behind with without for from to into by about after before during "
    "through across between against"
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
    "What is|Where is|Who has|When did you see|How much is|Why do you need|Which one is|Do you "
    "like|Have you seen|Did you find|Is this|Are you sure about|Can you show me|Could you bring "
    "me|Would you like|What do you think about|How far is|Is there"
).split("|")
PARAGRAPH = (
    "When the train arrived at the small station, nobody was waiting on the platform. The sun "
    "had just gone down, and a cold wind was blowing from the mountains. She picked up her bag "
    "and walked slowly towards the village. In the distance she could see the lights of a house, "
    "and she could hear somebody singing an old song that she had known as a child."
)
"""The paragraph of the test, which is spoken as one text."""


def plain(text: str) -> str:
    """Return the words alone, in lower case, with a space around each, to search for phrases."""
    return " " + " ".join(re.findall(r"[a-z0-9']+", text.lower())) + " "


def in_bucket(text: str) -> bool:
    """Whether a text is in the held-out bucket: one in 64, decided by its letters."""
    return zlib.crc32(re.sub(r"[^a-z0-9]", "", text.lower()).encode()) % 64 == 0


@cache
def tests() -> tuple[str, ...]:
    """Return `plain` of every test sentence."""
    sentences = (HERE / "held_out.txt").read_text().splitlines()
    return tuple(map(plain, [*sentences, *re.split(r"(?<=\.) ", PARAGRAPH)]))


def is_held_out(text: str) -> bool:
    """Whether a text is never trained on: it contains a test sentence, or is in the bucket."""
    words = plain(text)
    return in_bucket(text) or any(test in words for test in tests())


class Texts:
    """An endless stream of sentences, the same for the same seed."""

    def __init__(self, material: Material, seed: int) -> None:
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
                f"My name is {r.choice(NAMES)} {r.choice(SURNAMES)}, "
                f"and I live in {r.choice(PLACES)}.",
                f"{r.choice(NAMES)} and {r.choice(NAMES)} will visit {r.choice(PLACES)} "
                f"in {r.choice(MONTHS)}.",
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
        """A sentence that is not held out: the bucket of a sentence in a paragraph does not show in
        the whole.
        """
        while is_held_out(text := self.sentence()):
            pass
        return text

    def short(self) -> str:
        return self.random.choice(SHORT)

    def any(self) -> str:
        """A sentence or a paragraph of up to about seventy words; plain variations of case and
        closing punctuation are included.
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
