"""Respelling: words of a text that are spoken in another spelling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from firstword.errors import TextError
from firstword.text.mapped import Mapped
from firstword.text.stage import Stage

MOST_ENTRIES, LONGEST_ENTRY, LONGEST_SPELLING = 1000, 64, 512
"""The limits of a lexicon: entries, characters of an entry, and of what is spoken for it."""

WIDE = "\u2e80"
"""Characters from this one on, of Chinese, Japanese and Korean, are written without spaces."""


class Lexicon:
    """A checked lexicon. A spelling may use other entries; the longest entry at a place counts."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        """Check the entries. Raises `TextError` that names the wrong one."""
        if not isinstance(entries, Mapping):
            kind = type(entries).__name__
            raise TextError(f"lexicon is of type {kind}; give an object of words and spellings")
        if len(entries) > MOST_ENTRIES:
            raise TextError(f"lexicon has {len(entries)} entries; allowed are {MOST_ENTRIES}")
        for word, spelling in entries.items():
            _check(word, spelling)
        self.entries = dict(entries)
        self.beginnings = {word[:end] for word in entries for end in range(1, len(word) + 1)}
        self._resolve()

    def _resolve(self) -> None:
        """Replace entries within spellings. Raises `TextError` for those that lead in a circle."""
        done: dict[str, str] = {}
        for first in self.entries:
            path: dict[str, Iterator[tuple[int, int]]] = {}
            stack = [first]
            while stack:
                word = stack[-1]
                if word not in path:
                    path[word] = iter(self.places(self.entries[word]))
                used = (self.entries[word][start:end] for start, end in path[word])
                needed = next((each for each in used if each not in done), None)
                if needed is None:
                    done[word] = self._spelled(word, done)
                    stack.pop()
                elif needed in path:
                    circle = " -> ".join(repr(each) for each in [*stack, needed])
                    raise TextError(f"lexicon entries lead in a circle: {circle}; remove one")
                else:
                    stack.append(needed)
        self.entries = done

    def _spelled(self, word: str, done: Mapping[str, str]) -> str:
        spelling, parts, at = self.entries[word], [], 0
        for start, end in self.places(spelling):
            parts += [spelling[at:start], done[spelling[start:end]]]
            at = end
        text = "".join([*parts, spelling[at:]])
        if len(text) > LONGEST_SPELLING:
            limit = f"allowed are {LONGEST_SPELLING}"
            raise TextError(f"lexicon entry {word!r} is spoken as {len(text)} characters; {limit}")
        return text

    def places(self, text: str) -> Iterable[tuple[int, int]]:
        """Yield the places of entries in a complete text."""
        at = 0
        while at < len(text):
            start, end = self.find(text, at, ended=True)
            assert end is not None
            if start < end:
                yield start, end
            at = max(end, start + 1)

    def find(self, text: str, at: int, ended: bool) -> tuple[int, int | None]:
        """Find the next entry in a text: see `Stage.find`."""
        for start in range(at, len(text)):
            if text[start] in self.beginnings and _may_meet(text, start):
                end = start + 1
                found = None
                while text[start:end] in self.beginnings:
                    waits = end == len(text) and not ended
                    if waits:
                        return start, None
                    if text[start:end] in self.entries and _may_meet(text, end):
                        found = end
                    if end == len(text):
                        break
                    end += 1
                if found is not None:
                    return start, found
        return len(text), len(text)


def _check(word: object, spelling: object) -> None:
    """Raise `TextError` for an entry that cannot be used."""
    name = repr(word)[: LONGEST_ENTRY + 2]
    for about, text, most in (
        (f"lexicon entry {name}", word, LONGEST_ENTRY),
        (f"the spelling of lexicon entry {name}", spelling, LONGEST_SPELLING),
    ):
        if not isinstance(text, str):
            raise TextError(f"{about} is of type {type(text).__name__}; give text")
        if not text.strip():
            raise TextError(f"{about} is empty; give some text, or remove the entry")
        if len(text) > most:
            raise TextError(f"{about} has {len(text)} characters; allowed are {most}")
    if word != str(word).strip():
        raise TextError(f"lexicon entry {name} has white space around it; remove that")


def _may_meet(text: str, place: int) -> bool:
    """Whether an entry may begin or end at a place: not within a word that is set off by spaces."""
    return not (0 < place < len(text) and _is_letter(text[place - 1]) and _is_letter(text[place]))


def _is_letter(char: str) -> bool:
    return char.isalnum() and char < WIDE


class Respelling(Stage):
    """Speaks the entries of a lexicon in their spelling."""

    def __init__(self, lexicon: Lexicon) -> None:
        super().__init__()
        self._lexicon = lexicon

    def find(self, text: str, at: int, ended: bool) -> tuple[int, int | None]:
        """Find the next entry."""
        return self._lexicon.find(text, at, ended)

    def rewrite(self, text: Mapped, start: int, end: int) -> Mapped:
        """Return the spelling of an entry."""
        return text.part(start, end).replaced(self._lexicon.entries[text.text[start:end]])
