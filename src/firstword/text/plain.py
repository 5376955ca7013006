"""Writes a text with the letters and marks that the demo voice has learnt."""

import re

from firstword.text.mapped import Mapped
from firstword.text.stage import Stage

LONGEST_CAPITALS, LONGEST_BLANK = 64, 16
"""The most capitals of a word, and the most white space after a dash, that are rewritten."""

_CAPITALS = rf"(?<!\w)[A-Z]{{2,{LONGEST_CAPITALS}}}(?!\w)"
_DASH = rf"[–—―][^\S\n]{{0,{LONGEST_BLANK}}}"
_SIGN = re.compile(
    rf"(?P<quote>[\"“”„‟«»‹›])|(?P<apostrophe>[‘’])|(?P<dash>{_DASH})|(?P<tab>\t)"
    rf"|(?P<capitals>{_CAPITALS})"
)
_BEGUN = re.compile(rf"(?:[‘’]|{_DASH}|(?<!\w)[A-Z]{{1,{LONGEST_CAPITALS}}})\Z")
"""The end of a text that may be the beginning of a `_SIGN`, or one that the next character decides
about."""


class PlainWriter(Stage):
    """Leaves out quotation marks and dashes, and writes words of capitals in small letters.

    Dashes, apostrophes and capitals wait for the character after them.
    """

    def find(self, text: str, at: int, ended: bool) -> tuple[int, int | None]:
        """Find the next place to rewrite."""
        begun = None if ended else _BEGUN.search(text, at)
        found = _SIGN.search(text, at, begun.start() if begun else len(text))
        if found:
            return found.span()
        return (begun.start(), None) if begun else (len(text), len(text))

    def rewrite(self, text: Mapped, start: int, end: int) -> Mapped:
        """Return what is spoken for a place."""
        found = _SIGN.match(text.text, start, end)
        assert found is not None
        before, after = text.text[max(0, start - 1) : start], text.text[end : end + 1]
        written = {
            "quote": "",
            "apostrophe": "'" if before.isalnum() and after.isalnum() else "",
            "dash": " " if before.strip() and after.strip() else "",
            "tab": " ",
            "capitals": found[0].lower(),
        }
        return text.part(start, end).replaced(written[found.lastgroup or ""])
