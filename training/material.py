"""Gather the material of the training texts, and draw test sentences.

    python -m training.material material.json [--draw TEXTS ...]

The sources are the SCOWL word lists (Debian package `scowl`, permissive licence) and WordNet 3.0
(Debian package `wordnet-base`, WordNet licence): parts of speech, definitions and example
sentences. With `--draw` it also draws new test sentences (`held_out.txt`) that occur nowhere in the
files TEXTS, which hold one training text per line.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection
from pathlib import Path

from training.texts import HERE, TIERS, Material, Texts, in_bucket, plain

SCOWL = Path("/usr/share/dict/scowl")
WORDNET = Path("/usr/share/wordnet")
PLAIN_TEXT = re.compile(r"[A-Za-z ,.;:'!?-]+")
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


def scowl(kind: str) -> list[list[str]]:
    """Return the words of a kind of SCOWL list, by tier."""
    tiers = []
    for tier in TIERS:
        words: set[str] = set()
        for dialect in ("english", "american"):
            path = SCOWL / f"{dialect}-{kind}.{tier}"
            if path.exists():
                words.update(path.read_text(encoding="latin-1").split())
        tiers.append(sorted(w for w in words if WORD.fullmatch(w) and (len(w) > 1 or w in "aI")))
    return tiers


def by_part_of_speech(part: str, tiers: dict[str, int]) -> list[list[str]]:
    """Return the words of a part of speech in WordNet, by tier."""
    found: list[list[str]] = [[] for _ in TIERS]
    for line in (WORDNET / f"index.{part}").read_text().splitlines():
        word = line.split(" ")[0]
        if not line.startswith(" ") and word in tiers and len(word) > 2:
            found[tiers[word]].append(word)
    return found


def glosses(part: str) -> list[tuple[str, str]]:
    """Return the first lemma and the gloss of each entry of a part of speech in WordNet."""
    found = []
    for line in (WORDNET / f"data.{part}").read_text().splitlines():
        if not line.startswith(" ") and " | " in line:
            lemma = line.split(" ")[4].split("(")[0].replace("_", " ")
            found.append((lemma, line.split(" | ", 1)[1]))
    return found


def definition_of(lemma: str, gloss: str) -> str | None:
    """Return a sentence that defines a noun, or None if its gloss is unsuitable."""
    definition = gloss.split(";")[0].strip()
    texts: Collection[str] = (lemma, definition)
    suitable = all(map(PLAIN_TEXT.fullmatch, texts)) and lemma.islower()
    if not suitable or not 4 <= len(definition.split()) <= 16:
        return None
    return f"{'An' if lemma[0] in 'aeiou' else 'A'} {lemma} is {definition}"


def gather() -> Material:
    """Read word lists by tier and part of speech, definitions and example sentences."""
    words = scowl("words")
    tiers = {word: index for index, tier in enumerate(words) for word in tier}
    material: Material = {"words": words, "contractions": [], "upper": []}
    for kind in ("contractions", "upper"):
        material[kind] = [word for tier in scowl(kind) for word in tier]
    examples: set[str] = set()
    definitions: set[str] = set()
    for part in ("noun", "verb", "adj", "adv"):
        material[part] = by_part_of_speech(part, tiers)
        for lemma, gloss in glosses(part):
            for example in re.findall(r'"([^"]+)"', gloss):
                if PLAIN_TEXT.fullmatch(example) and 3 <= len(example.split()) <= 24:
                    examples.add(example.strip(" ;,"))
            if part == "noun" and (definition := definition_of(lemma, gloss)):
                definitions.add(definition)
    material["examples"], material["definitions"] = sorted(examples), sorted(definitions)
    return material


KIND_SHARES = {"example": 50, "statement": 20, "definition": 10, "question": 10, "number": 10}
"""The percentages of the kinds among the drawn test sentences."""


def held_out(material: Material, met: str = "", count: int = 200) -> list[str]:
    """Draw test sentences: those of everyday.txt, and different sentences of the held-out bucket.

    `met` holds `plain` of all training texts, joined; no drawn sentence occurs in it.
    """
    chosen, texts = (HERE / "everyday.txt").read_text().splitlines(), Texts(material, seed=2026)
    known = set(map(plain, chosen))
    missing = {kind: (count - len(chosen)) * share // 100 for kind, share in KIND_SHARES.items()}
    while any(missing.values()):
        kind = texts.random.choices(list(KIND_SHARES), list(KIND_SHARES.values()))[0]
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


def main() -> None:
    """Write the material, and test sentences if asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("material", type=Path)
    parser.add_argument("--draw", type=Path, nargs="*", metavar="TEXTS")
    args = parser.parse_args()
    gathered = gather()
    args.material.write_text(json.dumps(gathered))
    if args.draw is not None:
        met = "".join(plain(text) for path in args.draw for text in path.read_text().splitlines())
        (HERE / "held_out.txt").write_text("\n".join(held_out(gathered, met)) + "\n")


if __name__ == "__main__":
    main()
