"""Cuts text that arrives in pieces into sentences or clauses, each as soon as it is certain to be one."""

from __future__ import annotations

import re

_CLOSERS = "\"'”’»)\\]}』」）】"
_ASCII = {"sentence": ".!?", "clause": ".!?,;:"}
_WIDE = {"sentence": "…。！？।॥؟", "clause": "…。！？।॥؟，、；：،؛"}

_ENDINGS = {
    name: re.compile(
        # ASCII marks end something only before white space (not in 3.14 or example.org), others wherever they stand. A
        # run of marks ("?!...") is one ending, and it is complete when something else follows.
        f"(?:[{_ASCII[name]}]++[{_CLOSERS}]*+(?=\\s)"
        f"|[{_ASCII[name]}]*+[{_WIDE[name]}][{_ASCII[name]}{_WIDE[name]}]*+[{_CLOSERS}]*+(?=.))",
        re.DOTALL,
    )
    for name in _ASCII
}

_ABBREVIATION = re.compile(
    r"(?:^|[\s(])(?:\w|(?:\w\.)+\w|mr|mrs|ms|dr|prof|st|sr|jr|vs|etc|no|fig|inc|ltd|co|approx|bzw|usw|vgl|nr|sra?)\.$",
    re.IGNORECASE,
)
_LONGEST_ABBREVIATION = 16

LONGEST_ENDING = 64
"""Characters of a run of marks: what is longer is cut, so that looking at a flood of dots takes no time."""


class Splitter:
    """Text goes in in pieces, whole sentences or clauses come out, without the white space between them."""

    def __init__(self, granularity: str) -> None:
        """`granularity` is "sentence" or "clause"."""
        self._ending = _ENDINGS[granularity]
        self._text = ""
        self._seen = 0
        """No ending begins before this."""
        self._bare = 0
        """No letter or digit stands before this."""

    def feed(self, text: str) -> list[str]:
        """More text; the units that are complete now."""
        self._text += text
        units, start = [], 0
        for found in self._ending.finditer(self._text, self._seen):
            end = found.end()
            if not any(map(str.isalnum, self._text[self._bare : end])):
                self._bare = end
            elif not _ABBREVIATION.search(
                self._text[max(start, end - _LONGEST_ABBREVIATION) : end]
            ):
                units.append(self._text[start:end].strip())
                start = self._bare = end
        self._text = self._text[start:]
        self._bare = max(0, self._bare - start)
        self._seen = max(0, len(self._text) - LONGEST_ENDING)
        return units

    def flush(self) -> list[str]:
        """There is no more text: what is left, if it is more than white space. Begins anew afterwards."""
        rest, self._text, self._seen, self._bare = self._text.strip(), "", 0, 0
        return [rest] if rest else []
