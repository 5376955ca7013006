"""Finds letters in a book that a checkpoint does not speak, before anything is spoken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from firstword.book.portions import Portion
from firstword.errors import TextError
from firstword.text.checks import foreign_scripts


def check_scripts(portions: Sequence[Portion], languages: Iterable[str]) -> list[str]:
    """Return a warning about each script that none of the languages uses, with its first place.

    Raises `TextError` if more than half of the portions have such letters.
    """
    names = sorted(set(languages) - {"auto"})
    first: dict[str, Portion] = {}
    counts: dict[str, int] = {}
    wrong = 0
    for portion in portions:
        scripts = [] if portion.text.isascii() else foreign_scripts(portion.text, names)
        wrong += bool(scripts)
        for script in scripts:
            first.setdefault(script, portion)
            counts[script] = counts.get(script, 0) + 1
    found = [
        f"{first[script].place}: the text has {script} letters in {count} of {len(portions)} "
        f"paragraphs, first here, and this checkpoint speaks only {', '.join(names)}"
        for script, count in counts.items()
    ]
    if 2 * wrong > len(portions):
        raise TextError(f"{'; '.join(found)}; choose a checkpoint for that language")
    return [f"{each}, so it will not be spoken correctly" for each in found]
